"""Several engines: on one model, on parts of one, one through another, and engines that outlive their registration."""

import gc

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

import ds_layerwise
from ds_layerwise.errors import LayerWiseError, StepError
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.expected import assert_masters_are, assert_trained_as, oracle_step, start_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    Net,
    ds_config,
    start,
    start_adamw,
    train_engine,
    train_engines,
    weights,
)

pytestmark = rooms("param_owner", "register", "patches")


def hooks_of(model):
    """The number of hooks of each kind, by module."""
    return {(name, kind): len(getattr(module, kind)) for name, module in model.named_modules() for kind in (
        "_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")}


class TestTwoEnginesOfOneModel(DistributedTest):
    @pytest.mark.parametrize("stage, precision, late", [(1, "fp32", True), (2, "bf16", False), (1, "bf16", True)])
    def test_the_new_one_trains_and_the_old_one_says_so(self, stage, precision, late, tmp_path):
        module, sections = Net(), BF16 if precision == "bf16" else {}
        config = ds_config(stage=stage, layerwise={"overlap_param_gather": late}, **sections)
        old = train_engine(start(module, config), 2)
        loss = old((2, 0, dist.get_rank()))
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        new, gas = start(module, ds_config(stage=stage, gas=2, **sections)), 2
        # No hook of the old one is left, which had more where parameters may be pending.
        fresh = start(Net(), ds_config(stage=stage, gas=2, **sections))
        assert hooks_of(module) == hooks_of(fresh.module)
        fresh.destroy()
        oracle = start_oracle(module, gas=gas, param_dtype=dtype, accum_dtype=dtype)
        for use in (lambda: old((2, 0, 0)), lambda: old.backward(loss), lambda: old.optimizer.step(),
                    lambda: old.save_checkpoint(tmp_path), old.zero_grad, old.offload_states,
                    lambda: old.load_checkpoint(tmp_path)):
            new.save_checkpoint(tmp_path)
            with pytest.raises(LayerWiseError, match="another engine was made for parameters of this one.*use that"):
                use()
        train_engine(new, 2, gas=gas)
        for step in range(2):
            oracle_step(oracle, step, gas=gas)
        assert_masters_are(new, oracle.params)
        old.destroy()
        train_engine(new, 1, gas=gas, first=2)
        oracle_step(oracle, 2, gas=gas)
        assert_masters_are(new, oracle.params)
        resumed = start(Net(), config)
        new.save_checkpoint(tmp_path)
        resumed.load_checkpoint(tmp_path)
        assert_equal_states(whole_states(resumed), whole_states(new))

    def test_on_all_ranks_or_on_none(self):
        taken, free = Net(), Net()
        kept, oracle = start(taken, ds_config()), start_oracle(taken)
        with pytest.raises(LayerWiseError, match="the model differs between ranks.*trained by another engine before"):
            start(taken if dist.get_rank() else free, ds_config())
        train_engine(kept, 1)
        oracle_step(oracle, 0)
        assert_trained_as(taken, oracle)

    def test_another_optimizer_gets_its_gradients(self):
        module = Net()
        old = start(module, ds_config())
        new, before = start_adamw(module), weights(module)
        assert type(new.optimizer) is DeepSpeedZeroOptimizer
        train_engine(new, 1)
        # Adam's first step is the learning rate wherever there is a gradient.
        grad = torch.cat([sum(whole_number_gradients(name, p.shape, 0, 0, rank) for rank in range(2)).flatten()
                          for name, p in module.named_parameters()])
        moved = (weights(module) - before).abs()
        torch.testing.assert_close(moved[grad != 0], torch.full_like(moved[grad != 0], 0.1), rtol=0, atol=0.02)
        with pytest.raises(LayerWiseError, match="another engine was made for parameters of this one"):
            old((0, 0, 0))

    def test_two_engines_train_two_parts_of_a_model(self):
        module = Net()
        whole = start(module, ds_config(params={"weight_decay": 0.0}))
        other = nn.Sequential(module.square, nn.Linear(12, 12))
        config = ds_config(layerwise={"overrides": [{"name": "1.weight", "optimizer": "matrix"}]})
        part, *_ = ds_layerwise.initialize(model=other, model_parameters=other[1].parameters(), config=config)
        part.backward(part(torch.ones(2, 12)).sum())
        part.step()
        whole.zero_grad()
        train_engine(whole, 1)
        assert whole.global_steps == part.global_steps == 1


