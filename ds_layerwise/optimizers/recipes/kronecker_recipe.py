"""The costs of optimizers with a matrix of second moments for each side: Shampoo, SOAP, KL-SOAP."""

from __future__ import annotations

import math

from ds_layerwise.optimizers.base.fields import Count, Decay, NonNegative, OrNull
from ds_layerwise.optimizers.base.low_bit_settings import KeptMoments
from ds_layerwise.optimizers.base.recipe import COUNT, Shape, States, StateSpec
from ds_layerwise.orthogonalize.newton_schulz_cost import most_together
from ds_layerwise.orthogonalize.tensor_shards import Axis

#: The largest number of elements in squares (side, side) of one stack that are factorised together;
#: one square may be larger. Beyond sides of about a thousand, the launches that a batch saves are
#: not worth the memory.
MAX_BATCH_NUMEL = 2**20

#: The FLOPs of an eigendecomposition with vectors of a symmetric matrix, divided by the cube of its
#: side: the symmetric QR algorithm, Golub and Van Loan, Matrix Computations, section 8.3.
EIGH_FLOPS = 9


def qr_flops(side: int) -> int:
    """Return the FLOPs of the QR decomposition of a square matrix by reflections, and of forming Q:
    4/3 of the cube for each.
    """
    return 8 * side**3 // 3


class Kronecker(KeptMoments):
    """The settings and costs of Shampoo and related optimizers.

    A matrix of (rows, cols) has the factors ``L`` (rows, rows) and ``R`` (cols, cols), moving
    averages of G Gᵀ and Gᵀ G. An expensive function of them is computed every few steps.
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
        """Return the FLOPs of a product with each factor, for all matrices."""
        return 2 * math.prod(shape) * sum(self.sides(shape).values())

    def decaying(self, shape: Shape) -> int:
        """Return the bytes that weight decay needs: with l2 a copy of the gradient, cautious two of
        an update.
        """
        updates = self.together(shape) * math.prod(shape[-2:])
        copies = math.prod(shape) * (self.weight_decay_method == "l2")
        return 4 * (copies + 2 * updates * self.cautious_weight_decay)

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
