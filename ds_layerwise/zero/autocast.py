"""DeepSpeed's ``torch_autocast`` section: what it may say, and what follows from it for gradients and for the loss.

Weights stay float32. The engine runs the forward pass under ``torch.autocast`` and marks the parameters of modules that
are safe in the lower precision; their gradients travel in it, all others in their own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME, get_comm_dtype
from torch import nn

from ds_layerwise.errors import ConfigError, unknown_key

_DTYPES = ("bf16", "bfloat16", "fp16", "float16", "half")
_KEYS = ("enabled", "dtype", "lower_precision_safe_modules")

#: For float16, in the words of DeepSpeed's scaler, what ``torch.amp.GradScaler`` does. No section has keys for it.
LOSS_SCALE = {"init_scale": 2.0**16, "scale_window": 2000, "delayed_shift": 1, "consecutive_hysteresis": False,
              "min_scale": 1.0}


def check_section(ds_config: Mapping[str, Any]) -> None:
    """Check the section, and what the rest of a DeepSpeed config may not say beside it.

    Raises:
        ConfigError: names the key, its value and the way out.
    """
    section = ds_config.get("torch_autocast") or {}
    for key in section:
        if key not in _KEYS:
            raise unknown_key("torch_autocast", key, _KEYS)
    enabled = section.get("enabled", False)
    if not isinstance(enabled, bool):
        raise ConfigError(f"torch_autocast.enabled must be true or false, got {enabled!r}")
    if not enabled:
        return
    if section.get("dtype") not in _DTYPES:
        raise ConfigError(f"torch_autocast.dtype must be 'bfloat16' or 'float16', got {section.get('dtype')!r}")
    modules = section.get("lower_precision_safe_modules")
    if modules is not None and (isinstance(modules, str) or not isinstance(modules, Sequence)):
        raise ConfigError("torch_autocast.lower_precision_safe_modules must be a list of names of classes, such as "
                          f"'torch.nn.Linear', got {modules!r}")
    for other in ("bf16", "bfloat16", "fp16"):
        if (ds_config.get(other) or {}).get("enabled"):
            raise ConfigError(f"torch_autocast.enabled and {other}.enabled are both true: the one keeps weights in "
                              "float32, the other does not; remove one of the two")
    if ds_config.get("communication_data_type") is not None:
        raise ConfigError(f"communication_data_type is {ds_config['communication_data_type']!r}, but torch_autocast "
                          "decides for each parameter what its gradient travels in; remove one of the two")


def travels_in(param: nn.Parameter) -> torch.dtype:
    """What the gradient of ``param`` travels in."""
    dtype: torch.dtype = get_comm_dtype(param)
    return dtype


def forget(param: nn.Parameter) -> None:
    """Remove the engine's mark: the next engine may have another section, or none."""
    param.__dict__.pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
