"""Reductions, and parameters on their way, on a device with streams, on which nothing may be in order by luck."""

import random
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.comm import comm, streams
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer, new_shards
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync import bucket_transfers, transfer
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.cut_sync import CutSync
from ds_layerwise.ranks.sync.grad_sync import GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync
from tests.support.races import Machine, Race
from tests.support.rooms import rooms
from tests.support.transports import in_cuts

pytestmark = rooms("grad_sync", "streams", "param_sync", "bucket_transfers", "cut_sync", "transfer", "scratch")

SHAPES = {"a": (8, 8), "b": (5,), "c": (4, 16), "d": (70,), "e": (3, 3), "f": (8, 2), "g": (8, 8), "h": (6, 2)}

#: Of four ranks, two on each node, every other one holds the same of these.
EXPERTS = ("g", "h")


class Group(NamedTuple):
    """Ranks, as one of them sees them."""

    name: str
    size: int
    rank: int


LEVELS = {"inside": Group("inside", 2, 1), "across": Group("across", 2, 0)}

#: How sums are made, on rank 1 of four.
WIRES = {
    "ordered": {},
    "native": {"native": True},
    "levels": LEVELS,
}


@pytest.fixture
def machine(monkeypatch):
    """A device, and groups in which nothing arrives but time."""
    machine = Machine()

    def begin(reads, writes, group, async_op):
        assert async_op, "a collective that is not asynchronous holds up the stream that it is called on"
        return machine.collective(reads, writes, group)

    def all_to_all_single(out, sent, *, output_split_sizes, input_split_sizes, group, async_op):
        return begin([sent], [out], group, async_op)

    def one(out, sent, *, group, async_op):
        return begin([sent], [out], group, async_op)

    monkeypatch.setattr(streams, "get_accelerator", lambda: machine)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes: machine.resize(storage, nbytes))
    monkeypatch.setattr(streams.SideStream, "keep", lambda self, tensor: machine.record_stream(
        tensor, self._stream))
    monkeypatch.setattr(comm, "size_of", lambda group: group.size)
    monkeypatch.setattr(comm, "rank_of", lambda group: group.rank)
    monkeypatch.setattr(comm, "opposite_of", lambda group: None)
    monkeypatch.setattr(comm.dist, "all_to_all_single", all_to_all_single)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(comm.dist, name, one)
    return machine


def a_layout(kind, in_mxfp8=False):
    dtype, options = ("bfloat16", {"alignment": 512, "param_wire": "mxfp8"}) if in_mxfp8 else ("float32", {})
    layout = plan_layout([ParamSpec(name, shape, dtype, len(shape) == 2, 10 * (len(shape) == 2),
                                    2 if name in EXPERTS else 1) for name, shape in SHAPES.items()], 4, bucket_numel=1,
                         **options)
    return in_cuts(layout, {"even": lambda bucket: False, "cuts": lambda bucket: True,
                            "mixed": lambda bucket: bucket.index % 2}[kind], even=True)


def make_syncs(stage, kind, how, sent_as="bfloat16", **of_stage_2):
    *in_mxfp8, kind = kind.split()
    layout, rank = a_layout(kind, bool(in_mxfp8)), 1
    params = {name: nn.Parameter(torch.zeros(shape, dtype=DTYPES[layout.bucket_of(name).dtype]))
              for name, shape in SHAPES.items()}
    # Of those that hold the same experts there is one on each node.
    by_ep_size = {1: Wire(Group("all", 4, rank), on_host=False, **WIRES[how]),
                  2: Wire(Group("experts", 2, 0), on_host=False, native=how == "native")}
    grads = FlatBuffer(layout, torch.device("cpu")) if stage == 1 else None
    # Sums that the backend has made are kept as they arrive, until a second pass adds to them.
    kept_as = [sent_as if how == "native" else "float32"] * len(layout.buckets)
    reduced = ReducedGradients(layout, rank, grads, torch.device("cpu"), None if stage == 1 else kept_as)
    kwargs = {"wires": by_ep_size, "divide_by": 2.0, "sent_as": [sent_as] * len(layout.buckets)}
    grad_sync = GradSync(params, reduced, grads, **kwargs, **of_stage_2)
    values = FlatBuffer(layout, torch.device("cpu"), fill=lambda name, place: setattr(
        params[name], "data", place.view(SHAPES[name])))
    return grad_sync, ParamSync(rank, params, values, wires=by_ep_size), params, values


