"""What a run costs each rank, from names, shapes and the config alone: the numbers of the start-up table.

Training and ``ds-layerwise plan`` both end in a :class:`Forecast`. What differs is where shapes and dtypes come from:
from the engine there, from a file and :class:`RunConfig` here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ds_layerwise.config import LayerWiseConfig, OptimizerConfig, is_ours
from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.config_file import config_of
from ds_layerwise.plan.cost import (LayoutReport, RankMemory, RankTraffic, memory_bytes, state_bytes_of, traffic_bytes,
                                    wire_elements)
from ds_layerwise.plan.ds_config import refuse_unsupported, without_effect
from ds_layerwise.plan.layout import Layout, ParamSpec
from ds_layerwise.plan.planner import plan_layout
from ds_layerwise.plan.rates import check_peaks
from ds_layerwise.plan.routes import Axis, Route, whole_shape
from ds_layerwise.recipes.recipe import DTYPE_BYTES, Recipe

#: What DeepSpeed takes for zero_optimization.reduce_bucket_size where the config says nothing.
DEFAULT_BUCKET_NUMEL = 500_000_000

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ACCUMULATION_DTYPES = {**{spelling: name for short, name in _DTYPES.items()
                           for spelling in (short, name, f"torch.{name}")}, "half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What of a DeepSpeed config decides where parameters live and what they cost."""

    optimizer: OptimizerConfig
    layerwise: LayerWiseConfig
    stage: int
    bucket_numel: int
    param_dtype: str
    """Of the model, as a Layout names it. In float32 mode the engine casts nothing; this says a float32 model."""
    accumulation_dtype: str | None
    wire_dtype: str | None
    host_ratio: float
    without_effect: tuple[str, ...]
    """Keys that are accepted, but change nothing."""

    @classmethod
    def from_ds_config(cls, given: object) -> RunConfig:
        """Parse a whole DeepSpeed config, and refuse what training refuses at its start.

        Raises:
            ConfigError: names the key, its value and what it may say.
        """
        given = config_of(given)
        section = given.get("optimizer") or {}
        if not is_ours(section.get("type")):
            raise ConfigError(f"optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got {section.get('type')!r}"
                              f"{'' if section else ': there is no optimizer section'}")
        optimizer = OptimizerConfig.from_section(section)
        layerwise = LayerWiseConfig.from_section(given.get("layerwise", {}))
        refuse_unsupported(given)
        check_peaks(given.get("scheduler"), [{"lr": optimizer.lr, "matrix_lr_ratio": optimizer.matrix_lr_ratio,
                                              "scalar_lr_ratio": optimizer.scalar_lr_ratio}], optimizer)
        if (given.get("torch_autocast") or {}).get("enabled"):
            raise ConfigError("torch_autocast.enabled is true, and shapes do not say which modules it makes send their "
                              "gradients in half precision; plan without it")
        if (given.get("tensor_parallel") or {}).get("autotp_size") not in (None, 0, 1):
            raise ConfigError("tensor_parallel.autotp_size is not 1, and shapes of a whole model do not say how AutoTP "
                              "cuts them; plan without it")
        zero = given["zero_optimization"]
        return cls(
            optimizer=optimizer, layerwise=layerwise, stage=zero["stage"],
            bucket_numel=_bucket_numel(zero.get("reduce_bucket_size", "auto")), param_dtype=_param_dtype(given),
            accumulation_dtype=_dtype("data_types.grad_accum_dtype",
                                      (given.get("data_types") or {}).get("grad_accum_dtype"), _ACCUMULATION_DTYPES),
            wire_dtype=_dtype("communication_data_type", given.get("communication_data_type"), _DTYPES),
            host_ratio=_host_ratio(zero), without_effect=without_effect(given))

    def stored_as(self, dtype: str) -> str:
        """What gradients of parameters of ``dtype`` are accumulated in."""
        return "float32" if self.stage == 2 else self.accumulation_dtype or dtype

    def sent_as(self, dtype: str) -> str:
        """What gradients of parameters of ``dtype`` travel in."""
        return self.wire_dtype or (dtype if self.stage == 2 else self.stored_as(dtype))


def _bucket_numel(value: object) -> int:
    if value == "auto":
        return DEFAULT_BUCKET_NUMEL
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf or value % 1:
        raise ConfigError(f"zero_optimization.reduce_bucket_size must be a whole number of at least 1, got {value!r}")
    return int(value)


def _host_ratio(zero: Mapping[str, Any]) -> float:
    offload = zero.get("offload_optimizer") or {}
    if zero.get("cpu_offload") is True:
        return 1.0
    ratio = offload.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise ConfigError(f"zero_optimization.offload_optimizer.ratio must be a number in [0, 1], got {ratio!r}")
    return float(ratio) if offload.get("device") == "cpu" else 0.0


def _param_dtype(given: Mapping[str, Any]) -> str:
    halves = [name for section, name in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"))
              if (given.get(section) or {}).get("enabled")]
    if len(set(halves)) > 1:
        raise ConfigError("bf16.enabled and fp16.enabled are both true; set one of them to false")
    return halves[0] if halves else "float32"


