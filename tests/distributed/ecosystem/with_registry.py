"""Tests for a DeepSpeed with the registry of docs/proposal_backend_hook.md; test_backend_hook.py runs them under one.

Nothing here registers this package: its entry points do, in every rank of every test.
"""

import copy
import re
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR, _LRScheduler

import ds_layerwise
from ds_layerwise.engine.contract import patches
from ds_layerwise.engine.contract.contract import CONTRACT
from ds_layerwise.errors import ConfigError, StepError
from tests.support.expected import assert_trained_as, by_the_oracle, compared_to, mean_gradient
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.training import Net, ds_config, relative_error, train_engine, weights, whole

PAGE = Path(ds_layerwise.__file__).parents[1] / "docs/proposal_backend_hook.md"


def answers():
    """Return the answer that the page gives to where a name goes that this package wraps or extends, by its key."""
    rows = re.findall(r"^\| `(\w+)` \| (first|second|stays) \|", PAGE.read_text(), re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def start(module, config, **kwargs):
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config, **kwargs)
    return engine


def held():
    return {name.key: copy.copy(getattr(*name.place())) for name in CONTRACT}


class TestWithoutRegister(DistributedTest):
    def test_it_trains_saves_and_loads(self, stage, class_tmpdir):
        assert not patches.is_registered()
        before = held()
        engine = start(Net(), ds_config(gas=2, clip=5.0, stage=stage))
        after = held()
        untouched = {key for key in before if before[key] is after[key] or
                     isinstance(before[key], list) and before[key] == after[key]}
        assert untouched == {key for key, where in answers().items() if where == "first"}
        expected = by_the_oracle(gas=2, num_steps=3, clip=5.0)
        train_engine(engine, 3, gas=2, check=compared_to(expected))
        assert_trained_as(engine.module, expected)
        engine.save_checkpoint(class_tmpdir, tag=f"at {stage}")
        resumed = start(Net(), ds_config(gas=2, clip=5.0, stage=stage))
        resumed.load_checkpoint(class_tmpdir, tag=f"at {stage}")
        for each in (engine, resumed):
            train_engine(each, 1, gas=2, first=3)
        assert torch.equal(weights(engine.module), weights(resumed.module))

    def test_an_optimizer_of_the_script_and_a_scheduler_of_torch(self):
        def schedule(optimizer):
            return StepLR(optimizer, step_size=2, gamma=0.5)

        for given in (schedule, None):
            config = ds_config(scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}})
            del config["optimizer"]
            module = Net()
            engine = start(module, config, optimizer=AdamW(module.parameters(), lr=0.02), lr_scheduler=given)
            alone = Net()
            optimizer = AdamW(alone.parameters(), lr=0.02)
            steps = schedule(optimizer)
            assert isinstance(engine.optimizer, ds_layerwise.LayerWiseZeroOptimizer)
            assert type(engine.lr_scheduler) is StepLR and type(engine.basic_optimizer) is AdamW
            train_engine(engine, 4)
            for step in range(4):
                for name, param in trainable(alone).items():
                    param.grad = mean_gradient(name, param.shape, step, dist.get_world_size())
                optimizer.step()
                steps.step()
            for name, param in trainable(module).items():
                assert relative_error(whole(param), trainable(alone)[name].detach()) < 1e-5, name
            assert engine.get_lr() == [0.005]

    def test_an_offloaded_engine_has_no_optimizer_of_deepspeed(self):
        config = ds_config()
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        engine = train_engine(start(Net(), config), 3)
        assert engine.zero_use_cpu_optimizer() is False
        assert_trained_as(engine.module, by_the_oracle())

    def test_an_engine_that_is_only_asked(self):
        config = ds_config()
        config["zero_optimization"]["stage"] = 0
        engine, optimizer, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
        assert optimizer is None
        with pytest.raises(StepError, match="of an engine without an optimizer"):
            engine.step()

    @pytest.mark.parametrize("changes, message", [
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": "big"}}, "zero_optimization.reduce_bucket_size"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "train_micro_batch_size_per_gpu is 'auto', which only"),
        ({"train_batch_size": 3}, "Check batch related parameters"),
        ({"optimizer": {"type": "LayerWiseMuon", "params": {"momentum": 1.0}}}, "optimizer.params.momentum must be in"),
        ({"optimizer": {"type": "Adam"}}, "the layerwise section needs optimizer.type"),
        ({"optimizer": {"type": "LayerWiseMuom"}}, "optimizer.type 'LayerWiseMuom' is not known; did you mean"),
    ])
    def test_errors_are_those_of_this_package(self, changes, message):
        with pytest.raises(ConfigError, match=f"^{message}"):
            start(Net(), {**ds_config(), **changes})

    def test_errors_about_schedulers(self):
        class Constant(_LRScheduler):
            def get_lr(self):
                return self.base_lrs

        other = AdamW(Net().parameters())
        with pytest.raises(ConfigError, match="^Client Optimizer .* is not instantiated but Client LR Scheduler is"):
            start(Net(), ds_config(), lr_scheduler=Constant(other))
        with pytest.raises(ConfigError, match="^lr_scheduler is a StepLR of another optimizer"):
            start(Net(), ds_config(), lr_scheduler=lambda _: StepLR(other, 1))
