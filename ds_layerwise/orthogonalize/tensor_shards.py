"""Newton-Schulz on matrices of which every rank of a tensor-parallel group holds an equal part of
the rows or columns.

Note: what travels
    ``duplicated`` gathers the matrices and gives every rank the bits of the unsharded result.
    ``distributed`` sums Gram matrices over the ranks: with parts of the columns, X X' is the sum of
    the parts' own, with parts of the rows X' X is. Each is as wide as the side that is not cut, so
    it is only formed where that is the shorter side, or the matrix square: on the longer one it
    would be larger than the matrix itself, travel once a step or a restart, and take more products.
    Matrices cut along their shorter side are therefore gathered in both modes.

A permutation of the axis that is cut, which is what ranks hold of fused projections that are cut
part by part, only permutes the result: shards need not be consecutive.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ds_layerwise.orthogonalize.newton_schulz import Coefficients, iterate, newton_schulz, to_peak_1
from ds_layerwise.plan.routes.routes import Axis, whole_shape


class Peers(Protocol):
    """The ranks that hold the other parts of the same matrices. Every rank must enter every method
    alike.
    """

    @property
    def size(self) -> int:
        """The number of ranks that hold a tensor shard, this one included."""

    @property
    def rank(self) -> int:
        """The number of this rank among the peers; parts are in this order."""

    def gather(self, value: Tensor) -> Tensor:
        """Everyone's ``value``, stacked along a new first axis."""

    def sum_(self, value: Tensor) -> Tensor:
        """The sum of everyone's ``value``, the same everywhere; ``value`` may be overwritten."""


def newton_schulz_of_shards(
    shards: Tensor,
    coefficients: Coefficients,
    *,
    axis: Axis,
    peers: Peers,
    distributed: bool,
    method: str,
    dtype: torch.dtype,
) -> Tensor:
    """This rank's part of what :func:`.newton_schulz.newton_schulz` makes of the whole matrices.

    Args:
        shards: ``(k, rows, cols)``, of equal shape on all ranks. Not modified.
        axis: which axis is cut.
        distributed: see the note on what travels.
        method, dtype: as there.

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
        _normalised(shards, peers),
        coefficients,
        transposed=axis == -2,
        standard=method == "standard" or rows == cols,
        dtype=dtype,
        total=lambda gram: peers.sum_(gram.contiguous()),
    )
    return x.to(shards.dtype)


def _normalised(shards: Tensor, peers: Peers) -> Tensor:
    """Parts of matrices of Frobenius norm 1, or 0, float32."""
    x, norm, peak = to_peak_1(shards)
    norms, peaks = peers.gather(torch.cat([norm, peak], dim=-1)).chunk(2, dim=-1)
    # Of the whole matrices, as a multiple of their largest entry: no square leaves float32.
    whole_peak = peaks.amax(0)
    shrunk_by = torch.where(whole_peak > 0, whole_peak, 1)
    whole_norm = (norms * (peaks / shrunk_by)).square_().sum(0).sqrt_()
    return x.mul_(peak / shrunk_by / torch.where(whole_norm > 0, whole_norm, 1))
