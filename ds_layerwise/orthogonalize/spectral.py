"""What can be done to singular values with matrix products alone, beside making all of them equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from ds_layerwise.recipes.update_hooks import CLIP_STEPS


def capped(matrices: Tensor, most: float) -> Tensor:
    """Every singular value s of ``(k, rows, cols)`` becomes min(s, most), in float32.

    With X a wide one of them over ``most``, O = sign(X), which has 1 for every singular value, and P half of
    I + sign(XX' - I), which projects on those above 1: X + P (O - X), times ``most``. Both signs are eight steps of
    ``polar_express``, which leave singular values of a thousandth of the norm and more at 1 but for 1e-5, and smaller
    ones below; of those P takes nothing. The function is Emerging-Optimizers' ``spectral_hardcap``, whose formula,
    half of O + X - (O - X) sign(O - X)' O (https://leloykun.github.io/ponder/spectral-clipping/), needs O to be exact:
    of a square matrix of noise it lifts the smallest singular values up to an eighth of ``most``.

    Returns:
        New tensors.
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    towards = _sign(wide)
    wide = wide / most
    gram = symmetric.gram(wide)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    above = _sign(gram)
    del gram
    above.diagonal(dim1=-2, dim2=-1).add_(1)
    result = symmetric.product(above, towards.sub_(wide), wide, beta=2).mul_(0.5 * most)
    return result if matrices.shape[-2] <= matrices.shape[-1] else result.mT


def _sign(matrices: Tensor) -> Tensor:
    return newton_schulz(matrices, coefficients("polar_express", CLIP_STEPS), method="standard", dtype=torch.float32)
