"""Element-wise optimizers: every element is updated independently, so parameters may be cut
anywhere.

Adam and SGD are torch's own functional forms. In formulas, g is the gradient, t counts steps from
1, and u is the direction that the learning rate multiplies.
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
from ds_layerwise.optimizers.recipes import elementwise_recipes as recipes
from ds_layerwise.optimizers.rule import Hyper, State, UpdateRule


@dataclass(frozen=True)
class Batch:
    """Parameters, or zero tensors for their moves, that make one step together."""

    targets: list[Tensor]
    """The tensors to update, written in place."""
    grads: list[Tensor]
    states: list[State]
    """The states, written in place."""
    hyper: Hyper
    lr: float

    def state(self, key: str) -> list[Tensor]:
        """Return the state ``key`` of each parameter."""
        return [state[key] for state in self.states]

    def by_step(self) -> Iterator[tuple[float, Batch]]:
        """Count a step in each state; then yield, by step number, the parameters with that
        number.
        """
        alike: dict[float, Batch] = {}
        for target, grad, state in zip(self.targets, self.grads, self.states, strict=True):
            state["step"] += 1
            count = float(state["step"])
            own = alike.setdefault(count, Batch([], [], [], self.hyper, self.lr))
            own.targets.append(target)
            own.grads.append(grad)
            own.states.append(state)
        yield from alike.items()


class Elementwise(UpdateRule):
    """The base of element-wise rules. Subclasses define how parameters move."""

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Make a step of all parameters together: decay, then move them. Cautious decay needs their
        moves first.
        """
        decay = WeightDecay.of(self.recipe)
        given = decay.gradients(params, grads, hyper)
        if not (decay.cautious and decay.share(hyper)):
            decay.shrink_(params, (), hyper)
            self.move_(Batch(list(params), given, list(states), hyper, hyper.lr))
            return
        # Use rate 1 and start from zero, so that neither a rate of 0 nor a large weight rounds a
        # sign away.
        moves = [torch.zeros_like(param) for param in params]
        self.move_(Batch(moves, given, list(states), hyper, 1.0))
        torch._foreach_neg_(moves)
        decay.shrink_(params, moves, hyper)
        torch._foreach_add_(list(params), moves, alpha=-hyper.lr)

    def move_(self, batch: Batch) -> None:
        """Update the states of ``batch`` with its gradients, and subtract the direction times its
        ``lr`` from its targets, in place.

        The direction depends only on gradients and states, not on the targets.
        """
        raise NotImplementedError


class Adam(Elementwise):
    """Adam, with the recipe's method of weight decay: ``AdamW``, or ``Adam`` with L2
    regularisation.

    State: ``exp_avg``, ``exp_avg_sq``, like the parameter, and ``step``, 0-d float32 on the CPU.
    Reference: :class:`torch.optim.AdamW`, :class:`torch.optim.Adam`
    """

    def move_(self, batch: Batch) -> None:
        """Make torch's step without its weight decay."""
        beta1, beta2 = batch.hyper.betas
        adam(
            batch.targets,
            batch.grads,
            batch.state("exp_avg"),
            batch.state("exp_avg_sq"),
            [],
            batch.state("step"),
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=batch.lr,
            weight_decay=0.0,
            eps=batch.hyper.eps,
            maximize=False,
        )


