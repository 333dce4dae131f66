"""Masters of one rank as its bfloat16 weights and what these lack; see
:mod:`ds_layerwise.optimizers.split_masters`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ds_layerwise.optimizers.split_masters import merge_, split_
from ds_layerwise.plan.layout.layout import Layout
from ds_layerwise.ranks.owned.buffers import ShardBuffer
from ds_layerwise.recipes.base.dtypes import BLOCK


class Remaindered:
    """Remainders and marks of shards of ``rank``, one tensor each a bucket.

    Blocks start where shards do, and so do parameters: what a parameter is cut into does not move
    them.

    Args:
        layout: with an alignment that is a multiple of 64.
        values: the shards of the parameter buffer.
        buckets: by index, those that are meant; of bfloat16.
    """

    def __init__(
        self, layout: Layout, rank: int, values: ShardBuffer, buckets: Collection[int]
    ) -> None:
        self._values = values
        self._remainders: dict[int, Tensor] = {}
        self._marks: dict[int, Tensor] = {}
        self._place: dict[str, tuple[int, int, int]] = {}
        for index in buckets:
            shard = values.bucket(index)
            self._remainders[index] = torch.zeros_like(shard, dtype=torch.int16)
            self._marks[index] = torch.zeros(
                shard.numel() // BLOCK, dtype=torch.int64, device=shard.device
            )
            self.follow(index)
            origin = layout.buckets[index].shard(rank)[0]
            for piece in values.pieces[index]:
                self._place[piece.name] = index, piece.start - origin, piece.numel

    def __contains__(self, index: int) -> bool:
        """Whether the masters of bucket ``index`` are meant."""
        return index in self._marks

    def has(self, name: str) -> bool:
        """Whether what this rank holds of ``name`` is in here."""
        return name in self._place

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory, without that of the weights."""
        return (*self._remainders.values(), *self._marks.values())

    def open(self, index: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The masters of this rank's shard of bucket ``index`` in float32, new memory;
        :meth:`close` takes them back.

        Returns:
            All of them 1-D, padding included; by parameter, its own among them; and 0-d bool,
            whether some follow weights that somebody else has written, which are all of a block
            then.
        """
        values = self._values.bucket(index)
        masters = torch.empty_like(values, dtype=torch.float32)
        written = merge_(masters, values, self._remainders[index], self._marks[index])
        pieces = {}
        for piece in self._values.pieces[index]:
            _, start, numel = self._place[piece.name]
            pieces[piece.name] = masters[start : start + numel]
        return masters, pieces, written

    def close(self, index: int, masters: Tensor) -> None:
        """Write ``masters`` of this rank's whole shard of bucket ``index``, and the weights that
        they round to.
        """
        split_(masters, self._values.bucket(index), self._remainders[index], self._marks[index])

    def follow(self, index: int) -> None:
        """Let all masters of bucket ``index`` be the weights."""
        self.close(index, self._values.bucket(index).float())

    def piece(self, name: str) -> Tensor:
        """What this rank holds of the master of ``name``, 1-D float32, a copy."""
        masters, numel = self._open_piece(name)
        return masters[:numel]

    def set_piece(self, name: str, master: Tensor) -> None:
        """Write what this rank holds of the master of ``name``, and the weights that it rounds
        to.
        """
        masters, numel = self._open_piece(name)
        masters[:numel].copy_(master)
        split_(masters, *self._blocks(name))

    def _open_piece(self, name: str) -> tuple[Tensor, int]:
        values, remainders, marks = self._blocks(name)
        masters = torch.empty_like(values, dtype=torch.float32)
        merge_(masters, values, remainders, marks)
        return masters, self._place[name][2]

    def _blocks(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, remainders and marks of the blocks that this rank's piece of ``name`` fills."""
        index, start, numel = self._place[name]
        stop = start + -(-numel // BLOCK) * BLOCK
        return (
            self._values.bucket(index)[start:stop],
            self._remainders[index][start:stop],
            self._marks[index][start // BLOCK : stop // BLOCK],
        )
