"""What can be done to singular values with matrix products alone, beside making all of them equal."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from ds_layerwise.recipes.update_hooks import CLIP_STEPS


def capped(matrices: Tensor, most: float) -> Tensor:
    """Every singular value s of ``(k, rows, cols)`` becomes min(s, most), in float32.

    With sign(X) for Newton-Schulz, which makes every singular value 1, and O = sign(X):
    (most O + X - (most O - X) sign(most O - X)' O) / 2, https://leloykun.github.io/ponder/spectral-clipping/ . Both
    signs are eight steps of ``polar_express``.

    Returns:
        New tensors. Values that are far below ``most`` keep about four digits, and one that is above it ends at
        ``most`` but for 1 %.
    """
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    orthogonal = _sign(wide)
    result = torch.add(wide, orthogonal, alpha=most)
    below = torch.sub(orthogonal * most, wide)
    signs = symmetric.product(below, _sign(below).mT)
    result.sub_(symmetric.product(signs, orthogonal)).mul_(0.5)
    return result if wide is matrices else result.mT


def _sign(matrices: Tensor) -> Tensor:
    return newton_schulz(matrices, coefficients("polar_express", CLIP_STEPS), method="standard", dtype=torch.float32)
