"""The recipes that update every element independently: AdamW and its kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ds_layerwise.optimizers.base.fields import Decay, NonNegative
from ds_layerwise.optimizers.base.low_bit_settings import KeptAverage, KeptMoments, KeptMomentum
from ds_layerwise.optimizers.base.recipe import (
    COUNT,
    HyperText,
    Recipe,
    Shape,
    States,
    WeightDecayMethod,
)

#: A number of steps; 0 for none.
Steps = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Elementwise(Recipe):
    """A recipe of parameters that may be cut anywhere, with the rate ``adam_lr``."""

    whole = False
    lr_ratio = "scalar_lr_ratio"


class TwoMoments(Elementwise, KeptMoments):
    """A recipe with two averages and a count of steps."""

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
    """Lion: the sign of a moving average, with decoupled weight decay (arXiv 2302.06675)."""

    rule = "lion"
    family = "lion"
    gradient_average = "exp_avg"
    hyper = ("betas",)

    def states(self, shape: Shape) -> States:
        """Return one average."""
        return self.like(shape, "exp_avg")

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """Return the second of ``betas``, with which the average is updated."""
        return float(hyper["betas"][1])


class Sgd(Elementwise, KeptMomentum):
    """SGD with momentum and L2 regularisation, as :class:`torch.optim.SGD`. The momentum is a sum,
    not an average.
    """

    rule = "sgd"
    family = "sgd"
    hyper = ("momentum",)

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: Shape) -> States:
        """Return the momentum."""
        return self.like(shape, "momentum_buffer")


class Signum(Elementwise, KeptMomentum):
    """Signum: the sign of the momentum (arXiv 1802.04434), as in emerging_optimizers 0.5."""

    rule = "signum"
    family = "signum"
    gradient_average = "momentum_buffer"
    hyper = ("momentum",)

    nesterov: bool = False
    correct_bias: bool = True
    """It has an effect only with ``nesterov``: a sign has no size to correct."""

    def states(self, shape: Shape) -> States:
        """Return one average, and the number of steps."""
        return {**self.like(shape, "momentum_buffer"), **COUNT}

    def summary(self, hyper: HyperText) -> str:
        """Return the momentum and the kind of sign as text."""
        uncorrected = " without correction of bias" * (not self.correct_bias)
        return super().summary(hyper) + f", nesterov{uncorrected}" * self.nesterov


class LaProp(TwoMoments):
    """LaProp: the momentum of normalised gradients (arXiv 2002.04839), with Adam's two averages in
    reverse order.
    """

    rule = "laprop"
    family = "laprop"

    correct_bias: bool = True

    def summary(self, hyper: HyperText) -> str:
        """Return betas and eps as text, and whether averages lack the bias correction."""
        return super().summary(hyper) + ", without correction of bias" * (not self.correct_bias)


class AdEMAMix(TwoMoments):
    """AdEMAMix: Adam with an additional, slow average of the gradient (arXiv 2409.03137)."""

    rule = "ademamix"
    family = "ademamix"
    gradient_average = "exp_avg"

    alpha: NonNegative = 5.0
    """The weight of the slow average relative to the fast one."""
    beta3: Decay = 0.9999
    """The fraction of the slow average that is kept at a step."""
    alpha_warmup_steps: Steps = 0
    """The number of steps over which ``alpha`` grows from 0; in the paper, all steps of the run."""
    beta3_warmup_steps: Steps = 0
    """The number of steps over which ``beta3`` grows from the first of ``betas``; in the paper, all
    steps of the run.
    """

    def states(self, shape: Shape) -> States:
        """Return Adam's moments, a slow first one, and the number of steps."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq", "exp_avg_slow"), **COUNT}

    def summary(self, hyper: HyperText) -> str:
        """Return betas and eps, and the decay and the weight of the slow average, as text."""

        def warm(steps: int) -> str:
            if steps:
                return f" after {steps} steps"
            return ""

        return (
            f"{super().summary(hyper)}, beta3 {self.beta3:g}{warm(self.beta3_warmup_steps)}, alpha "
            f"{self.alpha:g}{warm(self.alpha_warmup_steps)}"
        )
