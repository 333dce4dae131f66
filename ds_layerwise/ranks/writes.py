"""Weights that somebody else than the optimizer has written, such as ``load_state_dict`` or an average that is tried.

Masters are what a step starts from, and would undo the write without a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements that are compared at a time: the memory that it takes is a few bytes for each.
_AT_A_TIME = 1 << 22


def follow_(masters: Tensor, values: Tensor) -> Tensor:
    """Set masters to those values that they do not round to.

    Element by element, so that the result does not depend on how parameters are cut, and what was not written keeps
    its precision.

    Args:
        masters: 1-D float32, written in place.
        values: 1-D, as many, in a dtype of 16 bits; may be on another device.

    Returns:
        0-d bool on the device of ``masters``: whether there were any. Nobody waits for the device.
    """
    written = torch.zeros((), dtype=torch.bool, device=masters.device)
    for start in range(0, masters.numel(), _AT_A_TIME):
        master, value = (t[start:start + _AT_A_TIME] for t in (masters, values))
        value = value.to(master.device)
        # Of all that is not a number, some is rounded to other bits, by where in a vector it stands.
        differs = master.to(value.dtype).view(torch.int16) != value.view(torch.int16)
        if master.device.type == "cpu" and not differs.any():
            continue
        written |= (differs & (value == value)).any()
        torch.where(differs, value, master, out=master)
    return written
