"""Ranks exchange sums and parameters between cuts and owners, played without ranks."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_layerwise.plan.forecast.memory import sums_bytes
from ds_layerwise.plan.forecast.sent import sent_bytes
from ds_layerwise.plan.layout.layout import Layout, Slot
from ds_layerwise.plan.layout.transfer_plan import begun_backwards, deal, seen_by
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.ranks.sync.transfer import Transfer
from tests.support.live_memory import LiveMemory, bytes_of
from tests.support.rooms import rooms
from tests.support.transports import bucket_of, held_at_a_time, in_cuts

pytestmark = rooms("transfer", "transfer_plan")


def a_layout(seed, world_size=6):
    """Buckets with shards of any length, of experts and others, of two dtypes; all that may be are in cuts."""
    draw, ends, buckets = random.Random(seed), {}, []
    for index in range(draw.randint(1, 7)):
        ep_size, dtype = draw.choice([1, 1, 2]), draw.choice(["float32", "float32", "bfloat16"])
        numels = [draw.choice([0, 0, 4, 8, 40]) for _ in range(world_size // ep_size)]
        numels[draw.randrange(len(numels))] += 4
        start, slots = ends.get(dtype, 0), []
        for number, numel in enumerate(numels):
            if numel:
                slots.append(Slot(f"{index}.{number}", start + sum(numels[:number]), numel))
        buckets.append(bucket_of(index, dtype, True, start, tuple(numels), tuple(slots), ep_size))
        ends[dtype] = buckets[-1].stop
    return in_cuts(Layout("balanced", world_size, 4, tuple(buckets)))


def rounds_of(buckets, rank):
    return seen_by(rank, deal(buckets))


def a_transfer(deals, rank, shard_of, cut_of, group_of={1: 1, 2: 2}.get, **kwargs):
    return Transfer(rank, deals, group_of=group_of, cut_of=cut_of, shard_of=shard_of, device=torch.device("cpu"),
                    **kwargs)


class Ranks:
    """All ranks in one process, and an all-to-all between those that hold the same experts."""

    def __init__(self, layout, monkeypatch):
        self.layout, self.sent = layout, {}
        monkeypatch.setattr(comm, "all_to_all", self.all_to_all)
        monkeypatch.setattr(comm, "rank_of", lambda group: 0)
        monkeypatch.setattr(comm, "size_of", lambda group: 2)

    def transfers(self, memory):
        """Return the transfers of all ranks, whose shards and cuts are in ``memory``."""
        return [a_transfer(deal(self.layout.buckets), rank, shards.__getitem__, cuts.__getitem__)
                for rank, (shards, cuts) in enumerate(memory)]

    def all_to_all(self, out, sent, *, group, received, sent_to):
        assert sum(received) == out.numel() and sum(sent_to) == sent.numel() and sent.dtype == out.dtype
        self.sent[self.rank] = out, sent.clone().split(sent_to), received, group
        return None

    def deliver(self):
        for rank, (out, _, received, ep_size) in self.sent.items():
            holders = self.layout.world_size // ep_size
            parts = [self.sent[holder * ep_size + rank % ep_size][1][rank // ep_size] for holder in range(holders)]
            assert [part.numel() for part in parts] == list(received)
            out.copy_(torch.cat(parts))
        self.sent = {}


def memory_of(layout, rank, shared):
    """Return this rank's shards and cuts, poisoned: memory of their own, or the places in that of the bucket."""
    shards, cuts = [], {}
    for bucket in layout.buckets:
        (start, stop), holder = bucket.shard(rank), rank // bucket.ep_size
        whole = torch.full((bucket.numel,), torch.nan, dtype=DTYPES[bucket.dtype])
        shard = whole[start - bucket.start:stop - bucket.start]
        cut = whole[holder * bucket.cut_numel:(holder + 1) * bucket.cut_numel]
        shards.append(shard if shared else shard.clone())
        cuts[bucket.index] = cut if shared else cut.clone()
    return shards, cuts


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_owners_get_their_shards_and_cuts_get_them_back(seed, shared, monkeypatch):
    layout = a_layout(seed)
    ranks, size = Ranks(layout, monkeypatch), layout.world_size
    draw = torch.Generator().manual_seed(seed)
    # Neighbours differ, and bfloat16 holds each exactly.
    values = {(bucket.index, expert): torch.randint(-99, 99, (bucket.numel,), generator=draw).to(DTYPES[bucket.dtype])
              for bucket in layout.buckets for expert in range(bucket.ep_size)}

    def wanted(bucket, rank, first, last):
        return values[bucket.index, rank % bucket.ep_size][first:last]

    def cut(bucket, rank):
        first = rank // bucket.ep_size * bucket.cut_numel
        return wanted(bucket, rank, first, first + bucket.cut_numel)

    there, back = ([memory_of(layout, rank, shared) for rank in range(size)] for _ in range(2))
    more = [([torch.ones_like(shard) for shard in shards], cuts) for shards, cuts in there]
    numbers = {len(transfer.rounds) for transfer in ranks.transfers(there)}
    assert len(numbers) == 1

    def play(memory, begin):
        pending = []
        for rank, transfer in enumerate(ranks.transfers(memory)):
            ranks.rank = rank
            pending.append(begin(transfer, transfer.rounds[number]))
            pending[-1]._works = ()
        ranks.deliver()
        for each in pending:
            each.wait()

    for rank in range(size):
        for bucket in layout.buckets:
            there[rank][1][bucket.index].copy_(cut(bucket, rank))
            first, last = (place - bucket.start for place in bucket.shard(rank))
            back[rank][0][bucket.index].copy_(wanted(bucket, rank, first, last))
    for number in range(numbers.pop()):
        # What is added to first: the other may write to where it reads.
        play(more, lambda transfer, each: transfer.to_owners(each, add=True))
        play(there, Transfer.to_owners)
        play(back, Transfer.to_cuts)
    for rank in range(size):
        for bucket in layout.buckets:
            first, last = (place - bucket.start for place in bucket.shard(rank))
            shard = wanted(bucket, rank, first, last)
            assert torch.equal(there[rank][0][bucket.index], shard)
            assert torch.equal(more[rank][0][bucket.index], shard + 1)
            assert torch.equal(back[rank][1][bucket.index], cut(bucket, rank))


