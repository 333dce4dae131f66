"""Recipes that update every element as if it were alone: AdamW, Adam, Lion, SGD, Signum, LaProp,
AdEMAMix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ds_layerwise.recipes.base.fields import Decay, NonNegative
from ds_layerwise.recipes.base.low_bit_settings import KeptAverage, KeptMoments, KeptMomentum
from ds_layerwise.recipes.base.recipe import (
    COUNT,
    HyperText,
    Recipe,
    Shape,
    States,
    WeightDecayMethod,
)

#: Number of steps; 0 for none.
Steps = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Elementwise(Recipe):
    """Recipe of parameters that may be cut anywhere, with the rate ``adam_lr``."""

    whole = False
    lr_ratio = "scalar_lr_ratio"


class TwoMoments(Elementwise, KeptMoments):
    """Recipe with two averages, and a count of steps."""

    hyper = ("betas", "eps")

    def states(self, shape: Shape) -> States:
        """Return two moments, and the number of steps."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq"), **COUNT}


class Adam(TwoMoments):
    """Adam with L2 regularisation, as :class:`torch.optim.Adam`."""

    rule = "adam"
    family = "adam"
    gradient_average = "exp_avg"

    weight_decay_method: WeightDecayMethod = "l2"


class AdamW(Adam):
    """Adam with decoupled weight decay, as :class:`torch.optim.AdamW`."""

    rule = "adamw"

    weight_decay_method: WeightDecayMethod = "decoupled"


class Lion(Elementwise, KeptAverage):
    """Sign of a moving average, with decoupled weight decay (arXiv 2302.06675)."""

    rule = "lion"
    family = "lion"
    gradient_average = "exp_avg"
    hyper = ("betas",)

    def states(self, shape: Shape) -> States:
        """Return one average."""
        return self.like(shape, "exp_avg")

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """Return the second of the betas, with which the average follows."""
        return float(hyper["betas"][1])


class Sgd(Elementwise, KeptMomentum):
    """SGD with momentum and L2 regularisation, as :class:`torch.optim.SGD`. The momentum is a sum,
    no average.
    """

    rule = "sgd"
    family = "sgd"
    hyper = ("momentum",)

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: Shape) -> States:
        """Return the momentum."""
        return self.like(shape, "momentum_buffer")


class Signum(Elementwise, KeptMomentum):
    """Sign of the momentum (arXiv 1802.04434), as emerging_optimizers 0.5 has it."""

    rule = "signum"
    family = "signum"
    gradient_average = "momentum_buffer"
    hyper = ("momentum",)

    nesterov: bool = False
    correct_bias: bool = True
    """Only matters with ``nesterov``: a sign has no size that could be corrected."""

    def states(self, shape: Shape) -> States:
        """Return one average, and the number of steps."""
        return {**self.like(shape, "momentum_buffer"), **COUNT}

    def summary(self, hyper: HyperText) -> str:
        """Name the momentum and the kind of sign."""
        uncorrected = " without correction of bias" * (not self.correct_bias)
        return super().summary(hyper) + f", nesterov{uncorrected}" * self.nesterov


class LaProp(TwoMoments):
    """Momentum of normalised gradients (arXiv 2002.04839): the order of Adam's two averages turned
    round.
    """

    rule = "laprop"
    family = "laprop"

    correct_bias: bool = True

    def summary(self, hyper: HyperText) -> str:
        """Name betas and eps, and tell if averages are not corrected."""
        return super().summary(hyper) + ", without correction of bias" * (not self.correct_bias)


class AdEMAMix(TwoMoments):
    """Adam with a second, slow average of the gradient (arXiv 2409.03137)."""

    rule = "ademamix"
    family = "ademamix"
    gradient_average = "exp_avg"

    alpha: NonNegative = 5.0
    """Weight of the slow average, over the fast one."""
    beta3: Decay = 0.9999
    """Share of the slow average that is kept at a step."""
    alpha_warmup_steps: Steps = 0
    """Steps over which ``alpha`` grows from 0; the paper takes all steps of the run."""
    beta3_warmup_steps: Steps = 0
    """Steps over which ``beta3`` grows from the first of ``betas``; the paper takes all steps of
    the run.
    """

    def states(self, shape: Shape) -> States:
        """Return Adam's moments, a slow first one, and the number of steps."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq", "exp_avg_slow"), **COUNT}

    def summary(self, hyper: HyperText) -> str:
        """Name betas and eps, and the share and the weight of the slow average."""

        def warm(steps: int) -> str:
            if steps:
                return f" after {steps} steps"
            return ""

        return (
            f"{super().summary(hyper)}, beta3 {self.beta3:g}{warm(self.beta3_warmup_steps)}, alpha "
            f"{self.alpha:g}{warm(self.alpha_warmup_steps)}"
        )
