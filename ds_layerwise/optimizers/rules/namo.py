"""NAMO: Muon with one second moment for every matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_layerwise.optimizers.rules.orthogonalized import Batch, Scaled
from ds_layerwise.orthogonalize.batching import matrices_of, stack, unstack
from ds_layerwise.recipes.rules.muon_recipes import Namo as Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Namo(Scaled):
    """Muon scaled by how long the momentum is beside the gradients, as Adam's steps are.

    With g the gradient, d the direction that is orthogonalised to O: v <- beta v + (1 - beta)
    |g|^2, and the update is |d| / (sqrt(v) + eps) times O. State ``moment2_buffer``: v, one number
    a matrix. It is an average of squares, so gradients whose norm is beyond 1e19 overflow it.

    Reference: Emerging-Optimizers 0.3.0, after arXiv 2602.17080. The authors' own code
    (minxin-zhg/namo) corrects both averages for their bias, has eps under the root, bounds the step
    by 1, lets weight decay follow the step and keeps 99 % of v; without a correction the factor
    begins at (1 - momentum) / sqrt(1 - beta), 0.22 without nesterov.
    """

    recipe: Recipe

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        states = batch.state("moment2_buffer")
        squares = self.norms(matrices_of(batch.grads)).square_().view(-1, 1, 1)
        moment2 = torch.lerp(stack(states), squares, 1 - self.recipe.moment2_beta)
        torch._foreach_copy_(states, unstack(moment2, states))
        return orthogonal.mul_(
            self.norms_of(batch.direction) / moment2.sqrt_().add_(self.recipe.moment2_eps)
        )
