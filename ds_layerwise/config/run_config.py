"""The single reading of a DeepSpeed config: parsed once and checked in one place, for both training
and plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ds_layerwise.config.ds_config import (
    at,
    check_autocast,
    config_of,
    refuse_unsupported,
    with_plain_numbers,
    without_effect,
)
from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, is_ours
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.fields import NonNegative, check

#: DeepSpeed's default for zero_optimization.reduce_bucket_size.
DEFAULT_BUCKET_NUMEL = 500_000_000

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ACCUMULATION_DTYPES = {"half": "float16", "float": "float32"}
for _short, _name in _DTYPES.items():
    _ACCUMULATION_DTYPES.update({_short: _name, _name: _name, f"torch.{_name}": _name})

_EXPECTS = {"expects": "a whole number of at least 1"}
_Numel = Annotated[float, Field(ge=1, multiple_of=1, json_schema_extra=_EXPECTS)]
_Ratio = Annotated[float, Field(ge=0, le=1, json_schema_extra={"expects": "a number in [0, 1]"})]


#: DeepSpeed's defaults, by keys without their prefix ``stage3_``, in elements.
_DEFAULTS = {
    "max_live_parameters": 1_000_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": sys.maxsize,
    "zero_hpz_partition_size": 1,
}


class Whole(NamedTuple):
    """The bytes of parameters that are whole on a rank, beside its cuts."""

    always: int
    """The bytes of persistent parameters, also between two steps."""
    most: int
    """The most bytes during a forward or backward pass, with the persistent ones and second
    copies.
    """


@dataclass(frozen=True)
class Fetching:
    """The limits of DeepSpeed's fetching, in elements."""

    max_live_parameters: int
    param_persistence_threshold: int
    model_persistence_threshold: int
    zero_hpz_partition_size: int = 1
    """The number of ranks that share second copies of weights; 1 for none."""

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> Fetching:
        """Read them from the section ``zero_optimization``; "auto" stands for the default."""
        found = {}
        for key, default in _DEFAULTS.items():
            alias = key if key.startswith("zero_") else f"stage3_{key}"
            value = zero.get(alias, zero.get(key, "auto"))
            if value != "auto":
                default = check(NonNegative, f"zero_optimization.{alias}", value)
            found[key] = int(default)
        return cls(**found)

    def whole(self, params: Iterable[tuple[int, int]]) -> Whole:
        """Return what is whole of ``params``: the elements and bytes of each, in model order."""
        stays = always = numel = nbytes = largest = 0
        for size, its_bytes in params:
            numel += size
            nbytes += its_bytes
            largest = max(largest, size)
            if (
                size <= self.param_persistence_threshold
                and stays + size <= self.model_persistence_threshold
            ):
                stays += size
                always += its_bytes
        # A parameter larger than the limit is fetched all the same.
        elements = min(numel, max(self.max_live_parameters, largest, stays))
        most = nbytes * elements // numel if numel else 0
        if self.zero_hpz_partition_size > 1:
            most += nbytes // self.zero_hpz_partition_size
        return Whole(always, most)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run, from the single reading of a DeepSpeed config, for training and for
    plans.
    """

    optimizer: OptimizerConfig
    layerwise: LayerWiseConfig
    stage: int
    bucket_numel: int
    param_dtype: str
    """The dtype of the model, as a Layout names it. It is float32 if the engine casts nothing,
    because the model is then assumed to be float32.
    """
    accumulation_dtype: str | None
    wire_dtype: str | None
    params_on_host: bool
    """True if the cuts of ZeRO stage 3 live in host memory."""
    fetching: Fetching | None
    """The limits of what is whole at a time at ZeRO stage 3; None at other stages."""
    host_ratio: float
    clip_grad: float
    micro_batches: int | None
    """The number of micro-batches of a step; None if the config alone does not say."""
    autocast: bool
    """True if ``torch_autocast`` decides in which dtype gradients are sent."""
    without_effect: tuple[str, ...]
    """The keys that are accepted but have no effect."""

    @classmethod
    def from_ds_config(cls, config: object, *, client: bool = False) -> RunConfig:
        """Parse a whole DeepSpeed config, and refuse settings that this backend does not support.

        Args:
            client: True if the script passes the optimizer, and the config names none.

        Raises:
            ConfigError: names the key, its value, the valid values and the way out.
        """
        given: Mapping[str, Any] = config_of(with_plain_numbers(config))
        section = given.get("optimizer") or {}
        if not client and not is_ours(section.get("type")):
            raise ConfigError(
                "optimizer.type must be 'LayerWiseMuon' or 'LayerWise', got "
                f"{section.get('type')!r}{'' if section else ': there is no optimizer section'}"
            )
        optimizer = OptimizerConfig()
        if not client:
            optimizer = OptimizerConfig.from_section(section)
        layerwise = LayerWiseConfig.from_section(given.get("layerwise", {}))
        refuse_unsupported(given)
        check_autocast(given)
        zero = given["zero_optimization"]
        size = zero.get("reduce_bucket_size", "auto")
        if size == "auto":
            size = DEFAULT_BUCKET_NUMEL
        passes = given.get(
            "gradient_accumulation_steps", None if given.get("train_batch_size") else 1
        )
        return cls(
            optimizer=optimizer,
            layerwise=layerwise,
            stage=zero["stage"],
            bucket_numel=int(check(_Numel, "zero_optimization.reduce_bucket_size", size)),
            param_dtype=_param_dtype(given),
            accumulation_dtype=_dtype("data_types.grad_accum_dtype", given, _ACCUMULATION_DTYPES),
            wire_dtype=_dtype("communication_data_type", given, _DTYPES),
            params_on_host=at(given, "zero_optimization.offload_param.device") == "cpu",
            fetching=Fetching.of(zero) if zero["stage"] == 3 else None,
            host_ratio=_host_ratio(zero),
            clip_grad=float(given.get("gradient_clipping", 1.0)),
            micro_batches=None if passes == "auto" else passes,
            autocast=bool(at(given, "torch_autocast.enabled")),
            without_effect=without_effect(given),
        )

    def stored_as(self, dtype: str) -> str:
        """Return the dtype in which gradients of parameters of ``dtype`` are accumulated."""
        if self.stage > 1:
            return "float32"
        return self.accumulation_dtype or dtype

    def sent_as(self, dtype: str) -> str:
        """Return the dtype in which gradients of parameters of ``dtype`` are sent."""
        return self.wire_dtype or (dtype if self.stage > 1 else self.stored_as(dtype))


def _host_ratio(zero: Mapping[str, Any]) -> float:
    if zero.get("cpu_offload") is True:
        return 1.0
    offload = zero.get("offload_optimizer") or {}
    ratio = offload.get("ratio", "auto")
    # DeepSpeed reads it in this way.
    ratio = checked_ratio(1.0 if ratio == "auto" else ratio)
    return ratio if offload.get("device") == "cpu" else 0.0


def checked_ratio(ratio: object) -> float:
    """Return ``zero_optimization.offload_optimizer.ratio`` as a number.

    Raises:
        ConfigError: it is not a number from 0 to 1.
    """
    return float(check(_Ratio, "zero_optimization.offload_optimizer.ratio", ratio))


def _param_dtype(given: Mapping[str, Any]) -> str:
    is_bf16 = at(given, "bf16.enabled") or at(given, "bfloat16.enabled")
    if is_bf16 and at(given, "fp16.enabled"):
        raise ConfigError("bf16.enabled and fp16.enabled are both true; set one of them to false")
    found = "float16" if at(given, "fp16.enabled") else "float32"
    if is_bf16:
        found = "bfloat16"
    if _dtype("data_types.param_dtype", given, _ACCUMULATION_DTYPES) not in (None, found):
        raise ConfigError(
            f"data_types.param_dtype is {at(given, 'data_types.param_dtype')!r}, and bf16 and fp16 "
            f"make parameters {found}; enable the section of that dtype, or remove the key"
        )
    return found


def _dtype(key: str, given: Mapping[str, Any], known: Mapping[str, str]) -> str | None:
    value = at(given, key)
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in known:
        raise ConfigError(f"{key} must be fp32, bf16 or fp16 with this optimizer, got {value!r}")
    return known[value.lower()]