def _dtype(key: str, value: Any, known: Mapping[str, str]) -> str | None:
    if value is None:
        return None
    name = known.get(value.lower() if isinstance(value, str) else "")
    if name is None:
        raise ConfigError(f"{key} must be fp32, bf16 or fp16 with this optimizer, got {value!r}")
    return name


def specs_of(params: Iterable[tuple[str, tuple[int, ...], str]], routes: Mapping[str, Route], *,
             variants: Mapping[str, int] | None = None, wires: Mapping[str, str] | None = None,
             tp_size: int = 1) -> list[ParamSpec]:
    """What the planner needs to know of the parameters that have a route.

    Args:
        params: name, shape and dtype of each, in model order.
        tp_size: how many parts tensor parallelism has cut matrices into.
        variants, wires: by name, see :class:`.plan.layout.ParamSpec`; 1 and float32 where nothing is said.
    """
    @cache
    def work(recipe: Recipe, shape: tuple[int, ...], axis: Axis | None) -> int:
        return recipe.work(whole_shape(shape, None if recipe.sees_tensor_shards else axis, tp_size))

    def spec(name: str, shape: tuple[int, ...], dtype: str) -> ParamSpec:
        route = routes[name]
        seen = route.matrix_shape or (math.prod(shape),)
        return ParamSpec(name=name, shape=shape, dtype=dtype, whole=route.whole,
                         work=work(route.recipe, seen, route.tp_axis) if route.whole else 0,
                         variants=(variants or {}).get(name, 1), wire=(wires or {}).get(name, "float32"),
                         state_bytes=route.recipe.state_bytes(seen))

    return [spec(*param) for param in params if param[0] in routes]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A layout and all that there is to say about its costs. Tuples are by rank, mappings by dtype of the layout."""

    layout: Layout
    stage: int
    stored_as: Mapping[str, str]
    """What gradients are accumulated in."""
    wires: tuple[str, ...]
    """What gradients travel in, by bucket."""
    report: LayoutReport
    memory: tuple[RankMemory, ...]
    """Bytes held between two steps."""
    traffic: tuple[RankTraffic, ...]
    """Bytes held for buckets under way, at most."""

    @classmethod
    def of(cls, layout: Layout, specs: list[ParamSpec], *, stage: int, stored_as: Mapping[str, str],
           host_ratio: float = 0.0) -> Forecast:
        """The forecast for ``layout``, a plan of exactly these ``specs``.

        Args:
            host_ratio: how much of masters and states lives in host memory.
        """
        wire_of = {spec.name: spec.wire for spec in specs}
        wires = tuple(wire_of[bucket.slots[0].name] for bucket in layout.buckets)
        return cls(layout, stage, stored_as, wires, LayoutReport.of(layout, specs),
                   memory_bytes(layout, state_bytes=state_bytes_of(specs), stage=stage, grads_stored_as=stored_as,
                                host_ratio=host_ratio),
                   traffic_bytes(layout, stage=stage, stored_as=stored_as, wires=wires))

    @property
    def start_up(self) -> tuple[int, ...]:
        """Bytes held at most until the first step: parameters move into their buffer a bucket at a time, the rest is
        made after that, and goes to the host a bucket at a time."""
        bucket = max((bucket.numel * DTYPE_BYTES[bucket.dtype] for bucket in self.layout.buckets), default=0)
        return tuple(max(rank.params + bucket, rank.total + rank.staging) for rank in self.memory)

    @property
    def fullest(self) -> int:
        """The rank that holds most between two steps."""
        totals = [rank.total for rank in self.memory]
        return totals.index(max(totals))

    def wire_as(self, dtype: str) -> str:
        """What gradients of parameters of ``dtype`` travel in."""
        return " and ".join(sorted({wire for bucket, wire in zip(self.layout.buckets, self.wires, strict=True)
                                    if bucket.dtype == dtype}))

    def reduce_bytes(self, dtype: str) -> float:
        """What the mean rank sends of gradients: in a step at stage 1, in a backward pass at stage 2."""
        total = 0
        for name in set(self.wires):
            wire = wire_elements(self.layout, dtype, {i for i, other in enumerate(self.wires) if other == name})
            total += sum(wire.reduce) * DTYPE_BYTES[name] + sum(wire.forward) * 4
        return total / len(self.memory)

    def gather_bytes(self, dtype: str) -> float:
        """What the mean rank sends of parameters in a step."""
        return sum(wire_elements(self.layout, dtype).gather) * DTYPE_BYTES[dtype] / len(self.memory)


def forecast(specs: list[ParamSpec], run: RunConfig, num_ranks: int) -> Forecast:
    """Place ``specs`` over ``num_ranks`` as training would, and say what that costs.

    Raises:
        LayoutError: ``num_ranks`` is less than 1.
    """
    specs = [replace(spec, wire=run.sent_as(spec.dtype)) for spec in specs]
    layout = plan_layout(specs, num_ranks, bucket_numel=run.bucket_numel, policy=run.layerwise.layout,
                         alignment=run.layerwise.alignment)
    return Forecast.of(layout, specs, stage=run.stage, host_ratio=run.host_ratio,
                       stored_as={dtype: run.stored_as(dtype) for dtype in layout.dtypes})