def test_elements_that_stay_are_left_out_unless_they_part_those_that_arrive():
    slots = (Slot("a", 0, 20), Slot("b", 20, 4), Slot("c", 24, 12))
    bucket, = in_cuts(Layout("balanced", 3, 4, (bucket_of(0, "float32", True, 0, (20, 4, 12), slots),))).buckets
    # Cuts of 12: rank 0 has 12 of its 20, the others all of theirs.
    of_ranks = [rounds_of([bucket], rank)[0] for rank in range(3)]
    assert [each.parts for each in of_ranks] == [(0, 12, 8), (0, 4, 0), (0, 12, 0)]
    assert [tuple(each.by_holder) for each in of_ranks] == [(0, 8, 0), (0, 0, 0), (0, 0, 0)]
    assert [tuple(each.by_owner) for each in of_ranks] == [(0, 0, 0), (8, 0, 0), (0, 0, 0)]
    slots = (Slot("a", 0, 8), Slot("b", 8, 20), Slot("c", 28, 8))
    bucket, = in_cuts(Layout("balanced", 3, 4, (bucket_of(0, "float32", True, 0, (8, 20, 8), slots),))).buckets
    # 4 on each side of 12 are copied rather than those.
    middle = rounds_of([bucket], 1)[0]
    assert (middle.parts, tuple(middle.by_holder), middle.stay[0][:3]) == ((4, 12, 4), (4, 0, 4), (0, 0, 12))
    slots = (Slot("a", 0, 4), Slot("b", 4, 32))
    bucket, = in_cuts(Layout("balanced", 3, 4, (bucket_of(0, "float32", True, 0, (4, 32, 0), slots),))).buckets
    # 8 of rank 0's cut and 12 of rank 2's are on both sides of the 12 that rank 1 has.
    parted = rounds_of([bucket], 1)[0]
    assert (parted.parts, tuple(parted.by_holder), parted.stay) == ((32, 0, 0), (8, 12, 12), [])


@pytest.mark.parametrize("seed", range(10))
def test_ranks_agree_on_rounds(seed):
    layout = a_layout(seed)
    of_ranks = [rounds_of(layout.buckets, rank) for rank in range(layout.world_size)]
    for of_all in zip(*of_ranks, strict=True):
        assert len({(each.deal.ep_size, each.deal.dtype, each.deal.buckets) for each in of_all}) == 1
        # What goes to all owners in one round is one tensor, and one group's.
        kinds = {(layout.buckets[index].ep_size, layout.buckets[index].dtype) for index in of_all[0].deal.buckets}
        assert kinds == {(of_all[0].deal.ep_size, of_all[0].deal.dtype)}
    for rounds in of_ranks:
        owned = [each.own for each in rounds if each.own is not None]
        assert len(set(owned)) == len(owned)


