"""Hooks on updates of whole matrices before they are added, and on the matrices after.

With W a matrix after its weight decay, u its update, lr the learning rate and norms those of
Frobenius::

    hyperball        W <- R (W - lr R u/|u|) / |W - lr R u/|u||,
                         R the setting or, for "own", |W|; nothing decays
    relative_update  W <- W - lr |W| u/|u|
    radial_brake     |W - lr u| <- |W| + s (|W - lr u| - |W|),
                         s the first setting if the norm grew, else the second
    spectral_clip    at last, singular values of W are cut down to the setting

As in NVIDIA's Emerging-Optimizers at fd77292 (``weight_update_hooks``, and ``spectral_hardcap`` of
``spectral_clipping_utils``), which takes one hook at a time. A norm below :data:`TINY` counts as 0
there and here, and what has it becomes 0. Its 0.3.0 has ``hyperball`` alone: "own" is its default
radius.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ds_layerwise.optimizers.fields import OrNull, Positive, Share
from ds_layerwise.optimizers.recipe import Hyper, Recipe, Shape
from ds_layerwise.optimizers.scalars import add_
from ds_layerwise.orthogonalize.batching import Tensors, matrices_of, unstack
from ds_layerwise.orthogonalize.newton_schulz import (
    CLIP_STEPS,
    newton_schulz_flops,
    newton_schulz_workspace,
    padded_batch,
)

#: A Frobenius norm below this counts as 0.
TINY = 1e-15

#: A function that returns the Frobenius norms of ``(rows, cols)`` matrices as ``(k,)``; for parts,
#: those of the whole matrices.
Norms = Callable[[Tensors], Tensor]

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
            if value != type(self).model_fields[key].default:
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

    def add_update_(
        self,
        params: Tensors,
        update: Tensor,
        *,
        hyper: Hyper,
        scale: float,
        norms: Norms,
    ) -> None:
        """Subtract the learning rate times ``scale`` times ``update`` from ``params``, with all
        hooks except ``spectral_clip``.

        Args:
            params: views of equal matrices, ``(rows, cols)`` or ``(batch, rows, cols)``.
            update: ``(k, rows, cols)``; overwritten.
            scale: greater than 0; it has no effect if a hook determines the size of the update.
        """
        if self.sizing_hook is not None or self.radial_brake is not None:
            matrices = matrices_of(params)
            before = norms(matrices)
            if isinstance(self.hyperball, float):
                before = torch.full_like(before, self.hyperball)
            if self.sizing_hook is not None:
                update.mul_(_ratio(before, norms(update.unbind())).view(-1, 1, 1))
                scale = 1.0
        add_(params, unstack(update, params), hyper.of(lambda now: -now.lr * scale))
        if self.hyperball is not None:
            torch._foreach_mul_(matrices, _ratio(before, norms(matrices)).unbind())
        if self.radial_brake is not None:
            factors = _braked(before, norms(matrices), *self.radial_brake)
            torch._foreach_mul_(matrices, factors.unbind())


def keeps_zeros(recipe: Recipe) -> bool:
    """Tell whether a zero matrix stays zero, because its updates have its own norm."""
    return isinstance(recipe, UpdateHooks) and (recipe.relative_update or recipe.hyperball == "own")


def _braked(
    before: Tensor,
    after: Tensor,
    outward: float,
    inward: float,
) -> Tensor:
    """Return the factor for matrices whose norms have changed from ``before`` to ``after``."""
    before, after = (torch.where(norm < TINY, 0, norm) for norm in (before, after))
    change = after - before
    return _ratio(before + torch.where(change > 0, outward, inward) * change, after)


def _ratio(wanted: Tensor, norms: Tensor) -> Tensor:
    """Return the factor that brings ``norms`` to ``wanted``; 0 for norms that count as 0."""
    return torch.where(norms < TINY, 0, wanted / norms.clamp_min(TINY))
