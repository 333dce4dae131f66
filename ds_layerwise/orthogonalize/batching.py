"""Matrices of equal shape go through the products together: fewer launches, the same bits."""

from __future__ import annotations

import math
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
    if device.type == "cpu":
        return MAX_BATCH_NUMEL_CPU
    return MAX_BATCH_NUMEL


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
        if tensor.dim() == 2:
            return tensor
        return tensor[self.start : self.stop]


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
        start = 0
        stop = math.prod(shape[:-2])
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
    # One operation where there are no batches, which views of each would triple.
    if len(matrices) > 1 and _are_single(matrices):
        return torch.stack(list(matrices))
    batches = [matrix.view(-1, *matrix.shape[-2:]) for matrix in matrices]
    if len(batches) > 1:
        return torch.cat(batches)
    # Sums over what is not contiguous are made in another order.
    return batches[0].contiguous()


def unstack(stacked: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo :func:`stack`: views into ``stacked``, shaped like the tensors of ``like``."""
    if _are_single(like):
        return list(stacked.unbind())
    parts = torch.split(stacked, [each.shape[:-2].numel() for each in like])
    return list(map(torch.Tensor.view_as, parts, like))


def _are_single(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dim() == 2 for tensor in tensors)


def matrices_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every matrix of matrices and batches, in their order, as a view."""
    matrices: list[Tensor] = []
    for tensor in tensors:
        if tensor.dim() == 3:
            matrices += tensor.unbind()
        else:
            matrices.append(tensor)
    return matrices
