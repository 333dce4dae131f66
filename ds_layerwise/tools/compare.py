"""Two checkpoints by parameter and state, whatever kinds they are and however many ranks saved
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_layerwise.checkpoint.formats.checkpoint_folder import Bars
from ds_layerwise.errors import few
from ds_layerwise.tools.checkpoint_contents import Contents
from ds_layerwise.tools.verify import same_bits


@dataclass(slots=True)
class _Difference:
    """What differs under one key."""

    names: list[str] = field(default_factory=list)
    num_elements: int = 0
    most: float = 0.0

    def add(self, name: str, one: Tensor, other: Tensor) -> None:
        self.names.append(name)
        if one.shape != other.shape:
            self.most = float("inf")
            self.num_elements += max(one.numel(), other.numel())
            return
        distance = (one.double() - other.double()).abs()
        # Where only one is a NaN, nothing is farther apart; the same infinity and zeros of two
        # signs are not at all.
        distance = torch.where(
            one.double() == other.double(), 0.0, distance.nan_to_num(nan=float("inf"))
        )
        self.num_elements += int((one != other).sum())
        self.most = max(self.most, float(distance.max()))


def differences(one: Contents, other: Contents, *, states: bool, bars: Bars) -> list[str]:
    """One line for each kind of difference between two checkpoints; none if they are equal bit for
    bit.

    Memory: one state of one parameter, a few times.

    Args:
        states: whether to compare the optimizer states, too.
    """
    lines: list[str] = []
    if one.saved.header.step != other.saved.header.step:
        lines.append(f"step: {one.saved.header.step} and {other.saved.header.step}")
    names, others = _names(one), _names(other)
    for contents, missing in (
        (one, names.keys() - others.keys()),
        (other, others.keys() - names.keys()),
    ):
        if missing:
            lines.append(f"only in {contents.folder}: {few(sorted(missing))}")
    unlike: dict[str, _Difference] = {}
    lonely: dict[tuple[str, int], list[str]] = {}
    both = [name for name in names if name in others]
    sizes = {name: names[name] * 4 * (len(one.keys(name)) if states else 1) for name in both}
    with bars("compare", sum(sizes.values())) as done:
        for name in both:
            found = (
                dict(_values(one, name, states=states)),
                dict(_values(other, name, states=states)),
            )
            for key in found[0].keys() & found[1].keys():
                if not same_bits(found[0][key], found[1][key]):
                    unlike.setdefault(key, _Difference()).add(name, found[0][key], found[1][key])
            for key in found[0].keys() ^ found[1].keys():
                lonely.setdefault((key, 0 if key in found[0] else 1), []).append(name)
            done(sizes[name])
    for (key, index), of in sorted(lonely.items()):
        lines.append(f"only in {(one, other)[index].folder}: {key} of {few(of)}")
    for key, difference in sorted(unlike.items()):
        lines.append(
            f"{key} differs in {len(difference.names)} of {len(both)} parameters, "
            f"{difference.num_elements:,} elements, by at most {difference.most:.3g}: "
            f"{few(difference.names)}"
        )
    return lines


def _names(contents: Contents) -> dict[str, int]:
    """Every name and how many elements it has."""
    return {
        **{name: torch.Size(shape).numel() for name, shape in contents.trained.items()},
        **{name: value.numel() for name, value in contents.others.items()},
    }


def _values(contents: Contents, name: str, *, states: bool) -> Iterator[tuple[str, Tensor]]:
    for key, value in contents.values(name, states=states):
        # The universal format has everything that is not trained in float32; as numbers they are
        # the same.
        yield key, value.double() if name in contents.others else value
