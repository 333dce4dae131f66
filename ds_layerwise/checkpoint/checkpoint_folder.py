"""Access to a checkpoint's folder without an engine: its place, its bytes, the model's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from deepspeed.checkpoint.constants import (
    AUTOEP_LAYERS_KEY,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    PARAM_SHAPES,
)
from torch import Tensor

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.atomic import pointed
from ds_layerwise.checkpoint.manifest import FILE_NAME, ByteRange, Manifest, check_file, leads_out
from ds_layerwise.checkpoint.new_names import first_expert
from ds_layerwise.checkpoint.plain_values import load_safely, load_trusted
from ds_layerwise.checkpoint.regular import RegularCheckpoint, mp_size, parts_in
from ds_layerwise.checkpoint.universal import LATEST, is_universal
from ds_layerwise.errors import LayerWiseError, few
from ds_layerwise.optimizers.recipe import Shape

#: The name of DeepSpeed's file with the module.
MODEL_FILE = "mp_rank_{mp_rank:02d}_model_states.pt"

#: The name of that file for ZeRO-3, whose parameters are in other files.
ZERO3_MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"

#: The files of DeepSpeed with one expert each.
EXPERT_FILES = "layer_*_expert_*_mp_rank_{mp_rank}_model_states.pt"

Item = TypeVar("Item")
Result = TypeVar("Result")


#: Progress bars, by what is done and its number of bytes. The context returns a function to call
#: with the number of bytes done since the last call.
Bars = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True)
class Reading:
    """The choices of a command that reads a checkpoint."""

    workers: int
    """The number of threads. They suffice, because reading, checksums and ``torch.save`` release
    the interpreter lock.
    """
    trust: bool
    """True to let the model's file run code."""
    bars: Bars

    def in_parallel(
        self, work: Callable[[Item], Result], items: Sequence[tuple[Item, int]], what: str
    ) -> list[Result]:
        """Call ``work`` on every item, given with its bytes. A progress bar says ``what``."""
        results = []
        total = sum(size for _, size in items)
        with ThreadPoolExecutor(self.workers) as pool, self.bars(what, total) as done:
            each = pool.map(work, [item for item, _ in items])
            for result, (_, size) in zip(each, items, strict=True):
                results.append(result)
                done(size)
        return results


def find(path: Path) -> Path:
    """Return the folder of one checkpoint: ``path`` itself, or the one that ``latest`` names.

    Raises:
        LayerWiseError: there is none, or only an engine can read its kind.
    """
    if not path.is_dir():
        raise LayerWiseError(
            f"{path} is not a folder; give the folder of a checkpoint, or one with a file named "
            "latest"
        )
    folder = path
    if not (
        is_universal(path) or (path / FILE_NAME).exists() or any(path.glob("*_optim_states.pt"))
    ):
        folder = _pointed(path)
    if any(folder.glob("layer_*-model_states.pt")):
        raise _of_a_pipeline(folder)
    return folder


def refuse_stages(folder: Path) -> None:
    """Refuse the regular checkpoint of a pipeline with experts, which has no files of layers.

    Raises:
        LayerWiseError: ``folder`` has one.
    """
    parts = mp_size(folder)
    # Whoever needs the optimizer's files reads them, and says what is wrong with them.
    with suppress(LayerWiseError):
        parts = parts_in(folder)
    if parts != mp_size(folder):
        raise _of_a_pipeline(folder)


def _of_a_pipeline(folder: Path) -> LayerWiseError:
    """Return the error for the regular checkpoint of a pipeline."""
    return LayerWiseError(
        f"{folder} was saved by a pipeline, which only a pipeline reads; give a universal "
        "checkpoint of it, which layerwise.save_universal or DeepSpeed's ds_to_universal.py write "
        "if tensor parallelism has not cut its layers"
    )


def _pointed(path: Path) -> Path:
    for pointer in (path / "latest", path / LATEST):
        if pointer.is_file():
            tag = pointed(pointer)
            if not tag or not (path / tag).is_dir():
                raise LayerWiseError(
                    f"{pointer} names {tag!r}, and {path} has no such folder; give the folder of a "
                    "checkpoint instead"
                )
            return path / tag
    raise LayerWiseError(
        f"{path} holds no checkpoint: no *_optim_states.pt, no zero folder, and no file named "
        "latest"
    )


def num_expert_layers(folder: Path, mp_rank: str = "*") -> int:
    """Return the number of layers of experts with files of their own, in all parts of the model or
    in the one whose file names have the number ``mp_rank``.
    """
    files = folder.glob(EXPERT_FILES.format(mp_rank=mp_rank))
    return len({path.name.partition("_expert_")[0] for path in files})


