"""A player that notes each rank's collectives: one process plays the ranks in turn, in groups of torch's ``fake``
backend.

Nothing travels. Tensors are on torch's meta device, so that models may have any size.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import deepspeed.comm.comm as deepspeed_comm
import deepspeed.ops
import pytest
import torch
from deepspeed.comm.torch import TorchBackend
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_layerwise.ranks.comm import comm

META = torch.device("meta")

#: Every part that goes to another rank, or comes from one, must start at a multiple of this. NCCL copies such parts in
#: packs of so many bytes if all of them do, and element by element if one does not.
PACK_BYTES = 16

#: The ranks of a group, and torch's name of the group, which counts the groups that a rank has made.
GroupKey = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Call:
    """A collective as one rank asks for it."""

    group: GroupKey
    kind: str
    dtype: torch.dtype
    sent: tuple[int, ...]
    """Elements that go to each rank of the group; of a sum, the number of its summands there."""
    received: tuple[int, ...]
    """Elements that come from each rank of the group."""


class Memory(NamedTuple):
    """A place in memory, in bytes."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Memory) -> bool:
        """Return whether both have a byte in common."""
        return self.storage == other.storage and max(self.start, other.start) < min(self.stop, other.stop)


def _memory(tensor: Tensor) -> Memory:
    assert tensor.is_contiguous()
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Memory(tensor.untyped_storage()._cdata, start, start + tensor.nbytes)


def _cut(tensor: Tensor, numels: Sequence[int]) -> list[Memory]:
    """Return the places of parts of ``numels`` elements of a tensor."""
    assert sum(numels) == tensor.numel() and tensor.dim() == 1
    storage, start, _ = _memory(tensor)
    stops = [start + stop * tensor.itemsize for stop in accumulate(numels)]
    return [Memory(storage, *ends) for ends in zip([start, *stops], stops)]


class Work:
    """A collective that is over when ``luck`` says so, or when somebody waits for it."""

    def __init__(self, luck: random.Random) -> None:
        self._luck, self._is_over = luck, False

    def is_completed(self) -> bool:
        """Return whether the collective is over. Once over, it stays so."""
        self._is_over = self._is_over or self._luck.random() < 0.5
        return self._is_over

    def wait(self) -> None:
        """End the collective."""
        self._is_over = True


