"""Batches of matrices with equal shapes, which share products: fewer launches, and the same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.orthogonalize.newton_schulz_cost import MAX_BATCH_NUMEL

#: Like :data:`.orthogonalize.newton_schulz_cost.MAX_BATCH_NUMEL`, for a CPU. There a batch
#: saves little, and matrices that do not fit into the cache cost up to a fifth.
MAX_BATCH_NUMEL_CPU = 2**17


def max_batch_numel(device: torch.device) -> int:
    """Return the largest number of elements of a batch on ``device``; one matrix may be larger."""
    if device.type == "cpu":
        return MAX_BATCH_NUMEL_CPU
    return MAX_BATCH_NUMEL


class Some(NamedTuple):
    """The matrices ``start`` to ``stop`` of the tensor number ``tensor``. A 2-D tensor has one
    matrix.
    """

    tensor: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return these matrices: a 2-D tensor itself, or a view ``(stop - start, rows, cols)`` of a
        batch.
        """
        return self.within(tensors[self.tensor])

    def within(self, tensor: Tensor) -> Tensor:
        """Return these matrices of ``tensor``, which contains them, or is a state of that
        tensor.
        """
        if tensor.dim() == 2:
            return tensor
        return tensor[self.start : self.stop]


def batches(shapes: Sequence[Sequence[int]], max_numel: int = MAX_BATCH_NUMEL) -> list[list[Some]]:
    """Return all matrices of tensors of ``shapes``, in groups of equal (rows, cols) with at most
    ``max_numel`` elements.

    Shapes are ``(rows, cols)`` or ``(batch, rows, cols)``; batches are cut along their leading
    axis. Groups and their members are in order of first appearance. A matrix larger than the bound
    is a group of its own.
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
    cols)``. For a single contiguous one, it is a view.
    """
    # A single operation if there are no batches; making views of each first would triple the cost.
    if len(matrices) > 1 and _are_single(matrices):
        return torch.stack(list(matrices))
    batches = [matrix.view(-1, *matrix.shape[-2:]) for matrix in matrices]
    if len(batches) > 1:
        return torch.cat(batches)
    # Sums over a tensor that is not contiguous have another order.
    return batches[0].contiguous()


def unstack(stacked: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views into ``stacked`` with the shapes of the tensors in ``like``: the inverse of
    :func:`stack`.
    """
    if _are_single(like):
        return list(stacked.unbind())
    parts = torch.split(stacked, [each.shape[:-2].numel() for each in like])
    return list(map(torch.Tensor.view_as, parts, like))


def _are_single(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.dim() == 2 for tensor in tensors)


def matrices_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return every matrix of matrices and batches as a view, in their order."""
    matrices: list[Tensor] = []
    for tensor in tensors:
        if tensor.dim() == 3:
            matrices += tensor.unbind()
        else:
            matrices.append(tensor)
    return matrices
