"""Checks that a checkpoint is complete and consistent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

from ds_layerwise.checkpoint.checkpoint_folder import (
    ZERO3_MODEL_FILE,
    ModelFile,
    Reading,
    damaged,
    find,
    manifest_of,
    refuse_stages,
)
from ds_layerwise.checkpoint.manifest import FILE_NAME, names_in
from ds_layerwise.checkpoint.new_names import first_expert
from ds_layerwise.checkpoint.record import joined, travels_as, weights_in
from ds_layerwise.checkpoint.regular import KEY, RegularCheckpoint, mp_size
from ds_layerwise.checkpoint.universal import UniversalCheckpoint, is_universal
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers import mxfp8

#: The key of the weights beside those of states, as in the universal format.
WEIGHTS = "fp32"


class Contents:
    """The checkpoint in ``folder``, with all of its files open.

    Args:
        trust: True to let the model's file run code.
        mp_rank: the number of the piece of a model that is cut; see :func:`.regular.mp_size`.

    Raises:
        LayerWiseError: a file is missing, unreadable, of another save, or in a newer format; names
            it.
    """

    def __init__(self, folder: Path, *, trust: bool, mp_rank: int = 0) -> None:
        self.folder = folder
        self.model = ModelFile.read(folder, trust=trust, mp_rank=mp_rank)
        self.saved: RegularCheckpoint | UniversalCheckpoint
        if is_universal(folder):
            self.saved = UniversalCheckpoint(folder)
        else:
            self.saved = RegularCheckpoint(folder, mp_rank=mp_rank)
            self.saved.open_all()
        model = self.model
        header = self.saved.header
        known = model.shapes if model else {}
        from_zero3 = model is not None and model.path.name == ZERO3_MODEL_FILE
        self.trained: dict[str, tuple[int, ...]] = {}
        for name, shape in header.shapes.items():
            if name in known and from_zero3 and tuple(shape) == (math.prod(known[name]),):
                # DeepSpeed's converter leaves this parameter flat.
                self.trained[name] = known[name]
            elif name in header.rules or name in known:
                self.trained[name] = tuple(shape)
        self.aliases: dict[str, str] = {}
        for alias, name in model.aliases.items() if model else ():
            if alias not in self.trained:
                self.aliases[alias] = name
        self.others = self._untrained()
        """Frozen parameters and buffers, in their saved dtype."""

    def _untrained(self) -> dict[str, Tensor]:
        others = {}
        if isinstance(self.saved, UniversalCheckpoint):
            for name in self.saved.header.shapes:
                if name not in self.trained and name not in self.aliases:
                    others[name] = self.saved.value(name, WEIGHTS)
        for name, value in self.model.others(self.trained).items() if self.model else ():
            # A universal folder has them in float32; the model's file has their own dtype.
            if name not in others or others[name].shape == value.shape:
                others[name] = value
        return others

    @property
    def compared(self) -> ModelFile | None:
        """The model's file, unless it is of one tensor-parallel part, and parameters are whole."""
        is_universal = isinstance(self.saved, UniversalCheckpoint)
        if is_universal and self.model and self.model.num_parts > 1:
            return None
        return self.model

    @property
    def world_size(self) -> int | None:
        """The number of ranks that saved the checkpoint, if it is known."""
        if isinstance(self.saved, RegularCheckpoint):
            return self.saved.world_size
        if self.model:
            return self.model.world_size
        return None

    def num_bytes(self, name: str, *, states: bool) -> int:
        """Return about the number of bytes of the weights of ``name`` and, with ``states``, of its
        states.
        """
        if name in self.others:
            return self.others[name].numel() * 4
        return math.prod(self.trained[name]) * 4 * (len(self.keys(name)) if states else 1)

    def keys(self, name: str) -> tuple[str, ...]:
        """Return :data:`WEIGHTS` and the keys of the states of ``name``."""
        return WEIGHTS, *self.saved.header.keys(name)[1:]

    def weight(self, name: str) -> Tensor:
        """Return a trained parameter in float32, or a frozen one or a buffer in its saved dtype.

        Raises:
            LayerWiseError: some elements are missing.
        """
        if name in self.others:
            return self.others[name]
        return weights_in(self.saved, name, self.trained[name])

    def values(self, name: str, *, states: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of ``name`` and, with ``states``, its states, with their keys.

        The weights are 1-D, and so are states with one element per element of the parameter.

        Raises:
            LayerWiseError: some elements are missing, or pieces disagree.
        """
        yield WEIGHTS, self.weight(name).reshape(-1)
        if not states or name in self.others:
            return
        pieces = self.saved.pieces(name, 0, math.prod(self.trained[name]))
        for key in self.keys(name)[1:]:
            values = [piece.values_of(key) for piece in pieces]
            if key != "step" and all(piece.is_elementwise(key) for piece in pieces):
                yield key, joined(f"{key} of {name}", values, self.trained[name]).reshape(-1)
            elif all(torch.equal(value, values[0]) for value in values):
                # The states of a 0-d parameter are 0-d in one form and 1-D in the other, and so is
                # the parameter.
                is_one = math.prod(self.trained[name]) == 1
                yield key, values[0].reshape(-1) if is_one else values[0]
            else:
                raise LayerWiseError(
                    f"{name} has several {key}, one for each of its {len(values)} pieces, which "
                    "differ, or one of them is cut short"
                )


@dataclass
class Report:
    """The findings about one checkpoint."""

    folder: Path
    summary: str
    problems: list[str] = field(default_factory=list)
    """The problems, one line each; empty if the checkpoint is good."""
    warnings: list[str] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)
    """The kinds of states, one line each."""


def verify(path: Path, reading: Reading, *, states: bool) -> Report:
    """Check the checkpoint at ``path``: every byte, then every tensor.

    Args:
        states: False to leave the optimizer states out. Bytes are always checked.

    Raises:
        LayerWiseError: there is no checkpoint that this package reads, or its model file needs
            to be trusted.
    """
    folder = find(path)
    kind = "universal" if is_universal(folder) else "regular"
    names = names_in(folder)
    size = sum((folder / name).stat().st_size for name in names)
    report = Report(folder, f"{folder}: {kind} checkpoint, {len(names)} files, {size:,} bytes")
    if kind == "regular" and names and not (folder / FILE_NAME).exists():
        # Raises an error for a checkpoint of another optimizer.
        RegularCheckpoint(folder)
    _check_bytes(report, names, reading)
    if report.problems:
        # Mapping a damaged file may crash the process.
        return report
    refuse_stages(folder)
    try:
        parts = [
            Contents(folder, trust=reading.trust, mp_rank=mp_rank)
            for mp_rank in range(mp_size(folder))
        ]
    except LayerWiseError as e:
        if "--trust-client-state" in str(e):
            raise
        report.problems.append(str(e))
        return report
    first = parts[0]
    numel = 0
    steps = set()
    kinds: Counter[str] = Counter()
    for contents in parts:
        numel += sum(map(math.prod, contents.trained.values()))
        steps.add(contents.saved.header.step)
        for name in contents.trained:
            kinds[", ".join(contents.keys(name))] += 1
    for keys, count in sorted(kinds.items()):
        report.holds.append(f"{count} x {keys}")
    ranks = {None: "unknown world size", 1: "1 rank"}.get(
        first.world_size, f"{first.world_size} ranks"
    )
    if len(parts) > 1:
        ranks += f", {len(parts)} parts"
    report.summary = (
        f"{folder}: {kind} checkpoint, step {first.saved.header.step}, {ranks}, "
        f"{len(first.trained)} parameters, {numel:,} elements, {size:,} bytes"
    )
    for contents in parts:
        _check_contents(contents, report, reading, states=states)
    if len(steps) > 1:
        report.problems.append(
            f"the parts in {folder} are of steps {', '.join(map(str, sorted(steps)))}"
        )
    return report


def _check_bytes(report: Report, names: list[str], reading: Reading) -> None:
    try:
        manifest = manifest_of(report.folder)
    except LayerWiseError as e:
        report.problems.append(str(e))
        return
    if manifest is None:
        report.warnings.append(
            f"{report.folder} has no {FILE_NAME} (DeepSpeed's converter writes none), so its bytes "
            "are not checked; everything else is"
        )
        return
    for script in sorted((Path(deepspeed.__file__).parent / "utils").glob("zero_to_*.py")):
        path = report.folder.parent / script.name
        if path.is_file() and path.read_bytes() != script.read_bytes():
            report.warnings.append(
                f"{path} differs from the script of the installed DeepSpeed; compare the two "
                "before running it, or use the installed one"
            )
    report.problems += damaged(report.folder, manifest, reading)
    for name in names:
        if name not in manifest.files:
            report.warnings.append(f"{report.folder / name} is not of this save")


def _check_contents(contents: Contents, report: Report, reading: Reading, *, states: bool) -> None:
    saved = contents.saved
    problems = report.problems
    sound = dict(contents.trained)
    for name, line in (
        _misplaced(saved) if isinstance(saved, RegularCheckpoint) else _misshapen(contents, saved)
    ):
        problems.append(line)
        sound.pop(name, None)
    problems += _against_model_file(contents)
    if contents.compared is not contents.model:
        report.warnings.append(
            f"{contents.folder} has the model's file of one tensor-parallel part alone, which is "
            "not compared with the whole parameters"
        )
    if contents.model and contents.model.module.keys().isdisjoint(contents.trained):
        report.warnings.append(
            f"{contents.model.path} has no trained weights to compare with; at ZeRO stage 3 that "
            "is right, and the optimizer's files have them"
        )
    sizes = {name: contents.num_bytes(name, states=states) for name in sound}
    with reading.bars("compare", sum(sizes.values())) as done:
        for name, size in sizes.items():
            try:
                for key, value in contents.values(name, states=states):
                    if not _is_finite(value):
                        report.warnings.append(f"{name}: {key} has values that are not finite")
                    if key == WEIGHTS:
                        problems += _unlike_model(contents, name, value)
            except LayerWiseError as e:
                problems.append(str(e))
            done(size)
    for name, value in contents.others.items():
        if not _is_finite(value):
            report.warnings.append(f"{name}, which is not trained, has values that are not finite")


def _misplaced(saved: RegularCheckpoint) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter of which a rank's file does not hold the part that the
    layout says, with a line about it. A layout has every element once.
    """
    for rank in range(saved.world_size):
        path = saved.path(rank)
        state_dict = saved.state_dict(rank)
        starts = state_dict[KEY]["param_starts"]
        for index, name in enumerate(saved.header.shapes):
            numel = 0
            expected = []
            for holder, first, length in saved.holders[name]:
                if holder == rank:
                    expected.append((name, first, length))
                    numel = length
            listed = []
            for key, address in state_dict[PARAM_SLICE_MAPPINGS][index].items():
                listed.append((key, starts.get(key), address.numel))
            if listed != expected:
                yield name, f"{path} does not hold the part of {name} that its layout says"
                continue
            # DeepSpeed's scripts use all tensors in the file, whether or not they are listed.
            states = state_dict[BASE_OPTIMIZER_STATE]["state"][index]
            tensors = {
                WEIGHTS: state_dict[SINGLE_PARTITION_OF_FP32_GROUPS][index],
                "exp_avg": states.get("exp_avg"),
                "exp_avg_sq": states.get("exp_avg_sq"),
            }
            for key, value in tensors.items():
                if value is None or value.shape != (numel,):
                    size = "no" if value is None else value.numel()
                    has = f"{path} has {size} elements of {key} of {name}"
                    yield name, f"{has}, but {numel} in its layout"


def _misshapen(contents: Contents, saved: UniversalCheckpoint) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter that lacks a file of the universal format, or has one of
    another shape, with a line about it.
    """
    for name, shape in contents.trained.items():
        keys = contents.keys(name)
        elementwise = {WEIGHTS, *travels_as(keys)} - {"step"}
        for key in keys:
            try:
                value = saved.value(name, key)
            except LayerWiseError as e:
                yield name, str(e)
                continue
            if key in elementwise and tuple(value.shape) not in (shape, (math.prod(shape),)):
                yield name, f"{name}: {key} is {tuple(value.shape)}, the parameter is {shape}"
    if contents.compared is None:
        return
    for name, value in contents.compared.others(contents.trained).items():
        if name not in saved.header.shapes:
            path = contents.folder / "zero" / name / "fp32.pt"
            yield name, f"{path} is missing, and {name} is in the model's file"
            continue
        held = saved.value(name, WEIGHTS)
        if not same_bits(held.reshape(-1), value.to(held.dtype).reshape(-1)):
            unlike = "is not the same in fp32.pt and in the model's file"
            yield name, f"{name}, which is not trained, {unlike}"


def _against_model_file(contents: Contents) -> Iterator[str]:
    """Yield a line for each difference from the model's file, or inside of it."""
    model = contents.model
    if model is None:
        yield f"{contents.folder} has no model file to compare the weights with"
    if contents.compared is None or model is None:
        return
    for name in sorted(model.shapes.keys() - contents.trained.keys()):
        yield f"{name} is missing in the optimizer's files"
    for name, trained in sorted(contents.trained.items()):
        shape = model.shapes.get(name, model.shapes.get(first_expert(name) or name))
        if shape is None:
            yield f"{name} is missing in the param_shapes of {model.path}"
        elif shape != trained:
            yield f"{name} is {trained}, and {shape} in the param_shapes of {model.path}"
    module = model.module
    for alias, name in model.aliases.items():
        if {alias, name} <= module.keys() and not same_bits(module[alias], module[name]):
            yield f"{alias} is tied to {name}, and {model.path} has other weights for it"
    for name, value in model.frozen.items():
        if name in module and not same_bits(module[name], value):
            yield f"{name} is frozen, and {model.path} has two values of it that differ"


def _unlike_model(contents: Contents, name: str, master: Tensor) -> Iterator[str]:
    """Yield a line if the model's weights are not ``master`` rounded to their dtype, or to the
    format in which they were sent.
    """
    model = contents.compared
    if model is None or model.module.keys().isdisjoint(contents.trained):
        # The file is of ZeRO-3, or is missing, which has a line of its own.
        return
    if name not in model.module:
        # Only a regular checkpoint has files of experts.
        is_of_expert = name in model.stacks or first_expert(name) is not None
        if not is_of_expert or isinstance(contents.saved, RegularCheckpoint):
            yield f"{name} is missing in the module of {model.path}"
        return
    weights = model.module[name].reshape(-1)
    rounded = master.to(weights.dtype)
    if weights.shape != rounded.shape:
        yield f"{name} is {tuple(model.module[name].shape)} in the module of {model.path}"
        return
    unlike = (weights != rounded) & ~(weights.isnan() & rounded.isnan())
    if mxfp8.MXFP8 in (contents.saved.header.dtypes or ()):
        # Which of the parameters were matrices of one owner is not known here.
        sent = mxfp8.rounded(master)
        unlike &= (weights != sent) & ~(weights.isnan() & sent.isnan())
    if bool(unlike.any()):
        yield (
            f"{name}: {int(unlike.sum())} of {weights.numel()} weights in {model.path} are not the "
            f"float32 weights in {str(weights.dtype).removeprefix('torch.')}"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Tell whether dtype, shape and every bit are equal.

    Zeros of different signs differ, and a NaN equals itself.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = one.reshape(-1).contiguous().view(torch.uint8)
    return torch.equal(bits, other.reshape(-1).contiguous().view(torch.uint8))


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())