class TestOfModels(DistributedTest):
    def test_engines_one_after_the_other_on_one_model(self, stage):
        module = Net()
        for gas, overlap, late in ((1, True, True), (2, False, False)):
            oracle = start_oracle(module, gas=gas)
            engine = start(module, ds_config(stage=stage, gas=gas, overlap=overlap,
                                             layerwise={"overlap_param_gather": late}))
            for step in range(2):
                train_engine(engine, 1, gas=gas, first=step)
                oracle_step(oracle, step, gas=gas)
            engine.optimizer.wait_for_params()
            assert_trained_as(module, oracle)
            engine.destroy()
            engine.destroy()
            hooks = [hook for m in module.modules() for hook in m._forward_pre_hooks.values()]
            assert not [hook for hook in hooks if hook.__module__.startswith("ds_layerwise")]
            # A model without an engine is as any other.
            module((0, 0, 0)).backward()
            grad = module.experts.grad
            assert torch.equal(grad, whole_number_gradients("experts", grad.shape, 0, 0, 0))
            module.zero_grad()


class TestThroughAnother(DistributedTest):
    """The loss of one engine that goes through the model of another, as a generator's through its discriminator."""

    def step_both(self, one, other, step, cure):
        place = step, 0, dist.get_rank()
        one.backward(one(place))
        one.step()
        one.module.requires_grad_(cure != "freeze")
        other.backward(other(place) + sum(p.sum() for p in one.module.parameters()))
        one.module.requires_grad_(True)
        if cure == "zero_grad":
            one.zero_grad()
        other.step()

    @pytest.mark.parametrize("cure", ["freeze", "zero_grad"])
    def test_either_way_out_that_the_error_names_does(self, cure):
        engines, oracles = [start(Net(), ds_config()) for _ in range(2)], [start_oracle(Net()) for _ in range(2)]
        for step in range(3):
            self.step_both(*engines, step, cure)
            for oracle in oracles:
                oracle_step(oracle, step)
        for engine, oracle in zip(engines, oracles, strict=True):
            assert_trained_as(engine.module, oracle)

    def test_neither_is_an_error_that_names_both(self):
        engines = [start(Net(), ds_config()) for _ in range(2)]
        with pytest.raises(StepError, match=r"freeze this model for that pass, or call this engine's zero_grad\(\)"):
            for step in range(2):
                self.step_both(*engines, step, None)

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_a_step_for_two_micro_batches_says_when_to_call_it(self, by_hand):
        engine = start(Net(), ds_config(gas=2))
        with pytest.raises(StepError, match=r"engine.step\(\) after every micro-batch, also of those that accumulate"):
            for step in range(2):
                for micro in range(2):
                    engine.backward(engine((step, micro, dist.get_rank())))
                (engine.optimizer if by_hand else engine).step()


def patched():
    """All of DeepSpeed that registering changes."""
    return (list(ds_config_module.DEEPSPEED_OPTIMIZERS), list(utils.ZERO_SUPPORTED_OPTIMIZERS),
            dict(vars(DeepSpeedEngine)), dict(vars(ds_config_module.DeepSpeedConfig)))


class TestUnregistered(DistributedTest):
    def test_an_engine_that_exists_keeps_working(self, tmp_path):
        config = ds_config(bf16={"enabled": True})
        ds_layerwise.unregister()
        before = patched()
        engine, twin = start(Net(), config), start(Net(), config)
        ds_layerwise.unregister()
        ds_layerwise.unregister()
        # A gradient that is dropped, by the engine, does not come back.
        engine.backward(engine((9, 0, dist.get_rank())))
        engine.zero_grad()
        train_engines((engine, twin), 2)
        assert_equal_states(whole_states(engine), whole_states(twin))
        engine.save_checkpoint(tmp_path)
        train_engine(engine, 1, first=2)
        engine.load_checkpoint(tmp_path)
        engine.offload_states()
        engine.reload_states()
        assert engine.optimizer.step_count == 2
        assert_equal_states(whole_states(engine), whole_states(twin))
        module = Net()
        with pytest.raises(AssertionError, match="not a supported DeepSpeed Optimizer"):
            deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        assert "LayerWiseMuon" not in ds_config_module.DEEPSPEED_OPTIMIZERS
        ds_layerwise.register()
        ds_layerwise.unregister()
        train_engine(engine, 1, first=2)
        train_engine(twin, 1, first=2)
        assert_equal_states(whole_states(engine), whole_states(twin))
        for each in (engine, twin):
            each.destroy()
        del engine, twin, each, module
        gc.collect()
        ds_layerwise.register()
        ds_layerwise.register()
        assert patched() != before
        ds_layerwise.unregister()
        assert patched() == before
