"""The forms of masters. Each covers a range of a rank's shard, and also writes and follows the
weights of that range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.dtypes import BLOCK, merge_, split_
from ds_layerwise.optimizers.mxfp8 import rounded
from ds_layerwise.ranks.owned.forms import Form
from ds_layerwise.ranks.owned.weight_writes import follow_


class Masters(Form):
    """Masters that are the float32 weights themselves.

    Args:
        values: the weights, a range of this rank's shard of the parameter buffer.
        memory: their stored form.
    """

    def __init__(self, values: Tensor, memory: Tensor) -> None:
        super().__init__(memory)
        self._values = values

    def follow(self) -> None:
        """Follow weights that something other than an update has written; see
        :mod:`.ranks.owned.weight_writes`. Split masters follow whenever they are read.
        """

    def take_values(self) -> None:
        """Set the masters from the weights."""

    def to_values(self) -> None:
        """Set the weights from the masters."""

    def piece(self, place: slice) -> Tensor:
        """Return the masters at ``place``: live memory, or a copy if :attr:`is_live` is False."""
        return self.memory[place]

    def set_piece(self, place: slice, value: Tensor) -> None:
        """Store the masters at ``place``."""
        self.memory[place].copy_(value)


class OwnMasters(Masters):
    """Masters of 16-bit weights in float32 memory of their own.

    Args:
        written: 0-d bool, set to True when masters follow written weights.
        in_mxfp8: True if weights are sent in MXFP8: they are the masters in that format.
    """

    def __init__(self, values: Tensor, written: Tensor, *, in_mxfp8: bool = False) -> None:
        super().__init__(values, values.detach().float())
        self._written = written
        self._in_mxfp8 = in_mxfp8

    def open(self, here: Tensor) -> None:
        """Follow written weights; see :func:`.weight_writes.follow_`."""
        self.opened = here
        follow_(here, self._values, written=self._written, in_mxfp8=self._in_mxfp8)

    def close(self, step: int) -> None:
        """Write the weights."""
        self._write(self.opened)

    def _write(self, masters: Tensor) -> None:
        if self._in_mxfp8:
            rounded(masters, self._values)
        else:
            self._values.copy_(masters)

    def follow(self) -> None:
        """Do what :meth:`open` does, between updates."""
        self.open(self.memory)

    def take_values(self) -> None:
        """Set the masters from the weights."""
        self.memory.copy_(self._values)

    def to_values(self) -> None:
        """Set the weights from the masters."""
        self._write(self.memory)


class SplitMasters(Masters):
    """The remainders and marks of a whole bfloat16 shard; see
    :mod:`ds_layerwise.optimizers.dtypes`. They follow written weights whenever they are
    read.

    Blocks start at shard starts, and parameters at block borders, so cutting a parameter does not
    move its blocks.

    Args:
        values: the shard. The layout's alignment must be a multiple of 64.
        written: 0-d bool, set to True when masters follow written weights.
    """

    fixed = is_live = False

    def __init__(self, values: Tensor, written: Tensor) -> None:
        super().__init__(values, torch.zeros_like(values, dtype=torch.int16))
        blocks = values.numel() // BLOCK
        self._marks = torch.zeros(blocks, dtype=torch.int64, device=values.device)
        self._written = written
        self.take_values()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The remainders and the marks."""
        return self.memory, self._marks

    def open(self, here: Tensor) -> None:
        """Make float32 masters of the whole shard, with padding."""
        self.opened = torch.empty_like(self._values, dtype=torch.float32)
        self._written |= merge_(self.opened, self._values, here, self._marks)

    def close(self, step: int) -> None:
        """Store the masters, and the weights that they round to."""
        split_(self.opened, self._values, self.memory, self._marks)

    def take_values(self) -> None:
        """Set the masters from the weights."""
        split_(self._values.float(), self._values, self.memory, self._marks)

    def piece(self, place: slice) -> Tensor:
        """Return a float32 copy of the masters at ``place``."""
        return self._merged(place)[: place.stop - place.start]

    def set_piece(self, place: slice, value: Tensor) -> None:
        """Store the masters at ``place``, and the weights that they round to."""
        masters = self._merged(place)
        masters[: value.numel()].copy_(value)
        split_(masters, *self._blocks(place))

    def _merged(self, place: slice) -> Tensor:
        blocks = self._blocks(place)
        masters = torch.empty_like(blocks[0], dtype=torch.float32)
        merge_(masters, *blocks)
        return masters

    def _blocks(self, place: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights, remainders and marks of the blocks that ``place`` fills."""
        first = place.start // BLOCK
        last = -(-place.stop // BLOCK)
        filled = slice(place.start, last * BLOCK)
        return self._values[filled], self.memory[filled], self._marks[first:last]
