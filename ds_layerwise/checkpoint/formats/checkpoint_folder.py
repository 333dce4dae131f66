"""A checkpoint's folder from outside an engine: where it is, whether its bytes are those saved, the
model's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, TypeVar
from zipfile import is_zipfile

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES, PARAM_SHAPES
from torch import Tensor

from ds_layerwise.checkpoint.files.atomic import pointed
from ds_layerwise.checkpoint.files.manifest import FILE_NAME, Manifest
from ds_layerwise.checkpoint.files.safe_load import UNREADABLE, load_safely
from ds_layerwise.checkpoint.formats.regular import RegularCheckpoint
from ds_layerwise.checkpoint.formats.universal import LATEST, is_universal
from ds_layerwise.checkpoint.new_names import first_expert
from ds_layerwise.errors import LayerWiseError

#: DeepSpeed's file with the module; the second is that of ZeRO-3, whose parameters are elsewhere.
MODEL_FILE, ZERO3_MODEL_FILE = (
    "mp_rank_{mp_rank:02d}_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)

#: Files are checked in parts of about this many bytes.
_PART = 1 << 26

Item = TypeVar("Item")
Result = TypeVar("Result")


class Bars(Protocol):
    """Shows how far something is: call what the context gives with the bytes that were done
    since.
    """

    def __call__(
        self, what: str, total_bytes: int
    ) -> AbstractContextManager[Callable[[int], object]]:
        """A bar for ``what``, as long as the context lasts."""


def in_parallel(
    work: Callable[[Item], Result],
    items: Iterable[tuple[Item, int]],
    *,
    what: str,
    workers: int,
    bars: Bars,
) -> list[Result]:
    """``work`` on every item, in ``workers`` threads; each comes with the bytes that it counts for.

    Threads, because reading, checksums and ``torch.save`` leave the interpreter alone while they
    work.
    """
    sized = list(items)
    pool = ThreadPoolExecutor(workers)
    try:
        with bars(what, sum(size for _, size in sized)) as done:
            futures = {pool.submit(work, item): size for item, size in sized}
            for future in as_completed(futures):
                future.result()
                done(futures[future])
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)


def find(path: Path) -> Path:
    """The folder of one checkpoint: ``path`` itself, or the one that ``latest`` in it names.

    Raises:
        LayerWiseError: there is none, or it is of a kind that only an engine reads.
    """
    folder = _find(path)
    if any(folder.glob("layer_*-model_states.pt")):
        raise LayerWiseError(
            f"{folder} was saved by a pipeline, which only a pipeline reads; give a universal "
            "checkpoint of it, which layerwise.save_universal or DeepSpeed's ds_to_universal.py "
            "write"
        )
    return folder


def _find(path: Path) -> Path:
    if not path.is_dir():
        raise LayerWiseError(
            f"{path} is no folder; give the folder of a checkpoint, or one with a file named latest"
        )
    if is_universal(path) or (path / FILE_NAME).exists() or any(path.glob("*_optim_states.pt")):
        return path
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


def manifest_of(folder: Path) -> Manifest | None:
    """The list of its files; None where the writer was DeepSpeed's converter, which leaves none.

    Raises:
        LayerWiseError: it is missing or damaged, or somebody else wrote a regular checkpoint.
    """
    if not (folder / FILE_NAME).exists():
        if is_universal(folder):
            return None
        # Says so if somebody else wrote it.
        RegularCheckpoint(folder)
    return Manifest.read(folder)


def damaged(folder: Path, manifest: Manifest, *, workers: int, bars: Bars) -> list[str]:
    """One line for each file that is missing or holds other bytes than ``manifest`` says."""

    def check(part: tuple[str, int, int]) -> tuple[str, str]:
        name, index, count = part
        try:
            manifest.only([name]).check(folder, rank=index, world_size=count)
        except LayerWiseError as e:
            return name, str(e)
        return name, ""

    parts: list[tuple[tuple[str, int, int], int]] = []
    for name in manifest.files:
        size, path = manifest.size_of(name), folder / name
        # A list may say anything, and a file is no longer than it is.
        count = min(size, path.stat().st_size if path.is_file() else 0) // _PART + 1
        parts += [
            ((name, index, count), size * (index + 1) // count - size * index // count)
            for index in range(count)
        ]
    lines: dict[str, str] = {}
    for name, line in in_parallel(check, parts, what="check", workers=workers, bars=bars):
        if line:
            lines.setdefault(name, line)
    return list(lines.values())


def check_bytes(folder: Path, *, workers: int, bars: Bars) -> None:
    """Compare every file with the list that was saved with it, where there is one.

    Raises:
        LayerWiseError: one is missing or damaged; names it.
    """
    manifest = manifest_of(folder)
    if manifest is not None and (lines := damaged(folder, manifest, workers=workers, bars=bars)):
        raise LayerWiseError(
            lines[0] + (f" ({len(lines) - 1} more files are damaged)" if len(lines) > 1 else "")
        )


def check_target(out: Path, source: Path, *, overwrite: bool, replaceable: bool) -> None:
    """Whether ``out`` may be written; ``replaceable`` says whether what is there is of the kind
    that it becomes.

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


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What DeepSpeed's model file says of parameters and buffers. Tensors are mapped from it."""

    path: Path
    module: Mapping[str, Tensor]
    """What is of the module's ``state_dict`` in this file, or in those of the experts, as a
    whole.
    """
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the trained parameters; of experts, those that the first rank held."""
    frozen: Mapping[str, Tensor]
    """What DeepSpeed's scripts take for frozen and empty parameters."""
    aliases: Mapping[str, str]
    """By a name that is not stored, the tied parameter that is."""
    world_size: int

    @classmethod
    def read(cls, folder: Path, *, trust: bool, mp_rank: int = 0) -> ModelFile | None:
        """The one in ``folder``; None if there is none.

        Args:
            trust: whether code in it may run.
            mp_rank: which piece of a model that is cut.

        Raises:
            LayerWiseError: it is damaged, or holds objects of a kind that only code can restore.
        """
        names = (MODEL_FILE.format(mp_rank=mp_rank), ZERO3_MODEL_FILE)
        paths = [path for name in names if (path := folder / name).exists()]
        if not paths:
            return None
        load = _load_trusted if trust else _load_client_state
        content = load(paths[0])
        if not isinstance(content, dict) or not isinstance(content.get("module", 0), dict | None):
            raise LayerWiseError(f"{paths[0]} holds no module; it is no model file of DeepSpeed")
        shapes = _shapes(content)
        for stage in sorted(folder.glob("mp_rank_*_model_states.pt")):
            # Of a pipeline, each stage has its own.
            shapes = shapes if stage == paths[0] else {**_shapes(load(stage)), **shapes}
        held = {
            **(content["module"] or {}),
            **_experts(folder, _load_trusted if trust else load_safely),
        }
        frozen: Mapping[str, Tensor] = content.get(FROZEN_PARAM_FRAGMENTS) or {}
        module = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        if paths[0].name == ZERO3_MODEL_FILE:
            elsewhere = {*shapes, *(content.get(FROZEN_PARAM_SHAPES) or ())}
            module, frozen = (
                {name: value for name, value in module.items() if name not in elsewhere},
                {},
            )
        tied = content.get("shared_params") or {}
        # DeepSpeed goes by addresses, and all tensors without elements have the same one.
        aliases = {
            alias: name
            for alias, name in tied.items()
            if alias not in module or module[alias].numel()
        }
        return cls(
            paths[0], module, shapes, frozen, aliases, int(content.get("dp_world_size") or 1)
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a trained parameter; None if the file knows none of that name."""
        return self.shapes.get(name, self.shapes.get(first_expert(name) or name))

    def others(self, trained: Iterable[str]) -> dict[str, Tensor]:
        """Frozen parameters and buffers."""
        left_out = {*trained, *self.aliases}
        return {name: value for name, value in self.module.items() if name not in left_out}


def _shapes(content: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    groups: Sequence[Mapping[str, Any]] = content.get(PARAM_SHAPES) or ()
    return {name: tuple(shape) for group in groups for name, shape in group.items()}


def _experts(folder: Path, load: Callable[[Path], Any]) -> dict[str, Tensor]:
    """The weights of experts, each of which DeepSpeed writes a file of."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("layer_*_expert_*_mp_rank_00_model_states.pt")):
        found.update(load(path))
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


def _load_trusted(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=False)
    except (*UNREADABLE, ImportError) as e:
        raise LayerWiseError(f"{path} cannot be read: {type(e).__name__}: {e}") from e
