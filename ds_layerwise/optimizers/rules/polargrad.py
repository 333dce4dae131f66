"""PolarGrad: Muon scaled by the nuclear norm of the momentum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ds_layerwise.optimizers.rules.orthogonalized import Batch, Orthogonalized
from ds_layerwise.recipes.rules.muon_recipes import PolarGrad as Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PolarGrad(Orthogonalized):
    """Steepest descent in the spectral norm: the update is <O, d> O, with O the orthogonalised
    direction d.

    <O, d>, the sum of products of their elements, is the nuclear norm of d as far as O is
    orthogonal. So updates are as large as gradients are.

    Reference: arXiv 2505.21799; Emerging-Optimizers 0.3.0.
    """

    recipe: Recipe

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """See the class."""
        # Rows first, and each matrix alone: over a batch, the order of the sum would depend on its
        # size.
        of_rows = (orthogonal * batch.direction).sum(-1)
        return orthogonal.mul_(self.summed(of_rows.sum(-1)).view(-1, 1, 1))

    def scale(self, rows: int, cols: int) -> float:
        """``extra_scale_factor``."""
        return self.recipe.extra_scale_factor
