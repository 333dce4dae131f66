"""Factors for the outputs of a layer, applied to a piece of its weight or bias that is cut
anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: The number of elements that are multiplied at a time, with memory for the place of each.
_AT_A_TIME = 1 << 20


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors for the outputs of a layer.

    Args:
        values: 1-D float32, one per output.
        axis: the axis of the parameter that indexes the outputs.
        cols: the length of the parameter's last axis; 1 for a bias.
    """

    values: Tensor
    axis: Literal[0, 1]
    cols: int

    def scale_(self, piece: Tensor, start: int) -> None:
        """Multiply the 1-D ``piece`` in place. It starts at offset ``start`` of the flattened
        parameter.
        """
        values = self.values.to(piece.device)
        for part in torch.split(piece, _AT_A_TIME):
            stop = start + part.numel()
            place = torch.arange(start, stop, device=piece.device)
            output = place // self.cols if self.axis == 0 else place % self.cols
            part.mul_(values[output])
            start = stop
