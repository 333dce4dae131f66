"""Host memory for device tensors: temporary (:class:`Parking`), or between updates
(:class:`HostMemory`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.forecast.memory import STAGING_SLOTS
from ds_layerwise.ranks.comm.streams import Moment, SideStream

#: Storages and the host memory for their contents, by kind.
Room = dict[str, list[tuple[torch.UntypedStorage, Tensor]]]


class Parking:
    """Storages whose contents are on the host. Their tensors must not be used until they are back.

    Note: how views survive
        Many views share one storage: pieces of a shard, parameters of a buffer. The storage object
        remains and frees its memory. When it is filled again, all views are valid again.
    """

    def __init__(self) -> None:
        self._parked: Room = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are on the host."""
        return tuple(self._parked)

    def find_room(self, tensors: Mapping[str, Iterable[Tensor]], *, pin_memory: bool) -> Room:
        """Allocate host memory for the storages of ``tensors``, by kind, for :meth:`park`. It is
        page-locked if requested and possible.

        Raises:
            LayerWiseError: the host lacks the memory.
        """
        room: Room = {}
        seen: set[int] = set()
        for kind, each in tensors.items():
            room[kind] = []
            for tensor in each:
                storage = tensor.untyped_storage()
                # Memory that numpy has seen cannot be freed, and is on the host.
                if not storage.resizable():
                    continue
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    pin = pin_memory and not tensor.is_cpu
                    away = host_memory(storage.nbytes(), torch.uint8, pin_memory=pin)
                    room[kind].append((storage, away))
        return room

    def park(self, room: Room) -> None:
        """Move the storages of ``room`` into the host memory from :meth:`find_room`. After an
        error, :meth:`unpark` brings those back that have moved.
        """
        for kind, parked in room.items():
            moved = self._parked.setdefault(kind, [])
            for storage, away in parked:
                away.copy_(_bytes(storage))
                moved.append((storage, away))
                storage.resize_(0)

    def unpark(self) -> None:
        """Bring everything back. After an error, storages that are back stay, and the rest can be
        brought back later.
        """
        for kind, parked in list(self._parked.items()):
            while parked:
                storage, away = parked[-1]
                storage.resize_(away.numel())
                _bytes(storage).copy_(away)
                parked.pop()
            del self._parked[kind]


def host_memory(numel: int, dtype: torch.dtype, *, pin_memory: bool) -> Tensor:
    """Return an uninitialized 1-D tensor on the host, in page-locked memory if requested.

    Raises:
        LayerWiseError: the host lacks the memory or does not allow so much of it.
    """
    accelerator = get_accelerator()
    try:
        if pin_memory and hasattr(accelerator, "pin_empty"):
            pinned: Tensor = accelerator.pin_empty(numel, dtype=dtype)
            return pinned
        memory = torch.empty(numel, dtype=dtype, device="cpu")
        # The oldest supported DeepSpeed can only lock memory that exists.
        if pin_memory:
            memory = accelerator.pin_memory(memory)
        return memory
    except (RuntimeError, MemoryError, OSError) as error:
        kind = way_out = ""
        if pin_memory:
            kind = "page-locked "
            way_out = (
                "; set pin_memory: false (of zero_optimization.offload_optimizer, or of "
                "engine.offload_states), or raise the limit that ulimit -l shows"
            )
        raise LayerWiseError(
            f"{numel * dtype.itemsize:,} bytes of {kind}host memory cannot be allocated: {error}"
            f"{way_out}"
        ) from error


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return memory.set_(storage, 0, (storage.nbytes(),), (1,))


