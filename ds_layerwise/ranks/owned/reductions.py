"""Sums over many tensors of a rank, in few operations and without a copy of a whole tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.ranks.owned.buffers import ShardBuffer

#: The number of elements per norm operation.
_SQUARED_AT_A_TIME = 1 << 22


def sum_of_squares(
    views: Sequence[Tensor], device: torch.device, *, divide_by: float = 1.0
) -> Tensor:
    """Return the sum of the squares of all elements of the 1-D ``views``, divided by ``divide_by``:
    0-d, float64 if the device has it.

    Finite float32 values cannot overflow it, and the way parameters are cut does not change the
    norm rounded to float32.
    """
    wide = widest_float()
    parts: list[Tensor] = []
    for view in views:
        # Each part may be copied to the wide dtype.
        small = view.numel() <= _SQUARED_AT_A_TIME
        parts += [view] if small else torch.split(view, _SQUARED_AT_A_TIME)
    if not parts:
        return torch.zeros((), dtype=wide, device=device)
    norms: list[Tensor] = []
    if divide_by == 1:
        norms += torch._foreach_norm(parts, 2, wide)
    else:
        for part in parts:
            norms += torch._foreach_norm([part / divide_by], 2, wide)
    return torch.stack(norms).square().sum()


class ReducedGradients(ShardBuffer):
    """The gradients of one rank."""

    divide_by = 1.0
    """The gradients divided by this are the averages over ranks."""

    def average_(self, index: int) -> None:
        """Divide bucket ``index`` in place, to the averages over ranks."""
        if self.divide_by != 1:
            self.bucket(index).div_(self.divide_by)

    def average(self, name: str) -> Tensor:
        """Return a copy of :meth:`piece`, averaged."""
        return self.piece(name) / self.divide_by

    def sum_of_squares(
        self, *, leave_out: Collection[str] = (), only: Collection[str] | None = None
    ) -> Tensor:
        """Return :func:`sum_of_squares` of the averages of all parameters.

        Args:
            leave_out: the parameters that do not count.
            only: the only parameters that count; None for all.
        """
        parts = self._parts(leave_out, only)
        return sum_of_squares(parts, self.bucket(0).device, divide_by=self.divide_by)

    def number_of_zeros(self, *, leave_out: Collection[str]) -> Tensor:
        """Count the elements that are zero: 0-d, in the widest float of the device. NaN does not
        count.

        Args:
            leave_out: the parameters that do not count.
        """
        parts = self._parts(leave_out)
        if not parts:
            return torch.zeros((), dtype=widest_float(), device=self.bucket(0).device)
        others = torch.stack([torch.count_nonzero(part) for part in parts]).sum()
        return (sum(part.numel() for part in parts) - others).to(widest_float())

    def _parts(
        self, leave_out: Collection[str], only: Collection[str] | None = None
    ) -> list[Tensor]:
        found = []
        for name, view in self._views.items():
            if name not in leave_out and (only is None or name in only):
                found.append(view)
        return found
