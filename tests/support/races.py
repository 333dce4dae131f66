"""A device whose streams must not depend on luck: two accesses of two streams to one memory must be in order.

An operation on a stream begins when the earlier ones there are over. Nobody knows when that is on another stream. So
two operations that touch the same memory, and of which one writes, are a race, unless the second stream has waited for
the first. One run covers every schedule that streams could take, on a CPU and on values that do not matter.

Note: collectives are played as NCCL runs them
    The collectives of a group have a stream of their own, which first waits for the current one. A wait holds up the
    current stream and not the host. Until then the memory that they read and write is kept alive.

Note: memory that is let go of
    The memory goes back to the stream that was current when it was taken, and its next owner there writes at once. So
    by then that stream must have waited for the accesses of others, or ``record_stream`` must have named these.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.streams import Streams

_resize = torch.UntypedStorage.resize_


class Race(AssertionError):
    """Two streams touch the same memory, in no order."""


class Timeline:
    """A stream that knows how much of each stream is over when its own next operation begins."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name
        self.done = 0
        self.knows: dict[Timeline, int] = {}
        self.waits = 0

    def wait_stream(self, other: Timeline) -> None:
        """Begin nothing more before all that ``other`` has been given so far is over."""
        self.waits += 1
        self.learn(other.everything())

    def record_event(self) -> dict[Timeline, int]:
        """Return the operations that are over when everything queued here is."""
        return self.everything()

    def wait_event(self, event: dict[Timeline, int]) -> None:
        """Begin nothing more before ``event``."""
        self.waits += 1
        self.learn(event)

    def everything(self) -> dict[Timeline, int]:
        """Return the operations that are over when everything queued here is."""
        return {**self.knows, self: self.done}

    def learn(self, known: dict[Timeline, int]) -> None:
        """Begin nothing more before the operations of ``known`` are over."""
        self.machine.look_for_freed()
        for stream, done in known.items():
            self.knows[stream] = max(done, self.knows.get(stream, 0))

    def synchronize(self) -> None:
        """Let the host wait for all that was queued here, and with it whatever it queues later."""
        self.machine.host.waits += 1
        self.machine.host.learn(self.everything())

    def has_seen(self, stream: Timeline, number: int) -> bool:
        """Return whether operation ``number`` of ``stream`` is over when the next one here begins."""
        host = self.machine.host
        return stream in (self, host) or max(self.knows.get(stream, 0), host.knows.get(stream, 0)) >= number


@dataclass(frozen=True)
class Access:
    """An operation on bytes ``[start, stop)`` of a storage."""

    what: str
    stream: Timeline
    number: int
    start: int
    stop: int
    writes: bool


@dataclass
class Memory:
    """A storage, and the operations that have touched it."""

    alive: StorageWeakRef
    taken_on: Timeline | None
    """None where the storage was there before."""
    accesses: list[Access] = field(default_factory=list)
    told_of: set[Timeline] = field(default_factory=set)
    """Streams that ``record_stream`` has named."""


class Work:
    """A collective under way; like NCCL, it keeps ``held`` until somebody waits."""

    def __init__(self, machine: Machine, known: dict[Timeline, int], held: Sequence[Tensor]) -> None:
        self._machine, self._known, self._held = machine, known, held

    def wait(self) -> None:
        """Let the current stream wait."""
        self._machine.current.learn(self._known)
        self._held = ()

    def is_completed(self) -> bool:
        """Raise: nobody may ask."""
        raise AssertionError("asks the device from the host")


