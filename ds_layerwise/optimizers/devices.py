"""Dtypes that an accelerator can compute in, and those that it is fast in."""

from __future__ import annotations

import time
from functools import lru_cache

import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.errors import ConfigError

#: How many times as fast as in float32 products must be in another dtype to count as fast. What has
#: units for a dtype is at 1.8 and more, what has none at 1.1 and less, so that the noise of a
#: measurement does not decide.
FAST = 1.3

#: Sides of the matrices that are multiplied to find out, so large that the product is what takes
#: the time.
_SIDE, _SIDE_CPU = 2048, 256

#: So many rounds in a row that none of the best times has become better in, by more than a little,
#: are enough: beside other work on the machine five rounds may all be disturbed. And so many are
#: enough in any case.
_SAME_ROUNDS, _ROUNDS, _LITTLE = 10, 200, 0.95


def widest_float() -> torch.dtype:
    """Return the dtype for sums of squares: float64, or float32 where the accelerator has none.

    In float32 a gradient beyond 1e19 counts as one that is not finite.
    """
    # 0.18.9 does not say.
    is_supported = getattr(get_accelerator(), "is_fp64_supported", None)
    if is_supported is None or is_supported():
        return torch.float64
    return torch.float32


def require(
    dtype: torch.dtype,
    device: torch.device,
    *,
    key: str,
    value: str,
) -> None:
    """Refuse a setting that takes products in a ``dtype`` that ``device`` has none for. A CPU has
    all of them.

    Raises:
        ConfigError: names ``key`` and its ``value``.
    """
    if not _has(dtype, device):
        raise ConfigError(
            f"{key} is {value!r}, and {device} has no products in "
            f"{str(dtype).removeprefix('torch.')}; set it to 'auto'"
        )


def _has(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type in ("cpu", "meta") or dtype in get_accelerator().supported_dtypes()
    if dtype == torch.bfloat16:
        # torch says that it knows bf16 on every one of them; before 8.0 cuBLAS does not.
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # An MI200 takes subnormals of float16 for zeros, and a Gram matrix is full of them.
    arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
    return dtype != torch.float16 or not arch.startswith("gfx90a")


def fast_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """In which dtypes of half precision ``device`` multiplies at least :data:`FAST` times as fast
    as in float32.

    Measured in some tens of milliseconds, once a process and device. float16 is a candidate on CUDA
    alone: elsewhere torch multiplies in bfloat16 wherever that is the faster one, or does not say
    whether subnormals are numbers.
    """
    by_type = {"cuda": [torch.float16, torch.bfloat16], "meta": []}
    fast = set()
    for dtype in by_type.get(device.type, [torch.bfloat16]):
        if _has(dtype, device) and speed_over_float32(dtype, device) >= FAST:
            fast.add(dtype)
    return frozenset(fast)


@lru_cache(maxsize=None)
def speed_over_float32(dtype: torch.dtype, device: torch.device) -> float:
    """Return how many times as fast as in float32 a product of two matrices is in ``dtype``; the
    same in the whole process.
    """
    side = _SIDE_CPU if device.type == "cpu" else _SIDE
    operands = {
        kind: torch.ones(side, side, dtype=kind, device=device) for kind in (torch.float32, dtype)
    }
    best = dict.fromkeys(operands, float("inf"))
    # In turns, so that a disturbance hits both, and the best of each: the first round also loads
    # what computes them.
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
