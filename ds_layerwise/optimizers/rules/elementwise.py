"""Element-wise optimizers: every element is updated independently, so parameters may be cut
anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ds_layerwise.optimizers.recipe import (
    ANYWHERE,
    COUNT,
    Hyper,
    KeptAverage,
    KeptMoments,
    KeptMomentum,
    Recipe,
    Shape,
    Site,
    State,
    States,
    WeightDecayMethod,
)
from ds_layerwise.optimizers.scalars import add_, lerp, lerp_, multiply_
from ds_layerwise.orthogonalize.batching import Tensors


@dataclass(frozen=True)
class ElementMoves:
    """Parameters, or zero tensors for their moves, that make one step together."""

    targets: list[Tensor]
    """The tensors to update, written in place."""
    grads: list[Tensor]
    states: Sequence[State]
    """The states, written in place."""
    hyper: Hyper
    is_at_rate_1: bool = False
    """True to make the step of a learning rate of 1."""

    def state(self, key: str) -> list[Tensor]:
        """Return the state ``key`` of each parameter."""
        return [state[key] for state in self.states]

    def lr(self, now: Hyper) -> float:
        """Return the rate of the step, with the learning rate of ``now``."""
        return 1.0 if self.is_at_rate_1 else now.lr


class Elementwise(Recipe):
    """An optimizer of parameters that may be cut anywhere, with the rate ``adam_lr``. Subclasses
    define how parameters move.
    """

    whole = False
    can_be_captured = True
    lr_ratio = "scalar_lr_ratio"

    def update_(
        self,
        params: Tensors,
        grads: Tensors,
        states: Sequence[State],
        hyper: Hyper,
        site: Site = ANYWHERE,
    ) -> None:
        """Make a step of all parameters together: decay, then move them. Cautious decay needs their
        moves first.
        """
        gradients = list(self.with_l2(params, grads, hyper))
        if not (self.cautious_weight_decay and hyper.may(self.decay_share(hyper))):
            self.decay_(params, [], hyper)
            self.move_(ElementMoves(list(params), gradients, states, hyper))
            return
        # Use rate 1 and start from zero, so that neither a rate of 0 nor a large weight rounds a
        # sign away.
        moves = [torch.zeros_like(param) for param in params]
        self.move_(ElementMoves(moves, gradients, states, hyper, is_at_rate_1=True))
        torch._foreach_neg_(moves)
        self.decay_(params, moves, hyper)
        add_(params, moves, hyper.of(lambda now: -now.lr))

    def move_(self, moves: ElementMoves) -> None:
        """Update the states of ``moves`` with its gradients, and subtract the direction times its
        ``lr`` from its targets, in place.

        The direction depends only on gradients and states, not on the targets.
        """
        raise NotImplementedError


class Adam(Elementwise, KeptMoments):
    """Adam with L2 regularisation, as :class:`torch.optim.Adam`.

    State: ``exp_avg``, ``exp_avg_sq``, like the parameter, and ``step``, 0-d float32 on the CPU.
    """

    rule = "adam"
    family = "adam"
    gradient_average = "exp_avg"
    hyper = ("betas", "eps")
    update_size = "normalised"

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: Shape) -> States:
        """Return two moments, and the number of steps."""
        return {**self.like(shape, "exp_avg", "exp_avg_sq"), **COUNT}

    def move_(self, moves: ElementMoves) -> None:
        """Make torch's step without its weight decay."""
        if moves.hyper.register is not None:
            self._move_captured_(moves)
            return
        beta1, beta2 = moves.hyper.betas
        adam(
            moves.targets,
            moves.grads,
            moves.state("exp_avg"),
            moves.state("exp_avg_sq"),
            [],
            moves.state("step"),
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=moves.lr(moves.hyper),
            weight_decay=0.0,
            eps=moves.hyper.eps,
            maximize=False,
        )

    def _move_captured_(self, moves: ElementMoves) -> None:
        """Make the same step with all numbers on the device, where torch's ``capturable`` wants
        counts of steps on the device, too, which checkpoints have on the host.
        """
        hyper = moves.hyper
        averages = moves.state("exp_avg")
        squares = moves.state("exp_avg_sq")
        lerp_(averages, moves.grads, hyper.of(lambda now: 1 - now.betas[0]))
        added = torch._foreach_mul(moves.grads, moves.grads)
        lerp_(squares, added, hyper.of(lambda now: 1 - now.betas[1]))
        roots = torch._foreach_sqrt(squares)
        places = zip(moves.targets, averages, roots, moves.state("step"), strict=True)
        for target, average, root, step in places:
            root.mul_(hyper.of(partial(_next_correction, step=step)))
            root.add_(hyper.of(lambda now: now.eps))
            rate = hyper.of(partial(_rate_after, moves=moves, step=step))
            target.addcdiv_(average * rate, root, value=-1)


def _next_correction(now: Hyper, step: Tensor) -> float:
    """Count a step, and return the factor that corrects the root of the second moment."""
    step.add_(1)
    return 1 / math.sqrt(1 - now.betas[1] ** step.item())


def _rate_after(now: Hyper, moves: ElementMoves, step: Tensor) -> float:
    """Return the learning rate over the correction of the first moment."""
    return moves.lr(now) / (1 - now.betas[0] ** step.item())


class AdamW(Adam):
    """Adam with decoupled weight decay, as :class:`torch.optim.AdamW`."""

    rule = "adamw"

    weight_decay_method: WeightDecayMethod = "decoupled"


class Sgd(Elementwise, KeptMomentum):
    """SGD with momentum and L2 regularisation, as :class:`torch.optim.SGD`. The momentum is a sum,
    not an average.

    State: ``momentum_buffer``, like the parameter; zeros, which the first step turns into the
    gradient, as torch's missing buffer does.
    """

    rule = "sgd"
    family = "sgd"
    hyper = ("momentum",)
    update_size = "gradient"

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: Shape) -> States:
        """Return the momentum."""
        return self.like(shape, "momentum_buffer")

    def move_(self, moves: ElementMoves) -> None:
        """Make torch's step without its weight decay."""
        momenta = moves.state("momentum_buffer")
        multiply_(momenta, moves.hyper.of(lambda now: now.momentum))
        torch._foreach_add_(momenta, moves.grads)
        add_(moves.targets, momenta, moves.hyper.of(lambda now: -moves.lr(now)))


class Lion(Elementwise, KeptAverage):
    """Lion: the sign of a moving average (arXiv 2302.06675).

    With g the gradient, m the average and u the direction that the learning rate multiplies::

        u = sign(beta1 m + (1 - beta1) g)
        m <- beta2 m + (1 - beta2) g

    State: ``exp_avg`` (m), like the parameter.
    """

    rule = "lion"
    family = "lion"
    gradient_average = "exp_avg"
    hyper = ("betas",)
    update_size = "normalised"

    def states(self, shape: Shape) -> States:
        """Return one average."""
        return self.like(shape, "exp_avg")

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """Return the second of ``betas``, with which the average is updated."""
        return float(hyper["betas"][1])

    def move_(self, moves: ElementMoves) -> None:
        """Take the sign with the first of ``betas``, then update the average with the second."""
        hyper = moves.hyper
        averages = moves.state("exp_avg")
        direction = lerp(averages, moves.grads, hyper.of(lambda now: 1 - now.betas[0]))
        torch._foreach_sign_(direction)
        add_(moves.targets, direction, hyper.of(lambda now: -moves.lr(now)))
        lerp_(averages, moves.grads, hyper.of(lambda now: 1 - now.betas[1]))
