"""Values from owners to the cuts of all ranks, and back, played without ranks."""

import math
import random
from functools import partial

import pytest
import torch

from ds_layerwise.plan.forecast.memory import memory_bytes, owner_dtype
from ds_layerwise.plan.forecast.sent import sent_bytes
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.plan.layout.transfer_plan import begun_backwards
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, new_shards
from ds_layerwise.ranks.sync import cut_sync, transfer
from ds_layerwise.ranks.sync.cut_sync import CutSync
from ds_layerwise.ranks.sync.transfer import Transfer
from tests.support.live_memory import LiveMemory
from tests.support.microscaling import weights_of
from tests.support.rooms import rooms
from tests.support.transports import held_at_a_time

pytestmark = rooms("cut_sync", "transfer", "transfer_plan", "buffers", "memory", "sent")


def some_specs(seed):
    """Matrices and vectors of any size, some with fewer elements than there are ranks, in two dtypes."""
    draw, specs = random.Random(seed), []
    for number in range(draw.randint(2, 12)):
        dtype, whole = draw.choice(["float32", "bfloat16"]), number == 0 or draw.random() < 0.7
        shape = (draw.randint(1, 9), draw.randint(1, 9)) if whole else (draw.randint(1, 40), )
        specs.append(ParamSpec(f"p{number}", shape, dtype, whole, work=math.prod(shape) if whole else 0))
    return specs


class Cuts:
    """The cuts of one rank: whole parameters have memory of their own, poisoned behind their end."""

    def __init__(self, layout, rank, values):
        self.cuts, self.released = {}, 0
        for bucket in layout.buckets:
            sizes = [bucket.cut_of(slot) for slot in bucket.slots]
            memory = torch.full((sum(sizes), ), torch.nan, dtype=DTYPES[bucket.dtype])
            self.cuts.update(zip((slot.name for slot in bucket.slots), memory.split(sizes), strict=True))

    def of(self, name):
        return self.cuts[name]

    def release(self):
        self.released += 1

    def fetch_persistent(self):
        self.released -= 1

    def persistent(self):
        return {}

    def take_note(self):
        self.noted = True


class Ranks:
    """All ranks in one process: what each of them sends arrives when all have sent it."""

    def __init__(self, layout, monkeypatch):
        self.layout, self.sent, self.rank = layout, {}, 0
        monkeypatch.setattr(cut_sync.comm, "all_to_all", self.all_to_all)
        monkeypatch.setattr(cut_sync.comm, "size_of", lambda group: layout.world_size)
        dtype_of = partial(owner_dtype, master_dtype="float32", host_ratio=0)
        self.values = [new_shards(layout, rank, torch.device("cpu"), dtype_of) for rank in range(layout.world_size)]
        self.cuts = [Cuts(layout, rank, values) for rank, values in enumerate(self.values)]
        self.syncs = [CutSync(self.values[rank], self.cuts[rank], groups={1: None}, ep_size={})
                      for rank in range(layout.world_size)]
        self.calls = 0

    def all_to_all(self, out, sent, *, group, received, sent_to):
        assert sum(received) == out.numel() and sum(sent_to) == sent.numel() and sent.dtype == out.dtype
        self.calls += self.rank == 0
        self.sent.setdefault(self.rank, []).append((out, sent.clone().split(list(sent_to)), received))
        return comm.Pending()

    def on_each(self, do):
        for self.rank in range(self.layout.world_size):
            do(self.rank)
        for number in range(len(self.sent[0])):
            for rank in range(self.layout.world_size):
                out, _, received = self.sent[rank][number]
                parts = [self.sent[other][number][1][rank] for other in range(self.layout.world_size)]
                assert [part.numel() for part in parts] == list(received)
                out.copy_(torch.cat(parts))
        self.sent = {}


def whole_values(layout):
    return {slot.name: torch.randint(-99, 99, (slot.numel, )).to(DTYPES[bucket.dtype])
            for bucket in layout.buckets for slot in bucket.slots if bucket.whole}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(6))