def manifest_of(folder: Path) -> Manifest | None:
    """Return the list of files; None for the output of DeepSpeed's converter, which writes none.

    Raises:
        LayerWiseError: it is missing or damaged, or another package wrote a regular checkpoint.
    """
    if not (folder / FILE_NAME).exists():
        if is_universal(folder):
            return None
        # Raises the error for a checkpoint of another package.
        RegularCheckpoint(folder)
    return Manifest.read(folder)


def damaged(folder: Path, manifest: Manifest, reading: Reading) -> list[str]:
    """Return a line for each file that is missing or differs from ``manifest``."""

    def check(part: tuple[str, ByteRange]) -> tuple[str, str]:
        name, byte_range = part
        try:
            check_file(folder / name, manifest.size_of(name), [byte_range])
        except LayerWiseError as e:
            return name, str(e)
        return name, ""

    parts = []
    for name, ranges in manifest.files.items():
        for byte_range in ranges:
            parts.append(((name, byte_range), byte_range.size))
    lines: dict[str, str] = {}
    for name, line in reading.in_parallel(check, parts, "check"):
        if line:
            lines.setdefault(name, line)
    return list(lines.values())


def check_bytes(folder: Path, reading: Reading) -> None:
    """Compare every file with the list that was saved with it, if there is one.

    Raises:
        LayerWiseError: a file is missing or damaged; names it.
    """
    manifest = manifest_of(folder)
    if manifest is not None and (lines := damaged(folder, manifest, reading)):
        raise LayerWiseError(few(lines))


def check_target(out: Path, source: Path, *, overwrite: bool, replaceable: bool) -> None:
    """Check that ``out`` may be written.

    Args:
        replaceable: True if it is of the kind that will be written.

    Raises:
        LayerWiseError: it exists and must stay.
    """
    if source.resolve().is_relative_to(out.resolve()):
        raise LayerWiseError(f"{out} is, or holds, the checkpoint that is read; name another place")
    if not out.exists():
        return
    if not overwrite:
        raise LayerWiseError(f"{out} exists; name another place, or replace it with --overwrite")
    if not replaceable:
        raise LayerWiseError(
            f"{out} is something else than this command writes, and --overwrite does not remove "
            "that; name another place, or remove it"
        )


@dataclass(frozen=True)
class ModelFile:
    """The parameters and buffers in DeepSpeed's model file. Tensors are mapped from it."""

    path: Path
    module: Mapping[str, Tensor]
    """The part of the module's ``state_dict`` that is whole in this file or in the files of
    experts.
    """
    shapes: Mapping[str, Shape]
    """The shapes of the trained parameters; in lists of experts, those that the first rank held."""
    stacks: frozenset[str]
    """The trained stacks of experts, which have files of their own."""
    frozen: Mapping[str, Tensor]
    """The values that DeepSpeed's scripts use for frozen and empty parameters."""
    aliases: Mapping[str, str]
    """The stored name of each tied parameter that is not stored itself."""
    world_size: int
    num_parts: int
    """The number of tensor-parallel parts of the model, of which this is one."""

    @classmethod
    def read(cls, folder: Path, *, trust: bool, mp_rank: int = 0) -> ModelFile | None:
        """Read the model file in ``folder``; None if there is none.

        Args:
            trust: True if code in it may run.
            mp_rank: the number of the piece of a model that is cut.

        Raises:
            LayerWiseError: it is damaged, or contains objects that only code can restore.
        """
        path = folder / MODEL_FILE.format(mp_rank=mp_rank)
        is_zero3 = not path.exists()
        if is_zero3:
            path = folder / ZERO3_MODEL_FILE
            if not path.exists():
                return None
        load = load_trusted if trust else _load_client_state
        content = load(path)
        if not isinstance(content, dict) or not isinstance(content.get("module", 0), dict | None):
            raise LayerWiseError(
                f"{path} has no module, as DeepSpeed's model files do; load another checkpoint"
            )
        shapes = {}
        listed: list[str] = []
        module: dict[str, Any] = {}
        # The other stages of a pipeline, or parts, whose names are the same.
        for each in (*_others(path, load), content):
            shapes.update(shapes_in(each))
            listed += shapes_in(each)
            module.update(each["module"] or {})
        experts = _experts(folder, load, mp_rank)
        elsewhere: set[str] = set()
        frozen: dict[str, Tensor] = {}
        if is_zero3:
            elsewhere = {*shapes, *(content.get(FROZEN_PARAM_SHAPES) or ())}
        else:
            frozen = dict(content.get(FROZEN_PARAM_FRAGMENTS) or {})
            for name in experts:
                # The file has those of the rank that wrote it alone.
                frozen.pop(name, None)
        # Stages have the same names for little, parts for everything.
        parts = len(listed) // max(1, len(shapes))
        stacks = _stacks_in(content, shapes)
        shapes |= stacks
        weights = {}
        for name, value in {**module, **experts}.items():
            if isinstance(value, Tensor) and name not in elsewhere:
                weights[name] = value
        aliases = _aliases(content, weights)
        world_size = int(content.get("dp_world_size") or 1)
        return cls(path, weights, shapes, frozenset(stacks), frozen, aliases, world_size, parts)

    def others(self, trained: Iterable[str]) -> dict[str, Tensor]:
        """Return frozen parameters and buffers."""
        left_out = {*trained, *self.aliases}
        return {name: value for name, value in self.module.items() if name not in left_out}


