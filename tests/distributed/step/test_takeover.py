"""An engine for a model that another engine trains, and engines that outlive their registration."""

import gc

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.engine import DeepSpeedEngine

import ds_layerwise
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.harness import DistributedTest
from tests.support.oracle import assert_masters_are, assert_trained_as, oracle_step, start_oracle
from tests.support.reference import whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, ds_config, start, start_adamw, train_engine, train_engines, weights

pytestmark = rooms("param_owner", "register", "patches")


def hooks_of(model):
    """How many hooks there are of each kind, by module."""
    return {(name, kind): len(getattr(module, kind)) for name, module in model.named_modules() for kind in (
        "_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")}


class TestTwoEnginesOfOneModel(DistributedTest):
    @pytest.mark.parametrize("stage, precision, late", [(1, "fp32", True), (2, "bf16", False), (1, "bf16", True)])
    def test_the_new_one_trains_and_the_old_one_says_so(self, stage, precision, late, tmp_path):
        module, sections = Net(), BF16 if precision == "bf16" else {}
        config = ds_config(stage=stage, layerwise={"overlap_param_gather": late}, **sections)
        old = start(module, config)
        train_engine(old, 2)
        loss = old((2, 0, dist.get_rank()))
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        new, gas = start(module, ds_config(stage=stage, gas=2, **sections)), 2
        # Of the old one none is left, which had some of its own where parameters may be under way.
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
        other = torch.nn.Sequential(module.square, torch.nn.Linear(12, 12))
        config = ds_config(layerwise={"overrides": [{"name": "1.weight", "optimizer": "matrix"}]})
        part, *_ = ds_layerwise.initialize(model=other, model_parameters=other[1].parameters(), config=config)
        part.backward(part(torch.ones(2, 12)).sum())
        part.step()
        whole.zero_grad()
        train_engine(whole, 1)
        assert whole.global_steps == part.global_steps == 1


class TestUnregistered(DistributedTest):
    def test_an_engine_that_exists_keeps_working(self, tmp_path):
        config = ds_config(bf16={"enabled": True})
        ds_layerwise.unregister()
        before = dict(vars(DeepSpeedEngine))
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
        ds_layerwise.unregister()
        assert dict(vars(DeepSpeedEngine)) == before
