"""Changes of singular values by matrix products, other than making all of them equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.batching import stack
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz

#: The number of Newton-Schulz steps of ``polar_express`` for one sign in :func:`capped`.
CLIP_STEPS = 8


def capped(matrices: Sequence[Tensor], most: float) -> Tensor:
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
