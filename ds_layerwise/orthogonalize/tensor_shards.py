"""Newton-Schulz on matrices of which every rank of a tensor-parallel group has an equal part of the
rows or columns.

Note: what is sent
    ``duplicated`` gathers the matrices and gives every rank the bits of the unsharded result.
    ``distributed`` sums Gram matrices over the ranks: if columns are cut, X X' is the sum over the
    parts; if rows are cut, X' X is. The Gram matrix is as wide as the side that is not cut. So it
    is only used if that is the shorter side, or the matrix is square. On the longer side it would
    be larger than the matrix, be sent once per step or restart, and take more products. Therefore,
    matrices cut along their shorter side are gathered in both modes.

A permutation of the cut axis only permutes the result, so shards need not be consecutive. Ranks
have such a permutation if a fused projection is cut part by part.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from ds_layerwise.orthogonalize.newton_schulz import Coefficients, iterate, newton_schulz, to_peak_1

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

    def gather(self, value: Tensor) -> Tensor:
        """Return ``value`` of all ranks, stacked along a new first axis."""

    def sum_(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over all ranks, the same on each; ``value`` may be
        overwritten.
        """


def whole_shape(shape: tuple[int, ...], axis: Axis | None, size: int) -> tuple[int, ...]:
    """Return the shape of matrices of which each of ``size`` ranks has a part of ``shape``."""
    whole = list(shape)
    if axis is not None and len(whole) >= -axis:
        whole[axis] *= size
    return tuple(whole)


def newton_schulz_of_shards(
    shards: Tensor,
    coefficients: Coefficients,
    *,
    axis: Axis,
    peers: ShardPeers,
    distributed: bool,
    method: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return this rank's part of the result of :func:`.newton_schulz.newton_schulz` for the whole
    matrices.

    Args:
        shards: ``(k, rows, cols)``, of equal shape on all ranks. Not modified.
        axis: the axis that is cut.
        distributed: see the note on what is sent.
        method, dtype: as in that function.

    Returns:
        A new tensor of the shape and dtype of ``shards``.
    """
    rows, cols = whole_shape(tuple(shards.shape[-2:]), axis, peers.size)
    sides = {-2: rows, -1: cols}
    is_cut_along_shorter = sides[axis] < max(rows, cols)
    if not distributed or is_cut_along_shorter:
        whole = torch.cat(peers.gather(shards.contiguous()).unbind(), dim=axis)
        done = newton_schulz(whole, coefficients, method=method, dtype=dtype)
        return done.chunk(peers.size, dim=axis)[peers.rank]
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
