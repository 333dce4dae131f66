"""Newton-Schulz: push every singular value of a matrix towards 1, using only matrix products.

Note: precision
    Relative error against the same polynomial applied to singular values in float64, for condition
    number 100, 256 x 1024, five ``simple`` steps (and the largest singular value of the result,
    which should be 1.20):

    =========================================  =======  =====
    standard, bf16                              0.044   1.20
    gram, fp32                                  1e-5    1.20
    gram, fp16, one restart after 2 steps       0.021   1.22
    gram, bf16, one restart after 2 steps       0.174   1.60
    gram, bf16, restarts after 2 and 4 steps    0.031   1.20
    =========================================  =======  =====

    Rounding makes small eigenvalues of a Gram matrix negative, and each step without a restart
    multiplies these by about a squared. So bf16 restarts every second step, and so does fp16 beyond
    five steps. The largest overshoot over the exact curve at ten ``quintic`` steps with 80 matrices
    in fp16 is 0.34 with a restart every third step, and 0.0003 every second step. With a single
    restart, ten steps end in NaN in half precision, and overshoot by 30 in fp32. ``cans`` has no
    margin for rounding: in half precision it diverges with either method, so it runs in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError, nearest
from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.batching import (
    MAX_BATCH_NUMEL,
    Tensors,
    most_together,
    norms_of,
    stack,
)
from ds_layerwise.orthogonalize.symmetric import ALIGNMENT

NsMethod = Literal["gram", "standard"]

#: Returns a tensor for a tensor.
Change = Callable[[Tensor], Tensor]

#: The coefficients ``(a, b, c)`` of each step: ``X <- aX + b(XX')X + c(XX')(XX')X``.
Coefficients = tuple[tuple[float, float, float], ...]

#: By Keller Jordan, tuned for the slope at zero. Singular values end in about [0.7, 1.2], not at 1.
#: https://kellerjordan.github.io/posts/muon/
SIMPLE: Coefficients = ((3.4445, -4.7750, 2.0315),)

#: Different coefficients for each of five steps, which then repeat; NVIDIA's default.
QUINTIC: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

#: Optimal step by step for singular values from 1e-3, including a safety factor of 1.01. arXiv
#: 2505.16932
POLAR_EXPRESS: Coefficients = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)

#: Chebyshev-optimal, arXiv 2506.10935.
CANS: Coefficients = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)

#: Eight steps for the slope, two that converge; meant for ten steps.
DEEPSEEKV4: Coefficients = SIMPLE * 8 + ((2.0, -1.5, 0.5),) * 2

#: The tables by name. The flag is True if further steps start again at the first row; else they
#: repeat the last row.
TABLES: dict[str, tuple[Coefficients, bool]] = {
    "simple": (SIMPLE, True),
    "quintic": (QUINTIC, True),
    "polar_express": (POLAR_EXPRESS, False),
    "cans": (CANS, False),
    "deepseekv4": (DEEPSEEKV4, False),
}

#: Replaces a peak, or a norm, of 0 as a divisor, so that zeros stay zeros.
TINY = torch.finfo(torch.float32).tiny

#: Between these norms, squares of entries do not overflow float32, and those that underflow do not
#: matter for the norm.
_EXACT_NORMS = (1e-12, 1e18)

#: The tables that diverge in half precision.
NEED_FLOAT32 = ("cans",)

#: The number of Newton-Schulz steps of ``polar_express`` for one sign in :func:`capped`.
CLIP_STEPS = 8


def coefficients(table: str | Sequence[Sequence[float]], steps: int) -> Coefficients:
    """Return exactly ``steps`` rows of a named table, or of the caller's own rows, which repeat
    from the first.

    Raises:
        ConfigError: the name is unknown.
    """
    cycles = True
    if not isinstance(table, str):
        rows = tuple((float(a), float(b), float(c)) for a, b, c in table)
    elif table in TABLES:
        rows, cycles = TABLES[table]
    else:
        hint = f"known: {', '.join(TABLES)}, or a list of [a, b, c]"
        if close := nearest(table, TABLES):
            hint = f"did you mean '{close}'?"
        raise ConfigError(f"ns_coefficients {table!r} is not known; {hint}")
    return (rows + (rows if cycles else rows[-1:]) * steps)[:steps]


def compute_dtype(setting: str, method: str, fast: Collection[torch.dtype] = ()) -> torch.dtype:
    """Return the dtype of the products: ``setting``, or for "auto" the first of ``fast`` that is
    exact enough, else float32.

    For ``gram`` these are float16, which is more exact there, and bfloat16; for ``standard`` only
    bfloat16.

    Args:
        fast: the dtypes in which the device multiplies much faster than in float32; see
            :func:`.optimizers.devices.fast_dtypes`.
    """
    fixed = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if setting != "auto":
        return fixed[setting]
    if method == "gram" and torch.float16 in fast:
        return torch.float16
    if torch.bfloat16 in fast:
        return torch.bfloat16
    return torch.float32


def newton_schulz(
    matrix: Tensor, coefficients: Coefficients, *, method: str, dtype: torch.dtype
) -> Tensor:
    """Push every singular value of ``matrix`` towards 1.

    Args:
        matrix: ``(..., m, n)``; leading axes are a batch of independent matrices. Not modified.
        method: ``standard`` iterates on the matrix; ``gram`` on the smaller of its two Gram
            matrices, except for square matrices, which gain nothing from it.
        dtype: the dtype of the products. Each matrix is first scaled to Frobenius norm 1 in
            float32.

    Returns:
        A new ``(..., m, n)`` tensor of ``matrix.dtype``. On a CPU its bits do not depend on other
        matrices in the batch. A zero matrix gives a zero matrix.
    """
    rows, cols = matrix.shape[-2:]
    x = iterate(
        matrix.reshape(-1, rows, cols),
        coefficients,
        normalise=_normalised,
        transposed=rows > cols,
        standard=method == "standard" or rows == cols,
        dtype=dtype,
    )
    return x.to(matrix.dtype).reshape(matrix.shape)


def _normalised(x: Tensor) -> Tensor:
    """Return float32 copies of ``(k, rows, cols)`` with Frobenius norm 1, or 0."""
    if x.device.type == "cuda":
        return _normalised_in_float64(x)
    if x.device.type != "cpu":
        return _normalised_by_peak(x)
    # Checking norms costs nothing here, and most matrices do not need the peak, which takes four
    # times as many passes.
    x = x.float()
    norms = norms_of(x)
    out = x / norms
    for index, norm in enumerate(norms.view(-1).tolist()):
        if not _EXACT_NORMS[0] < norm < _EXACT_NORMS[1]:
            out[index : index + 1] = _normalised_by_peak(x[index : index + 1])
    return out


def _normalised_in_float64(x: Tensor) -> Tensor:
    """Do what :func:`_normalised` does in two passes, of which squares in float64 need no peak."""
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    return torch.div(x, norms.clamp_min_(torch.finfo(torch.float64).tiny), out=out)


def _normalised_by_peak(x: Tensor) -> Tensor:
    x, norm, _ = to_peak_1(x)
    return x.div_(norm.clamp_min(TINY))


def to_peak_1(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 copies of ``(k, rows, cols)`` with a largest entry of 1, their Frobenius
    norms, and their divisors, both ``(k, 1, 1)``. Squares of tiny or huge entries do not leave the
    range of float32. Zeros stay zeros.
    """
    x = x.float()
    peak = x.abs().amax((-2, -1), keepdim=True)
    x = x / peak.clamp_min(TINY)
    return x, norms_of(x), peak


