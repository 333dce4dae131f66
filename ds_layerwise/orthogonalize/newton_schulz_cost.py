"""The segments, FLOPs and bytes of a Newton-Schulz iteration."""

from __future__ import annotations

import math
from typing import Literal, get_args

from ds_layerwise.errors import LayoutError

NsMethod = Literal["gram", "standard"]

#: The largest number of elements in matrices that share products on an accelerator; one matrix may
#: be larger.
MAX_BATCH_NUMEL = 64 * 2**20

#: The number of elements up to which matrices of other buckets are added to those of a bucket,
#: enough to fill an accelerator.
FULL_BATCH_NUMEL = 16 * 2**20

#: Matrices are padded with zeros, which stay zeros, to sides that are multiples of this. On a CPU,
#: the start of a matrix in memory changes the last bits of a product; with this padding, every
#: matrix of a batch starts as it would alone.
ALIGNMENT = 16


def newton_schulz_flops(
    rows: int, cols: int, *, steps: int = 5, method: str = "gram", batch: int = 1
) -> int:
    """Return the FLOPs to orthogonalise ``batch`` matrices of ``(rows, cols)``. A product of m x k
    and k x n counts as 2mnk.

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
    """Return the lengths of the segments of steps. Each segment recomputes the Gram matrix.

    The first segment has two steps. Later ones have two steps in bf16, and in fp16 if there are
    more than five steps, else three. So five steps in fp16 or float32 restart once.
    :mod:`ds_layerwise.orthogonalize.newton_schulz` has the measurements.
    """
    every = 2 if bf16 or (fp16 and steps > 5) else 3
    starts = [0, *range(2, steps, every)]
    return tuple(stop - start for start, stop in zip(starts, [*starts[1:], steps], strict=True))


def most_together(count: int, numel: int, most: int) -> int:
    """Return how many of ``count`` matrices of ``numel`` elements go together: as many as fit into
    ``most`` elements, at least one.
    """
    return min(count, max(1, most // numel))


def padded_batch(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the number of matrices that share products on an accelerator, and their sides with
    padding, the shorter one first.
    """
    *batch, rows, cols = shape
    together = most_together(math.prod(batch), rows * cols, MAX_BATCH_NUMEL)
    m, n = sorted(side + -side % ALIGNMENT for side in (rows, cols))
    return together, m, n


def newton_schulz_workspace(
    shape: tuple[int, ...], *, method: NsMethod, beside: int = 0, after: int = 0
) -> int:
    """Return the most bytes that an update of ``(rows, cols)`` or ``(batch, rows, cols)`` needs,
    for the batch size of an accelerator. A CPU needs no more at a time.

    In ``standard`` the direction, the iterate, the next one and two small squares live together. In
    ``gram`` it is the direction and the iterate with four squares, or the next iterate with one.
    Sums of rows or columns are four vectors more. All are counted as float32; half precision takes
    two and a half matrices of that shape, or three if it is square. Not counted are the gathered
    data of tensor-parallel ranks, and what a CPU alone needs: 16 more elements per row of some
    squares, and a copy of tall matrices where adamuon takes their norms.

    Args:
        beside: the number of further matrices of that shape that are held at the same time.
        after: the number of matrices of that shape that are held when the iteration is over.
    """
    rows, cols = shape[-2:]
    together, m, n = padded_batch(shape)
    most = max(2 * m * n + 4 * m * m, 3 * m * n + m * m)
    if method == "standard" or rows == cols:
        most = 3 * m * n + 2 * m * m
    return 4 * together * (max(most + beside * rows * cols, after * rows * cols) + 4 * n)
