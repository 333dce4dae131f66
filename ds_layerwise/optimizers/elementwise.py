"""Element-wise optimizers: every element is updated as if it were alone, so parameters may be cut anywhere.

Adam and SGD are torch's own, through their functional forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ds_layerwise.optimizers.decay import WeightDecay
from ds_layerwise.optimizers.rule import Hyper, State, zeros
from ds_layerwise.recipes import elementwise as recipes
from ds_layerwise.recipes.recipe import Recipe

T = TypeVar("T", bound="Elementwise")


@dataclass(frozen=True, slots=True)
class Elementwise:
    """What all of these are alike in; each says how it moves parameters, apart from weight decay."""

    recipe: Recipe

    @classmethod
    def of(cls: type[T], recipe: Recipe) -> T:
        """The rule that runs ``recipe``."""
        return cls(recipe)

    def init_state(self, param: Tensor) -> State:
        """Zeros."""
        return zeros(self.recipe.states(tuple(param.shape)), param)

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step of all parameters together."""
        decay = WeightDecay.of(self.recipe)
        given = decay.gradients(params, grads, hyper)
        decay.update_(params, hyper, lambda targets, lr: self.move_(targets, given, states, hyper, lr))

    def move_(self, targets: list[Tensor], grads: list[Tensor], states: Sequence[State], hyper: Hyper,
              lr: float) -> None:
        """Update ``states`` with ``grads``, and subtract the direction times ``lr`` from ``targets``, in place.

        The direction depends on ``grads`` and ``states`` alone, not on what is in ``targets``.
        """
        raise NotImplementedError

    def check(self, device: torch.device) -> None:
        """Every device can do it."""

    def on_device(self: T, fast_dtypes: Any) -> T:
        """There are no matrix products."""
        return self

    @property
    def products_in(self) -> None:
        """There are none."""

    def of_shards(self: T, axis: Any, peers: Any) -> T:
        """A part of a parameter is a parameter."""
        return self


@dataclass(frozen=True, slots=True)
class Adam(Elementwise):
    """Adam, with weight decay as the recipe has it: ``AdamW``, or with L2 regularisation ``Adam``.

    State: ``exp_avg``, ``exp_avg_sq``, like the parameter, and ``step``, 0-d float32 on the CPU.
    Reference: :class:`torch.optim.AdamW`, :class:`torch.optim.Adam`
    """

    recipe: Recipe = recipes.AdamW()

    def move_(self, targets: list[Tensor], grads: list[Tensor], states: Sequence[State], hyper: Hyper,
              lr: float) -> None:
        """Torch's step without its weight decay."""
        adam(targets, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
             [s["step"] for s in states], foreach=True, amsgrad=False, beta1=hyper.betas[0], beta2=hyper.betas[1],
             lr=lr, weight_decay=0.0, eps=hyper.eps, maximize=False)


@dataclass(frozen=True, slots=True)
class Sgd(Elementwise):
    """SGD with momentum and, unless the recipe says otherwise, L2 regularisation.

    State: ``momentum_buffer``, like the parameter; zeros, which the first step turns into the gradient, as torch's
    missing buffer does.
    Reference: :class:`torch.optim.SGD`
    """

    recipe: Recipe = recipes.Sgd()

    def move_(self, targets: list[Tensor], grads: list[Tensor], states: Sequence[State], hyper: Hyper,
              lr: float) -> None:
        """Torch's step without its weight decay."""
        sgd(targets, grads, [s["momentum_buffer"] for s in states], foreach=True, weight_decay=0.0,
            momentum=hyper.momentum, lr=lr, dampening=0.0, nesterov=False, maximize=False)


@dataclass(frozen=True, slots=True)
class Lion(Elementwise):
    """Sign of a moving average.

    State: ``exp_avg``, like the parameter. ``betas``: of the direction, and of the average that is kept.
    Reference: arXiv 2302.06675
    """

    recipe: Recipe = recipes.Lion()

    def move_(self, targets: list[Tensor], grads: list[Tensor], states: Sequence[State], hyper: Hyper,
              lr: float) -> None:
        """Take the sign with the first of the betas, then let the average follow with the second."""
        averages = [s["exp_avg"] for s in states]
        direction = torch._foreach_lerp(averages, grads, 1 - hyper.betas[0])
        torch._foreach_sign_(direction)
        torch._foreach_add_(targets, direction, alpha=-lr)
        torch._foreach_lerp_(averages, grads, 1 - hyper.betas[1])
