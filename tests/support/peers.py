"""Tensor-parallel ranks as threads of one process, for updates that know their peers by a protocol alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


class ThreadPeers:
    """A rank's view of ``size`` ranks. ``calls`` lists its requests to the others: method and shape."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self.lengths: tuple[int, ...] = ()
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._slots, self._barrier = slots, barrier

    def _exchange(self, what: str, value: Tensor) -> Tensor:
        return torch.stack(self._from_all(what, tuple(value.shape), value.clone()))

    def _from_all(self, what: str, shape: tuple[int, ...], value: Any) -> list[Any]:
        self.calls.append((what, shape))
        self._slots[self.rank] = (what, value)
        self._barrier.wait(120)
        kinds, values = zip(*self._slots, strict=True)
        assert len(set(kinds)) == 1, f"ranks are in different collectives: {kinds}"
        self._barrier.wait(120)
        return list(values)

    def with_lengths(self, lengths: Sequence[int]) -> ThreadPeers:
        """Return itself, with parts of ``lengths``."""
        self.lengths = tuple(lengths)
        return self

    def gather(self, value: Tensor) -> Tensor:
        """Return everyone's ``value``, stacked."""
        assert value.is_contiguous()
        return self._exchange("gather", value)

    def sum_(self, value: Tensor) -> Tensor:
        """Return the sum of everyone's ``value``."""
        assert value.is_contiguous(), "as collectives ask for"
        return self._exchange("sum", value).sum(0)

    def exchange(self, value: Tensor, sent_to: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return what everyone sends to this rank. ``calls`` has the elements that this rank sends to each."""
        everyone = self._from_all("exchange", tuple(sent_to), value.split(list(sent_to)))
        mine = [parts[self.rank] for parts in everyone]
        assert [part.numel() for part in mine] == list(received)
        return torch.cat(mine)


def on_ranks(size: int, function: Callable[[ThreadPeers], Any]) -> list[Any]:
    """Return the results of ``function`` for each of ``size`` ranks that run side by side."""
    slots, barrier = [None] * size, threading.Barrier(size)

    def run(rank: int) -> Any:
        try:
            return function(ThreadPeers(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
