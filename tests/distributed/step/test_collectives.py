"""What travels in one step, counted by the benchmark's own counter."""

import math
from itertools import product

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.comm import comms_logger

from ds_layerwise.plan import cost, wire
from ds_layerwise.ranks import comm
from examples.benchmarks.collectives import OPTIMIZERS, count_step
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("comm", "own_groups")

#: Scalars of one step, twice: the norm of the gradient, and what ranks agree on beside it.
SCALARS = 16


class TestWire(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.parametrize("bucket_numel", [1, 20_000, 10**9])
    def test_a_step_moves_the_lower_bound(self, bucket_numel):
        counter, numel = count_step(OPTIMIZERS["LayerWiseMuon"], bucket_numel=bucket_numel)
        size = dist.get_world_size()
        # Starts of parameters and shards are aligned to 64 elements.
        padding = 64 * (25 + 25 * size)
        assert sum(counter.elements.values()) <= 2 * (size - 1) / size * (numel + padding) + SCALARS
        assert counter.calls["all_reduce"] == 1 and counter.elements["all_reduce"] <= SCALARS

    def test_without_alignment_it_is_the_bound_itself(self):
        counter, numel = count_step(OPTIMIZERS["LayerWiseMuon"], layerwise={"alignment": 1})
        size = dist.get_world_size()
        assert sum(counter.elements.values()) <= 2 * (size - 1) / size * numel + SCALARS

    @pytest.mark.parametrize("sections, gradient_bytes", [
        ({}, 2), ({"communication_data_type": "fp32"}, 4), ({"data_types": {"grad_accum_dtype": "fp32"}}, 4),
        ({"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}, 2)])
    def test_gradients_travel_in_the_dtype_asked_for(self, sections, gradient_bytes):
        counter, _ = count_step(OPTIMIZERS["LayerWiseMuon"], bf16={"enabled": True}, **sections)
        kind = "all_to_all_single"
        assert counter.bytes[kind] == gradient_bytes * counter.elements[kind] > 0
        for gathered in ("broadcast", "all_gather_into_tensor"):
            assert counter.bytes[gathered] == 2 * counter.elements[gathered]

    def test_the_counter_sees_stock_muon_move_half_as_much_again(self):
        counter, numel = count_step(OPTIMIZERS["stock Muon"])
        size = dist.get_world_size()
        assert sum(counter.elements.values()) >= 3 * (size - 1) / size * numel


class TestReduce(DistributedTest):
    world_size = 3

    def reduced(self, of_rank, dtype):
        shard_numels, rank = [2, 0, 1], dist.get_rank()
        bucket = torch.full((3,), of_rank[rank], dtype=dtype)
        out = torch.empty(shard_numels[rank])
        comm.reduce_to_owners(bucket, shard_numels, out, group=None, divide_by=1, wire_dtype=dtype).wait()
        return out.tolist()

    def test_it_adds_in_float32_whatever_travels(self):
        assert self.reduced([256.0, 1.0, 2.0], torch.bfloat16) == [259.0] * [2, 0, 1][dist.get_rank()]

    def test_it_adds_in_the_order_of_ranks(self):
        # 2^24 + 1 is no float32, and rounds to 2^24.
        assert self.reduced([2.0**24, 1.0, 1.0], torch.float32) == [2.0**24] * [2, 0, 1][dist.get_rank()]
        assert self.reduced([1.0, 1.0, 2.0**24], torch.float32) == [2.0**24 + 2] * [2, 0, 1][dist.get_rank()]


class TestTwoHops(DistributedTest):
    world_size = [2, 3, 4]
    thorough_on = (3,)

    def test_they_make_the_same_bits(self, monkeypatch):
        rank, size = dist.get_rank(), dist.get_world_size()
        for seed, (numels, dtype) in enumerate(product(
                ([7, 0, 0, 0], [0, 0, 9, 1], [0, 64, 0, 0], [1, 2, 3, 4], [0, 0, 0, 2]),
                (torch.float32, torch.bfloat16))):
            numels = numels[:size - 1] + [sum(numels[size - 1:])]
            everyone = torch.randn(size, sum(numels), generator=torch.Generator().manual_seed(seed)).to(dtype)
            results = []
            for most, hops in ((size, 1), (0, 2)):
                monkeypatch.setattr(wire, "MAX_SKEW", most)
                assert wire.takes_two_hops(numels) == (hops == 2)
                out = torch.full((numels[rank],), math.nan)
                comm.reduce_to_owners(everyone[rank].clone(), numels, out, group=None, divide_by=3.0,
                                      wire_dtype=dtype).wait()
                results.append(out)
            start = sum(numels[:rank])
            wanted = torch.zeros(sum(numels))
            for row in everyone:
                wanted += row
            assert torch.equal(results[0], (wanted / 3.0)[start:start + numels[rank]])
            assert torch.equal(results[0], results[1])

    @pytest.mark.world_size(3)
    @pytest.mark.parametrize("stage", [1, 2])
    def test_training_and_what_it_sends(self, stage, monkeypatch):
        results = []
        for most in (4, 0):
            monkeypatch.setattr(wire, "MAX_SKEW", most)
            engine = start(Net(), ds_config(gas=2, clip=5.0, stage=stage, bucket_numel=1,
                                            comms_logger={"enabled": True}))
            comms_logger.comms_dict.clear()
            train_engine(engine, 3, gas=2)
            results.append(weights(engine.module).clone())
            sent = sum(size * record[0] for size, record in comms_logger.comms_dict["all_to_all_single"].items())
            layout, rank = engine.optimizer.layout, engine.optimizer.rank
            travels, passes = cost.wire_elements(layout), 3 if stage == 1 else 6
            kept = 0
            for bucket in layout.buckets:
                cuts = wire.even_cuts(bucket.numel, 3)
                # An all-to-all is logged with what stays on its rank.
                kept += bucket.shard_numels[rank] if most else cuts[rank] + wire.overlaps(
                    cuts, bucket.shard_numels, rank)[rank]
            assert sent == 4 * passes * (travels.reduce[rank] + travels.forward[rank] + kept)
            assert bool(sum(wire.forward)) is not bool(most)
            engine.destroy()
        assert torch.equal(*results)
