"""Scion: a step towards the point of a spectral ball that the momentum leads to."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from ds_layerwise.recipes.base.fields import Positive
from ds_layerwise.recipes.rules.orthogonalized_recipe import Orthogonalized


class Scion(Orthogonalized):
    """Muon in a ball of the spectral norm; see
    :class:`ds_layerwise.optimizers.rules.scion.Scion`.
    """

    rule: ClassVar[str] = "scion"
    family: ClassVar[str] = "muon"
    only_sizes: ClassVar[bool] = True

    nesterov: bool = False
    spectral_radius: Positive = 1.0
    """The spectral norm of the ball, in units of the root of rows over columns."""
    constrained: bool = True
    """Stay in the ball: weights decay by the learning rate, whatever ``weight_decay`` says. False:
    the ball bounds the update alone, and weights decay as for every other optimizer."""

    @model_validator(mode="after")
    def _stays_in_the_ball(self) -> Scion:
        if self.constrained and (
            self.weight_decay_method != "decoupled" or self.cautious_weight_decay
        ):
            key = (
                "cautious_weight_decay"
                if self.weight_decay_method == "decoupled"
                else "weight_decay_method"
            )
            raise ValueError(
                f"{key} of scion is {getattr(self, key)!r}, and constrained is true, with which "
                "every weight decays by the learning rate; leave it out, or set constrained to "
                "false"
            )
        return self

    @property
    def own_weight_decay(self) -> float | None:
        """With ``constrained`` 1."""
        return 1.0 if self.constrained else None

    def scale_summary(self) -> str:
        """The radius, and whether it bounds weights."""
        constrained = "constrained" if self.constrained else "unconstrained"
        return f", spectral_radius {self.spectral_radius:g}, {constrained}"
