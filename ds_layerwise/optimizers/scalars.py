"""Operations on lists of tensors with one number: the host's own, or one in the memory of the
device, which a captured update reads anew each time it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: A number, or a 0-d tensor of float32 with it, on the device of the tensors.
Scalar = float | Tensor


def multiply_(tensors: Sequence[Tensor], factor: Scalar) -> None:
    """Multiply ``tensors`` in place."""
    torch._foreach_mul_(list(tensors), factor)


def add_(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: Scalar) -> None:
    """Add ``others`` times ``factor`` to ``tensors``, in place."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(list(tensors), torch._foreach_mul(list(others), factor))
    else:
        torch._foreach_add_(list(tensors), list(others), alpha=factor)


def plus(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: Scalar) -> list[Tensor]:
    """Do what :func:`add_` does, in new memory."""
    if not isinstance(factor, Tensor):
        return list(torch._foreach_add(list(tensors), list(others), alpha=factor))
    found = list(torch._foreach_mul(list(others), factor))
    torch._foreach_add_(found, list(tensors))
    return found


def lerp(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: Scalar) -> list[Tensor]:
    """Return what lies between ``tensors``, for a ``weight`` of 0, and ``ends``, for 1."""
    if isinstance(weight, Tensor):
        return plus(tensors, torch._foreach_sub(list(ends), list(tensors)), weight)
    return list(torch._foreach_lerp(list(tensors), list(ends), weight))


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: Scalar) -> None:
    """Do what :func:`lerp` does, in place in ``tensors``."""
    if isinstance(weight, Tensor):
        add_(tensors, torch._foreach_sub(list(ends), list(tensors)), weight)
    else:
        torch._foreach_lerp_(list(tensors), list(ends), weight)
