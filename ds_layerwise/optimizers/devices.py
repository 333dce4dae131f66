"""What an accelerator can compute with."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.errors import ConfigError


def widest_float() -> torch.dtype:
    """What sums of squares are made in: float64, or float32 where the accelerator has none.

    In float32 a gradient beyond 1e19 counts as one that is not finite.
    """
    # 0.18.9 does not say.
    is_supported = getattr(get_accelerator(), "is_fp64_supported", None)
    return torch.float64 if is_supported is None or is_supported() else torch.float32


def require(dtype: torch.dtype, device: torch.device, *, key: str, value: str) -> None:
    """Refuse a setting that takes products in a ``dtype`` that ``device`` has none for. A CPU has all of them.

    Raises:
        ConfigError: names ``key`` and its ``value``.
    """
    if device.type == "cuda":
        # torch says that it knows bf16 on every one of them; before 8.0 cuBLAS does not.
        has = dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has = device.type in ("cpu", "meta") or dtype in get_accelerator().supported_dtypes()
    if not has:
        raise ConfigError(f"{key} is {value!r}, and {device} has no products in {str(dtype).removeprefix('torch.')}; "
                          "set it to 'auto'")
