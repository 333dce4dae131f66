"""Settings of a script around a call, kept out of the arithmetic of a step.

Note: what is set aside here, and what is not
    Autocast and the precision of float32 products change what a product computes, so both are off
    inside. Default dtypes and devices are not touched, as every thread of the process sees them:
    code that a step runs says the dtype and the device of all it makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

#: Whose float32 products may run in a shorter dtype.
_BACKENDS = ("cuda", "mkldnn")

#: Switches of ``torch.backends.cuda.matmul`` that let sums of half-precision products be made in
#: half precision.
_HALF_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` as if nothing were set around this: no autocast, no gradients, products
    in full precision.

    Afterwards everything is as it was. Weights that autocast has cached are forgotten, as an update
    changes them.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _exact_float32(),
        _sums_in_float32(),
    ):
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Float32 products from float32 inputs: neither TF32 nor bf16 in their place."""
    overall = None
    # Only the words of newer releases may say what is set.
    with suppress(RuntimeError):
        overall = torch.get_float32_matmul_precision()
    by_backend = {}
    # Those are of torch 2.9.
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        by_backend = {backend: _precision(backend) for backend in _BACKENDS}
    if overall not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    for backend, precision in by_backend.items():
        if precision not in ("none", "ieee"):
            _set(backend, "ieee")
    try:
        yield
    finally:
        if overall not in (None, "highest"):
            torch.set_float32_matmul_precision(overall)
        for backend, precision in by_backend.items():
            if precision not in ("none", "ieee"):
                # Unset it follows a setting for more than products, which may be where it came
                # from.
                _set(backend, "none")
            if _precision(backend) != precision:
                _set(backend, precision)


def _precision(backend: str) -> str:
    precision: str = torch._C._get_fp32_precision_getter(backend, "matmul")
    return precision


def _set(backend: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, "matmul", precision)


@contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Products of half-precision matrices add up in float32."""
    matmul = torch.backends.cuda.matmul
    before = {name: value for name in _HALF_SUMS if (value := getattr(matmul, name, False))}
    for name in before:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
