"""The recipe of Shampoo: the momentum multiplied by inverse roots of its factors."""

from __future__ import annotations

import math
from typing import Literal

from ds_layerwise.optimizers.base.fields import Positive
from ds_layerwise.optimizers.base.recipe import HyperText, Shape, States
from ds_layerwise.optimizers.recipes.kronecker_recipe import EIGH_FLOPS, Kronecker

Grafting = Literal["adam", "none"]
Statistics = Literal["average", "sum"]


class Shampoo(Kronecker):
    """Stochastic tensor optimization with matrix preconditioning; see
    :class:`.optimizers.rules.shampoo.Shampoo`.
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
        return {**self.averages(shape, *moments), **self.squares(shape, "", "root_")}

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of an update: of the factors, of the products of momentum and roots, and
        the share of one step in the roots.
        """
        matrices = math.prod(shape[:-2])
        roots = sum((EIGH_FLOPS + 2) * side**3 for side in self.sides(shape).values())
        return 2 * self.products(shape) + matrices * roots // self.precondition_frequency

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of the update and its scale, or of the computation of the larger root.

        An eigendecomposition needs its result, and twice that in LAPACK.
        """
        *_, rows, cols = shape
        most = max(2 * rows * cols, 3 * max(self.sides(shape).values()) ** 2)
        return 4 * self.together(shape) * (most + 8 * max(rows, cols)) + self.decaying(shape)

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
