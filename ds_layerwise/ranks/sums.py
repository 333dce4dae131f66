"""What many tensors of a rank add up to, in few operations, and without a copy of any as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float

#: Elements of which the norm is taken at a time.
_SQUARED_AT_A_TIME = 1 << 22


def sum_of_squares(views: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements of 1-D ``views``, 0-d, float64 where the device has it.

    No finite float32 overflows it, and how parameters are cut does not show in the float32 norm.
    """
    wide = widest_float()
    # Each part may be copied into the wide dtype.
    parts = [part for view in views
             for part in ((view,) if view.numel() <= _SQUARED_AT_A_TIME else torch.split(view, _SQUARED_AT_A_TIME))]
    if not parts:
        return torch.zeros((), dtype=wide, device=device)
    return torch.stack(torch._foreach_norm(parts, 2, wide)).square().sum()


def number_of_zeros(views: Sequence[Tensor], device: torch.device) -> Tensor:
    """How many elements of ``views`` are zero, 0-d, in the widest float of the device; what is NaN is not."""
    if not views:
        return torch.zeros((), dtype=widest_float(), device=device)
    others = torch.stack([torch.count_nonzero(view) for view in views]).sum()
    return (sum(view.numel() for view in views) - others).to(widest_float())