def test_a_bucket_that_is_not_in_cuts_takes_no_part():
    layout = Layout("balanced", 2, 4, (bucket_of(0, "float32", True, 0, (8, 8), (Slot("a", 0, 4), Slot("b", 8, 8))),))
    assert rounds_of(layout.buckets, 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_ranks_send_the_predicted_bytes(seed):
    layout = a_layout(seed)
    for dtype, sent in sent_bytes(layout, wires=["float32"] * len(layout.buckets), reduction="ordered",
                                  stage=1).items():
        buckets = [bucket for bucket in layout.buckets if bucket.dtype == dtype]
        cuts = sum((bucket.holders - 1) * bucket.cut_numel for bucket in buckets)
        for rank in range(layout.world_size):
            there = back = 0
            for each in rounds_of(buckets, rank):
                own = rank // each.deal.ep_size
                there += sum(each.by_owner) - each.by_owner[own]
                back += sum(each.by_holder) - each.by_holder[own]
            assert sent.gradients[rank] == 4 * (cuts + there)
            assert sent.parameters[rank] == DTYPES[dtype].itemsize * (cuts + back)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_make_room_for_shards_as_planned(seed, monkeypatch):
    layout = a_layout(seed)
    Ranks(layout, monkeypatch)
    monkeypatch.setattr(comm, "all_to_all", lambda *args, **kwargs: SimpleNamespace(wait=lambda: None))
    most = []
    for rank in range(layout.world_size):
        shards, cuts = memory_of(layout, rank, shared=False)
        cuts = {index: cut.float() for index, cut in cuts.items()}
        held = [4 * sum(cut.numel() for cut in cuts.values())]
        there = []

        def shard(index):
            there.append(shards[index].float())
            held.append(4 * sum(memory.numel() for memory in [*there, *cuts.values()]))
            return there[-1]

        a_transfer(deal(layout.buckets, lambda bucket: "float32"), rank, shard, cuts.__getitem__,
                   then=lambda indices: [cuts.pop(index) for index in indices]).all_to_owners()
        assert not cuts and len(there) == sum(bool(each.numel()) for each in shards)
        most.append((held[0], max(held)))
    found = sums_bytes(layout, stage=2, reduction="ordered", wires=["float32"] * len(layout.buckets), stored_as={})
    assert found[:2] == tuple(map(max, zip(*most, strict=True)))
    assert found.update == max(4 * sum(bucket.shard(rank)[1] - bucket.shard(rank)[0] for bucket in layout.buckets)
                               for rank in range(layout.world_size))


@pytest.mark.parametrize("sums", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(20))
def test_the_memory_of_an_exchange_is_known_to_the_byte(seed, sums, monkeypatch):
    layout = a_layout(seed)
    # Nothing arrives: what counts is who has memory when.
    monkeypatch.setattr(comm, "all_to_all", lambda *args, **kwargs: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(comm, "rank_of", lambda group: 0)
    monkeypatch.setattr(comm, "size_of", lambda group: 2)
    monkeypatch.setattr(ParamSync, "_gather", lambda sync, indices: sync._pending.update(
        dict.fromkeys(indices, comm.Pending())))
    wires = {1: Wire(1), 2: Wire(2)}
    there = held_at_a_time(deal(layout.buckets, lambda bucket: sums), layout.world_size, owners_have="float32")
    back = held_at_a_time(begun_backwards(layout.buckets), layout.world_size)
    assert any(bucket.transport == "cuts" for bucket in layout.buckets) == any(there) == any(back)
    for rank in range(layout.world_size):
        shards, cuts = memory_of(layout, rank, shared=False)
        shards = [shard.float() for shard in shards]
        cuts = {index: cut.to(DTYPES[sums]) for index, cut in cuts.items()}
        held = [*shards, *cuts.values()]
        with LiveMemory(held) as memory:
            a_transfer(deal(layout.buckets, lambda bucket: sums), rank, shards.__getitem__, cuts.__getitem__,
                       lambda ep_size: wires[ep_size].group).all_to_owners()
        assert memory.peak - bytes_of(held) == there[rank]
        values = FlatBuffer(layout, torch.device("cpu"))
        params = {slot.name: nn.Parameter(torch.zeros(1)) for bucket in layout.buckets for slot in bucket.slots}
        with torch.no_grad(), LiveMemory(values.tensors) as memory:
            sync = ParamSync(rank, params, values, wires=wires)
            for index in reversed(range(len(layout.buckets))):
                sync.launch(index)
            sync.finish()
        assert memory.peak - bytes_of(values.tensors) == back[rank]
