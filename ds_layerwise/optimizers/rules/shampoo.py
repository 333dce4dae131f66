"""Shampoo: the momentum multiplied by inverse roots of its factors."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ds_layerwise.optimizers.fields import Positive
from ds_layerwise.optimizers.recipe import Hyper, HyperText, Shape, State, States
from ds_layerwise.optimizers.rules.kronecker import EIGH_FLOPS, Kronecker, eigh
from ds_layerwise.orthogonalize.batching import norms_of
from ds_layerwise.orthogonalize.newton_schulz import TINY

Grafting = Literal["adam", "none"]
Statistics = Literal["average", "sum"]


class Shampoo(Kronecker):
    """Shampoo, for whole matrices G of (rows, cols).

    The rule is Distributed Shampoo's (arXiv 2309.06497, facebookresearch/optimizers), for whole
    matrices instead of blocks, from the first step on::

        L <- b L + (1 - b) G Gᵀ,  R <- b R + (1 - b) Gᵀ G,
            b = 1 - (1 - shampoo_beta) / (1 - shampoo_beta^t)
        exp_avg <- betas[0] exp_avg + (1 - betas[0]) G
        U = L^(-1/4) exp_avg R^(-1/4)
        W <- W - lr ‖A‖ / ‖U‖ U,
            A = exp_avg / (sqrt(exp_avg_sq) + eps), Adam's update, with its corrections

    A root is that of the eigenvalues, with negative ones set to 0, plus ``matrix_eps`` times the
    largest. So it does not depend on the size of gradients (Distributed Shampoo adds its epsilon
    without scaling). The root of a zero factor is the identity. If only one side has a factor, its
    root has the exponent -1/2.

    With ``grafting`` "none", ``statistics`` "sum" and betas[0] of 0 it is the first Shampoo (arXiv
    1802.09568, algorithm 1), except for the size of ``matrix_eps``.

    State: ``exp_avg``, and ``exp_avg_sq`` with grafting, like the parameter; ``L``, ``R``,
    ``root_L``, ``root_R``, square, without those of a side beyond ``max_side``; ``step``, 0-d
    float32 on the CPU.
    """

    rule = "shampoo"
    family = "shampoo"
    as_adamw = "grafting to 'adam'"

    grafting: Grafting = "adam"
    """The norm of the update of a matrix: "adam" for that of Adam's update, "none" for its own."""
    statistics: Statistics = "average"
    """The kind of ``L`` and ``R``: "average" over steps with ``shampoo_beta``, or "sum", as in
    AdaGrad.
    """
    matrix_eps: Positive = 1e-6
    """Added to eigenvalues before the root, relative to the largest one of the factor."""

    def states(self, shape: Shape) -> States:
        """Return a momentum, factors and their inverse roots, the number of steps, and the second
        moment for Adam's norm.
        """
        moments = ("exp_avg", "exp_avg_sq") if self.grafting == "adam" else ("exp_avg",)
        return {**self.like(shape, *moments), **self.squares(shape, "", "root_")}

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of an update: of the factors, of the products of momentum and roots, and
        the share of one step in the roots.
        """
        matrices = math.prod(shape[:-2])
        roots = sum((EIGH_FLOPS + 2) * side**3 for side in self.sides(shape).values())
        return 2 * self.products(shape) + matrices * roots // self.precondition_frequency

    def most_held(self, numel: int, square: int) -> int:
        """Return the elements of the update and its scale, or of the computation of the larger
        root.

        An eigendecomposition needs its result, and twice that in LAPACK.
        """
        return max(2 * numel, 3 * square)

    @property
    def meaning(self) -> str:
        """The kind of statistics: a sum is larger than an average by the number of steps."""
        return f"statistics {self.statistics!r}"

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True with ``grafting`` "adam"."""
        return self.grafting == "adam"

    def summary(self, hyper: HyperText) -> str:
        """Return the averages and the frequency of roots as text."""
        kind = f"shampoo_beta {self.shampoo_beta:g}" if self.statistics == "average" else "sums"
        return (
            f"betas {hyper('betas')}, eps {hyper('eps')}, {kind}, roots every "
            f"{self.precondition_frequency} steps, grafting {self.grafting}{self.update_limit()}"
        )

    def _update(self, grad: Tensor, state: State, step: int, hyper: Hyper) -> Tensor:
        sides = self.sides(tuple(grad.shape))
        kept = self._kept(step)
        new = 1 - kept
        if self.statistics == "sum":
            kept = new = 1.0
        for key in sides:
            matrix = {"L": grad, "R": grad.mT}[key]
            state[key].baddbmm_(matrix, matrix.mT, beta=kept, alpha=new)
            if self._is_due(step):
                state[f"root_{key}"].copy_(self._root(state[key], -0.5 / len(sides)))
        beta1, beta2 = hyper.betas
        correction1, correction2 = self._corrections(step, hyper)
        update = momentum = state["exp_avg"].lerp_(grad, 1 - beta1)
        if "L" in sides:
            update = state["root_L"] @ update
        if "R" in sides:
            update = update @ state["root_R"]
        if self.grafting == "none":
            return update.div_(correction1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        roots = (second / correction2).sqrt_().add_(hyper.eps)
        of_adam = roots.reciprocal_().mul_(momentum).div_(correction1)
        return update.mul_(norms_of(of_adam) / norms_of(update).clamp_min(TINY))

    def _root(self, factor: Tensor, exponent: float) -> Tensor:
        values, vectors = eigh(factor)
        largest = values[..., :1]
        powers = values.clamp_min(0).add_(largest, alpha=self.matrix_eps).pow_(exponent)
        powers = torch.where(largest > 0, powers, 1.0)
        return (vectors * powers.unsqueeze(-2)) @ vectors.mT
