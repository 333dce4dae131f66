"""AdaMuon: Muon with a second moment for every element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_layerwise.optimizers.rules.orthogonalized import TINY, Batch, Scaled
from ds_layerwise.orthogonalize.batching import unstack
from ds_layerwise.recipes.rules.muon_recipes import AdaMuon as Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaMuon(Scaled):
    """Muon divided by the root of an average of its own squares, with the norm of an orthogonal
    matrix.

    With O orthogonal: v <- beta v + (1 - beta) O^2, u = O / (sqrt(v) + eps), then sqrt(min(rows,
    cols)) / |u| times u, so that with ``scale_mode`` "match_rms_adamw" every update has an RMS of
    0.2. State ``moment2_buffer``: v.

    Reference: arXiv 2507.11005 as the authors' own code has it (Chongjie-Si/AdaMuon at 3b84e03) and
    pytorch_optimizer 4.1.0; both also correct v for its bias, which the norm takes back but for
    eps. The paper's second version orthogonalises the signs of the momentum (``sign_momentum``).
    Without ``moment2_rescale`` it is what Emerging-Optimizers 0.3.0 calls adamuon: an element's
    first update is 1 / sqrt(1 - beta) whatever its gradient, so that with ``scale_mode`` "spectral"
    updates begin at an RMS of 72 (64 x 256) and end near 16.
    """

    recipe: Recipe

    def prepared(self, direction: Tensor) -> Tensor:
        """Its signs, if they are asked for."""
        return direction.sign() if self.recipe.sign_momentum else direction

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        moments = batch.state("moment2_buffer")
        parts = unstack(orthogonal, moments)
        torch._foreach_mul_(moments, self.recipe.moment2_beta)
        torch._foreach_addcmul_(moments, parts, parts, value=1 - self.recipe.moment2_beta)
        roots = torch._foreach_sqrt(moments)
        torch._foreach_add_(roots, self.recipe.moment2_eps)
        torch._foreach_div_(parts, roots)
        if self.recipe.moment2_rescale:
            norms, wanted = self.norms_of(orthogonal), math.sqrt(min(batch.shape))
            # A matrix without a gradient has no norm to divide by, and 0 times infinity is NaN.
            orthogonal.mul_(torch.where(norms < wanted * TINY, 0, wanted / norms))
        return orthogonal
