"""What users, schedulers and other wiring see: groups that stay, ratios that hold."""

import deepspeed.comm as dist
import pytest
import torch

import ds_layerwise
from tests.harness import DistributedTest
from tests.reference import train, trainable
from tests.training import Net, ds_config, recipe_for, relative_error, start, train_engine

STEPS = 8


def used_learning_rates(engine):
    """(matrix, scalar) learning rates that the next step will use."""
    group, = engine.optimizer.param_groups
    return group["lr"] * group["matrix_lr_ratio"], group["lr"] * group["scalar_lr_ratio"]


class TestSchedulers(DistributedTest):
    world_size = 2

    def test_warmup_keeps_the_ratio(self):
        scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003, "warmup_num_steps": 4,
                                                    "warmup_type": "linear"}}
        engine = start(Net(), ds_config(scheduler=scheduler))
        for step in range(STEPS):
            matrix, scalar = used_learning_rates(engine)
            if scalar:
                assert matrix / scalar == pytest.approx(0.02 / 0.003)
            train_engine(engine, 1, first=step)
        assert used_learning_rates(engine) == (pytest.approx(0.02), pytest.approx(0.003))
        assert engine.get_lr() == [pytest.approx(0.003)]

    @pytest.mark.parametrize("kind", ["deepspeed", "torch"])
    def test_a_schedule_is_followed_as_the_oracle_does(self, kind):
        if kind == "torch":
            engine = start(Net(), ds_config(), lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1 / (1 + step)))
            factor = lambda step: 1 / (1 + step)  # noqa: E731
        else:
            scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003,
                                                        "warmup_num_steps": 4, "warmup_type": "linear"}}
            engine = start(Net(), ds_config(scheduler=scheduler))
            lrs = []
            factor = lambda step: lrs[step] / 0.003  # noqa: E731
            for step in range(STEPS):
                lrs.append(engine.optimizer.param_groups[0]["lr"])
                train_engine(engine, 1, first=step)
            assert len(set(lrs)) > 3
        expected = train(Net, lambda *place: place, lambda module, place: module(place),
                         recipe_for(Net(), schedule=factor), STEPS)
        if kind == "torch":
            train_engine(engine, STEPS)
        for name, p in trainable(engine.module).items():
            assert relative_error(p.detach(), expected.model_params[name]) < 1e-5, name

    def test_groups_are_the_users_in_number_order_and_identity(self):
        module = Net()
        decay = [p for p in module.parameters() if p.dim() > 1]
        rest = [p for p in module.parameters() if p.dim() < 2]
        groups = [{"params": decay, "name": "decay"}, {"params": rest, "weight_decay": 0.0, "name": "rest"}]
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=groups, config=ds_config())
        seen = engine.optimizer.param_groups
        identities = [id(group) for group in seen]
        assert [group["name"] for group in seen] == ["decay", "rest"]
        assert seen is engine.basic_optimizer.param_groups
        train_engine(engine, 2)
        assert [id(group) for group in engine.optimizer.param_groups] == identities
        expected = train(Net, lambda *place: place, lambda m, place: m(place),
                         recipe_for(Net(), wd={n: 0.0 for n, p in Net().named_parameters() if p.dim() < 2}), 2)
        for name, p in trainable(module).items():
            assert relative_error(p.detach(), expected.model_params[name]) < 1e-5, name

    def test_a_groups_own_learning_rate_is_both_halves(self):
        module = Net()
        slow = [module.square.weight, module.square.bias]
        rest = [p for p in module.parameters() if all(p is not q for q in slow)]
        groups = [{"params": rest}, {"params": slow, "lr": 1e-4}]
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=groups, config=ds_config())
        train_engine(engine, 3)
        expected = train(Net, lambda *place: place, lambda m, place: m(place),
                         recipe_for(Net(), lr={"square.weight": 1e-4, "square.bias": 1e-4}), 3)
        for name, p in trainable(module).items():
            assert relative_error(p.detach(), expected.model_params[name]) < 1e-5, name

    def test_overrides_reach_the_update(self):
        layerwise = {"overrides": [{"name": "*.bias", "weight_decay": 0.0}, {"name": "tall.*", "lr_scale": 0.5}]}
        engine = start(Net(), ds_config(layerwise=layerwise))
        train_engine(engine, 3)
        names = trainable(Net())
        expected = train(Net, lambda *place: place, lambda m, place: m(place), recipe_for(
            Net(), wd={n: 0.0 for n in names if n.endswith(".bias")}, lr={"tall.weight": 0.01, "tall.bias": 0.0015}), 3)
        for name, p in trainable(engine.module).items():
            assert relative_error(p.detach(), expected.model_params[name]) < 1e-5, name

    def test_changing_the_learning_rate_by_hand(self):
        engine = start(Net(), ds_config())
        before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        engine.optimizer.param_groups[0]["lr"] = 0.0
        train_engine(engine, 1)
        for name, p in engine.module.named_parameters():
            assert torch.equal(p, before[name]), name


class TestRegistration(DistributedTest):
    world_size = 1

    def test_it_can_be_undone(self):
        from deepspeed.runtime import config
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero import utils

        def patched():
            return (list(config.DEEPSPEED_OPTIMIZERS), list(utils.ZERO_SUPPORTED_OPTIMIZERS),
                    {(owner, name): value for owner in (DeepSpeedEngine, config.DeepSpeedConfig)
                     for name, value in vars(owner).items() if callable(value)})

        before = patched()
        ds_layerwise.register()
        ds_layerwise.register()
        assert patched() != before
        ds_layerwise.unregister()
        assert patched() == before
        ds_layerwise.unregister()
        engine = start(Net(), ds_config())
        train_engine(engine, 1)
        assert dist.get_world_size() == 1 and engine.global_steps == 1

    def test_other_optimizers_are_built_as_ever(self):
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        module = torch.nn.Linear(4, 4)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
                  "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=config)
        assert type(engine.optimizer) is DeepSpeedZeroOptimizer
