"""Shampoo: the momentum between inverse roots of its factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

from ds_layerwise.recipes.base.fields import Positive
from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.kronecker_recipe import EIGH_FLOPS, Kronecker

Grafting = Literal["adam", "none"]
Statistics = Literal["average", "sum"]


class Shampoo(Kronecker):
    """Stochastic tensor optimization with matrix preconditioning; see
    :class:`.optimizers.rules.shampoo.Shampoo`.
    """

    rule: ClassVar[str] = "shampoo"
    family: ClassVar[str] = "shampoo"
    as_adamw: ClassVar[str] = "grafting to 'adam'"

    grafting: Grafting = "adam"
    """Whose norm the update of a matrix has: "adam", that of Adam's update; "none", its own."""
    statistics: Statistics = "average"
    """What ``L`` and ``R`` are: "average" over steps by ``shampoo_beta``, or "sum", as AdaGrad has
    it.
    """
    matrix_eps: Positive = 1e-6
    """Is added to eigenvalues, times the largest of the factor, before the root."""

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """A momentum, factors and their inverse roots, the steps, and the second moment that Adam's
        norm takes.
        """
        moments = ("exp_avg", "exp_avg_sq") if self.grafting == "adam" else ("exp_avg",)
        return {**self.averages(shape, *moments), **self.squares(shape, "", "root_")}

    def work(self, shape: tuple[int, ...]) -> int:
        """FLOPs of an update: factors, and the momentum between the roots; of the roots the share
        of one step.
        """
        matrices = math.prod(shape[:-2])
        roots = sum((EIGH_FLOPS + 2) * side**3 for side in self.sides(shape).values())
        return 2 * self.products(shape) + matrices * roots // self.precondition_frequency

    def workspace(self, shape: tuple[int, ...]) -> int:
        """Bytes: the update and what it is scaled by, or what the longer root is made of.

        An eigendecomposition takes its result and twice that in LAPACK.
        """
        *_, rows, cols = shape
        vectors = 8 * max(rows, cols)
        return 4 * self.together(shape) * (
            max(2 * rows * cols, 3 * max(self.sides(shape).values()) ** 2) + vectors
        ) + self.decaying(shape)

    @property
    def meaning(self) -> str:
        """A sum of as many steps is so much larger than an average."""
        return f"statistics {self.statistics!r}"

    @property
    def takes_rate_of_adamw(self) -> bool:
        """With ``grafting`` "adam"."""
        return self.grafting == "adam"

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Averages, and how roots are made."""
        kind = f"shampoo_beta {self.shampoo_beta:g}" if self.statistics == "average" else "sums"
        limit = f", RMS up to {self.max_update_rms:g}" if self.max_update_rms else ""
        return (
            f"betas {hyper('betas')}, eps {hyper('eps')}, {kind}, roots every "
            f"{self.precondition_frequency} steps, grafting {self.grafting}{limit}"
        )
