"""PolarGrad: Muon scaled by the nuclear norm of the momentum."""

from __future__ import annotations

from typing import ClassVar

from ds_layerwise.recipes.base.fields import Positive
from ds_layerwise.recipes.rules.orthogonalized_recipe import Orthogonalized


class PolarGrad(Orthogonalized):
    """Steepest descent in the spectral norm; see
    :class:`ds_layerwise.optimizers.rules.polargrad.PolarGrad`.
    """

    rule: ClassVar[str] = "polargrad"
    family: ClassVar[str] = "muon"
    only_sizes: ClassVar[bool] = True

    extra_scale_factor: Positive = 1.0

    def scale_summary(self) -> str:
        """The scale."""
        factor = f" x {self.extra_scale_factor:g}" if self.extra_scale_factor != 1 else ""
        return f", nuclear norm{factor}"
