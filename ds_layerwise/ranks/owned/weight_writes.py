"""Writes into weights by others than the optimizer, such as ``load_state_dict`` or an average that
is tried.

A step starts from masters, which would undo the write without a word.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Elements that are compared at a time: the memory that it takes is a few bytes for each.
_AT_A_TIME = 1 << 22


def followed(masters: Tensor, values: Tensor) -> Tensor:
    """Return ``masters`` itself where it rounds to ``values``, else a copy on the host that has
    followed them.
    """
    if not any(_differs(*some).any() for some in _some_at_a_time(masters, values)):
        return masters
    copy = masters.to("cpu", copy=True)
    follow_(copy, values)
    return copy


def follow_(masters: Tensor, values: Tensor) -> Tensor:
    """Set masters to those values that they do not round to.

    Element by element, so that the result does not depend on how parameters are cut, and what was
    not written keeps its precision.

    Args:
        masters: 1-D float32, written in place.
        values: 1-D, as many, in a dtype of 16 bits; may be on another device.

    Returns:
        0-d bool on the device of ``masters``: whether there were any. Nobody waits for the device.
    """
    written = torch.zeros((), dtype=torch.bool, device=masters.device)
    for master, value in _some_at_a_time(masters, values):
        differs = _differs(master, value)
        if master.device.type == "cpu" and not differs.any():
            continue
        written |= (differs & (value == value)).any()
        torch.where(differs, value, master, out=master)
    return written


def _some_at_a_time(masters: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    parts = (torch.split(flat, _AT_A_TIME) for flat in (masters, values))
    for master, value in zip(*parts, strict=True):
        yield master, value.to(master.device)


def _differs(master: Tensor, value: Tensor) -> Tensor:
    # Of all that is not a number, some is rounded to other bits, by where in a vector it stands.
    return master.to(value.dtype).view(torch.int16) != value.view(torch.int16)
