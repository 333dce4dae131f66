"""Segments, FLOPs and bytes of a Newton-Schulz iteration."""

from __future__ import annotations

import math
from typing import Literal, get_args

from ds_layerwise.errors import LayoutError
from ds_layerwise.recipes.base.recipe import Shape

NsMethod = Literal["gram", "standard"]

#: Largest sum of elements of matrices that go through the products together on an accelerator; one
#: may be larger.
MAX_BATCH_NUMEL = 64 * 2**20

#: Sum of elements up to which matrices of other buckets join those of one: enough to fill an
#: accelerator.
FULL_BATCH_NUMEL = 16 * 2**20

#: Matrices are padded with zeros, which stay zeros, to sides that are multiples of this. Where a
#: matrix starts in memory changes the last bits of a product on a CPU; now every matrix of a batch
#: starts like one that is alone.
ALIGNMENT = 16


def newton_schulz_flops(
    rows: int, cols: int, *, steps: int = 5, method: str = "gram", batch: int = 1
) -> int:
    """Return the FLOPs to orthogonalise ``batch`` matrices of ``(rows, cols)``, a product of m x k
    and k x n counted as 2mnk.

    ``gram`` iterates on the small square, in the segments that fp16 and float32 need; square
    matrices run as ``standard``, as in DeepSpeed.

    Raises:
        LayoutError: an argument is out of range or ``method`` is unknown.
    """
    if min(rows, cols, steps, batch) < 1:
        raise LayoutError(
            f"rows, cols, steps and batch must be at least 1, got {rows}, {cols}, {steps}, {batch}"
        )
    if method not in get_args(NsMethod):
        raise LayoutError(f"method must be one of {', '.join(get_args(NsMethod))}, got {method!r}")
    m, n = sorted((rows, cols))
    if method == "standard" or m == n:
        return batch * steps * (4 * m * m * n + 2 * m**3)
    segments = len(gram_segments(steps))
    rectangular = 2 * segments
    square = 4 * steps - 3 * segments
    return batch * (rectangular * 2 * m * m * n + square * 2 * m**3)


def gram_segments(steps: int, *, bf16: bool = False, fp16: bool = False) -> tuple[int, ...]:
    """Return the lengths of the runs of steps after which the Gram matrix is formed anew.

    Two steps first; then every two in bf16, and in fp16 where there are more than five, else every
    three. Five steps in fp16 or float32 so restart once.
    :mod:`ds_layerwise.orthogonalize.newton_schulz` has the measurements behind it.
    """
    every = 2 if bf16 or (fp16 and steps > 5) else 3
    starts = [0, *range(2, steps, every)]
    return tuple(stop - start for start, stop in zip(starts, [*starts[1:], steps], strict=True))


def most_together(count: int, numel: int, most: int) -> int:
    """Return the number of ``count`` matrices of ``numel`` elements that go together: one, or up to
    ``most`` elements.
    """
    return min(count, max(1, most // numel))


def newton_schulz_workspace(shape: Shape, *, beside: int = 0) -> int:
    """Return the most bytes that an update of ``(rows, cols)`` or ``(batch, rows, cols)`` takes, as
    many as go together on an accelerator; a CPU takes no more at a time.

    The direction and what goes into the iteration, and beside them either the two matrices of that
    shape that it goes between and two of its small squares, or one matrix and the four squares that
    ``gram`` goes between; all in float32, of which half precision takes half to two thirds. Without
    what tensor-parallel ranks gather, and the 16 elements more that a row of some squares has on a
    CPU.

    Args:
        beside: how many more matrices of that shape are held while those that go together do.
    """
    *batch, rows, cols = shape
    together = most_together(math.prod(batch), rows * cols, MAX_BATCH_NUMEL)
    m, n = sorted(side + -side % ALIGNMENT for side in (rows, cols))
    return 4 * together * (max(4 * m * n + 2 * m * m, 3 * m * n + 4 * m * m) + beside * rows * cols)
