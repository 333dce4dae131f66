"""Adafactor: second moments of whole matrices, as the product of a column and a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_layerwise.optimizers.decay import WeightDecay
from ds_layerwise.optimizers.recipes import adafactor_recipe as recipes
from ds_layerwise.optimizers.rule import Hyper, OneByOne, State, few_at_a_time
from ds_layerwise.orthogonalize.norms import norms_of

#: The lowest bound of a divisor: the inverse root of anything smaller is not a float32 number.
TINY = torch.finfo(torch.float32).tiny


class Adafactor(OneByOne):
    """Adafactor, for whole matrices.

    With t steps, b = t^``beta2_decay``, R and C the means of g^2 over columns and over rows, and W
    the matrix before the step::

        R <- R + b (mean_cols(g^2) - R)
        C <- C + b (mean_rows(g^2) - C)
        V = R C / max(mean(R), eps1)
        U = g / max(sqrt(V), eps1)
        U <- U / max(1, rms(U) / clip_threshold)
        W <- W - min(lr, 1 / sqrt(t)) max(eps2, rms(W)) U

    So the learning rate is the largest step relative to the size of the matrix; weight decay uses
    lr itself. A stack ``(batch, rows, cols)`` is updated like its matrices one by one. torch
    instead takes the mean squares of W and U over a whole stack, and factors the last two axes of a
    convolution.

    State: ``row_var`` (R), ``(..., rows, 1)``, ``col_var`` (C), ``(..., 1, cols)``, and ``step``
    (t), 0-d float32 on the CPU.

    Reference: :class:`torch.optim.Adafactor`, which says how it differs from arXiv 1804.04235.
    Where ``eps1``^2 is no float32, as of 1e-30, torch makes NaN of a row without gradients; here it
    stays where it is.
    """

    recipe: recipes.Adafactor

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Make a step of the parameter; of a long stack, a few matrices at a time."""
        state["step"] += 1
        step = float(state["step"])
        together = self.recipe.together(tuple(param.shape))
        for matrices, gradients, own in few_at_a_time(together, param, grad, state):
            self._update_(matrices, gradients, own, step, hyper)

    def _update_(
        self, param: Tensor, grad: Tensor, state: State, step: float, hyper: Hyper
    ) -> None:
        """Make a step of matrices that are updated together."""
        decay = WeightDecay.of(self.recipe)
        (given,) = decay.gradients([param], [grad], hyper)
        update = self._normalised(given, state["row_var"], state["col_var"], step)
        size = _rms(param).clamp_(min=self.recipe.eps2).mul_(min(hyper.lr, 1 / math.sqrt(step)))
        size.div_(_rms(update).div_(self.recipe.clip_threshold).clamp_(min=1))
        decay.shrink_([param], [update], hyper)
        param.sub_(update.mul_(size))

    def _normalised(
        self,
        grad: Tensor,
        rows: Tensor,
        columns: Tensor,
        step: float,
    ) -> Tensor:
        """Return ``grad`` divided by the root of its second moment, which is updated first."""
        weight = step**self.recipe.beta2_decay
        for means, axis in ((rows, -1), (columns, -2)):
            means.lerp_(
                torch.linalg.vector_norm(grad, dim=axis, keepdim=True)
                .square_()
                .div_(grad.shape[axis]),
                weight,
            )
        moments = rows @ columns
        moments.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=max(self.recipe.eps1, TINY)))
        # The square of 1e-30, the eps1 of other packages, underflows float32. A row without a
        # gradient would become NaN.
        return moments.clamp_(min=max(self.recipe.eps1**2, TINY)).rsqrt_().mul_(grad)


def _rms(matrices: Tensor) -> Tensor:
    """Return the root mean square of each matrix, ``(..., 1, 1)``."""
    return norms_of(matrices).div_(math.sqrt(matrices.shape[-2] * matrices.shape[-1]))
