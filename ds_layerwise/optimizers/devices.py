"""The dtypes that an accelerator can compute in, and those in which it is fast."""

from __future__ import annotations

import time
from functools import lru_cache

import torch
from deepspeed.accelerator import get_accelerator

#: The least ratio to the speed of float32 products with which a dtype counts as fast. Devices with
#: units for a dtype reach 1.8 and more, those without 1.1 and less, so the noise of a measurement
#: does not decide.
FAST = 1.3

#: The side of the matrices in the measurement, so large that the product takes most of the time.
_SIDE, _SIDE_CPU = 2048, 256

#: The measurement stops after this many rounds in a row in which no best time has improved by more
#: than the third factor, and after at most this many rounds. Other work on the machine may disturb
#: five rounds in a row.
_SAME_ROUNDS, _ROUNDS, _LITTLE = 10, 200, 0.95


def widest_float() -> torch.dtype:
    """Return the dtype for sums of squares: float64, or float32 if the accelerator does not support
    it.

    In float32, a gradient beyond 1e19 counts as not finite.
    """
    # DeepSpeed before 0.19.6 has no such method.
    is_supported = getattr(get_accelerator(), "is_fp64_supported", None)
    if is_supported is None or is_supported():
        return torch.float64
    return torch.float32


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether ``device`` multiplies matrices in ``dtype``. A CPU does in all dtypes."""
    if device.type != "cuda":
        return device.type in ("cpu", "meta") or dtype in get_accelerator().supported_dtypes()
    if dtype == torch.bfloat16:
        # torch reports bf16 support on every GPU, but cuBLAS has it only from 8.0 on.
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # An MI200 flushes subnormals of float16 to zero, and a Gram matrix is full of them.
    arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    return dtype != torch.float16 or not arch.startswith("gfx90a")


def fast_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Return the half-precision dtypes in which ``device`` multiplies at least :data:`FAST` times
    as fast as in float32.

    The measurement takes some tens of milliseconds, once per process and device. float16 is a
    candidate only on CUDA: elsewhere torch multiplies in bfloat16 wherever that is faster, or does
    not tell whether subnormals are kept.
    """
    by_type = {"cuda": [torch.float16, torch.bfloat16], "meta": []}
    fast = set()
    for dtype in by_type.get(device.type, [torch.bfloat16]):
        if has_products(dtype, device) and speed_over_float32(dtype, device) >= FAST:
            fast.add(dtype)
    return frozenset(fast)


@lru_cache(maxsize=None)
def speed_over_float32(dtype: torch.dtype, device: torch.device) -> float:
    """Return the speed of matrix products in ``dtype`` relative to float32. It is measured once per
    process.
    """
    side = _SIDE_CPU if device.type == "cpu" else _SIDE
    operands = {
        kind: torch.ones(side, side, dtype=kind, device=device) for kind in (torch.float32, dtype)
    }
    best = dict.fromkeys(operands, float("inf"))
    # Alternate, so that a disturbance affects both, and keep the best time of each. The first round
    # also loads the kernels.
    same = 0
    for _ in range(_ROUNDS):
        same += 1
        for kind, matrix in operands.items():
            _finish(device)
            start = time.perf_counter()
            matrix @ matrix
            _finish(device)
            took = time.perf_counter() - start
            if took < _LITTLE * best[kind]:
                same = 0
            best[kind] = min(best[kind], took)
        if same == _SAME_ROUNDS:
            break
    return best[torch.float32] / best[dtype]


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        get_accelerator().synchronize()
