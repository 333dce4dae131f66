"""The dtypes that an accelerator can compute in, and those in which it is fast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

#: How many times as much as on a CPU an accelerator takes at a time of what fills a few bytes for
#: each element: a CPU has it in its cache, and here each time is several launches.
LONGER_ON_DEVICE = 4

_BF16 = frozenset((torch.bfloat16,))
_FP16 = frozenset((torch.float16,))


class Traits(NamedTuple):
    """The properties of a device that decide in which dtypes it multiplies matrices fast."""

    kind: str
    """The type by torch's name."""
    capability: tuple[int, int] = (0, 0)
    """The compute capability of an NVIDIA GPU."""
    arch: str = ""
    """The architecture of an AMD GPU."""
    has_bf16: bool = False
    """True if it has units for products in bfloat16."""


#: AMD's architectures with matrix units, by the beginning of their names, the longest first. An
#: MI200 (gfx90a) flushes subnormals of float16 to zero, and a Gram matrix is full of them.
_OF_AMD = {
    "gfx90a": _BF16,
    "gfx908": _BF16 | _FP16,
    "gfx94": _BF16 | _FP16,
    "gfx95": _BF16 | _FP16,
    "gfx11": _BF16 | _FP16,
    "gfx12": _BF16 | _FP16,
}


def fast_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Return the half-precision dtypes in which ``device`` multiplies matrices faster than in
    float32.

    A CPU has bfloat16 by AVX-512 BF16 or AMX; another one multiplies in it some hundred times
    slower than in float32. NVIDIA's GPUs have units for float16 from Volta on (7.0), for bfloat16
    from Ampere on (8.0). Of other accelerators nothing tells whether they keep subnormals of
    float16.
    """
    traits = traits_of(device)
    if traits.arch:
        for prefix, dtypes in _OF_AMD.items():
            if traits.arch.startswith(prefix):
                return dtypes
        return frozenset()
    if traits.kind == "cuda":
        if traits.capability >= (8, 0):
            return _BF16 | _FP16
        return _FP16 if traits.capability >= (7, 0) else frozenset()
    return _BF16 if traits.has_bf16 else frozenset()


def traits_of(device: torch.device) -> Traits:
    """Return the traits of ``device``, as the process sees it."""
    if device.type == "cuda":
        arch = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")
        return Traits("cuda", torch.cuda.get_device_capability(device), arch)
    has_bf16 = False
    if device.type == "cpu":
        units = torch.cpu.get_capabilities()
        has_bf16 = units.get("avx512_bf16", False) or units.get("amx_bf16", False)
    elif device.type != "meta":
        has_bf16 = torch.bfloat16 in get_accelerator().supported_dtypes()
    return Traits(device.type, has_bf16=has_bf16)


def has_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether ``device`` multiplies matrices in ``dtype``. A CPU does in all dtypes."""
    if device.type != "cuda":
        return device.type in ("cpu", "meta") or dtype in get_accelerator().supported_dtypes()
    traits = traits_of(device)
    if dtype == torch.bfloat16:
        # torch reports bf16 support on every GPU, but cuBLAS has it only from 8.0 on.
        return traits.capability >= (8, 0)
    return dtype != torch.float16 or not traits.arch.startswith("gfx90a")


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