def iterate(
    x: Tensor,
    coefficients: Coefficients,
    *,
    normalise: Change,
    transposed: bool,
    standard: bool,
    dtype: torch.dtype,
    total: Change = lambda gram: gram,
) -> Tensor:
    """Run the steps on ``(k, rows, cols)`` matrices, or on parts of them.

    Args:
        x: the matrices. Not modified.
        normalise: returns float32 copies of ``x``, each whole matrix with Frobenius norm 1. Called
            here, so that nobody else holds them when there is a copy in ``dtype``.
        transposed: True to form the Gram matrix of the columns, False for the rows.
        standard: True to iterate on the matrix, False for the Gram matrix.
        total: takes the Gram matrix of ``x`` and returns that of the whole matrices, possibly in
            the same memory.

    Returns:
        A tensor with ``x``'s shape, in ``dtype``.
    """
    rows, cols = x.shape[-2:]
    x = symmetric.padded(normalise(x)).to(dtype)
    if transposed:
        x = symmetric.upright(x)
    # The loops are here, as a function that they were in would leave its input alive to the end.
    if standard:
        for a, b, c in coefficients:
            gram = total(symmetric.gram(x))
            factor = symmetric.commuting(gram, gram, gram, beta=b, alpha=c)
            x = symmetric.product(factor, x, x, beta=a)
    else:
        for start, stop in gram_segments(len(coefficients), dtype):
            x = symmetric.product(_factor(x, coefficients[start:stop], total), x)
    if transposed:
        x = x.mT
    return x[:, :rows, :cols]


