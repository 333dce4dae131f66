"""The comparison of two checkpoints by parameter and state, of any kinds and numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from ds_layerwise.checkpoint.formats.checkpoint_folder import Bars
from ds_layerwise.errors import few
from ds_layerwise.tools.checkpoint_contents import Contents
from ds_layerwise.tools.verify import same_bits


def _difference(one: Tensor, other: Tensor) -> tuple[int, float]:
    """Return the number of different elements, and the largest distance between two."""
    if one.shape != other.shape:
        return max(one.numel(), other.numel()), math.inf
    # A NaN in only one of them is the largest difference. Equal infinities, and zeros with
    # different signs, have no difference.
    distance = (one.double() - other.double()).abs().nan_to_num(nan=math.inf)
    distance[one.double() == other.double()] = 0.0
    return int((one != other).sum()), float(distance.max())


def differences(one: Contents, other: Contents, *, states: bool, bars: Bars) -> list[str]:
    """Return a line for each kind of difference; none if two checkpoints are equal bit for bit.

    It needs memory for a few copies of one state of one parameter.

    Args:
        states: False to leave the optimizer states out.
    """
    lines = []
    if one.saved.header.step != other.saved.header.step:
        lines.append(f"step: {one.saved.header.step} and {other.saved.header.step}")
    ours = one.trained.keys() | one.others.keys()
    theirs = other.trained.keys() | other.others.keys()
    for folder, lonely_names in (
        (one.folder, ours - theirs),
        (other.folder, theirs - ours),
    ):
        if lonely_names:
            lines.append(f"only in {folder}: {few(sorted(lonely_names))}")
    unlike: dict[str, dict[str, tuple[int, float]]] = {}
    lonely: dict[tuple[str, int], list[str]] = {}
    sizes = {}
    for name in (*one.trained, *one.others):
        if name in theirs:
            sizes[name] = one.num_bytes(name, states=states)
    with bars("compare", sum(sizes.values())) as done:
        for name, size in sizes.items():
            mine = dict(_values(one, name, states=states))
            yours = dict(_values(other, name, states=states))
            for key in mine.keys() | yours.keys():
                if key not in yours:
                    lonely.setdefault((key, 0), []).append(name)
                elif key not in mine:
                    lonely.setdefault((key, 1), []).append(name)
                elif not same_bits(mine[key], yours[key]):
                    unlike.setdefault(key, {})[name] = _difference(mine[key], yours[key])
            done(size)
    for (key, side), names in sorted(lonely.items()):
        lines.append(f"only in {(one, other)[side].folder}: {key} of {few(names)}")
    for key, found in sorted(unlike.items()):
        counts, distances = zip(*found.values(), strict=True)
        lines.append(
            f"{key} differs in {len(found)} of {len(sizes)} parameters, {sum(counts):,} elements, "
            f"by at most {max(distances):.3g}: {few(list(found))}"
        )
    return lines


def _values(contents: Contents, name: str, *, states: bool) -> Iterator[tuple[str, Tensor]]:
    for key, value in contents.values(name, states=states):
        # The universal format stores everything untrained in float32, so compare numbers.
        yield key, value.double() if name in contents.others else value
