"""What recipes have in common whose updates are momenta, orthogonalised by Newton-Schulz."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_layerwise.recipes.base.fields import Decay, Positive
from ds_layerwise.recipes.base.low_bit_settings import KeptMomentum
from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.newton_schulz_settings import (
    FULL_BATCH_NUMEL,
    NsMethod,
    newton_schulz_flops,
    newton_schulz_workspace,
)
from ds_layerwise.recipes.rules.update_hook_settings import UpdateHooks

NsDtype = Literal["auto", "bf16", "fp16", "fp32"]
ScaleMode = Literal["original", "spectral", "unit_rms_norm", "match_rms_adamw"]
TpMode = Literal["duplicated", "distributed", "blockwise"]
#: One row a step, each with the a, b and c of aX + b(XX')X + c(XX')(XX')X.
Rows = tuple[tuple[float, float, float], ...]


class Orthogonalized(UpdateHooks, KeptMomentum):
    """Momentum, and how it is orthogonalised; see
    :class:`ds_layerwise.optimizers.rules.orthogonalized.Orthogonalized`.
    """

    whole: ClassVar[bool] = True
    gradient_average: ClassVar[str | None] = "momentum_buffer"
    as_adamw: ClassVar[str] = "matrix_optimizer to 'adamuon'"
    hyper: ClassVar[tuple[str, ...]] = ("momentum",)
    full_batch_numel: ClassVar[int] = FULL_BATCH_NUMEL

    nesterov: bool = True
    ns_method: NsMethod = "gram"
    ns_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    ns_coefficients: Annotated[
        str | Annotated[Rows, Field(min_length=1)],
        Field(json_schema_extra={"expects": "a name or a list of [a, b, c]"}),
    ] = "simple"
    ns_dtype: NsDtype = "auto"
    muon_tp_mode: TpMode = "duplicated"
    """How matrices that tensor parallelism has cut are orthogonalised; see
    :mod:`.orthogonalize.tensor_shards`.
    """

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One momentum."""
        return self.like(shape, "momentum_buffer")

    def work(self, shape: tuple[int, ...]) -> int:
        """The FLOPs of the Newton-Schulz iteration, and of hooks."""
        *batch, rows, cols = shape
        return newton_schulz_flops(
            rows, cols, steps=self.ns_steps, method=self.ns_method, batch=math.prod(batch)
        ) + self.hook_flops(shape)

    def workspace(self, shape: tuple[int, ...]) -> int:
        """The bytes that Newton-Schulz works in, on as many matrices as go through it together, and
        with l2 the gradients that weight decay makes of theirs; or those of a hook after it."""
        return max(
            newton_schulz_workspace(shape, beside=int(self.weight_decay_method == "l2")),
            self.hook_workspace(shape),
        )

    @property
    def sees_tensor_shards(self) -> bool:
        """With ``muon_tp_mode`` "blockwise"."""
        return self.muon_tp_mode == "blockwise"

    @property
    def takes_rate_of_adamw(self) -> bool:
        """Never, unless a recipe says so."""
        return False

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Momentum, how the update is scaled, and what else is done to it."""
        return (
            f"momentum {hyper('momentum')}{', nesterov' if self.nesterov else ''}"
            f"{self.scale_summary()}"
            f"{self.hook_summary()}"
        )

    def scale_summary(self) -> str:
        """What a recipe says of its own in :meth:`summary`; begins with a comma unless it is
        empty.
        """
        return ""


class Scaled(Orthogonalized):
    """An orthogonalised momentum that is scaled by the shape of its matrix."""

    as_adamw: ClassVar[str] = "scale_mode to 'match_rms_adamw'"
    sized_by: ClassVar[tuple[str, ...]] = ("scale_mode", "extra_scale_factor")

    scale_mode: ScaleMode = "original"
    """See :func:`ds_layerwise.optimizers.rules.orthogonalized.scale_factor`."""
    extra_scale_factor: Positive = 1.0

    @property
    def takes_rate_of_adamw(self) -> bool:
        """With ``scale_mode`` "match_rms_adamw", or what is the same: "spectral", and 0.2 times
        that; unless a hook decides how large updates are."""
        same = self.scale_mode == "match_rms_adamw" or (
            self.scale_mode,
            self.extra_scale_factor,
        ) == ("spectral", 0.2)
        return same and self.sizing_hook is None

    def scale_summary(self) -> str:
        """The scale, unless a hook replaces it."""
        if self.sizing_hook is not None:
            return ""
        return (
            f", scale_mode {self.scale_mode}"
            f"{f' x {self.extra_scale_factor:g}' if self.extra_scale_factor != 1 else ''}"
        )


class Adaptive(Scaled):
    """An orthogonalised momentum that is divided by the root of a second moment, beside the
    first.
    """

    moment2_beta: Decay = 0.95
    """What is kept of the second moment at a step."""
    moment2_eps: Positive = 1e-8
    """Added to the root of the second moment."""

    def scale_summary(self) -> str:
        """The scale, and the average."""
        return f"{super().scale_summary()}, moment2_beta {self.moment2_beta:g}"
