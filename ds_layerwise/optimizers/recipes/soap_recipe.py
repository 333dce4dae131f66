"""The recipes of SOAP and KL-SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_layerwise.optimizers.base.recipe import HyperText, Shape, States, StateSpec
from ds_layerwise.optimizers.recipes.kronecker_recipe import EIGH_FLOPS, Kronecker, qr_flops

Basis = Literal["qr", "eigh"]


class Soap(Kronecker):
    """ShampoO with Adam in the Preconditioner's eigenbasis; see
    :class:`ds_layerwise.optimizers.rules.soap.Soap`.
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
        return {**self.averages(shape, "exp_avg", "exp_avg_sq"), **self.squares(shape, "", "Q_")}

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

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of Adam, or of the update that is held while the larger basis is
        computed.

        A QR decomposition needs its input and two results; an eigendecomposition needs its result,
        and twice that in LAPACK.
        """
        *_, rows, cols = shape
        numel = rows * cols
        square = max(self.sides(shape).values()) ** 2
        learning = max(3 * square, 2 * numel * self.kl) + numel * self.lagged_basis
        most = max((3 + self.nesterov) * numel, learning)
        return 4 * self.together(shape) * (most + 8 * max(rows, cols)) + self.decaying(shape)

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


class KlSoap(Soap):
    """SOAP whose factors are estimated by Kullback-Leibler minimisation; see
    :class:`.optimizers.rules.soap.Soap`.
    """

    rule = "kl_soap"
    family = "kl_soap"
    kl = True

    def states(self, shape: Shape) -> States:
        """Return SOAP's states, and the eigenvalues of the factors in their bases."""
        specs = super().states(shape)
        for key, side in self.sides(shape).items():
            specs[f"eigvals_{key}"] = StateSpec((*shape[:-2], side))
        return specs
