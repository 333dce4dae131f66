"""MXFP8 by the words of the OCP Microscaling specification 1.0, in Python's floats, an element at a time.

A float of Python holds every float32, product and quotient here exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def floor_log2(value: float) -> int:
    """Return the exponent of the largest power of two that is not larger than ``value``, which is above 0."""
    return math.frexp(value)[1] - 1


def to_multiple(value: float, step: float) -> float:
    """Return the nearest multiple of a power of two, of two the even one, with the sign of ``value``."""
    return math.copysign(round(abs(value) / step) * step, value)


def to_e4m3(value: float) -> float:
    """Return the nearest number of e4m3 (4 bits of exponent with bias 7, 3 of mantissa, no infinity)."""
    exponent = max(floor_log2(abs(value)), -6) if value else -6
    found = to_multiple(value, 2.0 ** (exponent - 3))
    return math.copysign(min(abs(found), 448.0), found)


def block_of(values: list[float]) -> tuple[int, list[int], list[float]]:
    """Return the byte of the scale, those of the elements, and the values that they stand for, as float32.

    The bytes of elements count for nothing if the scale is NaN.
    """
    if not all(map(math.isfinite, values)):
        return 255, [0] * len(values), [math.nan] * len(values)
    largest = max(map(abs, values))
    exponent = max(-127, floor_log2(largest) - 8) if largest else -127
    elements = [to_e4m3(value / 2.0**exponent) for value in values]
    return exponent + 127, [byte_of(each) for each in elements], [each * 2.0**exponent for each in elements]


def byte_of(element: float) -> int:
    """Return the byte of a number of e4m3."""
    size = abs(element)
    byte = int(size * 2**9)
    if size >= 2**-6:
        exponent = floor_log2(size)
        byte = (exponent + 7) * 8 + int(size / 2.0**exponent * 8 - 8)
    return byte + 128 * (math.copysign(1, element) < 0)


def blocks_of(values: Tensor) -> list[tuple[int, list[int], list[float]]]:
    """Return :func:`block_of` each 32 of ``values``, the last with zeros to the end."""
    flat = values.detach().float().flatten().tolist()
    flat += [0.0] * (-len(flat) % 32)
    return [block_of(flat[first:first + 32]) for first in range(0, len(flat), 32)]


def weights_of(masters: Tensor) -> Tensor:
    """Return the bfloat16 weights of float32 ``masters``, in their shape."""
    values = [value for _, _, block in blocks_of(masters) for value in block]
    return torch.tensor(values[:masters.numel()], dtype=torch.float32).bfloat16().view(masters.shape)
