"""The split masters of one rank: its bfloat16 weights and remainders; see
:mod:`ds_layerwise.optimizers.split_masters`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ds_layerwise.optimizers.base.dtypes import BLOCK
from ds_layerwise.optimizers.split_masters import merge_, split_
from ds_layerwise.ranks.owned.buffers import ShardBuffer


class SplitMasters:
    """The remainders and marks of the shards of one rank, one tensor of each per bucket.

    Blocks start at shard starts, and parameters at block borders, so cutting a parameter does not
    move its blocks.

    Args:
        values: the shards of the parameter buffer. The layout's alignment must be a multiple of 64.
        buckets: the indices of the buckets with split masters, all bfloat16.
    """

    def __init__(self, values: ShardBuffer, buckets: Collection[int]) -> None:
        self._values = values
        self._remainders: dict[int, Tensor] = {}
        self._marks: dict[int, Tensor] = {}
        self._index_of: dict[str, int] = {}
        for index in buckets:
            shard = values.bucket(index)
            self._remainders[index] = torch.zeros_like(shard, dtype=torch.int16)
            blocks = shard.numel() // BLOCK
            self._marks[index] = torch.zeros(blocks, dtype=torch.int64, device=shard.device)
            self.follow(index)
            self._index_of.update({piece.name: index for piece in values.pieces[index]})

    def __contains__(self, index: int) -> bool:
        """Tell whether the masters of bucket ``index`` are split."""
        return index in self._marks

    def has(self, name: str) -> bool:
        """Tell whether this rank's piece of the master of ``name`` is split."""
        return name in self._index_of

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory, without the weights."""
        return (*self._remainders.values(), *self._marks.values())

    def open(self, index: int) -> tuple[Tensor, Tensor]:
        """Return float32 masters of this rank's shard of bucket ``index``. :meth:`close` stores
        them.

        Returns:
            The masters, 1-D, with padding; and a 0-d bool, True if masters follow weights that
            something else has written. All masters of such a block follow.
        """
        return _merged(self._values.bucket(index), self._remainders[index], self._marks[index])

    def close(self, index: int, masters: Tensor) -> None:
        """Store ``masters`` of this rank's whole shard of bucket ``index``, and the weights that
        they round to.
        """
        split_(masters, self._values.bucket(index), self._remainders[index], self._marks[index])

    def follow(self, index: int) -> None:
        """Set all masters of bucket ``index`` to the weights."""
        self.close(index, self._values.bucket(index).float())

    def piece(self, name: str) -> Tensor:
        """Return a float32 copy of this rank's piece of the master of ``name``, 1-D."""
        masters, _ = _merged(*self._blocks(name))
        return masters[: self._values.piece(name).numel()]

    def set_piece(self, name: str, master: Tensor) -> None:
        """Store this rank's piece of the master of ``name``, and the weights that it rounds to."""
        blocks = self._blocks(name)
        masters, _ = _merged(*blocks)
        masters[: master.numel()].copy_(master)
        split_(masters, *blocks)

    def _blocks(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights, remainders and marks of the blocks that this rank's piece fills."""
        index = self._index_of[name]
        shard = self._values.bucket(index)
        piece = self._values.piece(name)
        start = piece.storage_offset() - shard.storage_offset()
        first = start // BLOCK
        last = -(-(start + piece.numel()) // BLOCK)
        place = slice(start, last * BLOCK)
        return shard[place], self._remainders[index][place], self._marks[index][first:last]


def _merged(values: Tensor, remainders: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
    masters = torch.empty_like(values, dtype=torch.float32)
    return masters, merge_(masters, values, remainders, marks)
