"""Matrices of equal shape go through the products together: fewer launches, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.recipes.rules.newton_schulz_settings import MAX_BATCH_NUMEL

#: As :data:`.recipes.rules.newton_schulz_settings.MAX_BATCH_NUMEL`, on a CPU, where a batch saves
#: little and what falls out of the cache costs up to a fifth.
MAX_BATCH_NUMEL_CPU = 2**17


def max_batch_numel(device: torch.device) -> int:
    """Elements of matrices that go through the products together on ``device``; one may be
    larger.
    """
    return MAX_BATCH_NUMEL_CPU if device.type == "cpu" else MAX_BATCH_NUMEL


class Some(NamedTuple):
    """Matrices ``start`` to ``stop`` of the tensor number ``tensor``; a matrix is a tensor of
    one.
    """

    tensor: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The matrices meant: one matrix as it is, or a view ``(stop - start, rows, cols)`` of a
        batch.
        """
        return self.within(tensors[self.tensor])

    def within(self, tensor: Tensor) -> Tensor:
        """The matrices meant, of the tensor that has them, or of a state of it."""
        return tensor if tensor.dim() == 2 else tensor[self.start : self.stop]


def batches(shapes: Sequence[Sequence[int]], max_numel: int = MAX_BATCH_NUMEL) -> list[list[Some]]:
    """All matrices of tensors of ``shapes``, in groups of equal (rows, cols) and at most
    ``max_numel`` elements.

    Shapes are ``(rows, cols)`` or ``(batch, rows, cols)``; batches are cut along their leading
    axis. Groups and their members are in order of first appearance; one matrix larger than the
    bound is a group of its own.
    """
    groups: dict[tuple[int, int], list[list[Some]]] = {}
    room: dict[tuple[int, int], int] = {}
    for index, shape in enumerate(shapes):
        key = (shape[-2], shape[-1])
        per_group = max(1, max_numel // (key[0] * key[1]))
        start, stop = 0, shape[0] if len(shape) == 3 else 1
        while start < stop:
            if not room.get(key):
                groups.setdefault(key, []).append([])
                room[key] = per_group
            taken = min(room[key], stop - start)
            groups[key][-1].append(Some(index, start, start + taken))
            room[key] -= taken
            start += taken
    return list(chain.from_iterable(groups.values()))


def stack(matrices: Sequence[Tensor]) -> Tensor:
    """Return one contiguous ``(k, rows, cols)`` tensor of matrices and batches ``(batch, rows,
    cols)``; of a single one that is contiguous a view."""
    if len(matrices) > 1 and all(matrix.dim() == 2 for matrix in matrices):
        return torch.stack(list(matrices))
    batches = [matrix if matrix.dim() == 3 else matrix.unsqueeze(0) for matrix in matrices]
    # Sums over what is not contiguous are made in another order.
    return batches[0].contiguous() if len(batches) == 1 else torch.cat(batches)


def unstack(stacked: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo :func:`stack`: views into ``stacked``, shaped like the tensors of ``like``."""
    if all(each.dim() == 2 for each in like):
        return list(stacked.unbind())
    parts = torch.split(stacked, [len(each) if each.dim() == 3 else 1 for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def matrices_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every matrix of matrices and batches, in their order, as a view."""
    matrices: list[Tensor] = []
    for tensor in tensors:
        matrices += tensor.unbind() if tensor.dim() == 3 else (tensor,)
    return matrices