class Sgd(Elementwise):
    """SGD with momentum and, by default, L2 regularisation.

    State: ``momentum_buffer``, like the parameter; zeros, which the first step turns into the
    gradient, as torch's missing buffer does.

    Reference: :class:`torch.optim.SGD`
    """

    def move_(self, batch: Batch) -> None:
        """Make torch's step without its weight decay."""
        sgd(
            batch.targets,
            batch.grads,
            list(batch.state("momentum_buffer")),
            foreach=True,
            weight_decay=0.0,
            momentum=batch.hyper.momentum,
            lr=batch.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Lion(Elementwise):
    """Lion: the sign of a moving average.

    State: ``exp_avg``, like the parameter. ``betas``: of the direction, and of the average that is
    kept.

    Reference: arXiv 2302.06675
    """

    def move_(self, batch: Batch) -> None:
        """Take the sign with the first of ``betas``, then update the average with the second."""
        averages = batch.state("exp_avg")
        beta1, beta2 = batch.hyper.betas
        direction = torch._foreach_lerp(averages, batch.grads, 1 - beta1)
        torch._foreach_sign_(direction)
        torch._foreach_add_(batch.targets, direction, alpha=-batch.lr)
        torch._foreach_lerp_(averages, batch.grads, 1 - beta2)


class Signum(Elementwise):
    """Signum: the sign of the momentum.

    With g the gradient and u the direction of the update::

        m <- mu m + (1 - mu) g
        u = sign(m)

    and with ``nesterov``, as emerging_optimizers 0.5 has it, and without the divisors where
    ``correct_bias`` is false::

        u = sign(mu m / (1 - mu^(t+1)) + (1 - mu) g / (1 - mu^t))

    State: ``momentum_buffer`` (m), like the parameter, and ``step`` (t), 0-d float32 on the CPU.
    Reference: arXiv 1802.04434; without ``nesterov`` also pytorch_optimizer 4.1's SignSGD.
    """

    recipe: recipes.Signum

    def move_(self, batch: Batch) -> None:
        """Update the momentum, then take the sign."""
        keep = batch.hyper.momentum
        for step, some in batch.by_step():
            averages = some.state("momentum_buffer")
            torch._foreach_lerp_(averages, some.grads, 1 - keep)
            if not self.recipe.nesterov:
                signs = torch._foreach_sign(averages)
            else:
                next_one = _correction(self.recipe.correct_bias, keep ** (step + 1))
                this_one = _correction(self.recipe.correct_bias, keep**step)
                signs = torch._foreach_mul(averages, keep / next_one)
                torch._foreach_add_(signs, some.grads, alpha=(1 - keep) / this_one)
                torch._foreach_sign_(signs)
            torch._foreach_add_(some.targets, signs, alpha=-some.lr)


class LaProp(Elementwise):
    """LaProp: the momentum of normalised gradients.

    With g the gradient and u the direction of the update, and without the divisors 1 - beta^t where
    ``correct_bias`` is false::

        v <- beta2 v + (1 - beta2) g^2
        m <- beta1 m + (1 - beta1) g / (sqrt(v / (1 - beta2^t)) + eps)
        u = m / (1 - beta1^t)

    State: ``exp_avg`` (m), ``exp_avg_sq`` (v), like the parameter, and ``step`` (t), 0-d float32 on
    the CPU.

    Reference: the algorithm of arXiv 2002.04839. Its authors' code and pytorch_optimizer 4.1 have
    the learning rate inside m, which is the same while that does not change.
    """

    recipe: recipes.LaProp

    def move_(self, batch: Batch) -> None:
        """Normalise with the second average, then update the first one."""
        beta1, beta2 = batch.hyper.betas
        corrects = self.recipe.correct_bias
        for step, some in batch.by_step():
            averages = some.state("exp_avg")
            divisors = _roots(some, _correction(corrects, beta2**step))
            torch._foreach_mul_(averages, beta1)
            torch._foreach_addcdiv_(averages, some.grads, divisors, 1 - beta1)
            rate = some.lr / _correction(corrects, beta1**step)
            torch._foreach_add_(some.targets, averages, alpha=-rate)


class AdEMAMix(Elementwise):
    """AdEMAMix: Adam with an additional, slow average of the gradient.

    With g the gradient and u the direction of the update::

        m1 <- beta1 m1 + (1 - beta1) g
        m2 <- b3 m2 + (1 - b3) g
        v <- beta2 v + (1 - beta2) g^2
        u = (m1 / (1 - beta1^t) + a m2) / (sqrt(v / (1 - beta2^t)) + eps)

    Over ``alpha_warmup_steps`` a grows from 0 to ``alpha`` in a straight line; over
    ``beta3_warmup_steps`` b3 grows from beta1 to ``beta3`` so that 1 / ln b3, about how many steps
    it looks back, does.

    State: ``exp_avg`` (m1), ``exp_avg_slow`` (m2), ``exp_avg_sq`` (v), like the parameter, and
    ``step`` (t), 0-d float32 on the CPU.

    Reference: the algorithm and the schedulers of arXiv 2409.03137, which pytorch_optimizer 4.1's
    AdEMAMix follows; emerging_optimizers 0.5 has its one-average simplification instead.
    """

    recipe: recipes.AdEMAMix

    def move_(self, batch: Batch) -> None:
        """Update the three averages, then subtract both averages of gradients over the root of that
        of squares.
        """
        beta1, beta2 = batch.hyper.betas
        for step, some in batch.by_step():
            fast = some.state("exp_avg")
            slow = some.state("exp_avg_slow")
            alpha, beta3 = self.scheduled(step, beta1)
            torch._foreach_lerp_(fast, some.grads, 1 - beta1)
            torch._foreach_lerp_(slow, some.grads, 1 - beta3)
            divisors = _roots(some, 1 - beta2**step)
            torch._foreach_addcdiv_(some.targets, fast, divisors, -some.lr / (1 - beta1**step))
            torch._foreach_addcdiv_(some.targets, slow, divisors, -some.lr * alpha)

    def scheduled(self, step: float, beta1: float) -> tuple[float, float]:
        """Return ``alpha`` and ``beta3`` at ``step``."""
        recipe = self.recipe
        alpha = recipe.alpha * _warmed(step, recipe.alpha_warmup_steps)
        warmed = _warmed(step, recipe.beta3_warmup_steps)
        span = (1 - warmed) * _span_of(beta1) + warmed * _span_of(recipe.beta3)
        beta3 = math.exp(1 / span) if span else 0.0
        return alpha, min(beta3, recipe.beta3)


def _warmed(step: float, steps: int) -> float:
    """Return the fraction of ``steps`` that is over at ``step``."""
    return min(1.0, step / steps) if steps else 1.0


def _span_of(beta: float) -> float:
    """Return 1 / ln beta, and 0 for a beta of 0."""
    return 1 / math.log(beta) if beta else 0.0


def _correction(corrects: bool, left: float) -> float:
    """Return the bias correction of an average whose weights add up to 1 - ``left``; 1 without
    correction.
    """
    return 1 - left if corrects else 1.0


def _roots(batch: Batch, correction: float) -> list[Tensor]:
    """Update the averages v of squared gradients, and return sqrt(v / correction) + eps."""
    squares = batch.state("exp_avg_sq")
    beta = batch.hyper.betas[1]
    torch._foreach_mul_(squares, beta)
    torch._foreach_addcmul_(squares, batch.grads, batch.grads, 1 - beta)
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_div_(roots, math.sqrt(correction))
    torch._foreach_add_(roots, batch.hyper.eps)
    return roots
