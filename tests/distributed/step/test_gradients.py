"""The state of a step's gradients, from its first backward pass to its update: one answer for all who ask."""

import deepspeed.comm as dist
import pytest
from deepspeed.utils import safe_get_full_grad

from ds_layerwise.ranks.sync.step_state import Gradients
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start

pytestmark = rooms("grad_sync", "step_progress", "step_state", "bucket_scheduler")


class TestOneAnswer(DistributedTest):
    @pytest.mark.parametrize("stage, overlap", [(1, True), (1, False), (2, True), (2, False)])
    def test_through_two_steps(self, stage, overlap):
        engine = start(Net(), ds_config(stage=stage, gas=2, overlap=overlap))
        sync = internals.grad_sync(engine)
        launching = internals.seen_at_launches(engine, lambda: sync.state.gradients)
        updating = internals.seen_at(internals.owned(engine), "update", lambda: sync.state.gradients)
        for step in range(2):
            for micro in range(2):
                before = Gradients.SUMS if micro else Gradients.NONE
                loss = engine((step, micro, dist.get_rank()))
                assert sync.state.gradients is before
                engine.backward(loss)
                assert sync.state.gradients is (Gradients.AVERAGES if micro and stage == 1 else Gradients.SUMS)
                assert safe_get_full_grad(engine.module.square.weight) is not None
                engine.step()
            assert sync.state.gradients is Gradients.NONE
        assert {*launching} == {Gradients.UNDER_WAY} and {*updating} == {Gradients.AVERAGES}