def shapes_in(content: Mapping[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the trained parameters that the model's file ``content`` lists."""
    shapes = {}
    for group in content.get(PARAM_SHAPES) or ():
        shapes.update({name: tuple(shape) for name, shape in group.items()})
    return shapes


def _stacks_in(content: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes over all ranks of the trained stacks of experts, of which ``shapes`` has
    one rank's.
    """
    stacks = {}
    for layer in content.get(AUTOEP_LAYERS_KEY) or ():
        for name, shape in shapes.items():
            if name.startswith(f"{layer['expert_key_prefix']}."):
                stacks[name] = (layer["num_experts"], *shape[1:])
    return stacks


def _others(path: Path, load: Callable[[Path], Any]) -> list[Any]:
    """Read the model's files beside the one at ``path``, the last one first."""
    files = sorted(path.parent.glob("mp_rank_*_model_states.pt"), reverse=True)
    return [load(each) for each in files if each != path]


def _aliases(content: Mapping[str, Any], module: Mapping[str, Tensor]) -> dict[str, str]:
    aliases = dict(content.get("shared_params") or {})
    for alias in aliases.keys() & module.keys():
        # DeepSpeed finds ties by address, and all tensors without elements have the same address.
        if not module[alias].numel():
            del aliases[alias]
    return aliases


def _experts(folder: Path, load: Callable[[Path], Any], mp_rank: int) -> dict[str, Tensor]:
    """Read the weights of experts; DeepSpeed writes one file per expert, also of stacks."""
    found = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    files = sorted(folder.glob(EXPERT_FILES.format(mp_rank="*")))
    own = f"_mp_rank_{mp_rank:02d}_"
    # Other tensor-parallel ranks have other experts, or their parts of the same ones.
    for path in sorted(files, key=lambda path: own in path.name):
        for name, value in load(path).items():
            stack, _, number = name.rpartition(".")
            if first_expert(name) is None and number.isdecimal():
                stacks.setdefault(stack, {})[int(number)] = value
            else:
                found[name] = value
    for name, experts in stacks.items():
        found[name] = torch.stack([experts[number] for number in sorted(experts)])
    return found


def _load_client_state(path: Path) -> Any:
    try:
        return load_safely(path)
    except LayerWiseError as e:
        if not isinstance(e.__cause__, UnpicklingError):
            raise
        raise LayerWiseError(
            f"{path} holds objects, such as a client state, that cannot be read without running "
            "code that the file names; if you trust whoever wrote it, add --trust-client-state"
        ) from e


#: The names of files beside checkpoints.
_TAKEN = ("latest", LATEST, "zero_to_fp32.py", "zero_to_torch.py")

#: The most bytes of one part of a path, without the suffixes that are added to it.
_LONGEST = 255 - len("_universal") - len(atomic.INCOMPLETE) - 17


def check_tag(tag: object) -> str:
    """Return ``tag`` as text, if it is valid.

    Raises:
        LayerWiseError: no checkpoint can have it.
    """
    text = str(tag)
    parts = text.split("/")
    reason = ""
    if not text or leads_out(text):
        reason = "names no folder below save_dir"
    elif not text.isprintable() or text != text.strip():
        reason = "holds characters that the file latest cannot hold"
    elif parts[0] in _TAKEN:
        reason = f"is the name of a file beside the checkpoints ({', '.join(_TAKEN)})"
    elif any(part.endswith((atomic.INCOMPLETE, atomic.REPLACED)) for part in parts):
        reason = f"ends in {atomic.INCOMPLETE} or {atomic.REPLACED}, as only unfinished saves do"
    elif (longest := max(map(len, text.encode().split(b"/")))) > _LONGEST:
        reason = f"has a part of {longest} bytes, more than {_LONGEST}"
    if reason:
        raise LayerWiseError(
            f"the checkpoint's tag {tag!r:.300} {reason}; choose another, such as 'global_step10' "
            "or 'run/step10'"
        )
    return text
