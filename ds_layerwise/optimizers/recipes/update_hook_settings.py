"""The settings and costs of hooks on updates of whole matrices, and on the matrices after them.

The formulas are in :mod:`ds_layerwise.optimizers.rules.update_hooks`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ds_layerwise.optimizers.base.fields import OrNull, Positive, Share
from ds_layerwise.optimizers.base.recipe import Recipe, Shape
from ds_layerwise.orthogonalize.newton_schulz_cost import (
    newton_schulz_flops,
    newton_schulz_workspace,
    padded_batch,
)
from ds_layerwise.orthogonalize.spectral import CLIP_STEPS

#: The settings of the size of an update, in any recipe.
_OF_SIZE = (
    "scale_mode",
    "extra_scale_factor",
    "spectral_radius",
    "moment2_rescale",
    "sizing_hook",
)


class UpdateHooks(Recipe):
    """The settings that every recipe of whole matrices may have. None and false, the defaults, do
    nothing.

    Each matrix of a batch is treated by itself. Its Frobenius norm is that of the whole matrix,
    also if tensor parallelism has cut it. No hook keeps a state.
    """

    #: The settings of the size of an update, without the learning rate. With a hook that determines
    #: the size, these must have their defaults.
    sized_by: ClassVar[tuple[str, ...]] = ()
    #: True if updates differ from Muon's only in their size, so that such a hook would leave
    #: nothing of the rule.
    only_sizes: ClassVar[bool] = False

    hyperball: Annotated[
        Positive | Literal["own"] | None,
        Field(
            json_schema_extra={"may_be_null": True, "expects": "a norm greater than 0, or 'own'"}
        ),
    ] = None
    """The Frobenius norm of matrices from the first update on; "own" is the norm that each has
    before it. The learning rate is then the length of an update relative to the matrix, and there
    is no weight decay.
    """
    radial_brake: OrNull[tuple[Share, Share]] = None
    """The fractions of a change of the Frobenius norm that are kept: of a growth, and of a
    decrease.
    """
    relative_update: bool = False
    """Give updates the Frobenius norm of their matrix, so that the learning rate is their relative
    length.
    """
    spectral_clip: OrNull[Positive] = None
    """The largest singular value of a matrix after an update."""

    @model_validator(mode="after")
    def _hooks_fit(self) -> UpdateHooks:
        if self.hyperball is not None:
            for other in ("radial_brake", "relative_update", "spectral_clip"):
                if getattr(self, other) not in (None, False):
                    raise ValueError(
                        f"hyperball is {self.hyperball!r} and {other} {getattr(self, other)!r}, "
                        "but hyperball determines the norm of an update and of its matrix; "
                        "remove one of the two"
                    )
        name = self.sizing_hook
        if name is None:
            return self
        for key in self.sized_by:
            value = getattr(self, key)
            default = type(self).model_fields[key].default
            if value != default:
                raise ValueError(
                    f"{key} is {value!r}, but {name} determines the size of updates; remove one of "
                    f"the two (with {name}, change the learning rate instead of {key})"
                )
        if self.only_sizes:
            raise ValueError(
                f"{name} is set for {self.rule}, whose updates differ from muon's only by their "
                f"size, which {name} determines; leave it out, or use muon"
            )
        return self

    @property
    def sizing_hook(self) -> str | None:
        """The name of the hook that determines the size of updates; None if there is none."""
        if self.hyperball is not None:
            return "hyperball"
        if self.relative_update:
            return "relative_update"
        return None

    @property
    def scale(self) -> str:
        """The rule, and the settings that determine the size of its updates, in words."""
        words = [f"{key} {getattr(self, key)}" for key in _OF_SIZE if hasattr(self, key)]
        return f"{self.rule} with {', '.join(words)}"

    @property
    def own_weight_decay(self) -> float | None:
        """0 with ``hyperball``; else None, for that of the group."""
        return None if self.hyperball is None else 0.0

    def hook_flops(self, shape: Shape) -> int:
        """Return the FLOPs of ``spectral_clip``; the others are negligible."""
        if self.spectral_clip is None:
            return 0
        *batch, rows, cols = shape
        m, n = sorted((rows, cols))
        flops = partial(newton_schulz_flops, m, steps=CLIP_STEPS, method="standard")
        return math.prod(batch) * (flops(n) + flops(m) + 4 * m * m * n)

    def hook_workspace(self, shape: Shape) -> int:
        """Return the most bytes that ``spectral_clip`` needs after the update; the others need
        almost none.

        The sign of the matrices needs as much as their update. The sign of their squares, which
        takes five squares while it is computed, is needed in addition to two matrices.
        """
        if self.spectral_clip is None:
            return 0
        together, m, n = padded_batch(shape)
        squares = 4 * together * (5 * m * m + 2 * m * n)
        return max(newton_schulz_workspace(shape, method="standard"), squares)

    def hook_summary(self) -> str:
        """Return the hooks as text for the start-up table; it starts with a comma unless it is
        empty.
        """
        summary = ""
        for key in ("hyperball", "radial_brake", "spectral_clip"):
            if (value := getattr(self, key)) is not None:
                summary += f", {key} {list(value) if isinstance(value, tuple) else value}"
        return summary + ", relative_update" * self.relative_update


def keeps_zeros(recipe: Recipe) -> bool:
    """Tell whether a zero matrix stays zero, because its updates have its own norm."""
    return isinstance(recipe, UpdateHooks) and (recipe.relative_update or recipe.hyperball == "own")
