"""A DeepSpeed config from a file, for ``ds-layerwise plan``: unchecked, and with "auto" values.

In training, DeepSpeed and Hugging Face's Trainer process a config before this package does. This
module makes the same checks, and fills in the same values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ds_layerwise.errors import ConfigError

#: The values that Hugging Face's Trainer uses for "auto" with default TrainingArguments.
_FILLED_IN: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "bf16.enabled": False,
    "fp16.enabled": False,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
}

#: Values for the "auto" keys that do not affect a plan. DeepSpeed takes None for a missing key.
_WITHOUT_EFFECT = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "scheduler.params.total_num_steps": 10**9,
    "scheduler.params.warmup_num_steps": 1,
}

#: The sections that must be objects in any config.
_OBJECTS = """
    optimizer optimizer.params layerwise zero_optimization zero_optimization.offload_optimizer
    zero_optimization.offload_param bf16 bfloat16 fp16 torch_autocast data_types tensor_parallel
    checkpoint scheduler scheduler.params amp compile hybrid_engine eigenvalue expert_parallel
    activation_checkpointing data_efficiency flops_profiler pipeline zero_optimization.leaf_module
""".split()

#: The switches that affect a plan or a check of the config. DeepSpeed accepts values other than
#: booleans for them.
_FLAGS = """
    bf16.enabled bfloat16.enabled fp16.enabled torch_autocast.enabled zero_optimization.cpu_offload
    zero_optimization.compute_grad_norm checkpoint.use_node_local_storage
    managed_gradient_accumulation
""".split()

#: Those that may be 0 or 1, too, as in DeepSpeed.
_NUMBERS_OR_FLAGS = """
    zero_optimization.overlap_comm flops_profiler.enabled wall_clock_breakdown
""".split()


def config_of(given: object) -> Mapping[str, Any]:
    """Return ``given`` if it is an object whose sections are objects and whose switches are
    booleans.

    Raises:
        ConfigError: names the wrong value.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"a DeepSpeed config must be an object, got {given!r}")
    for path in _OBJECTS:
        value = at(given, path)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be an object, got {value!r}")
    for path, wanted in (
        ("optimizer.type", "'LayerWiseMuon' or 'LayerWise'"),
        ("scheduler.type", "a name"),
    ):
        value = at(given, path)
        if not isinstance(value, str | None):
            raise ConfigError(f"{path} must be {wanted}, got {value!r}")
    for path in (*_FLAGS, *_NUMBERS_OR_FLAGS):
        value = at(given, path)
        is_flag = isinstance(value, bool) or (path in _NUMBERS_OR_FLAGS and value in (0, 1))
        if value is not None and value != "auto" and not is_flag:
            raise ConfigError(f"{path} must be true or false, got {value!r}")
    return given


def at(given: Mapping[str, Any], path: str) -> Any:
    """Return the value of ``given`` at a path of keys separated by dots; None if there is none. The
    empty path is that of ``given`` itself.
    """
    value: Any = given
    for key in filter(None, path.split(".")):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def fill_in(
    given: Mapping[str, Any], *, hidden_size: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of ``given`` in which every "auto" of a Trainer has a value, and these values
    by path.

    Args:
        hidden_size: that of the model, if it is known: a Trainer makes buckets of its square.
    """
    filled = json.loads(json.dumps(given))
    values = {path: value for path, value in _FILLED_IN.items() if at(given, path) == "auto"}
    lr = at(given, "optimizer.params.lr")
    if "scheduler.params.warmup_max_lr" in values and isinstance(lr, (int, float)):
        values["scheduler.params.warmup_max_lr"] = lr
    if hidden_size and at(given, "zero_optimization.reduce_bucket_size") == "auto":
        values["zero_optimization.reduce_bucket_size"] = hidden_size**2
    for path, value in {**_WITHOUT_EFFECT, **values}.items():
        if at(filled, path) == "auto":
            section, _, key = path.rpartition(".")
            at(filled, section)[key] = value
    if filled.get("train_batch_size") is filled.get("train_micro_batch_size_per_gpu") is None:
        filled["train_micro_batch_size_per_gpu"] = 1
    return filled, values
