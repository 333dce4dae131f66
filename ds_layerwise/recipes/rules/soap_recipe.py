"""SOAP and KL-SOAP: Adam in the eigenbases of Shampoo's factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.kronecker_recipe import EIGH_FLOPS, Kronecker, qr_flops

Basis = Literal["qr", "eigh"]


class Soap(Kronecker):
    """ShampoO with Adam in the Preconditioner's eigenbasis; see
    :class:`ds_layerwise.optimizers.rules.soap.Soap`.
    """

    rule: ClassVar[str] = "soap"
    family: ClassVar[str] = "soap"
    kl: ClassVar[bool] = False

    basis: Basis = "qr"
    """How bases are computed anew: "qr", by a power iteration from those before; "eigh", exactly,
    as the first are.
    """
    power_iter_steps: Annotated[int, Field(ge=1, le=1000)] = 1
    """Steps of the power iteration, each with a QR decomposition."""
    lagged_basis: bool = True
    """Whether a gradient is seen in the bases that those before it have made, as in the paper, so
    that nothing moves at the first step; false: in those that it has changed itself, as in
    Emerging-Optimizers."""
    nesterov: bool = False

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Two moments, of which the second is in the eigenbases, the factors and their bases, and
        the steps.
        """
        return {**self.averages(shape, "exp_avg", "exp_avg_sq"), **self.squares(shape, "", "Q_")}

    def work(self, shape: tuple[int, ...]) -> int:
        """FLOPs of an update: factors, gradient and momentum into the bases and the update out of
        them; of the bases the share of one step."""
        matrices = math.prod(shape[:-2])
        each = 5 if self.kl and len(self.sides(shape)) == 2 else 4
        return (
            each * self.products(shape)
            + matrices
            * sum(self._basis_flops(side) for side in self.sides(shape).values())
            // self.precondition_frequency
        )

    def _basis_flops(self, side: int) -> int:
        """Of computing one basis anew. The first product of a power iteration also says how to sort
        the old basis.
        """
        product = 2 * side**3
        if self.basis == "eigh":
            return product + EIGH_FLOPS * side**3
        return self.power_iter_steps * (product + qr_flops(side)) + (product if self.kl else 0)

    def workspace(self, shape: tuple[int, ...]) -> int:
        """Bytes: what Adam works in, or the update that waits while the longer basis is made anew.

        A QR decomposition takes its input and two results, an eigendecomposition its result and
        twice that in LAPACK.
        """
        *_, rows, cols = shape
        square = max(self.sides(shape).values()) ** 2
        learning = max(3 * square, 2 * rows * cols if self.kl else 0) + (
            rows * cols if self.lagged_basis else 0
        )
        vectors = 8 * max(rows, cols)
        return 4 * self.together(shape) * (
            max((3 + self.nesterov) * rows * cols, learning) + vectors
        ) + self.decaying(shape)

    @property
    def takes_rate_of_adamw(self) -> bool:
        """Always: an update is AdamW's, turned."""
        return True

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Averages, and how bases are made."""
        limit = f", RMS up to {self.max_update_rms:g}" if self.max_update_rms else ""
        return (
            f"betas {hyper('betas')}, eps {hyper('eps')}, shampoo_beta {self.shampoo_beta:g}, "
            f"bases by {self.basis} every {self.precondition_frequency} "
            f"steps{', nesterov' if self.nesterov else ''}{limit}"
        )


class KlSoap(Soap):
    """SOAP whose factors are estimated by Kullback-Leibler minimisation; see
    :class:`.optimizers.rules.soap.Soap`.
    """

    rule: ClassVar[str] = "kl_soap"
    family: ClassVar[str] = "kl_soap"
    kl: ClassVar[bool] = True

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """SOAP's, and the eigenvalues of the factors in their bases."""
        batch = shape[:-2]
        return {
            **super().states(shape),
            **{
                f"eigvals_{key}": StateSpec((*batch, side))
                for key, side in self.sides(shape).items()
            },
        }
