"""Reductions on a device with streams, played by streams that only know what was done before they go on."""

import random

import pytest
import torch
from torch import nn

from ds_layerwise.plan.layout import ParamSpec
from ds_layerwise.plan.planner import plan_layout
from ds_layerwise.ranks import comm, side_stream, wires
from ds_layerwise.ranks.buffers import FlatBuffer, ShardBuffer
from ds_layerwise.ranks.sync import EagerGradSync, GradSync
from ds_layerwise.ranks.wires import Wire
from tests.support import streams
from tests.support.rooms import rooms
from tests.support.ways import in_cuts

pytestmark = rooms("sync", "side_stream")

SHAPES = {"a": (8, 8), "b": (5,), "c": (4, 16), "d": (70,), "e": (3, 3), "f": (8, 2)}


class Device(streams.Device):
    """An accelerator, and a group of two ranks of which this is the first, where nothing arrives but time."""

    def __init__(self):
        super().__init__()
        self.log, self.kept = [], []

    def all_to_all_single(self, out, sent, *, output_split_sizes, input_split_sizes, group, async_op):
        assert async_op, "a collective that is not asynchronous holds up the stream that it is called on"
        for splits, tensor in ((output_split_sizes, out), (input_split_sizes, sent)):
            assert splits is None or sum(splits) == tensor.numel()
        out.zero_()
        self.log.append(("collective", self.current, set(self.current.knows)))
        return Work(self, len(self.log))


class Work:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def wait(self):
        self.device.current.knows.add(("arrived", self.number))

    def is_completed(self):
        raise AssertionError("asks the device from the host")


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    average = wires.average

    def averaging(*args):
        fake.log.append(("sum", fake.current, set(fake.current.knows)))
        fake.current.knows.add(("summed", sum(kind == "sum" for kind, *_ in fake.log)))
        average(*args)

    monkeypatch.setattr(side_stream, "get_accelerator", lambda: fake)
    monkeypatch.setattr(side_stream.SideStream, "keep", lambda self, tensor: fake.kept.append(tensor.data_ptr()))
    monkeypatch.setattr(wires, "average", averaging)
    monkeypatch.setattr(comm, "size_of", lambda group: 2)
    monkeypatch.setattr(comm, "rank_of", lambda group: 0)
    monkeypatch.setattr(comm.dist, "all_to_all_single", fake.all_to_all_single)
    return fake


def make_sync(stage, cuts=False):
    layout = plan_layout([ParamSpec(name, shape, "float32", len(shape) == 2, 10 * (len(shape) == 2))
                          for name, shape in SHAPES.items()], 2, bucket_numel=1)
    layout = in_cuts(layout) if cuts else layout
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    reduced = ShardBuffer(layout, 0, [torch.zeros(bucket.shard_numels[0]) for bucket in layout.buckets])
    kwargs = {"wires": {1: Wire(None)}, "divide_by": 2.0, "wire_dtype": lambda bucket: torch.bfloat16}
    if stage == 2:
        return EagerGradSync(layout, 0, params, reduced, **kwargs), params
    return GradSync(layout, 0, params, FlatBuffer(layout, torch.device("cpu")), reduced, **kwargs), params


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("cuts", [False, True])
def test_computation_waits_for_nothing_before_the_end_of_its_pass(device, stage, cuts):
    for seed in range(20):
        sync, params = make_sync(stage, cuts)
        order = random.Random(seed).sample(sorted(params), len(params))
        computing, side = device.current, sync._side._stream
        unused = set(order[:seed % 3])
        for step in range(2):
            device.log.clear(), device.kept.clear()
            computing.waits, made = 0, []
            for name in order:
                if name not in unused:
                    params[name].grad = torch.ones(SHAPES[name])
                    made.append(params[name].grad.data_ptr())
                    computing.knows.add((step, name))
                    sync.accumulate(name, launch=True)
            assert not computing.waits and all(stream is side for _, stream, _ in device.log)
            # The end of the pass, and the step, may be on other streams than the hooks.
            for finish in (sync.reduce, sync.finish):
                device.current = streams.Stream()
                device.current.wait_stream(computing)
                finish()
                last = device.current
                assert all(stream is side for _, stream, _ in device.log)
                assert last.knows >= side.knows
            sums = [entry for entry in device.log if entry[0] == "sum"]
            assert len(sums) == len(sync.layout.buckets)
            for bucket, (_, _, knows) in zip(sync.layout.buckets, sums, strict=True):
                assert knows >= {(step, slot.name) for slot in bucket.slots if slot.name not in unused}
            for index, (kind, _, knows) in enumerate(device.log):
                if kind == "sum" or index and device.log[index - 1][0] == "sum":
                    # What it reads has arrived, or was summed.
                    assert ("arrived", index) in knows or ("summed", sum(k == "sum" for k, *_ in device.log[:index])) \
                        in knows
            if stage == 2:
                assert set(made) <= set(device.kept)
            # The next step writes to the same memory, on the stream that computes.
            computing.wait_stream(last)
            sync.reset()
            device.current = computing
            for stream in (computing, side):
                stream.knows.clear()
