"""Muon: momentum, orthogonalised."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_layerwise.recipes.newton_schulz import NsMethod, newton_schulz_flops, newton_schulz_workspace
from ds_layerwise.recipes.recipe import Recipe, StateSpec, like
from ds_layerwise.recipes.settings import Positive

NsDtype = Literal["auto", "bf16", "fp16", "fp32"]
ScaleMode = Literal["original", "spectral", "unit_rms_norm", "match_rms_adamw"]
TpMode = Literal["duplicated", "distributed", "blockwise"]
#: One row a step, each with the a, b and c of aX + b(XX')X + c(XX')(XX')X.
Rows = tuple[tuple[float, float, float], ...]


class Muon(Recipe):
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices; see :class:`ds_layerwise.optimizers.muon.Muon`."""

    rule: ClassVar[str] = "muon"
    whole: ClassVar[bool] = True
    family: ClassVar[str] = "muon"
    gradient_average: ClassVar[str | None] = "momentum_buffer"
    hyper: ClassVar[tuple[str, ...]] = ("momentum",)

    nesterov: bool = True
    ns_method: NsMethod = "gram"
    ns_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    ns_coefficients: Annotated[str | Annotated[Rows, Field(min_length=1)], Field(
        json_schema_extra={"expects": "a name or a list of [a, b, c]"})] = "simple"
    ns_dtype: NsDtype = "auto"
    scale_mode: ScaleMode = "original"
    extra_scale_factor: Positive = 1.0
    muon_tp_mode: TpMode = "duplicated"
    """How matrices that tensor parallelism has cut are orthogonalised; see :mod:`.orthogonalize.tensor_shards`."""

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One momentum."""
        return like(shape, "momentum_buffer")

    def work(self, shape: tuple[int, ...]) -> int:
        """The FLOPs of the Newton-Schulz iteration."""
        *batch, rows, cols = shape
        return newton_schulz_flops(rows, cols, steps=self.ns_steps, method=self.ns_method, batch=math.prod(batch))

    def workspace(self, shape: tuple[int, ...]) -> int:
        """The bytes that Newton-Schulz works in, on as many matrices as go through it together."""
        return newton_schulz_workspace(shape)

    @property
    def sees_tensor_shards(self) -> bool:
        """With ``muon_tp_mode`` "blockwise"."""
        return self.muon_tp_mode == "blockwise"

    @property
    def takes_rate_of_adamw(self) -> bool:
        """With ``scale_mode`` "match_rms_adamw", or what is the same: "spectral", and 0.2 times that."""
        return self.scale_mode == "match_rms_adamw" or (self.scale_mode, self.extra_scale_factor) == ("spectral", 0.2)

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Momentum, and how the update is scaled."""
        return (f"momentum {hyper('momentum')}{', nesterov' if self.nesterov else ''}, scale_mode {self.scale_mode}"
                f"{f' x {self.extra_scale_factor:g}' if self.extra_scale_factor != 1 else ''}")
