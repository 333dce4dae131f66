"""Host memory on a device with streams, played by queues that do as little as they may, or as much."""

import math
import weakref
from contextlib import contextmanager

import pytest
import torch

from ds_layerwise.ranks.comm import streams
from ds_layerwise.ranks.owned import host_memory
from ds_layerwise.ranks.owned.host_memory import HostMemory, Parking
from tests.support.rooms import rooms

pytestmark = rooms("host_memory")


class Stream:
    """Runs what was queued when somebody waits for it."""

    def __init__(self, accelerator):
        self.accelerator, self.queue, self.done = accelerator, [], 0

    def add(self, work):
        self.queue.append(work)
        if self.accelerator.eager is self:
            self.synchronize()

    def run(self, until):
        while self.done < until:
            self.done += 1
            self.queue[self.done - 1]()

    def record_event(self):
        return lambda until=len(self.queue): self.run(until)

    def wait_event(self, event):
        self.add(event)

    def wait_stream(self, other):
        self.add(other.record_event())

    def synchronize(self):
        self.run(len(self.queue))


class Accelerator:
    def __init__(self):
        self.eager, self.pinned, self.order = None, [], []
        self.compute = self.inside = Stream(self)
        self.streams = [self.compute]

    def is_synchronized_device(self):
        return False

    def Stream(self):
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self):
        return self.inside

    @contextmanager
    def stream(self, stream):
        self.inside = stream
        yield
        self.inside = self.compute

    def pin_memory(self, tensor):
        self.pinned.append(tensor.data_ptr())
        return tensor

    def transfer(self, into, out_of):
        self.inside.add(lambda: (self.order.append("copy"), into.copy_(out_of)))


@pytest.fixture
def accelerator(monkeypatch):
    fake = Accelerator()
    for module in (host_memory, streams):
        monkeypatch.setattr(module, "get_accelerator", lambda: fake)
    monkeypatch.setattr(host_memory, "transfer", fake.transfer)
    return fake


def tensors():
    """States of buckets 0, 2, 3, 4 and 6; the others have nothing on the host."""
    return {index: {(f"{index}", key): torch.full(shape, float(index)) for key, shape in
                    (("fp32", (index + 1, 3)), ("momentum", (index + 1, 3)), ("exp_avg", (2, )))}
            for index in (0, 2, 3, 4, 6)}


@pytest.mark.parametrize("eager", [None, 0, 1, 2])
def test_no_copy_overtakes_another_or_the_work(accelerator, eager):
    memory = HostMemory(torch.device("cpu"), pin_memory=True)
    homes = {index: memory.put(index, each) for index, each in tensors().items()}
    assert accelerator.pinned == [t.data_ptr() for t in memory.tensors]
    accelerator.eager = None if eager is None else accelerator.streams[eager]
    expected = tensors()
    for step in range(3):
        with memory:
            for index in reversed(range(8)):
                for key, tensor in memory.bring(index).items():
                    accelerator.compute.add(lambda tensor=tensor, step=step: tensor.mul_(-2).add_(step))
                memory.send_back(index)
        for index, home in homes.items():
            assert home.keys() == expected[index].keys()
            for key, value in expected[index].items():
                assert torch.equal(home[key], value.mul_(-2).add_(step)), (step, index, key)


def test_whole_cache_lines_start_at_one():
    # A factor of (8, 8) behind one of (3, 3) had other last bits than without offload.
    shapes = {"R": ((3, 3), torch.float32), "codes": ((7, ), torch.uint8), "step": ((1, ), torch.int64),
              "exp_avg": ((8, 8), torch.float32), "none": ((0, 4), torch.float32), "L": ((6, 6), torch.float32),
              "more": ((64, ), torch.uint8), "Q_L": ((4, 12, 12), torch.float32)}
    tensors = {("w", key): torch.full(shape, i, dtype=dtype) for i, (key, (shape, dtype)) in enumerate(shapes.items())}
    memory = HostMemory(torch.device("cpu"), pin_memory=False)
    home = memory.put(0, tensors)
    assert list(home) == list(tensors) and memory.tensors[0].nbytes == sum(t.nbytes for t in tensors.values()) + 1
    with memory:
        for views in (home, memory.bring(0)):
            for key, value in views.items():
                assert value.data_ptr() % math.gcd(value.nbytes, 64) == 0, key
                assert torch.equal(value, tensors[key]), key
        memory.send_back(0)


