"""Element-wise optimizers: every element is updated as if it were alone, so parameters may be cut anywhere.

Adam and SGD are torch's own, through their functional forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ds_layerwise.optimizers.rule import Hyper, State


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam with decoupled weight decay (``AdamW``), or with L2 regularisation.

    State: ``exp_avg``, ``exp_avg_sq``, like the parameter, and ``step``, 0-d float32 on the CPU.
    Reference: :class:`torch.optim.AdamW`, :class:`torch.optim.Adam`
    """

    decoupled: bool = True

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    family: ClassVar[str] = "adam"
    gradient_average: ClassVar[str | None] = "exp_avg"

    def init_state(self, param: Tensor) -> State:
        """Zeros."""
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        return {**{key: torch.zeros_like(param) for key in self.state_keys}, "step": step}

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step of all parameters together."""
        step = adamw if self.decoupled else adam
        step(list(params), list(grads), [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
             [s["step"] for s in states], foreach=True, amsgrad=False, beta1=hyper.betas[0], beta2=hyper.betas[1],
             lr=hyper.lr, weight_decay=hyper.weight_decay, eps=hyper.eps, maximize=False)


@dataclass(frozen=True, slots=True)
class Sgd:
    """SGD with momentum and L2 regularisation.

    State: ``momentum_buffer``, like the parameter.
    Reference: :class:`torch.optim.SGD`
    """

    state_keys: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    family: ClassVar[str] = "sgd"
    #: torch's momentum is a sum, 1 / (1 - momentum) times an average.
    gradient_average: ClassVar[str | None] = None

    def init_state(self, param: Tensor) -> State:
        """Zeros, which the first step turns into the gradient, as torch's missing buffer does."""
        return {"momentum_buffer": torch.zeros_like(param)}

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step of all parameters together."""
        sgd(list(params), list(grads), [s["momentum_buffer"] for s in states], foreach=True,
            weight_decay=hyper.weight_decay, momentum=hyper.momentum, lr=hyper.lr, dampening=0.0, nesterov=False,
            maximize=False)


@dataclass(frozen=True, slots=True)
class Lion:
    """Sign of a moving average, with decoupled weight decay.

    State: ``exp_avg``, like the parameter. ``betas``: of the direction, and of the average that is kept.
    Reference: arXiv 2302.06675
    """

    state_keys: ClassVar[tuple[str, ...]] = ("exp_avg",)
    family: ClassVar[str] = "lion"
    gradient_average: ClassVar[str | None] = "exp_avg"

    def init_state(self, param: Tensor) -> State:
        """Zeros."""
        return {"exp_avg": torch.zeros_like(param)}

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
