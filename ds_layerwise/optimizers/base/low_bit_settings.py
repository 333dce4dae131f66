"""The settings of states stored in fewer bits than float32. Rules get such states as float32."""

from __future__ import annotations

from dataclasses import replace

from ds_layerwise.optimizers.base.dtypes import StateDtype
from ds_layerwise.optimizers.base.recipe import Recipe, Shape, States, like

#: The largest fraction of itself that a low-bit average may keep in a step, so that 8 bits of
#: precision can represent its changes: a new value that differs by a quarter of the average then
#: moves it by half of the resolution of bfloat16.
MOST_KEPT = 1 - 2**-6


class Kept(Recipe):
    """A recipe with a field for each state that may be stored in fewer bits."""

    stochastic_rounding: bool = False
    """Use stochastic rounding for bfloat16 states, so that small changes add up; see
    :mod:`ds_layerwise.optimizers.low_bit`.
    """

    def like(self, shape: Shape, *names: str) -> States:
        """Return states of the parameter's own shape, with the dtypes in the fields."""
        specs = like(shape, *names)
        for name, dtype in self.low_bit_dtypes().items():
            if name in specs:
                specs[name] = replace(specs[name], kept_as=dtype, signed=name != "exp_avg_sq")
        return specs


class KeptMomentum(Kept):
    """A recipe with a ``momentum_buffer``."""

    kept_by = {"momentum_buffer": "momentum_dtype"}

    momentum_dtype: StateDtype = "float32"
    """The dtype of the momentum between updates."""


class KeptAverage(Kept):
    """A recipe with an ``exp_avg``."""

    kept_by = {"exp_avg": "exp_avg_dtype"}

    exp_avg_dtype: StateDtype = "float32"
    """The dtype of the average of gradients. An additional slow average stays in float32."""


class KeptMoments(KeptAverage):
    """A recipe with an ``exp_avg`` and an ``exp_avg_sq``."""

    kept_by = {**KeptAverage.kept_by, "exp_avg_sq": "exp_avg_sq_dtype"}

    exp_avg_sq_dtype: StateDtype = "float32"
    """The dtype of the average of squared gradients."""
