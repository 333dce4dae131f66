"""Element-wise optimizers: every element is updated as if it were alone, so parameters may be cut
anywhere.

Adam and SGD are torch's own, through their functional forms. In formulas g is the gradient, t
counts steps from 1, and u is what the learning rate is multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ds_layerwise.optimizers.decay import WeightDecay
from ds_layerwise.optimizers.rule import Hyper, State, UpdateRule
from ds_layerwise.recipes.base.recipe import Recipe
from ds_layerwise.recipes.rules import elementwise_recipes as recipes


@dataclass(frozen=True, slots=True)
class Elementwise(UpdateRule):
    """The base of element-wise rules. Each adds the way it moves parameters."""

    recipe: Recipe

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Take a step of all parameters together."""
        decay = WeightDecay.of(self.recipe)
        given = decay.gradients(params, grads, hyper)
        decay.update_(
            params, hyper, lambda targets, lr: self.move_(targets, given, states, hyper, lr)
        )

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Update ``states`` with ``grads``, and subtract the direction times ``lr`` from
        ``targets``, in place.

        The direction depends on ``grads`` and ``states`` alone, not on what is in ``targets``.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Adam(Elementwise):
    """Adam, with weight decay as the recipe has it: ``AdamW``, or with L2 regularisation ``Adam``.

    State: ``exp_avg``, ``exp_avg_sq``, like the parameter, and ``step``, 0-d float32 on the CPU.
    Reference: :class:`torch.optim.AdamW`, :class:`torch.optim.Adam`
    """

    recipe: Recipe = recipes.AdamW()

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Torch's step without its weight decay."""
        adam(
            targets,
            grads,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=True,
            amsgrad=False,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            lr=lr,
            weight_decay=0.0,
            eps=hyper.eps,
            maximize=False,
        )


