"""Elements that travel in a step, counted by the benchmark's own counter."""

import deepspeed.comm as dist
import pytest

from examples.benchmarks.collectives import OPTIMIZERS, count_step
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.transports import plan_in_cuts

pytestmark = rooms("comm", "group_pool")

#: Scalars of one step, twice: the norm of the gradient, and what ranks agree on beside it.
SCALARS = 16


class TestWire(DistributedTest):
    world_size = [2, 4]
    thorough_on = ()

    def test_a_step_moves_the_lower_bound_and_at_most_a_ranks_share_each_way(self):
        size = dist.get_world_size()
        # With an alignment of 64, starts of parameters and shards are padded.
        for bucket_numel, alignment, padding in ((1, 1, 0), (20_000, 1, 0), (10**9, 64, 64 * (25 + 25 * size))):
            counter, numel = count_step(OPTIMIZERS["LayerWiseMuon"], bucket_numel=bucket_numel,
                                        layerwise={"alignment": alignment})
            bound = 2 * (size - 1) / size * (numel + padding)
            assert sum(counter.elements.values()) <= bound + 2 * numel / size + SCALARS
            assert counter.calls["all_reduce"] == 1 and counter.elements["all_reduce"] <= SCALARS

    def test_gradients_travel_in_the_dtype_asked_for(self):
        for sections, gradient_bytes in (
                ({}, 2), ({"communication_data_type": "fp32"}, 4), ({"data_types": {"grad_accum_dtype": "fp32"}}, 4),
                ({"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}}, 2)):
            counter, _ = count_step(OPTIMIZERS["LayerWiseMuon"], bf16={"enabled": True},
                                    layerwise={"layout": "lpt"}, **sections)
            # Gradients and parameters have as many elements, and but for scalars nothing else travels.
            elements, sent = (sum(each.values()) - each["all_reduce"] for each in (counter.elements, counter.bytes))
            assert 2 * sent == pytest.approx((gradient_bytes + 2) * elements, rel=1e-4)

    def test_the_counter_sees_stock_muon_move_half_as_much_again(self):
        counter, numel = count_step(OPTIMIZERS["stock Muon"])
        size = dist.get_world_size()
        assert sum(counter.elements.values()) >= 3 * (size - 1) / size * numel

    def test_buckets_in_cuts_add_one_exchange_each_way(self, monkeypatch):
        plan_in_cuts(monkeypatch)
        counter, numel = count_step(OPTIMIZERS["LayerWiseMuon"], layerwise={"alignment": 1})
        size = dist.get_world_size()
        # To owners and back travels what is not its owner's already, at most a rank's share of everything.
        bound = 2 * (size - 1) / size * numel
        assert bound < sum(counter.elements.values()) <= bound + 2 * numel / size + SCALARS
