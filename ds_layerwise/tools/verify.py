"""Whether a checkpoint is whole and agrees with itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

from ds_layerwise.checkpoint.files.manifest import FILE_NAME, names_in
from ds_layerwise.checkpoint.formats.checkpoint_folder import Bars, damaged, find, manifest_of
from ds_layerwise.checkpoint.formats.regular import (
    CONVERTED,
    KEY,
    RegularCheckpoint,
    mp_size,
    travels_as,
)
from ds_layerwise.checkpoint.formats.universal import UniversalCheckpoint, is_universal
from ds_layerwise.checkpoint.new_names import first_expert
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools.checkpoint_contents import WEIGHTS, Contents

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Report:
    """What was found in one checkpoint."""

    folder: Path
    summary: str
    problems: list[str] = field(default_factory=list)
    """One line each; none where the checkpoint is good."""
    warnings: list[str] = field(default_factory=list)
    contents: list[Contents] = field(default_factory=list)
    """One for each part of the model; none where it could not be opened."""


def verify(path: Path, *, states: bool, workers: int, trust: bool, bars: Bars) -> Report:
    """Check the checkpoint at ``path``: every byte, then every tensor.

    Args:
        states: whether to look at the optimizer states, too. Bytes are checked in any case.
        trust: whether the model's file may run code.

    Raises:
        LayerWiseError: there is no checkpoint that this package reads, or its model file needs
            ``trust``.
    """
    folder = find(path)
    kind = "universal" if is_universal(folder) else "regular"
    names = names_in(folder)
    size = sum((folder / name).stat().st_size for name in names)
    report = Report(folder, f"{folder}: {kind} checkpoint, {len(names)} files, {size:,} bytes")
    if kind == "universal" or (folder / FILE_NAME).exists() or not names:
        _check_bytes(report, names, workers=workers, bars=bars)
    else:
        # Of another optimizer, it is refused; of ours, its list is lost.
        RegularCheckpoint(folder)
        report.problems.append(
            f"{folder / FILE_NAME} is missing: the save was never finished, or files were lost"
        )
    if report.problems:
        # Mapping a damaged file may end the process.
        return report
    try:
        report.contents = [
            Contents(folder, trust=trust, mp_rank=mp_rank) for mp_rank in range(mp_size(folder))
        ]
    except LayerWiseError as e:
        if "--trust-client-state" in str(e):
            raise
        report.problems.append(str(e))
        return report
    first, parts = report.contents[0], len(report.contents)
    numel = sum(
        math.prod(shape) for contents in report.contents for shape in contents.trained.values()
    )
    ranks = {None: "unknown world size", 1: "1 rank"}.get(
        first.world_size, f"{first.world_size} ranks"
    )
    report.summary = (
        f"{folder}: {kind} checkpoint, step {first.saved.header.step}, {ranks}, "
        f"{f'{parts} parts, ' if parts > 1 else ''}{len(first.trained)} parameters, {numel:,} "
        f"elements, {size:,} bytes"
    )
    for contents in report.contents:
        _check_contents(contents, report, states=states, bars=bars)
    if len(steps := {contents.saved.header.step for contents in report.contents}) > 1:
        report.problems.append(
            f"the parts in {folder} are of steps {', '.join(map(str, sorted(steps)))}"
        )
    return report


def _check_bytes(report: Report, names: list[str], *, workers: int, bars: Bars) -> None:
    try:
        manifest = manifest_of(report.folder)
    except LayerWiseError as e:
        report.problems.append(str(e))
        return
    if manifest is None:
        report.warnings.append(
            f"{report.folder} has no {FILE_NAME}, as DeepSpeed's converter writes none: its bytes "
            "cannot be checked, the rest is"
        )
        return
    report.warnings += [
        f"{path} is not the script of the DeepSpeed that is installed: before it is run, compare "
        "the two, or take that one"
        for path in _changed_scripts(report.folder.parent)
    ]
    report.problems += damaged(report.folder, manifest, workers=workers, bars=bars)
    report.warnings += [
        f"{report.folder / name} is not of this save"
        for name in names
        if name not in manifest.files
    ]


def _changed_scripts(folder: Path) -> list[Path]:
    """Those scripts of DeepSpeed, which it lays beside checkpoints, that are other than its own."""
    own = sorted(
        (Path(getattr(find_spec("deepspeed"), "origin", "")).parent / "utils").glob("zero_to_*.py")
    )
    return [
        path
        for script in own
        if (path := folder / script.name).is_file() and path.read_bytes() != script.read_bytes()
    ]


def _check_contents(contents: Contents, report: Report, *, states: bool, bars: Bars) -> None:
    saved, problems = contents.saved, report.problems
    sound = set(contents.trained)
    for name, line in (
        _misplaced(saved) if isinstance(saved, RegularCheckpoint) else _misshapen(contents)
    ):
        problems.append(line)
        sound.discard(name)
    problems += _against_model_file(contents)
    if contents.model and contents.model.module.keys().isdisjoint(contents.trained):
        report.warnings.append(f"{contents.model.path} has no trained weights to compare with")
    sizes = {
        name: math.prod(shape) * 4 * (len(contents.keys(name)) if states else 1)
        for name, shape in contents.trained.items()
    }
    with bars("compare", sum(sizes.values())) as done:
        for name in (name for name in contents.trained if name in sound):
            try:
                for key, value in contents.values(name, states=states):
                    if not _is_finite(value):
                        report.warnings.append(f"{name}: {key} has values that are not finite")
                    if key == WEIGHTS and (line := _unlike_model(contents, name, value)):
                        problems.append(line)
            except LayerWiseError as e:
                problems.append(str(e))
            done(sizes[name])
    for name, value in contents.others.items():
        if not _is_finite(value):
            report.warnings.append(f"{name}, which is not trained, has values that are not finite")


def _misplaced(saved: RegularCheckpoint) -> Iterator[tuple[str, str]]:
    """Parameters whose elements are not each in exactly one rank's file, as a name and a line."""
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in saved.header.shapes}
    broken: set[str] = set()
    for rank in range(saved.world_size):
        state_dict, path = saved.state_dict(rank), saved.path(rank)
        starts = state_dict[KEY]["param_starts"]
        for index, name in enumerate(saved.header.shapes):
            fragments = state_dict[PARAM_SLICE_MAPPINGS][index]
            if fragments.keys() != ({name} & starts.keys()):
                yield name, f"{path} does not hold the part of {name} that its own list says"
                broken.add(name)
                continue
            numel = 0
            for address in fragments.values():
                numel = address.start + address.numel
                found[name].append((starts[name], starts[name] + address.numel, rank))
            # DeepSpeed's scripts go by what is there, whether or not it is listed.
            states = state_dict[BASE_OPTIMIZER_STATE]["state"][index]
            tensors = {
                WEIGHTS: state_dict[SINGLE_PARTITION_OF_FP32_GROUPS][index],
                **{key: states.get(key) for key in CONVERTED if key != "step"},
            }
            for key, value in tensors.items():
                if value is None or tuple(value.shape) != (numel,):
                    size = "no" if value is None else value.numel()
                    yield (
                        name,
                        f"{path} has {size} elements of {key} of {name}, and {numel} by its own "
                        "list",
                    )
                    broken.add(name)
    for name, intervals in found.items():
        if name in broken:
            continue
        if line := _gaps(name, intervals, math.prod(saved.header.shapes[name])):
            yield name, f"{line} in the files of {saved.path(0).parent}"
        elif sorted(intervals) != sorted(
            (first, last, rank) for rank, first, last in saved.holders(name)
        ):
            yield name, f"{name} is not on the ranks that the layout in {saved.path(0)} says"