@dataclass(frozen=True, slots=True)
class Sgd(Elementwise):
    """SGD with momentum and, unless the recipe says otherwise, L2 regularisation.

    State: ``momentum_buffer``, like the parameter; zeros, which the first step turns into the
    gradient, as torch's missing buffer does. Reference: :class:`torch.optim.SGD`
    """

    recipe: Recipe = recipes.Sgd()

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Torch's step without its weight decay."""
        sgd(
            targets,
            grads,
            [s["momentum_buffer"] for s in states],
            foreach=True,
            weight_decay=0.0,
            momentum=hyper.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@dataclass(frozen=True, slots=True)
class Lion(Elementwise):
    """Sign of a moving average.

    State: ``exp_avg``, like the parameter. ``betas``: of the direction, and of the average that is
    kept. Reference: arXiv 2302.06675
    """

    recipe: Recipe = recipes.Lion()

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Take the sign with the first of the betas, then let the average follow with the
        second.
        """
        averages = [s["exp_avg"] for s in states]
        direction = torch._foreach_lerp(averages, grads, 1 - hyper.betas[0])
        torch._foreach_sign_(direction)
        torch._foreach_add_(targets, direction, alpha=-lr)
        torch._foreach_lerp_(averages, grads, 1 - hyper.betas[1])


@dataclass(frozen=True, slots=True)
class Signum(Elementwise):
    """Sign of the momentum.

    m <- mu m + (1 - mu) g, and u = sign(m). With ``nesterov``, as emerging_optimizers 0.5 has it, u
    = sign(mu m / (1 - mu^(t+1)) + (1 - mu) g / (1 - mu^t)), without the divisors where
    ``correct_bias`` is false.

    State: ``momentum_buffer`` (m), like the parameter, and ``step`` (t), 0-d float32 on the CPU.
    Reference: arXiv 1802.04434; without ``nesterov`` also pytorch_optimizer 4.1's SignSGD.
    """

    recipe: recipes.Signum = recipes.Signum()

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Update the momentum, then take the sign."""
        keep = hyper.momentum
        for step, alike in _counted(states):
            averages, given = (
                [states[i]["momentum_buffer"] for i in alike],
                [grads[i] for i in alike],
            )
            torch._foreach_lerp_(averages, given, 1 - keep)
            if self.recipe.nesterov:
                next_one, this_one = _corrections(
                    self.recipe.correct_bias, keep ** (step + 1), keep**step
                )
                signs = torch._foreach_mul(averages, keep / next_one)
                torch._foreach_add_(signs, given, alpha=(1 - keep) / this_one)
                torch._foreach_sign_(signs)
            else:
                signs = torch._foreach_sign(averages)
            torch._foreach_add_([targets[i] for i in alike], signs, alpha=-lr)


@dataclass(frozen=True, slots=True)
class LaProp(Elementwise):
    """Momentum of normalised gradients.

    v <- beta2 v + (1 - beta2) g^2, m <- beta1 m + (1 - beta1) g / (sqrt(v / (1 - beta2^t)) + eps),
    and u = m / (1 - beta1^t), without the divisors 1 - beta^t where ``correct_bias`` is false.

    State: ``exp_avg`` (m), ``exp_avg_sq`` (v), like the parameter, and ``step`` (t), 0-d float32 on
    the CPU. Reference: the algorithm of arXiv 2002.04839. Its authors' code and pytorch_optimizer
    4.1 have the learning rate inside m, which is the same while that does not change.
    """

    recipe: recipes.LaProp = recipes.LaProp()

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Normalise with the second average, then update the first one."""
        (beta1, beta2), corrects = hyper.betas, self.recipe.correct_bias
        for step, alike in _counted(states):
            averages = [states[i]["exp_avg"] for i in alike]
            squares = [states[i]["exp_avg_sq"] for i in alike]
            given = [grads[i] for i in alike]
            first, second = _corrections(corrects, beta1**step, beta2**step)
            divisors = _roots(squares, given, beta2, second, hyper.eps)
            torch._foreach_mul_(averages, beta1)
            torch._foreach_addcdiv_(averages, given, divisors, 1 - beta1)
            torch._foreach_add_([targets[i] for i in alike], averages, alpha=-lr / first)


@dataclass(frozen=True, slots=True)
class AdEMAMix(Elementwise):
    """Adam with a second, slow average of the gradient.

    m1 <- beta1 m1 + (1 - beta1) g, m2 <- b3 m2 + (1 - b3) g, v <- beta2 v + (1 - beta2) g^2, and u
    = (m1 / (1 - beta1^t) + a m2) / (sqrt(v / (1 - beta2^t)) + eps). Over ``alpha_warmup_steps`` a
    grows from 0 to ``alpha`` in a straight line; over ``beta3_warmup_steps`` b3 grows from beta1 to
    ``beta3`` so that 1 / ln b3, about how many steps it looks back, does.

    State: ``exp_avg`` (m1), ``exp_avg_slow`` (m2), ``exp_avg_sq`` (v), like the parameter, and
    ``step`` (t), 0-d float32 on the CPU. Reference: the algorithm and the schedulers of arXiv
    2409.03137, which pytorch_optimizer 4.1's AdEMAMix follows; emerging_optimizers 0.5 has its
    one-average simplification instead.
    """

    recipe: recipes.AdEMAMix = recipes.AdEMAMix()

    def move_(
        self,
        targets: list[Tensor],
        grads: list[Tensor],
        states: Sequence[State],
        hyper: Hyper,
        lr: float,
    ) -> None:
        """Update the three averages, then subtract both first ones over the root of the second."""
        beta1, beta2 = hyper.betas
        for step, alike in _counted(states):
            fast = [states[i]["exp_avg"] for i in alike]
            slow = [states[i]["exp_avg_slow"] for i in alike]
            squares = [states[i]["exp_avg_sq"] for i in alike]
            given = [grads[i] for i in alike]
            moved = [targets[i] for i in alike]
            alpha, beta3 = self.scheduled(step, beta1)
            torch._foreach_lerp_(fast, given, 1 - beta1)
            torch._foreach_lerp_(slow, given, 1 - beta3)
            divisors = _roots(squares, given, beta2, 1 - beta2**step, hyper.eps)
            torch._foreach_addcdiv_(moved, fast, divisors, -lr / (1 - beta1**step))
            torch._foreach_addcdiv_(moved, slow, divisors, -lr * alpha)

    def scheduled(self, step: float, beta1: float) -> tuple[float, float]:
        """``alpha`` and ``beta3`` at ``step``."""

        def part(of: int) -> float:
            return min(1.0, step / of) if of else 1.0

        warmed = part(self.recipe.beta3_warmup_steps)
        return (
            self.recipe.alpha * part(self.recipe.alpha_warmup_steps),
            min(
                _decay_of((1 - warmed) * _span_of(beta1) + warmed * _span_of(self.recipe.beta3)),
                self.recipe.beta3,
            ),
        )


def _span_of(beta: float) -> float:
    """1 / ln beta, and 0 for a beta of 0."""
    return 1 / math.log(beta) if beta else 0.0


def _decay_of(span: float) -> float:
    """The inverse of :func:`_span_of`."""
    return math.exp(1 / span) if span else 0.0


def _counted(states: Sequence[State]) -> Iterator[tuple[float, list[int]]]:
    """Count a step in each of ``states``; then, by how many there were, the places of those with so
    many.
    """
    alike: dict[float, list[int]] = {}
    for place, state in enumerate(states):
        state["step"] += 1
        alike.setdefault(float(state["step"]), []).append(place)
    yield from alike.items()


def _corrections(corrects: bool, *left: float) -> list[float]:
    """Return the divisors of averages, each of which holds 1 - ``left`` of the values averaged."""
    return [1 - each if corrects else 1.0 for each in left]


def _roots(
    squares: list[Tensor], grads: list[Tensor], beta: float, correction: float, eps: float
) -> list[Tensor]:
    """Update the averages ``squares`` of squared gradients, and return sqrt(squares / correction) +
    eps.
    """
    torch._foreach_mul_(squares, beta)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta)
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, math.sqrt(correction))
    torch._foreach_add_(roots, eps)
    return roots
