"""The common part of Shampoo and SOAP: factors, their eigenvectors, and a limit on the size of
updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.fields import Count, Decay, NonNegative, OrNull
from ds_layerwise.optimizers.recipe import (
    COUNT,
    Hyper,
    KeptMoments,
    Shape,
    State,
    States,
    StateSpec,
)
from ds_layerwise.orthogonalize.batching import most_together, norms_of
from ds_layerwise.orthogonalize.tensor_shards import Axis

#: The largest number of elements in squares (side, side) of one stack that are factorised together;
#: one square may be larger. Beyond sides of about a thousand, the launches that a batch saves are
#: not worth the memory.
MAX_BATCH_NUMEL = 2**20

#: The FLOPs of an eigendecomposition with vectors of a symmetric matrix, divided by the cube of its
#: side: the symmetric QR algorithm, Golub and Van Loan, Matrix Computations, section 8.3.
EIGH_FLOPS = 9

#: The error that torch raises if an iteration does not converge.
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

#: Added to a root mean square before it is a divisor.
_RMS_EPS = 1e-7


def qr_flops(side: int) -> int:
    """Return the FLOPs of the QR decomposition of a square matrix by reflections, and of forming Q:
    4/3 of the cube for each.
    """
    return 8 * side**3 // 3


class Kronecker(KeptMoments):
    """An optimizer that preconditions each (rows, cols) matrix from factors ``L`` (rows, rows) and
    ``R`` (cols, cols), moving averages of G Gᵀ and Gᵀ G. An expensive function of them is computed
    every few steps.

    Everything is computed in the dtype of the master, float32. Each matrix of a stack has factors
    of its own; a few small ones go through the linear algebra together.
    """

    whole = True
    gradient_average = "exp_avg"
    hyper = ("betas", "eps")

    shampoo_beta: Decay = 0.95
    """The fraction of the averages ``L`` and ``R`` that is kept at a step."""
    precondition_frequency: Count = 10
    """The bases, or roots, are recomputed at the first step, and every this many steps after it."""
    max_side: Count = 10_000
    """A longer side has no factor: the update is preconditioned only from the other side."""
    correct_bias: bool = True
    """Correct the bias of all averages towards zero, also of ``L`` and ``R``, so that the first
    steps are not too small.
    """
    max_update_rms: OrNull[NonNegative] = 1.0
    """The largest root mean square of the update of a matrix before the learning rate; larger
    updates are scaled down. 0 or null for no limit.
    """

    def sides(self, shape: Shape) -> dict[str, int]:
        """Return the lengths of the sides that have a factor, by its name."""
        sides = zip("LR", shape[-2:], strict=True)
        return {key: side for key, side in sides if side <= self.max_side}

    def squares(self, shape: Shape, *prefixes: str) -> States:
        """Return the number of steps, and a square for each side that has a factor, for each of
        ``prefixes``.
        """
        specs = dict(COUNT)
        for prefix in prefixes:
            for key, side in self.sides(shape).items():
                specs[prefix + key] = StateSpec((*shape[:-2], side, side))
        return specs

    def products(self, shape: Shape) -> int:
        """Return the FLOPs of a product with each factor, for all matrices."""
        return 2 * math.prod(shape) * sum(self.sides(shape).values())

    def workspace(self, shape: Shape) -> int:
        """Return the bytes that an update and weight decay need: with l2 a copy of the gradient,
        cautious two of an update.
        """
        *_, rows, cols = shape
        numel = rows * cols
        most = self.most_held(numel, max(self.sides(shape).values()) ** 2) + 8 * max(rows, cols)
        updates = self.together(shape) * (most + 2 * numel * self.cautious_weight_decay)
        return 4 * (updates + math.prod(shape) * (self.weight_decay_method == "l2"))

    def most_held(self, numel: int, square: int) -> int:
        """Return the most elements that an update of a matrix holds at a time beside its sums.

        Args:
            numel: the elements of the matrix.
            square: those of its larger factor.
        """
        raise NotImplementedError

    def together(self, shape: Shape) -> int:
        """Return the number of matrices of a stack that go through the linear algebra together."""
        return most_together(math.prod(shape[:-2]), max(shape[-2:]) ** 2, MAX_BATCH_NUMEL)

    def update_limit(self) -> str:
        """Return ``max_update_rms`` as text for the start-up table; empty if there is no limit."""
        if self.max_update_rms:
            return f", RMS up to {self.max_update_rms:g}"
        return ""

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Refuse tensor shards, because no rank alone could form their factors, and matrices in
        which no side has a factor.
        """
        if cut_axis is None and not self.sides(shape):
            return (
                f"has no side of at most max_side {self.max_side}, so that {self.rule} would have "
                "nothing to precondition with; raise max_side, or send it to 'adamw' with "
                "layerwise.overrides"
            )
        return super().refusal(shape, cut_axis=cut_axis)

    def check(self, device: torch.device | None) -> None:
        """Refuse a device on which torch has no eigendecomposition.

        Raises:
            ConfigError: names the optimizer.
        """
        super().check(device)
        if device is None:
            return
        try:
            torch.linalg.qr(torch.linalg.eigh(torch.eye(2, device=device, dtype=torch.float32))[1])
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{self.rule} needs torch.linalg.eigh and qr, which {device} does not have "
                f"({str(error).partition(chr(10))[0]}); use 'muon', which only multiplies"
            ) from error

    def products_in(self, fast_dtypes: frozenset[torch.dtype]) -> torch.dtype:
        """Return the dtype of masters. Factors in half precision would have other eigenvectors."""
        return torch.float32

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Update the states, then the matrices of the parameter, each by itself.

        Raises:
            StepError: the eigenvectors of a factor cannot be computed.
        """
        state["step"] += 1
        step = int(state["step"])
        together = self.together(tuple(param.shape))
        try:
            (decayed,) = self.with_l2([param], [grad], hyper)
            for matrices, gradients, some in few_at_a_time(together, param, decayed, state):
                update = self._update(gradients, some, step, hyper)
                if update is None:
                    continue
                if self.max_update_rms:
                    # Each matrix by itself comes down to that.
                    rms = norms_of(update) / math.sqrt(update.shape[-2] * update.shape[-1])
                    update.mul_((self.max_update_rms / (rms + _RMS_EPS)).clamp(max=1.0))
                self.decay_([matrices], [update], hyper)
                matrices.add_(update, alpha=-hyper.lr)
                del update
        except LinAlgError as error:
            raise StepError(
                f"{self.rule} finds no eigenvectors of {tuple(param.shape)} at its step "
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
        beta = self.shampoo_beta
        if not self.correct_bias:
            return beta
        return 1 - (1 - beta) / (1 - beta**step)

    def _corrections(self, step: int, hyper: Hyper) -> tuple[float, float]:
        """Return the bias corrections of the first and second moments."""
        if not self.correct_bias:
            return 1.0, 1.0
        return 1 - hyper.betas[0] ** step, 1 - hyper.betas[1] ** step

    def _is_due(self, step: int) -> bool:
        """Tell whether bases or roots are recomputed at this step."""
        return (step - 1) % self.precondition_frequency == 0


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


def few_at_a_time(
    together: int, param: Tensor, grad: Tensor, state: State
) -> Iterator[tuple[Tensor, Tensor, State]]:
    """Yield views of ``together`` matrices of ``param``, (batch, rows, cols), with those of their
    gradients and of their states, without the step count.
    """
    # None adds an axis to a single matrix.
    places: list[Any] = [None]
    if param.dim() == 3:
        starts = range(0, len(param), together)
        places = [slice(start, start + together) for start in starts]
    for some in places:
        own = {key: value[some] for key, value in state.items() if key != "step"}
        yield param[some], grad[some], own