class HostMemory:
    """Tensors that are stored in host memory, bucket by bucket, and updated on the device.

    Note: why every update runs on the device
        Newton-Schulz on the host would take longer than the rest of the step. Element-wise updates
        could run on the host, but would then round differently from a run without offload. On the
        device both use the same kernels, as far as the batches are the same; with offload, batches
        end at buckets.

    Note: the order of copies and updates
        The tensors of a bucket are one piece of host memory, so a bucket is one copy in each
        direction. While one bucket is updated, the next one arrives on a stream of its own, and the
        previous one goes back on another. Two slots of device memory, each for the largest bucket,
        take turns: a bucket comes into a slot after the previous one there has gone back. At the
        end of a step the host waits until everything is back, so that readers between two steps,
        such as a checkpoint, find current values. On a device without streams, a CPU, everything
        runs at once, and the copies are made all the same.

    Call :meth:`put` for every bucket first, in ascending order. Then use ``with memory:`` around
    every step, with :meth:`bring` and :meth:`send_back` in it, in descending order.

    Args:
        device: the device that runs the updates.
        pin_memory: True to use page-locked memory, if the device supports it.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool) -> None:
        self._device = device
        self._pin = pin_memory
        self._buckets: dict[int, tuple[Tensor, dict[Any, Tensor]]] = {}
        """The host memory of each bucket, and its tensors in it."""
        self._incoming = SideStream()
        self._outgoing = SideStream()
        self._reset()

    def _reset(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._coming: dict[int, _Slot] = {}
        self._here: dict[int, _Slot] = {}

    def put(self, index: int, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Copy ``tensors`` of bucket ``index`` to the host, and return the copies under the same
        keys. The copies are permanent and have the same shapes and dtypes.

        They are in descending order of the largest powers of two, up to a cache line, that divide
        their bytes. So each starts at a multiple of that power, as it would in memory of its own:
        on a CPU, the start changes the last bits of a product.

        Raises:
            LayerWiseError: the host lacks the memory.
        """
        words = -(-sum(tensor.nbytes for tensor in tensors.values()) // 4)
        memory = host_memory(words, torch.float32, pin_memory=self._pin)
        views = {}
        start = 0
        for key in sorted(tensors, key=lambda key: -math.gcd(tensors[key].nbytes, 64)):
            views[key] = _view(memory, start, tensors[key]).copy_(tensors[key])
            start += tensors[key].nbytes
        views = {key: views[key] for key in tensors}
        self._buckets[index] = memory, views
        return views

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The host memory, one tensor per bucket that has any."""
        return tuple(memory for memory, _ in self._buckets.values())

    def __enter__(self) -> None:
        """Begin a step: allocate device memory for the buckets."""
        if not self._buckets:
            return
        numel = max(memory.numel() for memory in self.tensors)
        for _ in range(min(STAGING_SLOTS, len(self._buckets))):
            memory = torch.empty(numel, dtype=torch.float32, device=self._device)
            self._slots.append(_Slot(memory, self._outgoing.moment()))
        # Earlier work in this memory may still be running.
        self._incoming.follow()

    def __exit__(self, *_: object) -> None:
        """End a step, also a failed one: wait until everything is back, and free the device
        memory.
        """
        if self._buckets:
            self._incoming.synchronize()
            self._outgoing.synchronize()
            self._reset()

    def bring(self, index: int) -> dict[Any, Tensor]:
        """Return the tensors of bucket ``index`` on the device, and start to copy the next
        bucket.
        """
        if index not in self._buckets:
            return {}
        if index not in self._coming:
            self._start(index)
        slot = self._here[index] = self._coming.pop(index)
        slot.copied.wait()
        following = [each for each in self._buckets if each < index]
        if following:
            self._start(following[-1])
        here = {}
        for key, home in self._buckets[index][1].items():
            here[key] = _view(slot.memory, int(home.storage_offset()) * home.itemsize, home)
        return here

    def send_back(self, index: int) -> None:
        """Copy the tensors of bucket ``index`` that :meth:`bring` returned back to the host, after
        the work on them.
        """
        if index not in self._buckets:
            return
        slot = self._here.pop(index)
        home, _ = self._buckets[index]
        self._outgoing.follow()
        with self._outgoing:
            transfer(home, slot.memory[: home.numel()])
        self._slots.append(_Slot(slot.memory, self._outgoing.moment()))

    def _start(self, index: int) -> None:
        slot = self._slots.popleft()
        home, _ = self._buckets[index]
        with self._incoming:
            slot.copied.wait()
            transfer(slot.memory[: home.numel()], home)
        self._coming[index] = _Slot(slot.memory, self._incoming.moment())


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the part of ``memory`` from byte ``start`` on, in the shape and dtype of ``like``."""
    return memory.view(torch.uint8)[start : start + like.nbytes].view(like.dtype).view(like.shape)


class _Slot(NamedTuple):
    """Device memory for one bucket, and the end of the last copy into it or out of it."""

    memory: Tensor
    copied: Moment


def transfer(into: Tensor, out_of: Tensor) -> None:
    """Copy between host and device, on the current stream."""
    into.copy_(out_of, non_blocking=True)
