"""Recipes that say in how many bits their states are kept between two updates; rules get them in
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ds_layerwise.recipes.base.dtypes import StateDtype
from ds_layerwise.recipes.base.recipe import Recipe, StateSpec, like

#: What an average may keep of itself in a step so that what it takes up is seen in 8 bits of
#: precision: a value that differs from it by a quarter of it then moves it by half of what bfloat16
#: tells apart.
MOST_KEPT = 1 - 2**-6


class Kept(Recipe):
    """What they have in common. A subclass has a field for each state that may be kept in fewer
    bits.
    """

    kept_by: ClassVar[Mapping[str, str]] = {}
    """By state, the field that says what it is kept in."""

    stochastic_rounding: bool = False
    """Whether states that are kept in bfloat16 are rounded by chance, so that small changes add up;
    see :mod:`ds_layerwise.optimizers.low_bit`."""

    def like(self, shape: tuple[int, ...], *names: str) -> dict[str, StateSpec]:
        """States of the parameter's own shape, kept as the fields say."""
        found = like(shape, *names)
        for name, field in self.kept_by.items():
            dtype: StateDtype = getattr(self, field)
            if name in found and dtype != "float32":
                found[name] = replace(found[name], kept_as=dtype, signed=name != "exp_avg_sq")
        return found

    @property
    def rounds_by_chance(self) -> bool:
        """With ``stochastic_rounding``."""
        return self.stochastic_rounding

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """What ``state`` keeps of itself in a step, with the hyper-parameters ``hyper``."""
        if state == "momentum_buffer":
            return float(hyper["momentum"])
        return float(hyper["betas"][state == "exp_avg_sq"])

    def kept_summary(self) -> str:
        """What is kept in fewer bits, as the start-up table says it; empty for nothing."""
        told = [
            f"{state} in {getattr(self, field)}"
            for state, field in self.kept_by.items()
            if getattr(self, field) != "float32"
        ]
        by_chance = (
            any(getattr(self, field) == "bfloat16" for field in self.kept_by.values())
            and self.rounds_by_chance
        )
        return ", ".join(told) + " rounded by chance" * by_chance


class KeptMomentum(Kept):
    """A recipe with a ``momentum_buffer``."""

    kept_by: ClassVar[Mapping[str, str]] = {"momentum_buffer": "momentum_dtype"}

    momentum_dtype: StateDtype = "float32"
    """What the momentum is kept in."""


class KeptAverage(Kept):
    """A recipe with an ``exp_avg``."""

    kept_by: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg_dtype"}

    exp_avg_dtype: StateDtype = "float32"
    """What the average of gradients is kept in; a slow one beside it stays in float32."""


class KeptMoments(KeptAverage):
    """A recipe with an ``exp_avg_sq``, too."""

    kept_by: ClassVar[Mapping[str, str]] = {
        "exp_avg": "exp_avg_dtype",
        "exp_avg_sq": "exp_avg_sq_dtype",
    }

    exp_avg_sq_dtype: StateDtype = "float32"
    """What the average of squared gradients is kept in."""
