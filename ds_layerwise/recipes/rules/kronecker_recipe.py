"""What optimizers cost that keep a matrix of second moments for each side of a parameter: Shampoo,
SOAP, KL-SOAP.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from ds_layerwise.recipes.base.fields import OR_NULL, Count, Decay, NonNegative
from ds_layerwise.recipes.base.low_bit_settings import KeptMoments
from ds_layerwise.recipes.base.recipe import COUNT, StateSpec
from ds_layerwise.recipes.rules.newton_schulz_settings import most_together

#: Largest sum of elements of squares (side, side) that are factorised together, out of one stack;
#: one may be larger. Beyond sides of about a thousand a batch saves no launches worth the memory.
MAX_BATCH_NUMEL = 2**20

#: FLOPs of an eigendecomposition of a symmetric matrix with its vectors, over the cube of its side:
#: the symmetric QR algorithm, Golub and Van Loan, Matrix Computations, section 8.3.
EIGH_FLOPS = 9


def qr_flops(side: int) -> int:
    """FLOPs of the QR decomposition of a square matrix by reflections, with Q written out: 4/3 of
    the cube for each.
    """
    return 8 * side**3 // 3


class Kronecker(KeptMoments):
    """What Shampoo and its relatives have in common: a matrix of (rows, cols) has the factors ``L``
    (rows, rows) and ``R`` (cols, cols), moving averages of G Gᵀ and Gᵀ G, of which something dear
    is computed now and then.
    """

    whole: ClassVar[bool] = True
    gradient_average: ClassVar[str | None] = "exp_avg"
    hyper: ClassVar[tuple[str, ...]] = ("betas", "eps")

    shampoo_beta: Decay = 0.95
    """What the averages ``L`` and ``R`` keep at a step."""
    precondition_frequency: Count = 10
    """Bases, or roots, are computed anew at the first step and every so many after it."""
    max_side: Count = 10_000
    """A longer side has no factor: the update is preconditioned from the other side alone."""
    correct_bias: bool = True
    """Whether all averages count from zero, so that the first steps are not too small; ``L`` and
    ``R``, too.
    """
    max_update_rms: Annotated[NonNegative | None, OR_NULL] = 1.0
    """The update of a matrix is scaled down to this root mean square, before the learning rate; 0
    or null: never.
    """

    def sides(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The lengths of the sides that have a factor, by its name."""
        *_, rows, cols = shape
        return {key: side for key, side in (("L", rows), ("R", cols)) if side <= self.max_side}

    def squares(self, shape: tuple[int, ...], *prefixes: str) -> dict[str, StateSpec]:
        """A square for each side that has a factor, for each of ``prefixes``."""
        batch = shape[:-2]
        return {
            prefix + key: StateSpec((*batch, side, side))
            for prefix in prefixes
            for key, side in self.sides(shape).items()
        }

    def averages(self, shape: tuple[int, ...], *names: str) -> dict[str, StateSpec]:
        """States of the parameter's own shape, and how many steps there were."""
        return {**self.like(shape, *names), **COUNT}

    def products(self, shape: tuple[int, ...]) -> int:
        """FLOPs of a product with each factor, of all matrices."""
        *batch, rows, cols = shape
        return math.prod(batch) * sum(2 * rows * cols * side for side in self.sides(shape).values())

    def decaying(self, shape: tuple[int, ...]) -> int:
        """Bytes that weight decay takes beside all else: with l2 a copy of the gradient, cautious
        two of an update.
        """
        *_, rows, cols = shape
        return 4 * (
            math.prod(shape) * (self.weight_decay_method == "l2")
            + 2 * self.together(shape) * rows * cols * self.cautious_weight_decay
        )

    def together(self, shape: tuple[int, ...]) -> int:
        """How many matrices of a stack go through the linear algebra together."""
        *batch, rows, cols = shape
        return most_together(math.prod(batch), max(rows, cols) ** 2, MAX_BATCH_NUMEL)

    def refusal(
        self, shape: tuple[int, ...], *, cut_axis: Literal[-2, -1] | None = None
    ) -> str | None:
        """Tensor shards, whose factors no rank could form alone, and matrices without a side that
        has a factor.
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