@pytest.mark.parametrize("how", WIRES)
@pytest.mark.parametrize("kind", ["even", "cuts", "mixed", "mxfp8 mixed"])
@pytest.mark.parametrize("stage", [1, 2])
def test_computation_waits_for_nothing_before_the_end_of_its_pass(machine, stage, kind, how, monkeypatch):
    computing, sums, average = machine.current, [], bucket_transfers.average

    def averaging(*args):
        sums.append(machine.current)
        average(*args)

    monkeypatch.setattr(bucket_transfers, "average", averaging)
    for seed in range(4):
        with machine, torch.no_grad():
            sync, param_sync, params, values = make_syncs(stage, kind, how, random.Random(seed).choice(
                ["bfloat16", "float32"]))
            param_sync.overlap_with_forward(nn.ParameterDict(params))
            side, layout = sync._scheduler.side._stream, sync.layout
            sides = {side, *(end._stream for end in sync._scheduler._ends)}
            order = random.Random(seed).sample(sorted(params), len(params))
            for step in range(3):
                computing.waits = 0
                machine.launched.clear(), sums.clear()
                for last in [False, True][-stage:]:
                    for name in order[seed % 3:]:
                        params[name].grad = torch.ones(SHAPES[name], dtype=params[name].dtype)
                        sync.accumulate(name, launch=True)
                    assert not computing.waits
                    assert {stream for _, stream in machine.launched} <= {side} and set(sums) <= sides
                    # The end of the pass, and the step, may be on other streams than the hooks.
                    ending = machine.Stream()
                    ending.wait_stream(computing)
                    with machine.stream(ending):
                        sync.reduce()
                    if not last:
                        computing.wait_stream(ending)
                        computing.waits = 0
                stepping = machine.Stream()
                stepping.wait_stream(computing)
                with machine.stream(stepping):
                    sync.finish()
                    assert {stream for _, stream in machine.launched} == {side} and set(sums) <= sides
                    param_sync.finish()
                    for bucket in reversed(layout.buckets):
                        total = sync.reduced.now(bucket.index).mul_(2)
                        values.shard(bucket, 1)[:len(total)].add_(total)
                        param_sync.launch(bucket.index)
                    param_sync.leave_pending()
                    sync.reset()
                # The next step is on the stream that computes, and reads some of the parameters in a forward pass.
                computing.wait_stream(stepping)
                for name in order[:3]:
                    param_sync.wait_for([params[name]])
                    params[name].sum()
            # Nothing is under way when what it writes to is gone.
            param_sync.finish()


def test_a_bucket_is_inside_its_node_while_the_one_before_is_between_nodes(machine, monkeypatch):
    begun, waits_for = [], []
    collective = machine.collective

    def begin(reads, writes, group):
        work = collective(reads, writes, group)
        begun.append(group.name)
        if group.name == "inside":
            across = [stream for stream in work._known if stream.name.endswith("name='across', size=2, rank=0)")]
            waits_for.append(sum(work._known[stream] for stream in across))
        return work

    monkeypatch.setattr(machine, "collective", begin)
    with machine, torch.no_grad():
        sync, _, params, _ = make_syncs(1, "cuts", "levels")
        for name in params:
            params[name].grad = torch.ones(SHAPES[name])
            sync.accumulate(name, launch=False)
        sync.reduce()
    levels = [name for name in begun if name in ("inside", "across")]
    assert len(waits_for) == sum(bucket.ep_size == 1 for bucket in sync.layout.buckets) > 3
    assert levels[:2 * len(waits_for)] == ["inside", "across"] * len(waits_for)
    # Bucket k has the memory of bucket k - 2, so it waits for that one, and for no later one.
    assert waits_for == [max(0, bucket - 1) for bucket in range(len(waits_for))]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["even", "cuts"])
def test_a_bucket_is_copied_while_the_one_before_travels(machine, stage, kind, monkeypatch):
    over, collective = [], machine.collective

    def begin(reads, writes, group):
        known = [done for stream, done in machine.current.knows.items() if "name='all'" in stream.name]
        work = collective(reads, writes, group)
        if group.name == "all":
            over.append(max(known, default=0))
        return work

    with machine, torch.no_grad():
        sync, _, params, _ = make_syncs(stage, kind, "native")
        monkeypatch.setattr(machine, "collective", begin)
        for name in params:
            params[name].grad = torch.ones(SHAPES[name])
        for name in params:
            sync.accumulate(name, launch=True)
    # Those of experts, which come last, are another group's. Bucket k has the memory of bucket k - 2.
    number = sum(bucket.ep_size == 1 for bucket in sync.layout.buckets)
    assert number > 3 and over == [max(0, bucket - 1) for bucket in range(number)]


