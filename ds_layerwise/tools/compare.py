"""The comparison of two checkpoints by parameter and state, of any kinds and numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ds_layerwise.checkpoint.formats.checkpoint_folder import Bars
from ds_layerwise.errors import few
from ds_layerwise.tools.checkpoint_contents import Contents
from ds_layerwise.tools.verify import same_bits


class _Difference(NamedTuple):
    """Two different values of one parameter."""

    name: str
    num_elements: int
    distance: float


def _difference(name: str, one: Tensor, other: Tensor) -> _Difference:
    if one.shape != other.shape:
        return _Difference(name, max(one.numel(), other.numel()), math.inf)
    # A NaN in only one of them is the largest difference. Equal infinities, and zeros with
    # different signs, have no difference.
    distance = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
    distance[one.double() == other.double()] = 0.0
    return _Difference(name, int((one != other).sum()), float(distance.max()))


def differences(one: Contents, other: Contents, *, states: bool, bars: Bars) -> list[str]:
    """Return a line for each kind of difference; none if two checkpoints are equal bit for bit.

    It needs memory for a few copies of one state of one parameter.

    Args:
        states: False to leave the optimizer states out.
    """
    lines: list[str] = []
    if one.saved.header.step != other.saved.header.step:
        lines.append(f"step: {one.saved.header.step} and {other.saved.header.step}")
    ours = _names(one)
    theirs = _names(other)
    for folder, lonely_names in (
        (one.folder, ours.keys() - theirs.keys()),
        (other.folder, theirs.keys() - ours.keys()),
    ):
        if lonely_names:
            lines.append(f"only in {folder}: {few(sorted(lonely_names))}")
    unlike: dict[str, list[_Difference]] = {}
    lonely: dict[tuple[str, int], list[str]] = {}
    both = {name: numel for name, numel in ours.items() if name in theirs}
    sizes = {}
    for name, numel in both.items():
        sizes[name] = numel * 4 * (len(one.keys(name)) if states else 1)
    with bars("compare", sum(sizes.values())) as done:
        for name in both:
            mine = dict(_values(one, name, states=states))
            yours = dict(_values(other, name, states=states))
            for key in mine.keys() | yours.keys():
                if key not in yours:
                    lonely.setdefault((key, 0), []).append(name)
                elif key not in mine:
                    lonely.setdefault((key, 1), []).append(name)
                elif not same_bits(mine[key], yours[key]):
                    unlike.setdefault(key, []).append(_difference(name, mine[key], yours[key]))
            done(sizes[name])
    for (key, side), names in sorted(lonely.items()):
        lines.append(f"only in {(one, other)[side].folder}: {key} of {few(names)}")
    for key, found in sorted(unlike.items()):
        unequal, counts, distances = zip(*found, strict=True)
        lines.append(
            f"{key} differs in {len(unequal)} of {len(both)} parameters, {sum(counts):,} elements, "
            f"by at most {max(distances):.3g}: {few(unequal)}"
        )
    return lines


def _names(contents: Contents) -> dict[str, int]:
    """Return the number of elements of each name."""
    numels = {}
    for name, shape in contents.trained.items():
        numels[name] = math.prod(shape)
    return numels | {name: value.numel() for name, value in contents.others.items()}


def _values(contents: Contents, name: str, *, states: bool) -> Iterator[tuple[str, Tensor]]:
    for key, value in contents.values(name, states=states):
        # The universal format stores everything untrained in float32, so compare numbers.
        yield key, value.double() if name in contents.others else value
