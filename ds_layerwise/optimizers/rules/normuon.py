"""NorMuon: Muon with a second moment for every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_layerwise.optimizers.rules.orthogonalized import TINY, Batch, Scaled
from ds_layerwise.orthogonalize.batching import stack, unstack
from ds_layerwise.recipes.rules.muon_recipes import NorMuon as Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class NorMuon(Scaled):
    """Muon whose rows are divided by the root of an average of their squares, with the norm that
    Muon has.

    With O orthogonal: v <- beta v + (1 - beta) mean over columns of O^2, u = O / (sqrt(v) + eps),
    then |O| / |u| times u. State ``moment2_buffer``: v, ``(rows, 1)``.

    Reference: arXiv 2510.05491, with the norm that the authors' own code keeps (ShizukaKuze/NorMuon
    at 22b57d4, and pytorch_optimizer 4.1.0); the paper's Algorithm 1 gives updates an RMS of 0.2,
    which ``scale_mode`` "match_rms_adamw" comes to but for what five Newton-Schulz steps leave.
    ``moment2_per`` "longer_side" is Emerging-Optimizers' choice (0.3.0), which averages over
    columns where there are at least as many rows, else over rows; it takes max(v, eps) for v.
    """

    recipe: Recipe

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        axis = self.recipe.axis(*batch.shape)
        squares = orthogonal.square().sum(axis, keepdim=True)
        if self.cut is not None and self.cut[0] == axis:
            squares = self.summed(squares)
        states = batch.state("moment2_buffer")
        moment2 = torch.lerp(
            stack(states), squares.div_(batch.shape[axis]), 1 - self.recipe.moment2_beta
        )
        torch._foreach_copy_(states, unstack(moment2, states))
        norms = self.norms_of(orthogonal)
        update = orthogonal.div_(moment2.sqrt_().add_(self.recipe.moment2_eps))
        return update.mul_(norms / self.norms_of(update).clamp_min(TINY))
