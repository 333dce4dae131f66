"""Shampoo: the momentum multiplied by inverse roots of its factors."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_layerwise.optimizers.recipes import shampoo_recipe as recipes
from ds_layerwise.optimizers.rule import Hyper, State
from ds_layerwise.optimizers.rules.kronecker import Kronecker, eigh
from ds_layerwise.orthogonalize.norms import norms_of


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

    recipe: recipes.Shampoo

    def _update(self, grad: Tensor, state: State, step: int, hyper: Hyper) -> Tensor:
        sides = self.recipe.sides(tuple(grad.shape))
        kept = self._kept(step)
        new = 1 - kept
        if self.recipe.statistics == "sum":
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
        if self.recipe.grafting == "none":
            return update.div_(correction1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        roots = (second / correction2).sqrt_().add_(hyper.eps)
        of_adam = roots.reciprocal_().mul_(momentum).div_(correction1)
        tiny = torch.finfo(update.dtype).tiny
        return update.mul_(norms_of(of_adam) / norms_of(update).clamp_min(tiny))

    def _root(self, factor: Tensor, exponent: float) -> Tensor:
        values, vectors = eigh(factor)
        largest = values[..., :1]
        least = self.recipe.matrix_eps
        powers = values.clamp_min(0).add_(largest, alpha=least).pow_(exponent)
        powers = torch.where(largest > 0, powers, 1.0)
        return (vectors * powers.unsqueeze(-2)) @ vectors.mT
