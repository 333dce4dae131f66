"""Matrices of equal shape go through the products together: fewer launches, the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Largest sum of elements of one batch on an accelerator; the products need about five tensors of this many.
MAX_BATCH_NUMEL = 64 * 2**20

#: The same on a CPU, where a batch saves little and what falls out of the cache costs up to a fifth.
MAX_BATCH_NUMEL_CPU = 2**17


def batches(shapes: Sequence[Sequence[int]], max_numel: int = MAX_BATCH_NUMEL) -> list[list[int]]:
    """Indices of ``shapes``, grouped so that each group has equal (rows, cols) and at most ``max_numel`` elements.

    Shapes are ``(rows, cols)`` or ``(batch, rows, cols)``. Groups and their members are in order of first appearance;
    one matrix larger than the bound is a group of its own.
    """
    groups: dict[tuple[int, int], list[list[int]]] = {}
    filled: dict[tuple[int, int], int] = {}
    for index, shape in enumerate(shapes):
        key, numel = (shape[-2], shape[-1]), int(torch.Size(shape).numel())
        group = groups.setdefault(key, [])
        if not group or filled[key] + numel > max_numel:
            group.append([])
            filled[key] = 0
        group[-1].append(index)
        filled[key] += numel
    return [indices for group in groups.values() for indices in group]


def stack(matrices: Sequence[Tensor]) -> Tensor:
    """One ``(k, rows, cols)`` tensor of matrices ``(rows, cols)`` and batches ``(batch, rows, cols)``."""
    return torch.cat([m.reshape(-1, *m.shape[-2:]) for m in matrices])


def unstack(stacked: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo :func:`stack`: views into ``stacked``, shaped like the tensors of ``like``."""
    sizes = [m.numel() // m.shape[-2:].numel() for m in like]
    return [part.view(m.shape) for part, m in zip(torch.split(stacked, sizes), like, strict=True)]