def test_every_rank_gets_its_cut_and_nothing_of_another(seed, world_size, monkeypatch):
    if seed % 2:
        monkeypatch.setattr(transfer, "_on_host", lambda cuts, beside: True)
    layout = plan_layout(some_specs(seed), world_size, bucket_numel=60, alignment=4, stage=3)
    ranks, values = Ranks(layout, monkeypatch), whole_values(layout)
    for rank, shards in enumerate(ranks.values):
        for bucket in layout.buckets:
            shards.tensors[bucket.index].fill_(torch.nan)
            if bucket.whole:
                for piece in bucket.pieces(rank):
                    # A master rounds to its weight.
                    between = shards.piece(piece.name).dtype != values[piece.name].dtype
                    shards.piece(piece.name).copy_(values[piece.name]).mul_(1 + between * 2**-12)
    order = [bucket.index for bucket in reversed(layout.buckets)]
    if seed % 2:
        order.reverse()
    with monkeypatch.context() as patch:
        # Nothing has arrived before all ranks have sent it.
        patch.setattr(Transfer, "_end", lambda transfer, *, but: None)
        ranks.on_each(lambda rank: [ranks.syncs[rank].launch(index) for index in order])
    assert ranks.calls == len(begun_backwards(layout.buckets, by_param=True))
    for rank, sync in enumerate(ranks.syncs):
        sync.finish()
        assert not ranks.cuts[rank].released
        for name, value in values.items():
            cut = ranks.cuts[rank].of(name)
            own = value[rank * len(cut):][:len(cut)]
            assert torch.equal(cut[:len(own)], own) and not cut[len(own):].any(), "padding is zeros"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_cuts_get_masters_in_mxfp8_and_travel_in_it_if_they_are_whole_groups(world_size, monkeypatch):
    draw, specs = random.Random(3), []
    for number in range(12):
        shape = (draw.choice([1, 3, 8]), draw.choice([100, 512 * world_size]))
        specs.append(ParamSpec(f"p{number}", shape, draw.choice(["bfloat16", "bfloat16", "float32"]), True, work=1))
    layout = plan_layout(specs, world_size, bucket_numel=1, alignment=512, stage=3, param_wire="mxfp8")
    ranks, values = Ranks(layout, monkeypatch), {spec.name: torch.randn(spec.numel) for spec in specs}
    for rank, shards in enumerate(ranks.values):
        for piece in layout.pieces(rank):
            shards.piece(piece.name).copy_(values[piece.name])
    sent = dict.fromkeys(range(world_size), 0)
    kinds = set()

    def launch(rank):
        for bucket in reversed(layout.buckets):
            ranks.syncs[rank].launch(bucket.index)
        for _, parts, _ in ranks.sent[rank]:
            sent[rank] += sum(part.nbytes for part in parts) - parts[rank].nbytes
            kinds.add(parts[rank].dtype)

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "_end", lambda transfer, *, but: None)
        ranks.on_each(launch)
    assert kinds == {torch.uint8, torch.bfloat16, torch.float32}
    planned = sent_bytes(layout, wires=[bucket.dtype for bucket in layout.buckets], reduction="native", stage=3)
    assert [*sent.values()] == [sum(of_dtype) for of_dtype in zip(*(each.parameters for each in planned.values()),
                                                                  strict=True)]
    for rank, sync in enumerate(ranks.syncs):
        sync.finish()
        for spec in specs:
            cut = ranks.cuts[rank].of(spec.name)
            value = values[spec.name]
            own = (weights_of(value) if spec.dtype == "bfloat16" else value)[rank * len(cut):][:len(cut)]
            assert torch.equal(cut[:len(own)], own) and not cut[len(own):].any(), spec


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_owners_get_what_lies_in_the_cuts(seed, world_size, monkeypatch):
    layout = plan_layout(some_specs(seed), world_size, bucket_numel=60, alignment=4, stage=3)
    ranks, values = Ranks(layout, monkeypatch), whole_values(layout)
    for rank, cuts in enumerate(ranks.cuts):
        for name, value in values.items():
            own = value[rank * len(cuts.of(name)):][:len(cuts.of(name))]
            cuts.of(name)[:len(own)] = own
    pending = []
    ranks.on_each(lambda rank: pending.extend(
        sync._transfer.to_owners(each)
        for sync in [ranks.syncs[rank]] for each in sync._transfer.rounds))
    for each in pending:
        each.wait()
    for rank, shards in enumerate(ranks.values):
        for bucket in layout.buckets:
            for piece in bucket.pieces(rank) if bucket.whole else ():
                start = piece.start - bucket.shard(rank)[0]
                assert torch.equal(shards.tensors[bucket.index][start:start + piece.numel], values[piece.name])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_bytes_sent_and_held_are_those_of_the_plan(world_size, monkeypatch):
    specs = some_specs(3)
    layout = plan_layout(specs, world_size, bucket_numel=60, alignment=4, stage=3)
    ranks = Ranks(layout, monkeypatch)
    monkeypatch.setattr(cut_sync.comm, "all_to_all", lambda *args, **kwargs: comm.Pending())
    most = held_at_a_time(begun_backwards(layout.buckets, by_param=True), world_size, pending=1)
    for rank, sync in enumerate(ranks.syncs):
        for round_ in sync._transfer.rounds:
            memory = LiveMemory(held=ranks.values[rank].tensors)
            there = memory.now()
            with memory:
                sync._transfer.to_cuts(round_)
            assert memory.peak - there <= most[rank]
    cut = {spec.name: -(-spec.numel // world_size) for spec in specs}
    wires = [bucket.dtype for bucket in layout.buckets]
    of_stages = [sent_bytes(layout, wires=wires, reduction="native", stage=stage) for stage in (2, 3)]
    for dtype in layout.buffers:
        reduced, sent = (each[dtype] for each in of_stages)
        size = DTYPES[dtype].itemsize * (world_size - 1)
        assert sum(sent.parameters) == size * sum(
            cut[spec.name] for spec in specs if spec.dtype == dtype and spec.whole)
        fetched = size * sum(cut[spec.name] for spec in specs if spec.dtype == dtype)
        assert [gradients + 2 * fetched for gradients in reduced.gradients] == [*sent.gradients]
    held = memory_bytes(layout, state_bytes=lambda name, numel: 0, stage=3)
    for rank, memory in enumerate(held):
        weights = sum(tensor.nbytes for tensor in ranks.values[rank].weights)
        shards = sum(tensor.nbytes for tensor in ranks.values[rank].tensors)
        cuts = sum(ranks.cuts[rank].of(slot.name).nbytes for bucket in layout.buckets if bucket.whole
                   for slot in bucket.slots)
        assert memory.params == weights + cuts
        split = sum(4 * numel for bucket in layout.buckets if (bucket.dtype, bucket.whole) == ("bfloat16", False)
                    for owner, numel in bucket.non_empty_shards() if owner == rank)
        assert memory.total == shards + cuts + split
