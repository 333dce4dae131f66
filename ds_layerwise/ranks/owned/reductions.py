"""What many tensors of a rank add up to, in few operations, and without a copy of any as a
whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.ranks.owned.buffers import ShardBuffer

#: Elements of which the norm is taken at a time.
_SQUARED_AT_A_TIME = 1 << 22


def sum_of_squares(views: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements of 1-D ``views``, 0-d, float64 where the device has
    it.

    No finite float32 overflows it, and how parameters are cut does not show in the float32 norm.
    """
    wide = widest_float()
    # Each part may be copied into the wide dtype.
    parts = [
        part
        for view in views
        for part in (
            (view,) if view.numel() <= _SQUARED_AT_A_TIME else torch.split(view, _SQUARED_AT_A_TIME)
        )
    ]
    if not parts:
        return torch.zeros((), dtype=wide, device=device)
    return torch.stack(torch._foreach_norm(parts, 2, wide)).square().sum()


class ReducedGradients(ShardBuffer):
    """Averaged gradients of one rank."""

    def sum_of_squares(
        self, *, leave_out: Collection[str] = (), only: Collection[str] | None = None
    ) -> Tensor:
        """See :func:`sum_of_squares`.

        Args:
            leave_out, only: parameters that do not count, and those that do alone; None for all.
        """
        return sum_of_squares(self._parts(leave_out, only), self.bucket(0).device)

    def number_of_zeros(self, *, leave_out: Collection[str]) -> Tensor:
        """How many elements are zero, 0-d, in the widest float of the device; what is NaN is not.

        Args:
            leave_out: parameters that do not count.
        """
        parts = self._parts(leave_out)
        if not parts:
            return torch.zeros((), dtype=widest_float(), device=self.bucket(0).device)
        others = torch.stack([torch.count_nonzero(part) for part in parts]).sum()
        return (sum(part.numel() for part in parts) - others).to(widest_float())

    def _parts(
        self, leave_out: Collection[str], only: Collection[str] | None = None
    ) -> list[Tensor]:
        return [
            self.piece(piece.name)
            for pieces in self.pieces
            for piece in pieces
            if piece.name not in leave_out and (only is None or piece.name in only)
        ]

    def multiply_(self, index: int, factor: float, factors: Mapping[str, float]) -> None:
        """Multiply those of bucket ``index`` by ``factor``, or by parameter with what ``factors``
        has in its place.
        """
        alike: dict[float, list[Tensor]] = {}
        for piece in self.pieces[index]:
            alike.setdefault(factors.get(piece.name, factor), []).append(self.piece(piece.name))
        for each, gradients in alike.items():
            if each != 1:
                torch._foreach_mul_(gradients, each)
