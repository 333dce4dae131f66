"""Writes into weights that do not come from the optimizer, such as ``load_state_dict`` or a trial
of averaged weights.

A step starts from masters. Without this module it would silently undo the write.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: The number of elements per comparison, which takes a few bytes of memory for each.
_AT_A_TIME = 1 << 22


def followed(masters: Tensor, values: Tensor) -> Tensor:
    """Return ``masters`` itself if it rounds to ``values``, else a copy on the host that follows
    them.
    """
    if not any(_differs(*some).any() for some in _some_at_a_time(masters, values)):
        return masters
    copy = masters.to("cpu", copy=True)
    follow_(copy, values)
    return copy


def follow_(masters: Tensor, values: Tensor) -> Tensor:
    """Set each master that does not round to its value in ``values`` to that value.

    It works element by element, so the result does not depend on how parameters are cut, and
    masters of unchanged weights keep their precision.

    Args:
        masters: 1-D float32, written in place.
        values: 1-D, of the same length, in a 16-bit dtype; may be on another device.

    Returns:
        0-d bool on the device of ``masters``: True if any master changed. The host does not wait.
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
    # Some NaNs round to other bits, depending on their position in a vector.
    return master.to(value.dtype).view(torch.int16) != value.view(torch.int16)
