"""An engine that is only asked, made as TRL makes that of its reference model: of the run's config, at stage 0."""

import copy

import deepspeed
import pytest
import torch
from torch import nn

import ds_layerwise
from ds_layerwise.errors import ConfigError, StepError
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, ds_config, start, train_engine, weights

pytestmark = rooms("inference_only")

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4}}


def small():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def at_stage_0(given):
    """Prepare a config as TRL's prepare_deepspeed does where the stage is not 3."""
    given = copy.deepcopy(given)
    given["zero_optimization"]["stage"] = 0
    return given


class TestReferenceModel(DistributedTest):
    @pytest.mark.parametrize("sections, dtype", [
        ({}, torch.float32), (BF16, torch.bfloat16), ({"scheduler": WARMUP}, torch.float32)])
    def test_it_answers_as_the_model_and_does_not_train(self, sections, dtype, capsys):
        given = ds_config(layerwise={"save_universal": False}, **sections)
        policy, alone = start(Net(), given), start(Net(), given)
        config = at_stage_0(given)
        before = copy.deepcopy(config)
        capsys.readouterr()
        engine, *_ = deepspeed.initialize(model=small(), config=config)
        said = capsys.readouterr().out.count("this engine has no optimizer (it is for inference, such as with a ref")
        assert said == (engine.global_rank == 0) and config == before
        engine.eval()
        x = torch.linspace(-1, 1, 16).reshape(2, 8).to(dtype)
        expected = small().to(dtype)(x)
        assert torch.equal(engine(x), expected)
        for call in (lambda: engine.backward(engine(x).sum()), engine.step):
            with pytest.raises(StepError, match="stage is 0, at which this backend does not train; set it to 1 or 2"):
                call()
        # The engine of the run is none of its business.
        train_engine(policy, 2)
        train_engine(alone, 2)
        assert torch.equal(weights(policy), weights(alone))
        assert torch.equal(engine(x), expected)

    def test_beside_an_optimizer_that_the_script_gives(self):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "layerwise": {}}
        engine, optimizer, *_ = ds_layerwise.initialize(model=small(), config=config)
        x = torch.linspace(-1, 1, 8).reshape(1, 8)
        assert optimizer is None and torch.equal(engine(x), small()(x))

    def test_a_reference_model_to_be_trained_is_refused(self):
        module, given = small(), at_stage_0(ds_config())
        client = {key: value for key, value in given.items() if key != "optimizer"}
        for config, kwargs in ((given, {"model_parameters": module.parameters()}),
                               (client, {"optimizer": torch.optim.AdamW(module.parameters())})):
            with pytest.raises(ConfigError, match="zero_optimization.stage must be 1 or 2 or 3 .* got 0"):
                ds_layerwise.initialize(model=module, config=config, **kwargs)
        for zero in ({}, {"stage": 4}):
            with pytest.raises(ConfigError, match="zero_optimization.stage must be 1"):
                ds_layerwise.initialize(model=module, config={**given, "zero_optimization": zero})

    def test_stocks_engines_at_stage_0_are_left_alone(self):
        given = {**at_stage_0(ds_config()), "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
        del given["layerwise"]
        ds_layerwise.register()
        module = small()
        engine, optimizer, *_ = deepspeed.initialize(model=module, config=given)
        before = module[0].weight.detach().clone()
        engine.backward(engine(torch.ones(1, 8)).square().sum())
        engine.step()
        step = (module[0].weight - before).abs()
        assert optimizer is not None and torch.allclose(step[step > 0], torch.tensor(0.01), rtol=0.05)