def _gaps(name: str, intervals: list[tuple[int, int, int]], numel: int) -> str:
    end = 0
    for start, stop, rank in sorted(intervals):
        if start != end:
            what = (
                "in no file"
                if start > end
                else f"in more than one file, among them that of rank {rank}"
            )
            return f"{name}: elements {min(start, end)} to {max(start, end)} of {numel} are {what},"
        end = stop
    return "" if end == numel else f"{name}: {end} elements where its shape has {numel}"


def _misshapen(contents: Contents) -> Iterator[tuple[str, str]]:
    """Parameters that lack a file of the universal format, or have one of another shape, as a name
    and a line.
    """
    saved = contents.saved
    if not isinstance(saved, UniversalCheckpoint):
        return
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
    for name, value in (contents.model.others(contents.trained) if contents.model else {}).items():
        if name not in saved.header.shapes:
            yield (
                name,
                f"{contents.folder / 'zero' / name / 'fp32.pt'} is missing, and {name} is in the "
                "model's file",
            )
            continue
        held = saved.value(name, WEIGHTS)
        if not same_bits(held.reshape(-1), value.to(held.dtype).reshape(-1)):
            yield (
                name,
                f"{name}, which is not trained, is not the same in fp32.pt and in the model's file",
            )


def _against_model_file(contents: Contents) -> Iterator[str]:
    """Names and shapes that differ from those in the model's file, and weights in it that it has
    twice.
    """
    model = contents.model
    if model is None:
        yield (
            f"{contents.folder} has no model file, so there is nothing to compare the weights with"
        )
        return
    for name in sorted(model.shapes.keys() - contents.trained.keys()):
        yield f"{name} is missing in the optimizer's files"
    for name in sorted(contents.trained):
        shape = model.shape(name)
        if shape is None:
            yield f"{name} is missing in the param_shapes of {model.path}"
        elif shape != contents.trained[name]:
            trained = contents.trained[name]
            yield f"{name} is {trained}, and {shape} in the param_shapes of {model.path}"
    for alias, name in model.aliases.items():
        if (
            alias in model.module
            and name in model.module
            and not same_bits(model.module[alias], model.module[name])
        ):
            yield f"{alias} is tied to {name}, and {model.path} has other weights for it"
    for name, value in model.frozen.items():
        if name in model.module and not same_bits(model.module[name], value):
            yield f"{name} is frozen, and {model.path} has two values of it that differ"


def _unlike_model(contents: Contents, name: str, master: Tensor) -> str:
    """A line where the model's weights are not ``master`` rounded to their dtype."""
    model = contents.model
    if model is None or (
        name not in model.module and model.module.keys().isdisjoint(contents.trained)
    ):
        # Of ZeRO-3, or none at all, which has a line of its own.
        return ""
    if name not in model.module:
        if first_expert(name) is not None and isinstance(contents.saved, UniversalCheckpoint):
            # Only a regular checkpoint has files of experts.
            return ""
        return f"{name} is missing in the module of {model.path}"
    held = model.module[name].reshape(-1)
    rounded = master.to(held.dtype)
    if held.shape != rounded.shape:
        return f"{name} is {tuple(model.module[name].shape)} in the module of {model.path}"
    if same_bits(held, rounded):
        return ""
    unlike = (held != rounded) & ~(held.isnan() & rounded.isnan())
    if not bool(unlike.any()):
        return ""
    return (
        f"{name}: {int(unlike.sum())} of {held.numel()} weights in {model.path} are not the "
        f"float32 weights in {str(held.dtype).removeprefix('torch.')}"
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal; zeros of either sign differ, a NaN equals
    itself.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())