class Machine(Streams, TorchDispatchMode):
    """An accelerator that raises a :class:`Race` where there may be one; use as a context."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Streams.__init__(self, functools.partial(Timeline, self, "another"))
        self.current.name = "first"
        self.host = Timeline(self, "of the host")
        """The host, whose own operations are over at once."""
        self._memories: dict[int, Memory] = {}
        self._of_groups: dict[Any, Timeline] = {}
        self.launched: list[tuple[Any, Timeline]] = []
        """The group of each collective, and the stream on which it was asked for."""

    # --- as DeepSpeed's accelerators -------------------------------------------------------------------------------

    def record_stream(self, tensor: Tensor, stream: Timeline) -> None:
        """Keep the memory of ``tensor`` until the operations that ``stream`` has so far are over."""
        self._memory_of(tensor).told_of.add(stream)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Let ``storage`` give its memory back, and take other memory on the current stream."""
        self.look_for_freed()
        memory = self._memories.pop(storage.data_ptr(), None)
        if memory is not None and memory.taken_on is not None:
            _check_free(memory, memory.taken_on)
        _resize(storage, nbytes)
        if nbytes:
            self._memories[storage.data_ptr()] = Memory(StorageWeakRef(storage), self.current)

    # --- what runs -------------------------------------------------------------------------------------------------

    def collective(self, reads: Sequence[Tensor], writes: Sequence[Tensor], group: Any) -> Work:
        """Begin a collective on the stream of ``group``."""
        self.look_for_freed()
        stream = self._of_groups.setdefault(group, Timeline(self, f"of group {group}"))
        stream.learn(self.current.everything())
        self.launched.append((group, self.current))
        self._run("a collective", stream, reads, writes)
        return Work(self, stream.everything(), [*reads, *writes])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the current stream."""
        kwargs = kwargs or {}
        self.look_for_freed()
        known = set(self._memories)
        out = func(*args, **kwargs)
        schema, name = func._schema, func.overloadpacket.__name__
        if any(declared.alias_info is not None and not declared.alias_info.is_write for declared in schema.returns):
            return out  # a view
        given = [*zip(schema.arguments, args), *((declared, kwargs[declared.name]) for declared in schema.arguments
                                                 if declared.name in kwargs)]
        writes: list[Tensor] = []
        reads: list[Tensor] = []
        for argument, value in given:
            of_argument = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            (writes if argument.alias_info is not None and argument.alias_info.is_write else reads).extend(of_argument)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)
                and leaf.untyped_storage().data_ptr() not in known]
        for tensor in made:
            if tensor.numel():
                self._memory_of(tensor, taken_on=self.current)
        if "empty" not in name:
            self._run(name, self.current, reads, [*writes, *made])
        return out

    def _run(self, what: str, stream: Timeline, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        stream.done += 1
        for tensor, is_write in [*((t, False) for t in reads), *((t, True) for t in writes)]:
            if not tensor.numel():
                continue
            memory = self._memory_of(tensor)
            start = int(tensor.storage_offset()) * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            this = Access(what, stream, stream.done, start, start + (last + 1) * tensor.itemsize, is_write)
            for other in memory.accesses:
                if (is_write or other.writes) and max(this.start, other.start) < min(this.stop, other.stop) \
                        and not stream.has_seen(other.stream, other.number):
                    raise Race(f"{what} on the stream {stream.name} {'writes' if is_write else 'reads'} what "
                               f"{other.what} on the stream {other.stream.name} "
                               f"{'writes' if other.writes else 'reads'}")
            memory.accesses.append(this)

    def _memory_of(self, tensor: Tensor, taken_on: Timeline | None = None) -> Memory:
        # Two storages may share memory, so the key is the address.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._memories:
            self._memories[storage.data_ptr()] = Memory(StorageWeakRef(storage), taken_on)
        return self._memories[storage.data_ptr()]

    def look_for_freed(self) -> None:
        """Check memory that nobody holds any more. Call this before any stream may learn more than it knew then."""
        for key, memory in list(self._memories.items()):
            if not memory.alive.expired():
                continue
            del self._memories[key]
            if memory.taken_on is not None:
                _check_free(memory, memory.taken_on)


def _check_free(memory: Memory, home: Timeline) -> None:
    for access in memory.accesses:
        if not home.has_seen(access.stream, access.number) and access.stream not in memory.told_of:
            raise Race(f"memory that {access.what} on the stream {access.stream.name} may still "
                       f"{'write' if access.writes else 'read'} is free on the stream {home.name}")
