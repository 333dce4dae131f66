"""Buckets travel: every way, both ways to add up, one level and two, against sums made without ranks."""

import functools
from itertools import product

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from ds_layerwise.plan.layout.layout import Slot
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.sync import bucket_transfers
from ds_layerwise.ranks.sync.bucket_transfers import make_wires
from tests.support import internals, transports
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, assert_same_on_all_ranks, ds_config, start, train_engine, weights
from tests.support.transports import plan_in_cuts

pytestmark = rooms("bucket_transfers", "transfer", "nodes", "comm")

DTYPES = (torch.float32, torch.bfloat16)


def bucket_of(numels, transport):
    slots = tuple(Slot(f"p{rank}", sum(numels[:rank]), numel) for rank, numel in enumerate(numels) if numel)
    return transports.bucket_of(0, "float32", True, 0, numels, slots, transport=transport)


def buckets_of(size):
    none = [0] * (size - 2)
    return [bucket_of([6] * size, "even"), bucket_of([0, 5 * size, *none], "cuts"),
            bucket_of([3, 5 * size - 3, *none], "cuts")]


def span(bucket, rank, size):
    """The range of the bucket that ``rank`` gets, and gives."""
    if bucket.transport == "cuts":
        return rank * bucket.cut_numel, (rank + 1) * bucket.cut_numel
    return bucket.shard(rank)


def in_rank_order(rows):
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows:
        total += row
    return total