@pytest.mark.parametrize("most", [1, None])
def test_buckets_behind_a_parameter_without_a_gradient_wait_for_the_end_of_the_pass(machine, most):
    with machine, torch.no_grad():
        sync, _, params, _ = make_syncs(2, "mixed", "native", max_waiting=most)
        unused, alive, machine.current.waits = sync.layout.buckets[1].slots[0].name, {}, 0
        for bucket in sync.layout.buckets:
            for name in (slot.name for slot in bucket.slots if slot.name != unused):
                params[name].grad = torch.ones(SHAPES[name])
                alive[name] = bucket.index, weakref.ref(params[name].grad)
                sync.accumulate(name, launch=True)
        assert sync._scheduler.ready == sync._scheduler.launched == 1 and len(sync.layout.buckets) > 2
        assert all(ref() is not None for index, ref in alive.values() if index) and not machine.current.waits
        sync.reduce()
        assert not any(ref() is not None for _, ref in alive.values())


@pytest.mark.parametrize("how", ["native", "levels"])
@pytest.mark.parametrize("most", [1, 3, None])
def test_gradients_wait_up_to_a_bound(machine, most, how, monkeypatch):
    """Beyond it computation waits, and has their memory again at once: the allocator hears of no other stream."""
    told = []
    record_stream = machine.record_stream
    monkeypatch.setattr(machine, "record_stream", lambda *args: told.append(True) or record_stream(*args))
    computing = machine.current
    with machine, torch.no_grad():
        sync, _, params, _ = make_syncs(2, "mixed", how, max_waiting=most)
        for _ in range(2):
            alive, computing.waits, told[:] = {}, 0, []
            for bucket in sync.layout.buckets:
                for name in (slot.name for slot in bucket.slots):
                    params[name].grad = torch.ones(SHAPES[name])
                    alive[name] = bucket.index, weakref.ref(params[name].grad)
                    sync.accumulate(name, launch=True)
                held = {index for index, ref in alive.values() if ref() is not None}
                assert held == (set(range(max(0, bucket.index + 1 - most), bucket.index + 1)) if most else set())
                assert computing.waits == (max(0, bucket.index + 1 - most) if most else 0)
                assert bool(told) is not bool(most)
            ending = machine.Stream()
            ending.wait_stream(computing)
            with machine.stream(ending):
                sync.reduce()
            assert not any(ref() is not None for _, ref in alive.values())
            computing.wait_stream(ending)


def test_memory_of_buckets_is_there_for_the_exchange(machine, monkeypatch):
    with machine, torch.no_grad():
        sync, _, params, _ = make_syncs(1, "cuts", "ordered")
        to_owners, held = sync._transfer.all_to_owners, []

        def exchanging(*args, **kwargs):
            held.append([len(turn._memory) for turn in sync._scheduler._turns])
            to_owners(*args, **kwargs)

        monkeypatch.setattr(sync._transfer, "all_to_owners", exchanging)
        for name in params:
            params[name].grad = torch.ones(SHAPES[name])
            sync.accumulate(name, launch=True)
        assert all(turn._memory for turn in sync._scheduler._turns)
        sync.reduce()
    assert held == [[0, 0]]


class Cuts:
    """Cuts of one rank, and the stream on which DeepSpeed fetches them."""

    def __init__(self, layout, stream):
        self.cuts = {slot.name: torch.zeros(bucket.cut_of(slot)) for bucket in layout.buckets for slot in bucket.slots}
        self.of = self.cuts.__getitem__
        self.take_note = streams.SideStream(stream).follow

    def release(self):
        """Nothing is whole, or stays so."""

    fetch_persistent = release


def a_layout_of_cuts(shapes, bucket_numel, *, dtype="float32", alignment=4, **options):
    specs = [ParamSpec(name, shape, dtype, len(shape) == 2, 10 * (len(shape) == 2)) for name, shape in shapes.items()]
    return plan_layout(specs, 4, bucket_numel=bucket_numel, alignment=alignment, stage=3, **options)


