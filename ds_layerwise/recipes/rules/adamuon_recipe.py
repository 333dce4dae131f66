"""AdaMuon: Muon with a second moment for every element."""

from __future__ import annotations

from typing import ClassVar

from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.orthogonalized_recipe import Adaptive, ScaleMode


class AdaMuon(Adaptive):
    """Muon divided by the root of its own second moment; see
    :class:`ds_layerwise.optimizers.rules.adamuon.AdaMuon`.
    """

    rule: ClassVar[str] = "adamuon"
    family: ClassVar[str] = "adamuon"

    scale_mode: ScaleMode = "match_rms_adamw"
    moment2_rescale: bool = True
    """Bring what was divided back to the Frobenius norm of an orthogonal matrix, the root of its
    shorter side.
    """
    sign_momentum: bool = False
    """Orthogonalise the signs of the momentum, not the momentum."""

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Two of the parameter's shape."""
        return self.like(shape, "momentum_buffer", "moment2_buffer")

    @property
    def takes_rate_of_adamw(self) -> bool:
        """With ``scale_mode`` "match_rms_adamw" and ``moment2_rescale``, its defaults."""
        return super().takes_rate_of_adamw and self.moment2_rescale

    def scale_summary(self) -> str:
        """The scale, the average, and what is set."""
        return (
            f"{super().scale_summary()}{'' if self.moment2_rescale else ', not rescaled'}"
            f"{', of signs' if self.sign_momentum else ''}"
        )
