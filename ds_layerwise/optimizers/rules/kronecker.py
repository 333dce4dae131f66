"""The common part of Shampoo and SOAP: factors, their eigenvectors, and a limit on the size of
updates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.decay import WeightDecay
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.recipes import kronecker_recipe as recipes
from ds_layerwise.optimizers.rule import Hyper, OneByOne, State, few_at_a_time
from ds_layerwise.orthogonalize.norms import norms_of

#: The error that torch raises if an iteration does not converge.
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

#: Added to a root mean square before it is a divisor.
_RMS_EPS = 1e-7


class Kronecker(OneByOne):
    """A rule that preconditions each (rows, cols) matrix from factors ``L`` (rows, rows) and ``R``
    (cols, cols).

    Everything is computed in the dtype of the master, float32. Each matrix of a stack has factors
    of its own; a few small ones go through the linear algebra together, see
    :meth:`.optimizers.recipes.kronecker_recipe.Kronecker.together`.
    """

    recipe: recipes.Kronecker

    def check(self, device: torch.device) -> None:
        """Refuse a device on which torch has no eigendecomposition.

        Raises:
            ConfigError: names the optimizer.
        """
        try:
            torch.linalg.qr(torch.linalg.eigh(torch.eye(2, device=device, dtype=torch.float32))[1])
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{self.recipe.rule} needs torch.linalg.eigh and qr, which {device} does not have "
                f"({str(error).partition(chr(10))[0]}); use 'muon', which only multiplies"
            ) from error

    @property
    def products_in(self) -> torch.dtype:
        """The dtype of masters. Factors in half precision would have other eigenvectors."""
        return torch.float32

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Update the states, then the matrices of the parameter, each by itself.

        Raises:
            StepError: the eigenvectors of a factor cannot be computed.
        """
        decay = WeightDecay.of(self.recipe)
        state["step"] += 1
        step = int(state["step"])
        together = self.recipe.together(tuple(param.shape))
        try:
            (given,) = decay.gradients([param], [grad], hyper)
            for matrices, gradients, some in few_at_a_time(together, param, given, state):
                update = self._update(gradients, some, step, hyper)
                if update is None:
                    continue
                self._limit(update)
                decay.shrink_([matrices], [update], hyper)
                matrices.add_(update, alpha=-hyper.lr)
                del update
        except LinAlgError as error:
            raise StepError(
                f"{self.recipe.rule} finds no eigenvectors of {tuple(param.shape)} at its step "
                f"{step} ({str(error).partition(chr(10))[0]}); {self._hint(hyper)}gradients "
                "beyond 1e18 have no finite squares: clip them (gradient_clipping), or send "
                "the parameter to 'adamw' with layerwise.overrides"
            ) from error

    def _update(
        self,
        grad: Tensor,
        state: State,
        step: int,
        hyper: Hyper,
    ) -> Tensor | None:
        """Return the direction of matrices (batch, rows, cols) in new memory, and update ``state``;
        None if the matrices do not change.
        """
        raise NotImplementedError

    def _hint(self, hyper: Hyper) -> str:
        """Return a hint at causes other than gradients, for a factor without eigenvectors."""
        return ""

    def _kept(self, step: int) -> float:
        """Return the fraction that factors keep at a step: ``shampoo_beta``, or less in the first
        steps, to correct the bias towards zero.
        """
        beta = self.recipe.shampoo_beta
        if not self.recipe.correct_bias:
            return beta
        return 1 - (1 - beta) / (1 - beta**step)

    def _corrections(self, step: int, hyper: Hyper) -> tuple[float, float]:
        """Return the bias corrections of the first and second moments."""
        if not self.recipe.correct_bias:
            return 1.0, 1.0
        return 1 - hyper.betas[0] ** step, 1 - hyper.betas[1] ** step

    def _is_due(self, step: int) -> bool:
        """Tell whether bases or roots are recomputed at this step."""
        return (step - 1) % self.recipe.precondition_frequency == 0

    def _limit(self, update: Tensor) -> None:
        """Scale each matrix down to ``max_update_rms``, in place."""
        if self.recipe.max_update_rms:
            rms = norms_of(update) / math.sqrt(update.shape[-2] * update.shape[-1])
            update.mul_((self.recipe.max_update_rms / (rms + _RMS_EPS)).clamp(max=1.0))


def eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (batch, n), largest first, and the eigenvectors (batch, n, n) of
    symmetric matrices.

    If it does not converge, it tries again in the widest dtype and rounds the result.

    Raises:
        LinAlgError: it does not converge there either, or a device that does not report this has
            returned NaN.
    """
    try:
        values, vectors = torch.linalg.eigh(factor)
    except LinAlgError:
        values, vectors = torch.linalg.eigh(factor.to(widest_float()))
    check_finite(values, "an eigenvalue")
    return values.flip(-1).to(factor.dtype), vectors.flip(-1).to(factor.dtype)


def check_finite(values: Tensor, what: str) -> None:
    """Refuse ``values`` that are not all finite, unless they have no memory.

    Raises:
        LinAlgError: names ``what``.
    """
    if not values.is_meta and not torch.isfinite(values).all():
        raise LinAlgError(f"{what} is not finite")