@pytest.mark.parametrize("follows", [True, False])
def test_cuts_are_fetched_after_updates_have_written_them(machine, follows):
    layout = a_layout_of_cuts(SHAPES, 60)
    with machine, torch.no_grad():
        computing, fetching = machine.current, machine.Stream()
        values = new_shards(layout, 1, torch.device("cpu"), lambda bucket: bucket.dtype)
        cuts = Cuts(layout, fetching)
        if not follows:
            cuts.take_note = cuts.release
        sync = CutSync(values, cuts, groups={1: Group("all", 4, 1)}, ep_size={})
        fetching.wait_stream(computing)

        def step():
            for tensor in values.tensors:
                tensor.add_(1)
            for bucket in reversed(layout.buckets):
                sync.launch(bucket.index)
            sync.finish()
            with machine.stream(fetching):
                fetched = [cut.clone() for cut in cuts.cuts.values()]
            computing.wait_stream(fetching)
            del fetched

        if follows:
            step(), step()
        else:
            with pytest.raises(Race, match="reads what"):
                step()


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "param_wire": "mxfp8", "alignment": 512}])
def test_cuts_in_host_memory_are_copied_beside_updates(machine, options, monkeypatch):
    shapes = {"d": (70,), **{f"w{number}": (8, 8) for number in range(16)}}
    layout, unpack, copies, arrived = a_layout_of_cuts(shapes, 256, **options), torch._foreach_copy_, [], []

    def copying(places, parts, non_blocking):
        copies.append((machine.current, non_blocking))
        arrived.append(StorageWeakRef(parts[0].untyped_storage()))
        unpack(places, parts, non_blocking)

    def begin(out, sent, *, output_split_sizes, input_split_sizes, group, async_op):
        assert all(memory.expired() for memory in arrived), "more rounds have memory than with cuts on the device"
        return machine.collective([sent], [out], group)

    monkeypatch.setattr(transfer, "_on_host", lambda cuts, beside: True)
    monkeypatch.setattr(torch, "_foreach_copy_", copying)
    monkeypatch.setattr(comm.dist, "all_to_all_single", begin)
    with machine, torch.no_grad():
        computing = machine.current
        values = new_shards(layout, 1, torch.device("cpu"), lambda bucket: bucket.dtype)
        cuts = Cuts(layout, machine.Stream())
        sync = CutSync(values, cuts, groups={1: Group("all", 4, 1)}, ep_size={})
        for step in range(1, 3):
            for bucket in reversed(layout.buckets):
                values.tensors[bucket.index].add_(1)
                made = len(copies)
                sync.launch(bucket.index)
                if len(copies) > made and bucket.index:
                    side = copies[-1][0]
                    assert not computing.has_seen(side, side.done)
            assert machine.host.waits == step - 1
            sync.finish()
            assert machine.host.waits == step and all(memory.expired() for memory in arrived)
            with machine.stream(machine.host):
                for cut in cuts.cuts.values():
                    cut.clone()
        assert set(copies) == {(side, True)} and computing is not side
        assert len(copies) == 2 * len(sync._transfer.rounds) > 6


def test_a_race_is_seen():
    machine = Machine()
    other = machine.Stream()
    with machine:
        values = torch.ones(8)
        with machine.stream(other), pytest.raises(Race, match="reads what"):
            values[2:4].sum()
        other.wait_stream(machine.current)
        with machine.stream(other):
            values[2:4].sum()
        values[:2].zero_()
        with pytest.raises(Race, match="writes what"):
            values[3:].zero_()


@pytest.mark.parametrize("how", ["waited for", "told", "neither"])
def test_memory_that_another_stream_still_reads_is_not_free(how):
    machine = Machine()
    other = machine.Stream()
    with machine:
        values = torch.ones(8)
        other.wait_stream(machine.current)
        with machine.stream(other):
            values.sum()
        if how == "waited for":
            machine.current.wait_stream(other)
        elif how == "told":
            machine.record_stream(values, other)
        del values
        if how == "neither":
            with pytest.raises(Race, match="is free"):
                torch.ones(2)
        else:
            torch.ones(2)


def test_memory_that_a_collective_reads_or_writes_waits_for_it():
    machine = Machine()
    with machine:
        sent, out = torch.ones(4), torch.empty(4)
        work = machine.collective([sent], [out], "all")
        sent.sum()
        for touch in (sent.zero_, out.sum):
            with pytest.raises(Race, match="a collective"):
                touch()
        del sent
        work.wait()
        out.sum()
