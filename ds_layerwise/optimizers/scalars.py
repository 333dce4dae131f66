"""Operations on lists of tensors with one number: the host's own, or one in the memory of the
device, which a captured update reads anew each time it is replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_layerwise.orthogonalize.batching import Tensors

#: A number, or a 0-d tensor of float32 with it, on the device of the tensors.
Scalar = float | Tensor


def multiply_(tensors: Tensors, factor: Scalar) -> None:
    """Multiply ``tensors`` in place."""
    torch._foreach_mul_(tensors, factor)


def add_(tensors: Tensors, others: Tensors, factor: Scalar) -> None:
    """Add ``others`` times ``factor`` to ``tensors``, in place."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(tensors, torch._foreach_mul(others, factor))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


def plus(tensors: Tensors, others: Tensors, factor: Scalar) -> Tensors:
    """Do what :func:`add_` does, in new memory."""
    if not isinstance(factor, Tensor):
        return torch._foreach_add(tensors, others, alpha=factor)
    found = torch._foreach_mul(others, factor)
    torch._foreach_add_(found, tensors)
    return found


def lerp(tensors: Tensors, ends: Tensors, weight: Scalar) -> Tensors:
    """Return what lies between ``tensors``, for a ``weight`` of 0, and ``ends``, for 1."""
    if isinstance(weight, Tensor):
        return plus(tensors, torch._foreach_sub(ends, tensors), weight)
    return torch._foreach_lerp(tensors, ends, weight)


def lerp_(tensors: Tensors, ends: Tensors, weight: Scalar) -> None:
    """Do what :func:`lerp` does, in place in ``tensors``."""
    if isinstance(weight, Tensor):
        add_(tensors, torch._foreach_sub(ends, tensors), weight)
    else:
        torch._foreach_lerp_(tensors, ends, weight)
