"""NAMO: Muon with one second moment for every matrix."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.orthogonalized_recipe import Adaptive


class Namo(Adaptive):
    """Muon scaled by the norm of the momentum over that of gradients; see
    :class:`ds_layerwise.optimizers.rules.namo.Namo`.
    """

    rule: ClassVar[str] = "namo"
    family: ClassVar[str] = "namo"
    only_sizes: ClassVar[bool] = True

    @model_validator(mode="after")
    def _sees_gradients(self) -> Namo:
        if self.weight_decay_method == "l2":
            raise ValueError(
                "weight_decay_method of namo is 'l2', which would make weight decay a part of the "
                "gradients whose norms it compares; set it to 'decoupled', 'independent' or 'palm'"
            )
        return self

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One momentum, and a number for each matrix."""
        return {**super().states(shape), "moment2_buffer": StateSpec((*shape[:-2], 1, 1))}
