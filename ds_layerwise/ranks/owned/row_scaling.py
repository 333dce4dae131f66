"""Factors for the outputs of a layer, applied to a piece of its weight or bias that is cut
anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ds_layerwise.plan.layout.layout import Piece


def scale_(
    scaled: Mapping[str, Factors], pieces: Sequence[Piece], master: Callable[[str], Tensor]
) -> None:
    """Multiply in place the masters of those ``pieces`` of which ``scaled`` has factors.

    Args:
        scaled: the factors by parameter.
        master: returns the master of a piece, 1-D, by the name of its parameter.
    """
    for piece in pieces:
        if piece.name in scaled:
            scaled[piece.name].scale_(master(piece.name), piece.param_start)


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
        cols = self.cols
        values = self.values.to(piece.device)
        # At most three iterations: the rest of a row, whole rows, the start of a row.
        while piece.numel():
            row, column = divmod(start, cols)
            rows = 0 if column else piece.numel() // cols
            if rows:
                part = piece[: rows * cols].view(rows, cols)
                part.mul_(values[row : row + rows, None] if self.axis == 0 else values)
            else:
                part = piece[: cols - column]
                part.mul_(values[row] if self.axis == 0 else values[column : column + len(part)])
            piece = piece[part.numel() :]
            start += part.numel()
