"""Factors by output of a layer, for a piece of its weight or bias that is cut anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Factors for the outputs of a layer.

    Args:
        values: 1-D float32, one for each output.
        axis: the axis of the parameter that the outputs are.
        cols: the length of its last axis; 1 for a bias.
    """

    values: Tensor
    axis: Literal[0, 1]
    cols: int

    def scale_(self, piece: Tensor, start: int) -> None:
        """Multiply, in place, 1-D ``piece``, which begins ``start`` elements into the flattened
        parameter.
        """
        cols, values = self.cols, self.values.to(piece.device)
        first, column = divmod(start, cols)
        # Up to three parts: the rest of a row, whole rows, the beginning of a row.
        begin = min(-start % cols, piece.numel())
        rows = (piece.numel() - begin) // cols
        whole = first + bool(column)
        for part, row, left in (
            (piece[:begin], first, column),
            (piece[begin + rows * cols :], whole + rows, 0),
        ):
            if part.numel():
                part.mul_(values[row] if self.axis == 0 else values[left : left + part.numel()])
        if rows:
            piece[begin : begin + rows * cols].view(rows, cols).mul_(
                values[whole : whole + rows, None] if self.axis == 0 else values
            )
