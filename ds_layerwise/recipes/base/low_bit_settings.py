"""Settings of states in fewer bits than float32; rules get such states in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ds_layerwise.recipes.base.dtypes import StateDtype
from ds_layerwise.recipes.base.recipe import Recipe, Shape, States, like

#: Largest share of itself that an average may keep in a step, so that 8 bits of precision show what
#: it takes up: a value that differs from it by a quarter of it then moves it by half of what
#: bfloat16 tells apart.
MOST_KEPT = 1 - 2**-6


class Kept(Recipe):
    """Recipe with a field for each state that may be kept in fewer bits."""

    kept_by: ClassVar[Mapping[str, str]] = {}
    """Fields that hold the dtypes of states, by state."""

    stochastic_rounding: bool = False
    """Round bfloat16 states by chance, so that small changes add up; see
    :mod:`ds_layerwise.optimizers.low_bit`."""

    def like(self, shape: Shape, *names: str) -> States:
        """Return states of the parameter's own shape, in the dtypes of the fields."""
        specs = like(shape, *names)
        for name, dtype in self._low_bit_dtypes().items():
            if name in specs:
                specs[name] = replace(specs[name], kept_as=dtype, signed=name != "exp_avg_sq")
        return specs

    def _low_bit_dtypes(self) -> dict[str, StateDtype]:
        dtypes = {}
        for state, field in self.kept_by.items():
            dtypes[state] = getattr(self, field)
        return {state: dtype for state, dtype in dtypes.items() if dtype != "float32"}

    @property
    def rounds_by_chance(self) -> bool:
        """True with ``stochastic_rounding``."""
        return self.stochastic_rounding

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """Return the share of itself that ``state`` keeps in a step."""
        if state == "momentum_buffer":
            return float(hyper["momentum"])
        return float(hyper["betas"][state == "exp_avg_sq"])

    def kept_summary(self) -> str:
        """Name the states in fewer bits for the start-up table; empty for none."""
        dtypes = self._low_bit_dtypes()
        by_chance = self.rounds_by_chance and "bfloat16" in dtypes.values()
        states = ", ".join(f"{state} in {dtype}" for state, dtype in dtypes.items())
        return states + " rounded by chance" * by_chance


class KeptMomentum(Kept):
    """Recipe with a ``momentum_buffer``."""

    kept_by = {"momentum_buffer": "momentum_dtype"}

    momentum_dtype: StateDtype = "float32"
    """Dtype of the momentum between updates."""


class KeptAverage(Kept):
    """Recipe with an ``exp_avg``."""

    kept_by = {"exp_avg": "exp_avg_dtype"}

    exp_avg_dtype: StateDtype = "float32"
    """Dtype of the average of gradients; a slow one beside it stays in float32."""


class KeptMoments(KeptAverage):
    """Recipe with an ``exp_avg`` and an ``exp_avg_sq``."""

    kept_by = {
        "exp_avg": "exp_avg_dtype",
        "exp_avg_sq": "exp_avg_sq_dtype",
    }

    exp_avg_sq_dtype: StateDtype = "float32"
    """Dtype of the average of squared gradients."""
