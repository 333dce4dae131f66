"""Ranges that torch.profiler shows of a step: one for every bucket that is reduced, updated and gathered."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("profiling")

RANGES = ("ds_layerwise.reduce", "ds_layerwise.update", "ds_layerwise.gather")


class TestRanges(DistributedTest):
    @pytest.mark.parametrize("stage, overlap, late", [(1, True, False), (1, False, True), (2, True, True)])
    def test_each_bucket_has_its_ranges(self, stage, overlap, late):
        gas = 2
        config = ds_config(stage=stage, gas=gas, overlap=overlap, clip=1.0, layerwise={"overlap_param_gather": late})
        engine, plain = start(Net(), config), start(Net(), config)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            train_engine(engine, 1, gas=gas)
        train_engine(plain, 1, gas=gas)
        engine.optimizer.wait_for_params()
        buckets = len(engine.optimizer.layout.buckets)
        assert buckets > 3
        ranges = [event for event in found.events() if event.name in RANGES]
        # Gradients of stage 2 are reduced after every micro-batch.
        assert Counter(event.name for event in ranges) == {
            RANGES[0]: buckets * (gas if stage == 2 else 1), RANGES[1]: buckets, RANGES[2]: buckets}
        names = [event.name for event in sorted(ranges, key=lambda event: event.time_range.start)]
        assert names == sorted(names, key=lambda name: name != RANGES[0])
        assert names[-2 * buckets:] == [RANGES[1], RANGES[2]] * buckets
        assert torch.equal(weights(engine.module), weights(plain.module))

    def test_none_without_a_profiler(self, monkeypatch):
        engine, made = start(Net(), ds_config()), []
        monkeypatch.setattr(torch.profiler, "record_function", made.append)
        train_engine(engine, 1)
        assert not made
