"""The recipe of Adafactor: second moments of whole matrices, as the product of a column and
a row.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from ds_layerwise.optimizers.base.fields import NonNegative, Positive
from ds_layerwise.optimizers.base.recipe import (
    COUNT,
    HyperText,
    Recipe,
    Shape,
    States,
    StateSpec,
)
from ds_layerwise.orthogonalize.newton_schulz_cost import most_together

#: The largest number of elements in matrices of a stack that are updated together, enough to fill
#: an accelerator; one matrix may be larger.
MAX_BATCH_NUMEL = 16 * 2**20


class Adafactor(Recipe):
    """Adafactor for whole matrices, as in :class:`torch.optim.Adafactor`; see
    :mod:`ds_layerwise.optimizers.rules.adafactor`.
    """

    rule = "adafactor"
    whole = True
    family = "adafactor"

    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    """At step t, the weight of the new value in the second moments is t to this power."""
    eps1: Positive = 2.0**-23
    """The lowest root of a second moment, and the lowest mean of second moments."""
    eps2: NonNegative = 1e-3
    """The lowest size of a matrix in the computation of its step."""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """The largest root mean square of an update before it is scaled; torch's ``d``."""

    def states(self, shape: Shape) -> States:
        """Return the mean squares of rows and of columns, and the number of steps."""
        *batch, rows, cols = shape
        return {
            "row_var": StateSpec((*batch, rows, 1)),
            "col_var": StateSpec((*batch, 1, cols)),
            **COUNT,
        }

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of the product of column and row."""
        return 2 * math.prod(shape)

    def together(self, shape: Shape) -> int:
        """Return the number of matrices of a stack that are updated together."""
        *batch, rows, cols = shape
        return most_together(math.prod(batch), rows * cols, MAX_BATCH_NUMEL)

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of the updates that are made together, of their decay, and of their
        norms.
        """
        together = self.together(shape)
        return super().workspace((together, *shape[-2:])) + 16 * together

    def summary(self, hyper: HyperText) -> str:
        """Return all settings as text."""
        return (
            f"beta2_decay {self.beta2_decay:g}, eps1 {self.eps1:g}, eps2 {self.eps2:g}, "
            f"clip_threshold {self.clip_threshold:g}"
        )
