"""SOAP and KL-SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ds_layerwise.optimizers.recipe import Hyper, HyperText, Shape, State, States, StateSpec
from ds_layerwise.optimizers.rules.kronecker import (
    EIGH_FLOPS,
    Kronecker,
    check_finite,
    eigh,
    qr_flops,
)

Basis = Literal["qr", "eigh"]


class Soap(Kronecker):
    """SOAP and KL-SOAP, for whole matrices G of (rows, cols).

    Adam, with bias corrections of both averages, on the gradient in the eigenbases (arXiv
    2409.11321, algorithm 3)::

        exp_avg <- betas[0] exp_avg + (1 - betas[0]) G
        exp_avg_sq <- betas[1] exp_avg_sq + (1 - betas[1]) (Q_Lᵀ G Q_R)²
        W <- W - lr Q_L (Q_Lᵀ exp_avg Q_R / (sqrt(exp_avg_sq) + eps)) Q_Rᵀ

    and after that, or before it if ``lagged_basis`` is false::

        L <- b L + (1 - b) G Gᵀ,  R <- b R + (1 - b) Gᵀ G,
            b = 1 - (1 - shampoo_beta) / (1 - shampoo_beta^t)
        Q_L <- the eigenvectors of L at t = 1, then the Q of L Q_L, whose columns are in the
            order of diag(Q_Lᵀ L Q_L)

    and the same for Q_R. The columns of ``exp_avg_sq`` are sorted with those of a basis. Bases are
    recomputed at t = 1 and every ``precondition_frequency`` steps after it. With ``lagged_basis``,
    as in the paper's code, the first step only makes factors and bases, and Adam's count starts at
    the second step. Emerging-Optimizers (0.3.0, ``soap/soap.py``) recomputes bases at each step
    before they are used, and skips no step. There the first gradient is a diagonal matrix in its
    own bases, so that for all other elements Adam divides rounding errors by rounding errors, and
    the first update is mostly noise.

    ``exp_avg`` is the average of the gradient itself, so that other optimizers can continue from
    it. Packages that keep it in the bases differ by rounding.

    KL-SOAP (arXiv 2509.03378, as in Emerging-Optimizers) weighs each factor by the eigenvalues of
    the other one. These are computed with its basis, and are at least ``eps``::

        L <- b L + (1 - b) / cols * G Q_R diag(1 / eigvals_R) Q_Rᵀ Gᵀ,
        R <- b R + (1 - b) / rows * Gᵀ Q_L ... G

    They start at 1, as in its 0.5.0. In 0.3.0 they start at 0, which counts as ``eps``; then a
    first gradient much larger than ``eps`` outweighs hundreds of later ones.

    State: ``exp_avg``, ``exp_avg_sq`` like the parameter; ``L``, ``R``, ``Q_L``, ``Q_R``, square,
    without those of a side beyond ``max_side``, whose basis is the identity; ``eigvals_L``,
    ``eigvals_R`` for KL-SOAP; ``step``, 0-d float32 on the CPU.
    """

    rule = "soap"
    family = "soap"
    kl: ClassVar[bool] = False

    basis: Basis = "qr"
    """The method for new bases: "qr", a power iteration from the previous ones; "eigh", exact, like
    the first ones.
    """
    power_iter_steps: Annotated[int, Field(ge=1, le=1000)] = 1
    """The number of steps of the power iteration, each with a QR decomposition."""
    lagged_basis: bool = True
    """Use a gradient in the bases from earlier gradients, as in the paper, so that weights do not
    change at the first step; false: in bases that include the gradient itself, as in
    Emerging-Optimizers.
    """
    nesterov: bool = False

    def states(self, shape: Shape) -> States:
        """Return two moments, of which the second is in the eigenbases, the factors and their
        bases, and the number of steps.
        """
        return {**self.like(shape, "exp_avg", "exp_avg_sq"), **self.squares(shape, "", "Q_")}

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of an update: of the factors, of moving gradient, momentum and update
        between bases, and the share of one step in the bases.
        """
        sides = self.sides(shape).values()
        bases = math.prod(shape[:-2]) * sum(map(self._basis_flops, sides))
        products = 5 if self.kl and len(sides) == 2 else 4
        return products * self.products(shape) + bases // self.precondition_frequency

    def _basis_flops(self, side: int) -> int:
        # The first product of a power iteration also determines the order of the old basis.
        product = 2 * side**3
        if self.basis == "eigh":
            return product + EIGH_FLOPS * side**3
        return self.power_iter_steps * (product + qr_flops(side)) + product * self.kl

    def most_held(self, numel: int, square: int) -> int:
        """Return the elements of Adam, or of the update that is held while the larger basis is
        computed.

        A QR decomposition needs its input and two results; an eigendecomposition needs its result,
        and twice that in LAPACK.
        """
        learning = max(3 * square, 2 * numel * self.kl) + numel * self.lagged_basis
        return max((3 + self.nesterov) * numel, learning)

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True: an update is AdamW's, rotated."""
        return True

    def summary(self, hyper: HyperText) -> str:
        """Return the averages and the method for bases as text."""
        return (
            f"betas {hyper('betas')}, eps {hyper('eps')}, shampoo_beta {self.shampoo_beta:g}, "
            f"bases by {self.basis} every {self.precondition_frequency} "
            f"steps{', nesterov' * self.nesterov}{self.update_limit()}"
        )

    def init_state(self, param: Tensor) -> State:
        """Return zeros, bases of the parameter's own axes, and eigenvalues of 1."""
        state = super().init_state(param)
        for key, value in state.items():
            if key.startswith("Q_"):
                value.diagonal(dim1=-2, dim2=-1).fill_(1)
            elif key.startswith("eigvals_"):
                value.fill_(1)
        return state

    def _update(
        self,
        grad: Tensor,
        state: State,
        step: int,
        hyper: Hyper,
    ) -> Tensor | None:
        update = None
        if self.lagged_basis and step > 1:
            # First, so that the result does not depend on the new bases.
            update = self._adam(grad, state, step - 1, hyper)
        self._learn(grad, state, step, hyper)
        if not self.lagged_basis:
            update = self._adam(grad, state, step, hyper)
        return update

    def _adam(self, grad: Tensor, state: State, count: int, hyper: Hyper) -> Tensor:
        """Return Adam's update number ``count``, computed in the bases and rotated back."""
        beta1, beta2 = hyper.betas
        correction1, correction2 = self._corrections(count, hyper)
        momentum = state["exp_avg"].lerp_(grad, 1 - beta1)
        if self.nesterov:
            after = self._corrections(count + 1, hyper)[0]
            momentum = (momentum * (beta1 / after)).add_(grad, alpha=(1 - beta1) / correction1)
            correction1 = 1.0
        turned = into(grad, state)
        state["exp_avg_sq"].lerp_(turned.square_(), 1 - beta2)
        del turned
        update = into(momentum, state)
        update.div_((state["exp_avg_sq"] / correction2).sqrt_().add_(hyper.eps).mul_(correction1))
        back = {key: value.mT for key, value in state.items() if key.startswith("Q_")}
        return into(update, back)

    def _learn(self, grad: Tensor, state: State, step: int, hyper: Hyper) -> None:
        """Update the factors with ``grad``, and the bases if they are due.

        Raises:
            LinAlgError: a basis cannot be computed.
        """
        kept = self._kept(step)
        for key, other, matrix in (("L", "R", grad), ("R", "L", grad.mT)):
            if key not in state:
                continue
            seen = weighed = matrix
            new = 1 - kept
            if self.kl:
                new /= matrix.shape[-1]
            if self.kl and other in state:
                # The rows to multiply with their transpose, in the basis of the other factor.
                seen = matrix @ state[f"Q_{other}"]
                weighed = seen / state[f"eigvals_{other}"].clamp_min(hyper.eps).unsqueeze(-2)
            state[key].baddbmm_(weighed, seen.mT, beta=kept, alpha=new)
            del seen, weighed
        if self._is_due(step):
            for key in self.sides(tuple(grad.shape)):
                self._renew_basis(key, state, first=step == 1)

    def _hint(self, hyper: Hyper) -> str:
        """See :meth:`.Kronecker._hint`."""
        return (
            f"eps, the least eigenvalue that kl_soap divides by, is {hyper.eps:g}: make it 1e-8; "
            * (self.kl and hyper.eps < 1e-10)
        )

    def _renew_basis(self, key: str, state: State, *, first: bool) -> None:
        factor = state[key]
        basis = state[f"Q_{key}"]
        values = None
        if first:
            values, vectors = eigh(factor)
        else:
            image = factor @ basis
            seen = (basis * image).sum(-2)
            # QR would silently turn this into NaN, and then the weights.
            check_finite(seen, key)
            order = torch.argsort(seen, dim=-1, descending=True, stable=True)
            del seen
            _sort_(state["exp_avg_sq"], order, {"L": -2, "R": -1}[key])
            if self.basis == "eigh":
                del image
                values, vectors = eigh(factor)
            else:
                _sort_(image, order, -1)
                vectors = torch.linalg.qr(image).Q
                for _ in range(self.power_iter_steps - 1):
                    torch.matmul(factor, vectors, out=image)
                    del vectors
                    vectors = torch.linalg.qr(image).Q
                del image
        basis.copy_(vectors)
        del vectors
        if self.kl:
            if values is None:
                values = (basis * (factor @ basis)).sum(-2)
            state[f"eigvals_{key}"].copy_(values)


class KlSoap(Soap):
    """SOAP whose factors are estimated by Kullback-Leibler minimisation."""

    rule = "kl_soap"
    family = "kl_soap"
    kl = True

    def states(self, shape: Shape) -> States:
        """Return SOAP's states, and the eigenvalues of the factors in their bases."""
        specs = super().states(shape)
        for key, side in self.sides(shape).items():
            specs[f"eigvals_{key}"] = StateSpec((*shape[:-2], side))
        return specs


def into(matrices: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """Return ``Q_Lᵀ X Q_R`` of matrices X, in new memory. A missing basis is the identity."""
    if "Q_L" in bases:
        matrices = bases["Q_L"].mT @ matrices
    if "Q_R" in bases:
        matrices = matrices @ bases["Q_R"]
    return matrices


def _sort_(values: Tensor, order: Tensor, axis: int) -> None:
    """Put ``values`` (batch, rows, cols) in ``order`` (batch, n) along ``axis``, in place."""
    index = order.unsqueeze(-3 - axis).expand_as(values)
    values.copy_(values.gather(axis, index))
