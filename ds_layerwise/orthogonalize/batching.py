"""Batches of matrices with equal shapes, which share products: fewer launches, and the same bits;
and their norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

#: Several tensors, as torch's operations on lists take them.
Tensors = list[Tensor] | tuple[Tensor, ...]

#: The largest number of elements in matrices that share products on an accelerator; one matrix may
#: be larger.
MAX_BATCH_NUMEL = 64 * 2**20

#: The same for a CPU. There a batch saves little, and matrices that do not fit into the cache cost
#: up to a fifth.
MAX_BATCH_NUMEL_CPU = 2**17

#: The number of elements up to which matrices of other buckets are added to those of a bucket,
#: enough to fill an accelerator.
FULL_BATCH_NUMEL = 16 * 2**20

#: The number of elements whose squares torch sums at a time on a CPU, one after another in float32.
#: For normal entries, a sum over 2^20 loses 1e-5 of the norm, one over 2^27 1.4 %, and this number
#: 1e-7; for other entries it loses at most 3e-4.
_AT_A_TIME = 1 << 16


def max_batch_numel(device: torch.device) -> int:
    """Return the largest number of elements of a batch on ``device``; one matrix may be larger."""
    if device.type == "cpu":
        return MAX_BATCH_NUMEL_CPU
    return MAX_BATCH_NUMEL


def most_together(count: int, numel: int, most: int) -> int:
    """Return how many of ``count`` matrices of ``numel`` elements go together: as many as fit into
    ``most`` elements, at least one.
    """
    return min(count, max(1, most // numel))


class Some(NamedTuple):
    """The matrices ``start`` to ``stop`` of the tensor number ``tensor``. A 2-D tensor has one
    matrix.
    """

    tensor: int
    start: int
    stop: int

    def of(self, tensors: Tensors) -> Tensor:
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


def stack(matrices: Tensors) -> Tensor:
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


def unstack(stacked: Tensor, like: Tensors) -> Tensors:
    """Return views into ``stacked`` with the shapes of the tensors in ``like``: the inverse of
    :func:`stack`.
    """
    if _are_single(like):
        return stacked.unbind()
    parts = torch.split(stacked, [each.shape[:-2].numel() for each in like])
    return list(map(torch.Tensor.view_as, parts, like))


def _are_single(tensors: Tensors) -> bool:
    return all(tensor.dim() == 2 for tensor in tensors)


def matrices_of(tensors: Tensors) -> list[Tensor]:
    """Return every matrix of matrices and batches as a view, in their order."""
    matrices: list[Tensor] = []
    for tensor in tensors:
        if tensor.dim() == 3:
            matrices += tensor.unbind()
        else:
            matrices.append(tensor)
    return matrices


def frobenius_norms(matrices: Tensors) -> Tensor:
    """Return the norms of ``k`` matrices of any shape, ``(k,)``.

    The norm of a contiguous matrix does not depend on the others.
    """
    if matrices[0].device.type != "cpu" or all(matrix.numel() <= _AT_A_TIME for matrix in matrices):
        # Compute one norm per matrix: over a batch, the order of the sum would depend on the batch
        # size.
        return torch.stack(torch._foreach_norm(matrices))
    parts = [torch.split(matrix.reshape(-1), _AT_A_TIME) for matrix in matrices]
    norms = torch.stack(torch._foreach_norm(list(chain.from_iterable(parts))))
    totals = []
    for of_matrix in torch.split(norms, list(map(len, parts))):
        totals.append(torch.linalg.vector_norm(of_matrix, dtype=torch.float64).to(norms.dtype))
    return torch.stack(totals)


def norms_of(stacked: Tensor) -> Tensor:
    """Return :func:`frobenius_norms` of ``(..., rows, cols)`` as ``(..., 1, 1)``."""
    matrices = stacked.reshape(-1, *stacked.shape[-2:]).unbind()
    return frobenius_norms(matrices).view(*stacked.shape[:-2], 1, 1)
