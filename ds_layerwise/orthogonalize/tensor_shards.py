"""Newton-Schulz on matrices of which every rank of a tensor-parallel group has a part of the rows
or columns.

Note: what is sent
    ``duplicated`` gathers the matrices and gives every rank the bits of the unsharded result.
    ``owner`` sends each matrix to one rank and its parts back, with the bits of ``duplicated``.
    Ranks choose owners from shapes alone, so all of them choose the same.
    ``distributed`` sums Gram matrices over the ranks: if columns are cut, X X' is the sum over the
    parts; if rows are cut, X' X is. The Gram matrix is as wide as the side that is not cut. So it
    is only used if that is the shorter side, or the matrix is square. On the longer side it would
    be larger than the matrix, be sent once per step or restart, and take more products. Therefore,
    matrices cut along their shorter side are gathered as in ``duplicated``.

Parts of unequal length are gathered with zeros behind them, which changes roundings alone.

A permutation of the cut axis only permutes the result, so shards need not be consecutive. Ranks
have such a permutation if a fused projection is cut part by part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_layerwise.orthogonalize.newton_schulz import Change, Coefficients, iterate, to_peak_1

#: The axis of rows, or of columns.
Axis = Literal[-2, -1]


class ShardPeers(Protocol):
    """The ranks with the other parts of the same matrices. Every rank must call the same
    methods.
    """

    @property
    def size(self) -> int:
        """The number of ranks with a tensor shard, including this one."""

    @property
    def rank(self) -> int:
        """The number of this rank among the peers; parts are in this order."""

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths of the cut axis of all parts; empty if they are equal."""

    def with_lengths(self, lengths: Sequence[int]) -> ShardPeers:
        """Return these ranks with parts of ``lengths``."""

    def gather(self, value: Tensor) -> Tensor:
        """Return ``value`` of all ranks, stacked along a new first axis."""

    def sum_(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over all ranks, the same on each; ``value`` may be
        overwritten.
        """

    def exchange(self, value: Tensor, sent_to: list[int], received: list[int]) -> Tensor:
        """Send 1-D ``value`` in parts of ``sent_to`` elements, by rank. Return the parts of all
        ranks, of ``received`` elements.
        """


#: The axis along which matrices are cut, and the ranks with their parts.
Shards = tuple[Axis, ShardPeers]


def whole_shape(
    shape: tuple[int, ...], axis: Axis | None, size: int, lengths: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the shape of matrices of which each of ``size`` ranks has a part of ``shape``, or of
    ``lengths`` along ``axis``.
    """
    whole = list(shape)
    if axis is not None and len(whole) >= -axis:
        whole[axis] = sum(lengths) or whole[axis] * size
    return tuple(whole)


def padded(part: Tensor, axis: Axis, length: int) -> Tensor:
    """Return ``part`` with zeros behind it, ``length`` along ``axis``. They stay zeros in the
    results for whole matrices.
    """
    return pad(part, [0, 0] * (-axis - 1) + [0, length - part.shape[axis]])


def newton_schulz_of_shards(
    shards: Tensor,
    coefficients: Coefficients,
    *,
    axis: Axis,
    peers: ShardPeers,
    method: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return this rank's part of the result of :func:`.newton_schulz.newton_schulz` for the whole
    matrices, from sums of Gram matrices.

    Args:
        shards: ``(k, rows, cols)``, of equal shape on all ranks but for ``axis``. Not modified.
        axis: the axis that is cut; not the shorter side, see the note on what is sent.
        method, dtype: as in that function.

    Returns:
        A new tensor of the shape and dtype of ``shards``.
    """
    rows, cols = whole_shape(tuple(shards.shape[-2:]), axis, peers.size, peers.lengths)
    x = iterate(
        shards,
        coefficients,
        normalise=lambda x: _normalised(x, peers),
        transposed=axis == -2,
        standard=method == "standard" or rows == cols,
        dtype=dtype,
        total=lambda gram: peers.sum_(gram.contiguous()),
    )
    return x.to(shards.dtype)


def at_all(shards: Tensor, function: Change, *, axis: Axis, peers: ShardPeers) -> Tensor:
    """Return this rank's part of ``function`` of whole ``(k, rows, cols)`` matrices, which every
    rank computes.
    """
    whole = torch.cat(peers.gather(shards.contiguous()).unbind(), dim=axis)
    return function(whole).chunk(peers.size, dim=axis)[peers.rank]


def at_owners(
    shards: Sequence[Tensor],
    function: Change,
    *,
    work: Sequence[int],
    axis: Axis,
    peers: ShardPeers,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return this rank's parts of ``function`` of whole matrices, each computed by one rank.

    Args:
        shards: ``(k, rows, cols)`` each, of equal shapes on all ranks. Not modified.
        function: takes ``(k, rows, cols)`` whole matrices; returns new ones of that shape.
        work: the work on one matrix of each of ``shards``.
        dtype: the dtype in which results are sent.

    Returns:
        New tensors of the shapes and dtypes of ``shards``.
    """
    counts = dealt(list(map(len, shards)), work, peers.size)

    def runs_of(tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the matrices of each owner, 1-D, owner by owner."""
        runs = zip(*map(torch.split, tensors, counts), strict=True)
        return [run.reshape(-1) for run in chain.from_iterable(runs)]

    sent = runs_of(shards)
    numels = list(map(len, sent))
    firsts = range(0, len(numels), len(shards))
    sizes = [sum(numels[first : first + len(shards)]) for first in firsts]
    first = peers.rank * len(shards)
    mine = numels[first : first + len(shards)]
    own = [sum(mine)] * peers.size
    arrived = peers.exchange(torch.cat(sent), sizes, own).view(peers.size, sum(mine))
    done = []
    for pieces, like in zip(torch.split(arrived, mine, dim=1), shards, strict=True):
        whole = torch.cat(list(pieces.view(peers.size, -1, *like.shape[1:])), dim=axis)
        if len(whole):
            whole = function(whole)
        done.append(torch.stack(whole.to(dtype).chunk(peers.size, dim=axis)).flatten(1))
    back = peers.exchange(torch.cat(done, dim=1).view(-1), own, sizes)
    results = [each.new_empty(each.shape) for each in shards]
    torch._foreach_copy_(runs_of(results), list(torch.split(back, numels)))
    return results


def dealt(numbers: Sequence[int], work: Sequence[int], size: int) -> list[list[int]]:
    """Return how many of ``numbers`` of equal matrices go to each of ``size`` ranks: the longest
    ``work`` first, each to the rank with the least so far.
    """
    loads = [0] * size
    runs = [[0] * size for _ in numbers]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        for _ in range(numbers[index]):
            rank = loads.index(min(loads))
            runs[index][rank] += 1
            loads[rank] += work[index]
    return runs


def _normalised(shards: Tensor, peers: ShardPeers) -> Tensor:
    """Return the parts of matrices with Frobenius norm 1, or 0, in float32."""
    x, norm, peak = to_peak_1(shards)
    norms, peaks = peers.gather(torch.cat([norm, peak], dim=-1)).chunk(2, dim=-1)
    # Divide by the largest entry of the whole matrix, so that no square leaves the range of
    # float32.
    whole_peak = peaks.amax(0)
    shrunk_by = torch.where(whole_peak > 0, whole_peak, 1)
    whole_norm = (norms * (peaks / shrunk_by)).square_().sum(0).sqrt_()
    return x.mul_(peak / shrunk_by / torch.where(whole_norm > 0, whole_norm, 1))
