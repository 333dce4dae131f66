"""The ways in which tensor-parallel ranks work on matrices of which each has a part, and their
costs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ds_layerwise.orthogonalize.newton_schulz import NsMethod, gram_segments, newton_schulz_flops
from ds_layerwise.orthogonalize.tensor_shards import Axis

TpMode = Literal["duplicated", "distributed", "owner", "auto", "blockwise"]

#: The modes among which "auto" chooses; of equal cost the first.
EXACT: tuple[TpMode, ...] = ("owner", "duplicated", "distributed")

#: The number of FLOPs in the time of one byte between two accelerators of a node: 400 TFLOP/s and
#: 400 GB/s.
FLOPS_PER_BYTE = 1000


class Cut(NamedTuple):
    """A matrix of which ``size`` ranks have parts, and its Newton-Schulz iteration."""

    rows: int
    cols: int
    axis: Axis
    size: int
    steps: int
    method: NsMethod
    beside: int
    """The FLOPs for the whole matrix beside the iteration."""

    def share(self, mode: TpMode, owners: int) -> tuple[int, int]:
        """Return the FLOPs and the sent bytes of a rank, in ``owner`` the mean of so many ranks
        that own matrices at the same time.
        """
        rows, cols, size = self.rows, self.cols, self.size
        parts = 1
        gathered = (size - 1) * rows * cols // size
        if mode == "owner":
            # There, and back.
            gathered *= 2
        sent = gathered
        if mode == "distributed":
            parts = size
            standard = self.method == "standard" or rows == cols
            sums = self.steps if standard else len(gram_segments(self.steps))
            sent = 2 * (size - 1) * sums * min(rows, cols) ** 2 // size
        flops = newton_schulz_flops(rows, cols, steps=self.steps, method=self.method, parts=parts)
        if mode != "owner":
            owners = 1
        # Work beside the iteration needs whole matrices, too.
        nbytes = 4 * (sent + bool(self.beside) * gathered)
        return (flops + self.beside) // owners, nbytes // owners

    def mode(self, mode: TpMode, owners: int) -> TpMode:
        """Return ``mode``, or for "auto" the exact one in which a rank has least to do. It is never
        ``distributed`` for a matrix that is cut along its shorter side.
        """
        sides = (self.rows, self.cols)
        exact = EXACT[:2] if sides[self.axis] < max(sides) else EXACT
        if mode == "distributed":
            return exact[-1]

        def total(mode: TpMode) -> int:
            flops, nbytes = self.share(mode, owners)
            return flops + FLOPS_PER_BYTE * nbytes

        return min(exact, key=total) if mode == "auto" else mode