class Player:
    """A player that notes the collectives of the current rank.

    Args:
        size: of the world.
        on_device: whether the tensors that travel are on a device. Then parts of a collective must start at multiples
            of :data:`PACK_BYTES`.
    """

    def __init__(self, size: int, *, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.on_device = size, on_device
        self.rank = -1
        self.calls: list[Call] = []
        self.made: list[GroupKey] = []
        """Groups that the current rank has made, or at whose making it was present."""
        self._luck = random.Random()
        self._objects: dict[tuple[int, int], Any] = {}
        self._num_gathered = 0
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        monkeypatch.setattr(comm, "gather_objects", self._gather_objects)
        for name in ("all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "all_gather",
                     "all_gather_into_tensor"):
            monkeypatch.setattr(distributed, name, self._noting(name, getattr(distributed, name)))
        for name in ("all_reduce", "broadcast", "send", "recv", "barrier", "all_gather_object"):
            monkeypatch.setattr(distributed, name, self._refuse)
        monkeypatch.setattr(distributed, "new_group", functools.partial(self._new_group, distributed.new_group))

    @staticmethod
    def _refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective that no bucket takes")

    @contextmanager
    def playing(self, rank: int) -> Iterator[None]:
        """Be ``rank`` for a while."""
        self.rank, self.calls, self.made, self._num_gathered = rank, [], [], 0
        self._luck.seed(rank)
        backend = deepspeed_comm.cdb
        distributed.init_process_group("fake", rank=rank, world_size=self.size, store=FakeStore())
        try:
            deepspeed_comm.cdb = TorchBackend("fake", None, None)
            yield
        finally:
            deepspeed_comm.cdb = backend
            distributed.destroy_process_group()

    def _gather_objects(self, value: Any, *, group: Any) -> list[Any]:
        """Return the objects of the ranks that were played before. Ranks not yet played say the same as this one."""
        assert group is None
        self._objects[self.rank, self._num_gathered] = value
        self._num_gathered += 1
        return [self._objects.get((rank, self._num_gathered - 1), value) for rank in range(self.size)]

    def _new_group(self, make: Callable[..., Any], ranks: Sequence[int], **kwargs: Any) -> Any:
        group = make(list(ranks), **kwargs)
        # The name is the same on the ranks that have made as many groups before. Ranks outside have no name for it.
        self.made.append((tuple(ranks), group.group_name if self.rank in ranks else ""))
        return group

    def _key(self, group: Any) -> GroupKey:
        group = distributed.group.WORLD if group is None else group
        return tuple(distributed.get_process_group_ranks(group)), group.group_name

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def noting(*args: Any, **kwargs: Any) -> Work:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            assert bound.arguments["async_op"], f"{name} is waited for where it starts"
            original(*args, **kwargs)
            self._note(name, **bound.arguments)
            return Work(self._luck)

        return noting

    def _note(self, name: str, *, group: Any, **given: Any) -> None:
        key = self._key(group)
        size, place = len(key[0]), key[0].index(self.rank)
        tensors: list[Tensor]
        if name == "all_to_all_single":
            tensors = [sent, out] = [given["input"], given["output"]]
            sent_to = given["input_split_sizes"] or [_share(sent, size)] * size
            received = given["output_split_sizes"] or [_share(out, size)] * size
            parts = [*_cut(sent, sent_to), *_cut(out, received)]
            assert not _memory(sent).overlaps(_memory(out)), "overwrites what it sends"
        elif name.startswith("reduce_scatter"):
            out = given["output"]
            sent_to, of_sent, tensors = self._several(given["input_list" if "input_list" in given else "input"], size)
            received, parts, tensors = [out.numel()] * size, [_memory(out), *of_sent], [*tensors, out]
            assert sent_to[place] == out.numel()
            self._check_in_place(_memory(out), of_sent, place)
        else:
            is_list = "tensor_list" in given
            sent = given["tensor" if is_list else "input_tensor"]
            received, of_out, tensors = self._several(given["tensor_list" if is_list else "output_tensor"], size)
            sent_to, parts, tensors = [sent.numel()] * size, [_memory(sent), *of_out], [*tensors, sent]
            assert received[place] == sent.numel()
            self._check_in_place(_memory(sent), of_out, place)
        assert len(sent_to) == len(received) == size
        if self.on_device:
            assert not any(part.start % PACK_BYTES for part in parts if part.start < part.stop), f"packs of {name}"
        dtype, = {tensor.dtype for tensor in tensors}
        self.calls.append(Call(key, name, dtype, tuple(sent_to), tuple(received)))

    @staticmethod
    def _several(value: Tensor | Sequence[Tensor], size: int) -> tuple[list[int], list[Memory], list[Tensor]]:
        """Return how much is for, or from, each rank, and its place; ``value`` is a list, or one tensor in equal parts.
        """
        if isinstance(value, Tensor):
            numels = [_share(value, size)] * size
            return numels, _cut(value, numels), [value]
        return [t.numel() for t in value], [_memory(t) for t in value], list(value)

    @staticmethod
    def _check_in_place(own: Memory, of_ranks: list[Memory], place: int) -> None:
        """Check that a sum overwrites at most this rank's own part of its input, and a gather reads at most that of its
        output."""
        assert own == of_ranks[place] or not own.overlaps(
            Memory(of_ranks[0].storage, min(part.start for part in of_ranks), max(part.stop for part in of_ranks)))


def _share(tensor: Tensor, size: int) -> int:
    assert tensor.numel() % size == 0
    return tensor.numel() // size


def check_calls(by_rank: dict[int, list[Call]], *, in_one_order: bool) -> None:
    """Raise unless the ranks of every group ask it for the same collectives, and each sends what another expects.

    Args:
        by_rank: the calls of the ranks that were played, in order; the others are left out.
        in_one_order: whether the order of collectives of several groups that ranks share must agree, too.
    """
    of_group: dict[GroupKey, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, calls in by_rank.items():
        for call in calls:
            of_group[call.group][rank].append(call)
    for (ranks, name), each in of_group.items():
        played = [rank for rank in ranks if rank in by_rank]
        places = [place for place, rank in enumerate(ranks) if rank in by_rank]
        numbers = {rank: len(each[rank]) for rank in played}
        assert len(set(numbers.values())) == 1, f"collectives of group {name}, {ranks}: {numbers}"
        for number, together in enumerate(zip(*(each[rank] for rank in played), strict=True)):
            where = f"collective {number} of group {name}, {ranks}"
            assert len({(call.kind, call.dtype) for call in together}) == 1, where
            for i, one in zip(places, together, strict=True):
                for j, other in zip(places, together, strict=True):
                    assert one.sent[j] == other.received[i], f"{where}, from {ranks[i]} to {ranks[j]}"
    if in_one_order:
        _check_order(by_rank)


def _check_order(by_rank: dict[int, list[Call]]) -> None:
    orders = {rank: [call.group for call in calls] for rank, calls in by_rank.items()}
    for i, one in orders.items():
        for j, other in orders.items():
            if i < j:
                shared = set(one) & set(other)
                assert [key for key in one if key in shared] == [key for key in other if key in shared], (i, j)


def check_groups(by_rank: dict[int, list[GroupKey]]) -> None:
    """Raise unless every rank was there when each group was made, in the same order."""
    orders = {tuple(ranks for ranks, _ in made) for made in by_rank.values()}
    assert len(orders) == 1, orders
    for of_ranks in zip(*by_rank.values(), strict=True):
        assert len({name for _, name in of_ranks if name}) <= 1

