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
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ds_layerwise.optimizers.rule import Hyper, State, zeros
from ds_layerwise.recipes import elementwise as recipes

T = TypeVar("T")


class Elementwise:
    """What all of these are alike in."""

    __slots__ = ()

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
    """Adam with decoupled weight decay (``AdamW``), or with L2 regularisation.

    State: ``exp_avg``, ``exp_avg_sq``, like the parameter, and ``step``, 0-d float32 on the CPU.
    Reference: :class:`torch.optim.AdamW`, :class:`torch.optim.Adam`
    """

    decoupled: bool = True

    @classmethod
    def of(cls, recipe: recipes.Adam) -> Adam:
        """With decoupled weight decay for the recipe of AdamW."""
        return cls(decoupled=isinstance(recipe, recipes.AdamW))

    def init_state(self, param: Tensor) -> State:
        """Zeros."""
        return zeros(recipes.Adam().states(tuple(param.shape)), param)

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step of all parameters together."""
        step = adamw if self.decoupled else adam
        step(list(params), list(grads), [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
             [s["step"] for s in states], foreach=True, amsgrad=False, beta1=hyper.betas[0], beta2=hyper.betas[1],
             lr=hyper.lr, weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=False)


@dataclass(frozen=True, slots=True)
class Sgd(Elementwise):
    """SGD with momentum and L2 regularisation.

    State: ``momentum_buffer``, like the parameter.
    Reference: :class:`torch.optim.SGD`
    """

    @classmethod
    def of(cls, recipe: recipes.Sgd) -> Sgd:
        """The rule of a recipe that has no settings."""
        return cls()

    def init_state(self, param: Tensor) -> State:
        """Zeros, which the first step turns into the gradient, as torch's missing buffer does."""
        return zeros(recipes.Sgd().states(tuple(param.shape)), param)

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step of all parameters together."""
        sgd(list(params), list(grads), [s["momentum_buffer"] for s in states], foreach=True,
            weight_decay=hyper.weight_decay, momentum=hyper.momentum, lr=hyper.lr, dampening=0.0, nesterov=False,
            maximize=False)


@dataclass(frozen=True, slots=True)
class Lion(Elementwise):
    """Sign of a moving average, with decoupled weight decay.

    State: ``exp_avg``, like the parameter. ``betas``: of the direction, and of the average that is kept.
    Reference: arXiv 2302.06675
    """

    @classmethod
    def of(cls, recipe: recipes.Lion) -> Lion:
        """The rule of a recipe that has no settings."""
        return cls()

    def init_state(self, param: Tensor) -> State:
        """Zeros."""
        return zeros(recipes.Lion().states(tuple(param.shape)), param)

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step of all parameters together."""
        averages, gradients = [s["exp_avg"] for s in states], list(grads)
        direction = torch._foreach_lerp(averages, gradients, 1 - hyper.betas[0])
        torch._foreach_sign_(direction)
        if hyper.weight_decay:
            torch._foreach_mul_(list(params), 1 - hyper.lr * hyper.weight_decay)
        torch._foreach_add_(list(params), direction, alpha=-hyper.lr)
        torch._foreach_lerp_(averages, gradients, 1 - hyper.betas[1])
