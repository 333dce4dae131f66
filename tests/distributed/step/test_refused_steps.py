"""A step that is refused, and survived: its gradients are still there."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from ds_layerwise.errors import LayerWiseError, StepError
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, train_engines, weights
from tests.support.transports import plan_in_cuts

pytestmark = rooms("pre_step", "grad_sync")

NAME = "tall.weight"

WAYS = pytest.mark.parametrize("stage, in_cuts", [(1, False), (1, True), (2, False), (2, True)])


def two(monkeypatch, in_cuts, **settings):
    if in_cuts:
        plan_in_cuts(monkeypatch)
    return [start(Net(), ds_config(**settings)) for _ in range(2)]


def backward(engine, step, micro=0):
    engine.backward(engine((step, micro, dist.get_rank())))


def refuse_for_offload(engine, include=(Kind.optim_states,)):
    engine.offload_states(include=include)
    with pytest.raises(StepError, match="offloaded"):
        engine.step()
    engine.reload_states()


def refuse_for_everything_away(engine):
    refuse_for_offload(engine, include=None)


def refuse_for_replaced_memory(engine):
    """Refused when averages are there already."""
    param = engine.module.get_parameter(NAME)
    data = param.data
    param.data = data.clone()
    with pytest.raises(StepError, match="was replaced"):
        engine.step()
    param.data = data


def one_refused(refuse, monkeypatch, in_cuts, stage):
    """Engines in their second step, which the first of the two was refused."""
    engines = two(monkeypatch, in_cuts, stage=stage)
    for engine in engines:
        train_engine(engine, 1)
        backward(engine, 1)
    refuse(engines[0])
    return engines


REFUSALS = [refuse_for_offload, refuse_for_everything_away, refuse_for_replaced_memory]


class TestRefusedSteps(DistributedTest):
    @WAYS
    def test_gradients_can_be_read_and_written(self, stage, in_cuts, monkeypatch):
        """Nothing is written after the refusal for what is away: the same step is taken once more."""
        for refuse in REFUSALS:
            refused, plain = engines = one_refused(refuse, monkeypatch, in_cuts, stage)
            param, other = (engine.module.get_parameter(NAME) for engine in engines)
            assert torch.equal(safe_get_full_grad(param), safe_get_full_grad(other))
            mine = torch.arange(1.0, param.numel() + 1).view(param.shape)
            for engine in engines:
                if refuse is not refuse_for_everything_away:
                    safe_set_full_grad(engine.module.get_parameter(NAME), mine)
                    assert torch.equal(safe_get_full_grad(engine.module.get_parameter(NAME)), mine)
                engine.step()
                train_engine(engine, 1, first=2)
            assert torch.equal(weights(refused.module), weights(plain.module))

    @pytest.mark.parametrize("in_cuts", [False, True])
    def test_a_save_leaves_the_gradients(self, in_cuts, monkeypatch, tmp_path):
        """There are sums until the step at stage 2, of a script that takes care of accumulation itself.

        They are there still for the same step once more, and a run resumed from the save repeats the passes.
        """
        refused, resumed = two(monkeypatch, in_cuts, stage=2, gas=2, overlap=False, managed_gradient_accumulation=False)
        for step in range(2):
            for micro in range(2):
                backward(refused, step, micro)
            if not step:
                refused.step()
        refuse_for_offload(refused)
        refused.save_checkpoint(tmp_path)
        resumed.load_checkpoint(tmp_path)
        for micro in range(2):
            backward(resumed, 1, micro)
        for engine in (refused, resumed):
            engine.step()
            assert engine.optimizer.step_count == 2
        assert torch.equal(weights(resumed.module), weights(refused.module))

    @WAYS
    def test_another_backward_pass(self, stage, in_cuts, monkeypatch):
        """Gradients add up at stage 2; at stage 1 buckets are gone."""
        refused, plain = engines = two(monkeypatch, in_cuts, stage=stage)
        found = []
        for micro in range(2):
            backward(plain, 0, micro)
            found.append(safe_get_full_grad(plain.module.get_parameter(NAME)).clone())
            plain.zero_grad()
        backward(refused, 0)
        refuse_for_replaced_memory(refused)
        param = refused.module.get_parameter(NAME)
        assert torch.equal(safe_get_full_grad(param), found[0])
        backward(refused, 0, 1)
        if stage == 1:
            with pytest.raises(StepError, match="got a gradient after its bucket"):
                refused.step()
            refused.zero_grad()
            train_engines(engines, 2)
            assert torch.equal(weights(refused.module), weights(plain.module))
        else:
            # The gradients are whole numbers, and there are two ranks: every sum, and half of it, is exact.
            assert torch.equal(safe_get_full_grad(param), found[0] + found[1])
            refused.step()

    @pytest.mark.parametrize("managed", [True, False])
    def test_a_step_of_nothing(self, stage, managed):
        engine = start(Net(), ds_config(stage=stage, overlap=False, managed_gradient_accumulation=managed))
        train_engine(engine, 1)
        before = weights(engine.module)
        with pytest.raises(LayerWiseError, match="no backward pass"):
            engine.step()
        assert torch.equal(weights(engine.module), before) and engine.optimizer.step_count == 1
        # Nothing is left of it.
        plain = start(Net(), ds_config(stage=stage, overlap=False, managed_gradient_accumulation=managed))
        train_engine(plain, 3)
        train_engine(engine, 2, first=1)
        assert torch.equal(weights(engine.module), weights(plain.module))

    @pytest.mark.parametrize("in_cuts", [False, True])
    def test_gradients_read_the_same_on_all_ranks_where_one_refuses(self, in_cuts, monkeypatch):
        """The rank that refuses has sums, at stage 2, and the others have averages."""
        refused, plain = engines = two(monkeypatch, in_cuts, stage=2)
        for engine in engines:
            backward(engine, 0)
        if dist.get_rank() == 1:
            internals.interrupt(refused)
        with pytest.raises(LayerWiseError, match="was interrupted"):
            refused.step()
        for (name, param), other in zip(refused.module.named_parameters(), plain.module.parameters(), strict=True):
            assert torch.equal(safe_get_full_grad(param), safe_get_full_grad(other)), name

    def test_a_rank_without_a_pass_follows_those_that_have_one(self):
        engine, plain = (start(Net(), ds_config(overlap=False, managed_gradient_accumulation=False)) for _ in range(2))
        for each in (engine, plain):
            loss = each((0, 0, 0))
            if dist.get_rank() == 0:
                each.backward(loss)
            elif each is plain:
                each.backward(0 * loss)
            each.step()
        assert torch.equal(weights(engine.module), weights(plain.module)) and engine.optimizer.step_count == 1


def refuse_for_a_rate(engine):
    """Refused at every stage when the sums are at their owners."""
    group = engine.optimizer.param_groups[0]
    group["muon_lr"] = 1.0
    with pytest.raises(StepError, match="muon_lr"):
        engine.step()
    del group["muon_lr"]


class TestTheSameBits(DistributedTest):
    """Gradients that no sum and no average holds exactly."""

    world_size = [2, 3, 5]

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_gradients_after_a_skipped_and_a_refused_step(self, stage):
        refused, plain = engines = [start(Net(), ds_config(
            stage=stage, gas=3, layerwise={"grad_norm_skip_threshold": 1e6})) for _ in range(2)]

        def passes(engine, micro_batches, factor=0.1):
            for micro in micro_batches:
                engine.backward(factor * engine((0, micro, dist.get_rank())))
                if micro < 2:
                    engine.step()

        def gradients(engine):
            return torch.cat([safe_get_full_grad(param).flatten() for param in engine.module.parameters()])

        passes(refused, range(3), 1e9)
        refused.step()
        assert refused.optimizer.overflow
        for engine in engines:
            passes(engine, range(3))
        before = gradients(plain)
        assert torch.equal(gradients(refused), before)
        refuse_for_a_rate(refused)
        assert torch.equal(gradients(refused), before)
        if stage > 1:  # more may come
            for engine in engines:
                passes(engine, [3])
            assert torch.equal(gradients(refused), gradients(plain))
        for engine in engines:
            engine.step()
        assert torch.equal(weights(refused.module), weights(plain.module))