def test_memory_taken_for_a_step_may_be_in_use_until_then(accelerator):
    memory = HostMemory(torch.device("cpu"), pin_memory=False)
    memory.put(0, tensors()[0])
    accelerator.compute.add(lambda: accelerator.order.append("before"))
    with memory:
        memory.bring(0)
        accelerator.streams[1].synchronize()
        assert accelerator.order == ["before", "copy"]
    assert not accelerator.pinned


def test_a_step_that_fails_leaves_nothing_to_the_next(accelerator):
    memory = HostMemory(torch.device("cpu"), pin_memory=False)
    homes = {index: memory.put(index, each) for index, each in tensors().items()}
    with pytest.raises(ZeroDivisionError):
        with memory:
            memory.bring(6)  # and bucket 4 is on its way
            raise ZeroDivisionError
    homes[4]["4", "fp32"].fill_(7)
    with memory:
        memory.bring(6)
        memory.send_back(6)
        brought = memory.bring(4)
        accelerator.compute.synchronize()
        assert brought["4", "fp32"].unique().item() == 7
        memory.send_back(4)


def test_two_buckets_at_a_time_are_on_the_device_and_none_between_steps(accelerator):
    memory = HostMemory(torch.device("cpu"), pin_memory=False)
    for index, each in tensors().items():
        memory.put(index, each)
    taken = set()
    with memory:
        slots = [weakref.ref(slot.memory) for slot in memory._slots]
        for index in reversed(range(8)):
            if brought := memory.bring(index):
                taken.add(min(tensor.data_ptr() for tensor in brought.values()))
            memory.send_back(index)
        assert taken == {slot().data_ptr() for slot in slots} and len(taken) == 2
    for stream in accelerator.streams:
        stream.queue, stream.done = [], 0
    assert [slot() for slot in slots] == [None, None]


@pytest.mark.parametrize("number", range(7))
def test_an_exception_while_storages_move_loses_nothing(number, monkeypatch):
    kinds = {"a": [torch.full((3, ), 1.0), torch.full((2, ), 2.0)], "b": [torch.full((4, ), 3.0)]}
    values = {kind: [tensor.clone() for tensor in tensors] for kind, tensors in kinds.items()}
    parking, calls, resize = Parking(), [], torch.UntypedStorage.resize_

    def interrupted(tensor_or_storage, *args):
        calls.append(args)
        if len(calls) == number:
            raise KeyboardInterrupt
        return resize(tensor_or_storage, *args) if isinstance(args[0], int) else copy(tensor_or_storage, *args)

    copy = torch.Tensor.copy_
    room = parking.find_room(kinds, pin_memory=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        patch.setattr(torch.UntypedStorage, "resize_", interrupted)
        if number:
            with pytest.raises(KeyboardInterrupt):
                parking.park(room)
        else:
            parking.park(room)
    if number == 3:
        # The rest may move later.
        parking.park(parking.find_room(kinds, pin_memory=False))
        assert not any(tensor.untyped_storage().nbytes() for tensors in kinds.values() for tensor in tensors)
    parking.unpark()
    assert not parking.kinds
    for kind, tensors in kinds.items():
        for tensor, value in zip(tensors, values[kind], strict=True):
            assert torch.equal(tensor, value)


def test_memory_that_numpy_has_seen_stays_where_it_is():
    tensors = [torch.ones(3), torch.ones(2)]
    tensors[0].numpy()
    parking = Parking()
    parking.park(parking.find_room({"a": tensors}, pin_memory=False))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [12, 0] and parking.kinds == ("a", )
    parking.unpark()
    assert torch.equal(torch.cat(tensors), torch.ones(5))
