"""Costs of optimizers with a matrix of second moments for each side: Shampoo, SOAP, KL-SOAP."""

from __future__ import annotations

import math
from typing import Annotated

from ds_layerwise.recipes.base.fields import OR_NULL, Count, Decay, NonNegative
from ds_layerwise.recipes.base.low_bit_settings import KeptMoments
from ds_layerwise.recipes.base.recipe import COUNT, Axis, Shape, States, StateSpec
from ds_layerwise.recipes.rules.newton_schulz_settings import most_together

#: Largest sum of elements of squares (side, side) that are factorised together, out of one stack;
#: one may be larger. Beyond sides of about a thousand a batch saves no launches worth the memory.
MAX_BATCH_NUMEL = 2**20

#: FLOPs of an eigendecomposition of a symmetric matrix with its vectors, over the cube of its side:
#: the symmetric QR algorithm, Golub and Van Loan, Matrix Computations, section 8.3.
EIGH_FLOPS = 9


def qr_flops(side: int) -> int:
    """Return the FLOPs of the QR decomposition of a square matrix by reflections, with Q written
    out: 4/3 of the cube for each.
    """
    return 8 * side**3 // 3


class Kronecker(KeptMoments):
    """Settings and costs of Shampoo and its relatives.

    A matrix of (rows, cols) has the factors ``L`` (rows, rows) and ``R`` (cols, cols), moving
    averages of G Gᵀ and Gᵀ G, of which something dear is computed now and then.
    """

    whole = True
    gradient_average = "exp_avg"
    hyper = ("betas", "eps")

    shampoo_beta: Decay = 0.95
    """Share of the averages ``L`` and ``R`` that is kept at a step."""
    precondition_frequency: Count = 10
    """Bases, or roots, are computed anew at the first step and every so many after it."""
    max_side: Count = 10_000
    """A longer side has no factor: the update is preconditioned from the other side alone."""
    correct_bias: bool = True
    """Count all averages from zero, so that the first steps are not too small; ``L`` and ``R``,
    too.
    """
    max_update_rms: Annotated[NonNegative | None, OR_NULL] = 1.0
    """The update of a matrix is scaled down to this root mean square, before the learning rate; 0
    or null: never.
    """

    def sides(self, shape: Shape) -> dict[str, int]:
        """Return the lengths of the sides that have a factor, by its name."""
        *_, rows, cols = shape
        sides = {"L": rows, "R": cols}
        found = {}
        for key, side in sides.items():
            if side <= self.max_side:
                found[key] = side
        return found

    def squares(self, shape: Shape, *prefixes: str) -> States:
        """Return a square for each side that has a factor, for each of ``prefixes``."""
        specs = {}
        for prefix in prefixes:
            for key, side in self.sides(shape).items():
                specs[prefix + key] = StateSpec((*shape[:-2], side, side))
        return specs

    def averages(self, shape: Shape, *names: str) -> States:
        """Return states of the parameter's own shape, and the number of steps."""
        return {**self.like(shape, *names), **COUNT}

    def products(self, shape: Shape) -> int:
        """Return the FLOPs of a product with each factor, of all matrices."""
        return 2 * math.prod(shape) * sum(self.sides(shape).values())

    def decaying(self, shape: Shape) -> int:
        """Return the bytes that weight decay takes: with l2 a copy of the gradient, cautious two of
        an update.
        """
        *_, rows, cols = shape
        return 4 * (
            math.prod(shape) * (self.weight_decay_method == "l2")
            + 2 * self.together(shape) * rows * cols * self.cautious_weight_decay
        )

    def together(self, shape: Shape) -> int:
        """Return the number of matrices of a stack that go through the linear algebra together."""
        return most_together(math.prod(shape[:-2]), max(shape[-2:]) ** 2, MAX_BATCH_NUMEL)

    def update_limit(self) -> str:
        """Name ``max_update_rms`` for the start-up table; empty for none."""
        if self.max_update_rms:
            return f", RMS up to {self.max_update_rms:g}"
        return ""

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Refuse tensor shards, whose factors no rank could form alone, and matrices without a side
        that has a factor.
        """
        if cut_axis is not None:
            return (
                f"is cut by tensor parallelism, and {self.rule} needs whole matrices; send it to "
                "'muon' or 'adamw' with layerwise.overrides"
            )
        if not self.sides(shape):
            return (
                f"has no side of at most max_side {self.max_side}, so that {self.rule} would have "
                "nothing to precondition with; raise max_side, or send it to 'adamw' with "
                "layerwise.overrides"
            )
        return None
