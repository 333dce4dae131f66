"""Changes of singular values by matrix products alone, beside making all of them
equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.batching import stack
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from ds_layerwise.recipes.rules.update_hook_settings import CLIP_STEPS


def capped(matrices: Sequence[Tensor], most: float) -> Tensor:
    """Every singular value s of k matrices becomes min(s, most), in float32.

    With X a wide one of them over ``most``, O = sign(X), which has 1 for every singular value, and
    P half of I + sign(XX' - I), which projects on those above 1: X + P (O - X), times ``most``.
    Both signs are eight steps of ``polar_express``, which leave singular values of a thousandth of
    the norm and more at 1 but for 1e-5, and smaller ones below; of those P takes nothing. The
    function is Emerging-Optimizers' ``spectral_hardcap``, whose formula, half of O + X - (O - X)
    sign(O - X)' O (https://leloykun.github.io/ponder/spectral-clipping/), needs O to be exact: of a
    square matrix of noise it lifts the smallest singular values up to an eighth of ``most``.

    All is padded to multiples of :data:`.ALIGNMENT`, as Newton-Schulz is, so that products have the
    same bits whatever else is in the batch, on a CPU.

    Args:
        matrices: equal ones, ``(rows, cols)`` or ``(batch, rows, cols)``. Not modified.

    Returns:
        ``(k, rows, cols)``, in memory of its own.
    """
    # Stacked here, so that nobody else holds the stack once there is a copy of it.
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
