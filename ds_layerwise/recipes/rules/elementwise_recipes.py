"""Optimizers that update every element as if it were alone: AdamW, Adam, Lion, SGD, Signum, LaProp,
AdEMAMix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ds_layerwise.recipes.base.fields import Decay, NonNegative
from ds_layerwise.recipes.base.low_bit_settings import KeptAverage, KeptMoments, KeptMomentum
from ds_layerwise.recipes.base.recipe import COUNT, Recipe, StateSpec, WeightDecayMethod

#: How many steps something takes; none for 0.
Steps = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Elementwise(Recipe):
    """What they have in common: parameters may be cut anywhere, and the rate is ``adam_lr``."""

    whole: ClassVar[bool] = False
    lr_ratio = "scalar_lr_ratio"


class Adam(Elementwise, KeptMoments):
    """Adam with L2 regularisation, as :class:`torch.optim.Adam`."""

    rule: ClassVar[str] = "adam"
    family: ClassVar[str] = "adam"
    gradient_average: ClassVar[str | None] = "exp_avg"
    hyper: ClassVar[tuple[str, ...]] = ("betas", "eps")

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Two moments, and how many steps there were."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq"), **COUNT}


class AdamW(Adam):
    """Adam with decoupled weight decay, as :class:`torch.optim.AdamW`."""

    rule: ClassVar[str] = "adamw"

    weight_decay_method: WeightDecayMethod = "decoupled"


class Lion(Elementwise, KeptAverage):
    """Sign of a moving average, with decoupled weight decay (arXiv 2302.06675)."""

    rule: ClassVar[str] = "lion"
    family: ClassVar[str] = "lion"
    gradient_average: ClassVar[str | None] = "exp_avg"
    hyper: ClassVar[tuple[str, ...]] = ("betas",)

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One average."""
        return self.like(shape, "exp_avg")

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """The second of the betas, with which the average follows."""
        return float(hyper["betas"][1])


class Sgd(Elementwise, KeptMomentum):
    """SGD with momentum and L2 regularisation, as :class:`torch.optim.SGD`. Its momentum is a sum,
    no average.
    """

    rule: ClassVar[str] = "sgd"
    family: ClassVar[str] = "sgd"
    hyper: ClassVar[tuple[str, ...]] = ("momentum",)

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One momentum."""
        return self.like(shape, "momentum_buffer")


class Signum(Elementwise, KeptMomentum):
    """Sign of the momentum (arXiv 1802.04434), as emerging_optimizers 0.5 has it."""

    rule: ClassVar[str] = "signum"
    family: ClassVar[str] = "signum"
    gradient_average: ClassVar[str | None] = "momentum_buffer"
    hyper: ClassVar[tuple[str, ...]] = ("momentum",)

    nesterov: bool = False
    correct_bias: bool = True
    """Only matters with ``nesterov``: a sign has no size that could be corrected."""

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One average, and how many steps there were."""
        return {**self.like(shape, "momentum_buffer"), **COUNT}

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Momentum, and how the sign is taken."""
        kind = (
            ", nesterov" + ("" if self.correct_bias else " without correction of bias")
            if self.nesterov
            else ""
        )
        return super().summary(hyper) + kind


class LaProp(Elementwise, KeptMoments):
    """Momentum of normalised gradients (arXiv 2002.04839): the order of Adam's two averages turned
    round.
    """

    rule: ClassVar[str] = "laprop"
    family: ClassVar[str] = "laprop"
    hyper: ClassVar[tuple[str, ...]] = ("betas", "eps")

    correct_bias: bool = True

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Two averages, the first one of normalised gradients, and how many steps there were."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq"), **COUNT}

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Betas, eps, and whether they are corrected."""
        return super().summary(hyper) + (
            "" if self.correct_bias else ", without correction of bias"
        )


class AdEMAMix(Elementwise, KeptMoments):
    """Adam with a second, slow average of the gradient (arXiv 2409.03137)."""

    rule: ClassVar[str] = "ademamix"
    family: ClassVar[str] = "ademamix"
    gradient_average: ClassVar[str | None] = "exp_avg"
    hyper: ClassVar[tuple[str, ...]] = ("betas", "eps")

    alpha: NonNegative = 5.0
    """How much the slow average counts, over the fast one."""
    beta3: Decay = 0.9999
    """Of the slow average, what is kept at a step."""
    alpha_warmup_steps: Steps = 0
    """Over so many steps ``alpha`` grows from 0; the paper takes all steps of the run."""
    beta3_warmup_steps: Steps = 0
    """Over so many steps ``beta3`` grows from the first of ``betas``; the paper takes all steps of
    the run.
    """

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Adam's moments, a slow first one, and how many steps there were."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq", "exp_avg_slow"), **COUNT}

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Betas and eps, and of the slow average what it keeps and how much it counts."""

        def warm(steps: int) -> str:
            return f" after {steps} steps" if steps else ""

        return (
            f"{super().summary(hyper)}, beta3 {self.beta3:g}{warm(self.beta3_warmup_steps)}, alpha "
            f"{self.alpha:g}{warm(self.alpha_warmup_steps)}"
        )
