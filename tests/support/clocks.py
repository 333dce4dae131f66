"""A device whose streams have clocks: it counts how long its network is idle, and how much memory waits for it.

:mod:`.races` finds accesses in no order; this finds operations that are in order and late. An operation begins when its
stream is free. The host queues it in no time, and :class:`Clocks` is told its duration. Values do not matter, so
tensors may be on torch's meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.streams import Streams


class Line:
    """A stream. ``now`` is the time at which everything that is queued on it is over."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_stream(self, other: Line) -> None:
        """Begin nothing more before everything that ``other`` has been given so far is over."""
        self.wait_event(other.now)

    def record_event(self) -> float:
        """Return the time at which everything that is queued here is over."""
        return self.now

    def wait_event(self, event: float) -> None:
        """Begin nothing more before ``event``."""
        self.now = max(self.now, event)


class Work:
    """A collective that is over at ``end``. The host may not ask for it."""

    def __init__(self, device: Clocks, end: float) -> None:
        self._device, self._end = device, end

    def wait(self) -> None:
        """Let the current stream wait for the end."""
        self._device.current.wait_event(self._end)


class Clocks(Streams, TorchDispatchMode):
    """An accelerator that counts time; use as a context.

    Args:
        takes: how long a collective takes, as a function of the tensors that it reads.
        copies: how long a copy takes, as a function of its bytes, read and written. Other operations take no time.
    """

    def __init__(self, takes: Callable[[Sequence[Tensor]], float], copies: Callable[[int], float]) -> None:
        TorchDispatchMode.__init__(self)
        Streams.__init__(self, Line)
        self._takes, self._copies = takes, copies
        self.network = Line()
        self.busy: list[tuple[float, float]] = []
        """Times at which each collective began and ended."""
        self._told_of: dict[int, set[Line]] = {}
        self._held: list[tuple[float, int]] = []

    def record_stream(self, tensor: Tensor, stream: Line) -> None:
        """Keep the memory of ``tensor`` until the operations that ``stream`` has when it is freed are over."""
        self._told_of.setdefault(id(tensor), set()).add(stream)

    def collective(self, reads: Sequence[Tensor]) -> Work:
        """Begin a collective when the current stream and the network are free."""
        begun = max(self.current.now, self.network.now)
        self.network.now = begun + self._takes(reads)
        self.busy.append((begun, self.network.now))
        return Work(self, self.network.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the current stream."""
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "copy_":
            self.current.now += self._copies(args[0].nbytes + args[1].nbytes)
        return out

    def watch(self, tensor: Tensor) -> Tensor:
        """Count the memory of ``tensor`` from now until its allocator may hand it out again."""
        home, nbytes = self.current, tensor.nbytes
        self._held.append((home.now, nbytes))

        def let_go(key: int = id(tensor)) -> None:
            until = max(line.now for line in (home, *self._told_of.pop(key, ())))
            self._held.append((until, -nbytes))

        weakref.finalize(tensor, let_go)
        return tensor

    def most_held(self) -> int:
        """Return the most bytes that watched tensors hold at a time."""
        most = held = 0
        for _, nbytes in sorted(self._held):
            held += nbytes
            most = max(most, held)
        return most

    def idle(self) -> float:
        """Return how long the network stood still between its first collective and the end of its last."""
        return self.busy[-1][1] - self.busy[0][0] - sum(end - begun for begun, end in self.busy)
