"""Scion: a step towards the point of a spectral ball that the momentum leads to."""

from __future__ import annotations

from dataclasses import dataclass

from ds_layerwise.optimizers.rules.orthogonalized import Orthogonalized, scale_factor
from ds_layerwise.recipes.rules.muon_recipes import Scion as Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Scion(Orthogonalized):
    """Stochastic conditional gradient with the spectral norm: W <- (1 - lr) W - lr radius sqrt(rows
    / cols) O.

    Once in the ball, W stays in it while lr is at most 1, as far as O is orthogonal. Without
    ``constrained`` W is not shrunk by lr but by ``weight_decay``, as in every other rule.

    Reference: arXiv 2502.07529 for layers between the first and the last; Emerging-Optimizers
    0.3.0, which has the constrained one alone, and pytorch_optimizer 4.1.0.
    """

    recipe: Recipe

    def scale(self, rows: int, cols: int) -> float:
        """See the class."""
        return self.recipe.spectral_radius * scale_factor("unit_rms_norm", rows, cols)
