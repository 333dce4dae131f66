"""The state of a step's gradients, from its first backward pass to its update: one answer for all who ask."""

from itertools import chain

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from ds_layerwise.plan.forecast.memory import sums_bytes
from ds_layerwise.ranks.sync.step_state import Gradients
from ds_layerwise.zero import run_state
from tests.support import internals
from tests.support.checkpoints import assert_same_run
from tests.support.harness import DistributedTest
from tests.support.live_memory import LiveMemory, bytes_of
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, ds_config, start
from tests.support.transports import plan_in_cuts

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


def native(stage, **layerwise):
    norms = {"norm_groups": {"some": {"name": "square.*", "gradient_clipping": 0.5}}, "log_num_zeros_in_grad": True}
    return ds_config(stage=stage, clip=1.0, bucket_numel=1200, layerwise={"reduction": "native", **norms, **layerwise},
                     **BF16)


def one_pass(engine, step, micro=0):
    # Sums of two such gradients are not exact in bfloat16.
    engine.backward(engine((step, micro, dist.get_rank())) * 0.3)


def two_passes(engine, step):
    for micro in range(2):
        one_pass(engine, step, micro)


def read(engine, step):
    one_pass(engine, step)
    return [safe_get_full_grad(param) for param in engine.module.parameters() if param.requires_grad]


def read_and_add(engine, step):
    return [*read(engine, step), *read(engine, step + 10)]


def write(engine, step):
    one_pass(engine, step)
    param = engine.module.square.weight
    safe_set_full_grad(param, safe_get_full_grad(param) / 3)


def skip(engine, step):
    one_pass(engine, step)
    engine.optimizer._before_update.decide(clip_grad=1.0, loss_scale=1.0)
    one_pass(engine, step + 10)


class TestAsTheyArrive(DistributedTest):
    """Sums that the backend has made in bfloat16 stay so until others are added, and give the bits of float32."""

    world_size = 3

    @pytest.mark.parametrize("transport", ["as planned", "in cuts"])
    @pytest.mark.parametrize("stage", [2, 3])
    def test_the_same_bits(self, stage, transport, monkeypatch):
        models = Net(tied=True), Net(tied=True)
        if transport == "in cuts":
            # Nothing goes straight to its owner.
            plan_in_cuts(monkeypatch)
            for name, param in chain(*(model.named_parameters() for model in models)):
                param.requires_grad_(name in ("square.weight", "tall.weight"))
        engine = start(models[0], native(stage))
        with monkeypatch.context() as patch:
            patch.setattr(run_state, "kept_dtypes", lambda wires, *_: ["float32" for _ in wires])
            plain = start(models[1], native(stage))
        for each in (engine, plain):
            internals.poison_sums(each)
        for step, way in enumerate((one_pass, two_passes, read, read_and_add, write, skip, one_pass)):
            found = [way(each, step) for each in (engine, plain)]
            for one, other in zip(*(values or [] for values in found), strict=True):
                assert torch.equal(one, other), way
            reduced = internals.owned(engine).reduced
            now = [reduced.now(bucket.index) for bucket in engine.optimizer.layout.buckets]
            narrow = any(len(shard) and shard.dtype == torch.bfloat16 for shard in now)
            if transport == "as planned" and way in (one_pass, two_passes):
                assert narrow == (way is one_pass)
            for each in (engine, plain):
                each.step()
            assert engine.optimizer.report() == plain.optimizer.report() and not engine.skipped_steps
            assert_same_run(engine, plain)

    @pytest.mark.world_size([2, 4])
    @pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.thorough), 3])
    def test_they_take_the_memory_of_the_plan(self, stage, monkeypatch):
        for only in (lambda bucket: False, lambda bucket: bucket.index % 2):
            with monkeypatch.context() as patch:
                plan_in_cuts(patch, only)
                engine = start(Net(tied=True), native(stage))
            plan = engine.optimizer.forecast()
            assert {*plan.kept_as} == {"bfloat16"}
            totals = [rank.total for rank in plan.memory]
            for step in range(2):
                one_pass(engine, step)
                sums = [*internals.owned(engine).reduced.tensors, *internals.cuts(engine)]
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, totals[engine.optimizer.rank] + bytes_of(sums))
                planned = sums_bytes(plan.layout, stage=stage, stored_as=plan.stored_as, wires=plan.wires,
                                     reduction=plan.reduction, kept_as=plan.kept_as, beside=totals)
                assert max(everyone) == max(totals) + planned.in_pass
                with LiveMemory(sums) as memory:
                    engine.step()
                assert memory.peak <= plan.working.update + plan.working.transfers
            engine.destroy()