def _factor(x: Tensor, coefficients: Coefficients, total: Change) -> Tensor:
    """Return Q with X_k = Q X_0, where X_0 is ``x``. It is a polynomial in the Gram matrix of X_0,
    so all factors here commute.
    """
    q = gram = total(symmetric.gram(x))
    for step, (a, b, c) in enumerate(coefficients):
        z = symmetric.commuting(gram, gram, gram, beta=b, alpha=c)
        if step == 0:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = symmetric.commuting(q, z, q, beta=a)
        if step + 1 < len(coefficients):
            gram = symmetric.commuting(gram, z, gram, beta=a)
            gram = symmetric.commuting(gram, gram, z, beta=a)
    return q


def capped(matrices: Tensors, most: float) -> Tensor:
    """Return k matrices in which every singular value s is replaced by min(s, most), in float32.

    Let X be a wide matrix divided by ``most``, O = sign(X), whose singular values are all 1, and P
    half of I + sign(XX' - I), which projects on the singular vectors with values above 1. The
    result is X + P (O - X), times ``most``. Both signs are eight steps of ``polar_express``. These
    bring singular values of at least a thousandth of the norm to 1 within 1e-5, and leave smaller
    ones below; P does not select those. The function is Emerging-Optimizers' ``spectral_hardcap``.
    Its formula, half of O + X - (O - X) sign(O - X)' O
    (https://leloykun.github.io/ponder/spectral-clipping/), needs an exact O: for a square matrix of
    noise it lifts the smallest singular values up to an eighth of ``most``.

    Matrices are padded to multiples of :data:`.ALIGNMENT`, as in Newton-Schulz, so that on a CPU
    the bits of products do not depend on other matrices in the batch.

    Args:
        matrices: of equal shapes, ``(rows, cols)`` or ``(batch, rows, cols)``. Not modified.

    Returns:
        ``(k, rows, cols)``, in new memory.
    """
    # Stack here, so that the stack is freed as soon as there is a copy of it.
    wide = stack(matrices)
    is_tall = wide.shape[-2] > wide.shape[-1]
    if is_tall:
        wide = wide.mT
    m, n = wide.shape[-2:]
    wide = symmetric.padded(wide)
    towards = _sign(wide)
    wide = wide / most
    gram = symmetric.gram(wide)
    gram.diagonal(dim1=-2, dim2=-1)[:, :m].sub_(1)
    above = _sign(gram)
    del gram
    above.diagonal(dim1=-2, dim2=-1)[:, :m].add_(1)
    result = symmetric.product(above, towards.sub_(wide), wide, beta=2).mul_(0.5 * most)[:, :m, :n]
    if is_tall:
        return result.mT
    return result


def _sign(matrices: Tensor) -> Tensor:
    return newton_schulz(
        matrices, coefficients("polar_express", CLIP_STEPS), method="standard", dtype=torch.float32
    )


def newton_schulz_flops(
    rows: int, cols: int, *, steps: int = 5, method: str = "gram", parts: int = 1
) -> int:
    """Return the FLOPs to orthogonalise a matrix of ``(rows, cols)``. A product of m x k and k x n
    counts as 2mnk.

    ``gram`` iterates on the small square, in the segments that fp16 and float32 need; square
    matrices run as ``standard``, as in DeepSpeed.
    """
    m, n = sorted((rows, cols))
    if method == "standard" or m == n:
        return steps * (4 * m * m * n // parts + 2 * m**3)
    segments = len(gram_segments(steps))
    rectangular = 2 * segments
    square = 4 * steps - 3 * segments
    return rectangular * 2 * m * m * n // parts + square * 2 * m**3


def gram_segments(steps: int, dtype: torch.dtype = torch.float32) -> list[tuple[int, int]]:
    """Return the starts and stops of the segments of steps. Each segment recomputes the Gram
    matrix.

    The first segment has two steps. Later ones have two steps in bf16, and in fp16 if there are
    more than five steps, else three. So five steps in fp16 or float32 restart once; see the note on
    precision.
    """
    every = 3
    if dtype == torch.bfloat16 or dtype == torch.float16 and steps > 5:
        every = 2
    return list(pairwise((0, *range(2, steps, every), steps)))


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
    data of tensor-parallel ranks, with owners also the directions and results that they exchange at
    a time, and what a CPU alone needs: 16 more elements per row of some squares, and a copy of tall
    matrices where adamuon takes their norms.

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