def wires_of(per_node, native=False, device="cpu"):
    where = [r // per_node for r in range(dist.get_world_size())]
    return make_wires({1: None}, where, native=native, device=torch.device(device))[1]


def rows_of(bucket, seed, dtype, draw=torch.randn):
    """A row of the bucket's values for each rank to give."""
    shape = (dist.get_world_size(), bucket.numel)
    return draw(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole_numbers(*shape, generator):
    return torch.randint(-9, 9, shape, generator=generator)


def summed(wire, bucket, rows, divide_by, *, in_place=False):
    """This rank's part of the sum of ``rows``, of which each rank gives one, and where it lies in the bucket."""
    rank, size = dist.get_rank(), dist.get_world_size()
    memory, (start, stop) = rows[rank].clone(), span(bucket, rank, size)
    out = memory[start:stop] if in_place and rows.dtype == torch.float32 else torch.full((stop - start,), torch.nan)
    wire.reduce(memory, out, divide_by=divide_by, wire_dtype=rows.dtype, turn=Turn(memory.device)).wait()
    return out, slice(start, stop)


def groups_of_calls(monkeypatch, *names):
    """A list of the groups of calls to these functions of ``comm``, in order, which grows."""
    groups = []
    for name in names:
        monkeypatch.setattr(comm, name, functools.partial(
            lambda original, out, some, *, group: groups.append(group) or original(out, some, group=group),
            getattr(comm, name)))
    return groups


class TestReduce(DistributedTest):
    world_size = [2, 3, 4]
    thorough_on = ()

    def test_ordered_sums_are_made_in_float32_in_the_order_of_ranks(self):
        size = dist.get_world_size()
        for per_node, dtype in product((1, 2, 4), DTYPES):
            wire, levels = wires_of(per_node), 1 < per_node < size and not size % per_node
            assert (wire.inside is not None) == levels
            for seed, (bucket, in_place) in enumerate(product(buckets_of(size), (False, True))):
                rows = rows_of(bucket, seed, dtype)
                out, mine = summed(wire, bucket, rows, 3.0, in_place=in_place)
                if levels:
                    rows = torch.stack([in_rank_order(rows[first:first + per_node]).to(dtype)
                                        for first in range(0, size, per_node)])
                assert torch.equal(out, (in_rank_order(rows) / 3.0)[mine])

    def test_native_sums_of_whole_numbers(self):
        for dtype in DTYPES:
            wire = wires_of(2, native=True)
            assert wire.native and wire.inside is None
            for seed, (bucket, in_place) in enumerate(product(buckets_of(dist.get_world_size()), (False, True))):
                rows = rows_of(bucket, seed, dtype, whole_numbers)
                out, mine = summed(wire, bucket, rows, 4.0, in_place=in_place)
                assert torch.equal(out, rows.float().sum(0)[mine] / 4.0)

    def test_float16_overflows_no_earlier_than_the_gradients_of_a_rank(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for native, per_node in ((False, 1), (False, 2), (True, 1)):
            wire = wires_of(per_node, native=native)
            for bucket, value in product(buckets_of(size), (61440.0, -61440.0, 3.0)):
                rows = torch.full((size, bucket.numel), value, dtype=torch.float16)
                out, (start, stop) = summed(wire, bucket, rows, size)[0], span(bucket, rank, size)
                assert torch.equal(out, torch.full_like(out, value))
                if bucket.transport == "cuts" and native:
                    memory = rows[rank]
                    wire.reduce(memory, memory[start:stop], divide_by=1, wire_dtype=torch.float16,
                                turn=Turn(memory.device)).wait()
                    total = memory[start:stop].float() / bucket_transfers.room_in(torch.float16, size)
                    assert torch.equal(total, torch.full_like(total, value * size))

    def test_native_sums_are_ordered_ones_within_rounding(self):
        size = dist.get_world_size()
        for dtype in DTYPES:
            native, ordered = wires_of(2, native=True), wires_of(1)
            for seed, bucket in enumerate(buckets_of(size)):
                rows = rows_of(bucket, seed, dtype)
                (one, mine), (other, _) = (summed(wire, bucket, rows, 4.0) for wire in (native, ordered))
                # Each of the additions rounds once, in the dtype that travels.
                bound = rows.float().abs().sum(0)[mine] / 4 * (size - 1) * torch.finfo(dtype).eps
                assert ((one - other).abs() <= bound).all()

    @pytest.mark.world_size(4)
    def test_two_levels_begin_their_second_in_order_and_when_asked(self):
        wire, rank = wires_of(2), dist.get_rank()
        pending = [wire.reduce(torch.full((24,), float(rank + i)), torch.empty(6), divide_by=1,
                               wire_dtype=torch.float32, turn=Turn(torch.device("cpu"))) for i in range(3)]
        assert all(each.is_chained for each in pending)
        for each in pending:
            each.begin_last()
            assert not each.is_chained
            each.wait()


class Scarce(Turn):
    """Memory of which there is none for one rank when it asks for ``what`` first."""

    def __init__(self, what, rank):
        super().__init__(torch.device("cpu"))
        self.left = {what} if dist.get_rank() == rank else set()

    def empty(self, what, numel, dtype):
        if what in self.left:
            self.left.remove(what)
            raise torch.OutOfMemoryError(what)
        return super().empty(what, numel, dtype)


class TestTwoLevels(DistributedTest):
    world_size = 4

    def test_a_rank_without_memory_begins_again_as_if_it_had_not_begun(self):
        rank, wire = dist.get_rank(), wires_of(2)
        for what in ("sent", "sums", "received"):
            memory, out = torch.full((24,), float(rank), dtype=torch.bfloat16), torch.empty(6)
            turn, failed = Scarce(what, rank=1), 0
            for _ in range(2):
                try:
                    wire.reduce(memory, out, divide_by=1, wire_dtype=torch.bfloat16, turn=turn).wait()
                    break
                except torch.OutOfMemoryError:
                    failed += 1
            assert failed == (rank == 1)
            assert out.tolist() == [6.0] * 6

    def test_ranks_that_need_no_levels_take_part_in_making_them(self):
        """The backend makes the sums of some ranks, as of some stages of a pipeline."""
        rank = dist.get_rank()
        wire = wires_of(2, native=rank >= 2, device="cuda")
        assert (wire.inside is None) == (rank >= 2)
        assert comm.gather_objects(rank, group=None) == [0, 1, 2, 3]


class TestBothDirections(DistributedTest):
    world_size = [2, 3, 4]

    def test_between_nodes_no_group_carries_data_both_ways_between_two_ranks(self, monkeypatch):
        rank, size, calls, all_to_all = dist.get_rank(), dist.get_world_size(), [], comm._all_to_all

        def recorded(out, sent, received, sent_to, group):
            calls.append((group, received, sent_to))
            return all_to_all(out, sent, received, sent_to, group)

        monkeypatch.setattr(comm, "_all_to_all", recorded)
        for per_node, bucket in product((size, 1), buckets_of(size)):
            calls.clear()
            out, _ = summed(wires_of(per_node), bucket, torch.ones(size, bucket.numel), 1)
            assert (out == size).all()
            if per_node == size:
                assert [group for group, *_ in calls] == [None]
                continue
            (one, received, sent_to), (other, received_too, sent_too) = calls
            assert one is None and other is not None and comm.ranks_of(other) == list(range(size))
            assert not any(received[rank + 1:]) and not any(sent_to[:rank])
            assert not any(received_too[:rank + 1]) and not any(sent_too[rank:])
            if bucket.transport == "even":
                # Each of two ranks reads its own where they are.
                wanted = [0 if size == 2 and other == rank else 6 for other in range(size)]
                assert [a + b for a, b in zip(sent_to, sent_too, strict=True)] == wanted


class TestConnect(DistributedTest):
    world_size = 4

    def test_every_group_of_every_level_sends(self, monkeypatch):
        sent = groups_of_calls(monkeypatch, "all_to_all", "all_gather")
        for per_node, groups in ((4, 1), (2, 3), (1, 1)):
            wire = wires_of(per_node)
            sent.clear()
            wire.connect(torch.device("cpu"))
            assert sent == [group for group in (wire.group, wire.inside, wire.across)[:groups] for _ in range(2)]


class TestGather(DistributedTest):
    world_size = [2, 3, 4]

    def check(self, wire):
        rank, size = dist.get_rank(), dist.get_world_size()
        for dtype, (seed, bucket) in product(DTYPES, enumerate(buckets_of(size))):
            wanted = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
            memory, (start, stop) = torch.full_like(wanted, torch.nan), span(bucket, rank, size)
            memory[start:stop] = wanted[start:stop]
            wire.gather(memory).wait()
            assert torch.equal(memory, wanted)

    def test_every_rank_gets_what_each_gives(self, monkeypatch):
        for per_node, broadcasts_up_to in ((1, 8), (2, 8), (4, 8), (4, 0)):
            monkeypatch.setattr(bucket_transfers, "_BROADCASTS_UP_TO", broadcasts_up_to)
            self.check(wires_of(per_node))


class TestTraining(DistributedTest):
    world_size = [2, 4]

    #: Choices of buckets in cuts, which give the same bits.
    TRANSPORTS = {"as planned": None, "all in cuts": lambda bucket: True,
                  "some in cuts": lambda bucket: bucket.index % 2}

    def train(self, monkeypatch, *, transport="as planned", per_node=8, stage=1, bucket_numel=600, **sections):
        only = self.TRANSPORTS[transport]
        with monkeypatch.context() as patch:
            if only is not None:
                plan_in_cuts(patch, only)
            patch.setattr(nodes, "node_of_each_rank", lambda: [r // per_node for r in range(dist.get_world_size())])
            engine = start(Net(odd=True), ds_config(gas=2, clip=5.0, stage=stage, bucket_numel=bucket_numel,
                                                    **sections))
        assert only is None or any(bucket.transport == "cuts" for bucket in engine.optimizer.layout.buckets)
        gradients = []
        train_engine(engine, 3, gas=2, check=lambda step, reduced: gradients.append(reduced))
        engine.optimizer.wait_for_params()
        return engine, weights(engine.module).clone(), gradients

    def check(self, monkeypatch, wanted, gradients, **kwargs):
        engine, found, others = self.train(monkeypatch, **kwargs)
        assert_same_on_all_ranks(engine.module)
        assert torch.equal(found, wanted)
        for step, other in zip(gradients, others, strict=True):
            assert step.keys() == other.keys()
            for name, (first, values) in step.items():
                assert other[name][0] == first and torch.equal(other[name][1], values)
        return engine

    @pytest.mark.parametrize("sections", [
        {}, BF16, {"overlap": False},
        {"layerwise": {"overlap_param_gather": True}}])
    def test_the_same_bits_whatever_transport_buckets_have(self, stage, sections, monkeypatch):
        _, *wanted = self.train(monkeypatch, stage=stage, **sections)
        self.check(monkeypatch, *wanted, stage=stage, transport="all in cuts", **sections)
        # Other buckets have other owners.
        for transport, bucket_numel in (("all in cuts", 10**6), ("some in cuts", 1)):
            _, found, _ = self.train(monkeypatch, stage=stage, transport=transport, bucket_numel=bucket_numel,
                                     **sections)
            assert torch.equal(found, wanted[0])

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("stage, sections", [
        (1, BF16), (2, {}), pytest.param(1, {}, marks=pytest.mark.thorough),
        pytest.param(2, BF16, marks=pytest.mark.thorough)])
    def test_native_and_two_levels_on_whole_numbers(self, stage, sections, monkeypatch):
        _, *wanted = self.train(monkeypatch, stage=stage, **sections)
        for transport, per_node, layerwise in product(("as planned", "some in cuts"), (2, 1),
                                                ({"reduction": "native"}, {"overlap_param_gather": True})):
            self.check(monkeypatch, *wanted, transport=transport, per_node=per_node, stage=stage, layerwise=layerwise,
                       **sections)

    @pytest.mark.world_size(3)
    def test_native_sums_go_on_as_they_are_and_are_divided_in_float32(self, stage, monkeypatch):
        _, *wanted = self.train(monkeypatch, stage=stage, **BF16)
        engine = self.check(monkeypatch, *wanted, transport="all in cuts", stage=stage,
                            layerwise={"reduction": "native"}, **BF16)
        assert {each.deal.dtype for each in internals.exchanges(engine)[0].rounds} == {
            "bfloat16" if stage == 1 else "float32"}

    @pytest.mark.world_size(4)
    def test_engines_one_after_the_other_make_no_more_groups(self, monkeypatch):
        """torch lets go of none, each with threads and connections of its own, before the process group's end."""
        numbers, weights_of = [], []
        for _ in range(3):
            engine, found, _ = self.train(monkeypatch, per_node=2)
            numbers.append(len(torch.distributed.distributed_c10d._world.pg_map))
            weights_of.append(found)
            engine.destroy()
        # There is one in each node, one between nodes, and one that sends the other way.
        assert numbers == [numbers[0]] * 3 and numbers[0] >= 4
        engines = [self.train(monkeypatch, per_node=2) for _ in range(2)]
        assert all(torch.equal(found, weights_of[0]) for found in (*weights_of, *(found for _, found, _ in engines)))
        one, other = ([wire.group, wire.inside, wire.across]
                      for engine, *_ in engines for wire in [internals.wires(engine)])
        assert None not in (*one[1:], *other) and not set(one) & set(other)

    @pytest.mark.world_size(4)
    def test_sums_so_far_of_buckets_in_cuts(self, monkeypatch):
        averages = []
        for transport in ("as planned", "all in cuts"):
            engine, *_ = self.train(monkeypatch, transport=transport, stage=2)
            for micro in range(2):
                engine.backward(engine((7, micro, dist.get_rank())))
                for ask in range(2):
                    averages.append({name: safe_get_full_grad(param).clone()
                                     for name, param in engine.module.named_parameters() if param.numel()})
                engine.step()
            averages.append(weights(engine.module).clone())
        for found, wanted in zip(averages[5:], averages[:5], strict=True):
            if isinstance(wanted, dict):
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            else:
                assert torch.equal(found, wanted)

    def test_averages_that_were_written_stay_when_they_are_asked_for_again(self, monkeypatch):
        for transport in ("as planned", "all in cuts"):
            engine, *_ = self.train(monkeypatch, transport=transport)
            params = [param for param in engine.module.parameters() if param.numel()]
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine((7, 0, dist.get_rank())))
            for param in params:
                safe_set_full_grad(param, torch.full_like(param, 100.5))
            engine.allreduce_gradients()
            for param in params:
                assert torch.equal(safe_get_full_grad(param), torch.full_like(param, 100.5))

    @pytest.mark.world_size(4)
    def test_a_checkpoint_inside_a_step_of_buckets_in_cuts(self, stage, monkeypatch, tmp_path):
        """The run that saves goes on with its sums, and the one that is resumed repeats the step."""
        results = []
        for transport in ("as planned", "all in cuts"):
            engine, *_ = self.train(monkeypatch, transport=transport, stage=stage)
            engine.backward(engine((7, 0, dist.get_rank())))
            engine.step()
            engine.save_checkpoint(str(tmp_path / transport), "inside")
            engine.backward(engine((7, 1, dist.get_rank())))
            engine.step()
            results.append(weights(engine.module).clone())
        for of, transport in product(self.TRANSPORTS, repeat=2):
            if of == "some in cuts":
                continue
            engine, *_ = self.train(monkeypatch, transport=transport, stage=stage)
            train_engine(engine, 1, gas=2, first=5)
            engine.load_checkpoint(str(tmp_path / of), "inside")
            train_engine(engine, 1, gas=2, first=7)
            results.append(weights(engine.module).clone())
        for result in results[1:]:
            assert torch.equal(result, results[0])
