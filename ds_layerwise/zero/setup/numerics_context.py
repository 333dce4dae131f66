"""A context in which a script's settings do not affect the arithmetic of a step.

Note: which settings this covers
    Autocast and the precision of float32 products change the result of a product, so both are off
    inside. Default dtypes and devices stay as they are, because all threads of the process share
    them; code that runs in a step names the dtype and the device of every tensor it makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

#: The products of backends whose float32 products may run in a shorter dtype.
_MATMULS: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
)

#: The switches of ``torch.backends.cuda.matmul`` that allow half-precision sums in half-precision
#: products.
_HALF_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` with torch's own settings: no autocast, no gradients, products in full
    precision.

    All settings are restored afterwards. The weights that autocast has cached are dropped, because
    an update changes them.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _exact_products(),
    ):
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute float32 products from float32 inputs, not in TF32 or bf16, and sum products of
    half-precision matrices in float32.
    """
    overall = None
    # If a setting was made through the newer interface, this getter raises.
    with suppress(RuntimeError):
        overall = torch.get_float32_matmul_precision()
    before = {}
    for matmul in _MATMULS:
        before[matmul] = matmul.fp32_precision
    cuda = torch.backends.cuda.matmul
    sums = {name: value for name in _HALF_SUMS if (value := getattr(cuda, name, False))}
    if overall not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    for matmul, precision in before.items():
        if precision not in ("none", "ieee"):
            matmul.fp32_precision = "ieee"
    for name in sums:
        setattr(cuda, name, False)
    try:
        yield
    finally:
        if overall not in (None, "highest"):
            torch.set_float32_matmul_precision(overall)
        for matmul, precision in before.items():
            if precision not in ("none", "ieee"):
                # Unset first: an unset backend follows the setting for all of its operations, which
                # may be where the precision came from.
                matmul.fp32_precision = "none"
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision
        for name, value in sums.items():
            setattr(cuda, name, value)
