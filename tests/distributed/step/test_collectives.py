"""What travels in one step, counted by the benchmark's own counter."""

import deepspeed.comm as dist
import pytest

from examples.benchmarks.collectives import OPTIMIZERS, count_step
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms

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
