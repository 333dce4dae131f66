"""What users, schedulers and other wiring see: groups that stay, ratios that hold."""

import math
from dataclasses import replace

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from deepspeed.runtime import lr_schedules

import ds_layerwise
from ds_layerwise.errors import ConfigError
from tests.support.checkpoints import loaded
from tests.support.expected import assert_trained_as, by_the_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import train, trainable
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, recipe_for, start, train_engine

pytestmark = rooms("param_groups", "schedule_rates", "schedules")

STEPS = 8

HIDDEN = ("square.weight", "tall.weight")


def used_learning_rates(engine):
    """(matrix, scalar) learning rates that the next step will use."""
    group, = engine.optimizer.param_groups
    return group["lr"] * group["matrix_lr_ratio"], group["lr"] * group["scalar_lr_ratio"]


class TestSchedulers(DistributedTest):
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
        expected = by_the_oracle(Net, STEPS, schedule=factor)
        if kind == "torch":
            train_engine(engine, STEPS)
        assert_trained_as(engine.module, expected)

    @pytest.mark.parametrize("how", ["section", "of what it wraps"])
    def test_torchs_cosine_is_followed_as_the_oracle_does(self, how):
        cosine = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 6}}} if how == "section" else {}
        engine = start(Net(), ds_config(**cosine))
        after = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer.optimizer, T_max=6) if not cosine else None
        for step in range(STEPS):
            train_engine(engine, 1, first=step)
            if after:
                after.step()
        expected = by_the_oracle(Net, STEPS, schedule=lambda step: (1 + math.cos(math.pi * step / 6)) / 2)
        assert_trained_as(engine.module, expected)

    @pytest.mark.parametrize("make, said", [
        (lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.009, total_steps=10),
         "OneCycleLR's max_lr is 0.009, and optimizer.params.lr is 0.003: .* muon_lr would become 0.06 instead"),
        (lambda optimizer: lr_schedules.WarmupDecayLR(optimizer, total_num_steps=100),
         "WarmupDecayLR's warmup_max_lr is 0.001, .* muon_lr would become 0.006667 instead of 0.02"),
        (torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.003), 1),
         r"lr_scheduler is a StepLR of another optimizer \(SGD\), so that no rate of this engine would ever move; "
         r"give a function: lr_scheduler=lambda optimizer: StepLR\(optimizer, ...\)")])
    def test_a_scripts_schedule_of_other_rates_is_refused(self, make, said):
        with pytest.raises(ConfigError, match=said):
            start(Net(), ds_config(), lr_scheduler=make)

    def test_a_peak_is_the_rate_where_no_matrix_is_whole(self):
        engine = start(Net(), ds_config(layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]}), lr_scheduler=(
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.009, total_steps=10)))
        assert engine.get_lr() == [pytest.approx(0.009 / 25)]

    def test_weights_alone_load_whether_or_not_there_is_a_scheduler(self):
        """``load_module_state_dict`` by itself knows nothing of schedulers, and leaves what it is given as it is."""
        scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4}}
        engine = start(Net(), ds_config(scheduler=scheduler))
        g = torch.Generator().manual_seed(5)
        held = {name: torch.rand(value.shape, generator=g) for name, value in engine.module.state_dict().items()}
        given = {"module": dict(held)}
        engine.load_module_state_dict(given)
        assert given.keys() == {"module"} and given["module"].keys() == held.keys()
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, held[name]), name

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
        expected = by_the_oracle(Net, 2, wd={n: 0.0 for n, p in Net().named_parameters() if p.dim() < 2})
        assert_trained_as(module, expected)

    def test_a_group_has_learning_rates_of_its_own(self):
        module = Net()
        slow = [module.square.weight, module.square.bias]
        rest = [p for p in module.parameters() if all(p is not q for q in slow)]
        groups = [{"params": rest}, {"params": slow, "lr": 1e-4, "muon_lr": 1e-3}]
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=groups, config=ds_config())
        train_engine(engine, 3)
        expected = by_the_oracle(Net, 3, lr={"square.weight": 1e-3, "square.bias": 1e-4})
        assert_trained_as(module, expected)

    def test_groups_that_say_which_optimizer_they_are_for(self):
        module = Net()
        hidden = [module.square.weight, module.tall.weight]
        groups = [{"params": hidden, "use_muon": True, "lr": np.float32(0.0625), "weight_decay": 0.25},
                  {"params": [p for p in module.parameters() if all(p is not q for q in hidden)], "use_muon": False,
                   "lr": torch.tensor(0.00390625), "weight_decay": 0.0}]
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=groups, config=ds_config(
            params={"lr": 0.003, "muon_lr": 0.02}))
        train_engine(engine, 3)
        names = trainable(Net())
        recipe = recipe_for(Net(), lr={name: 0.0625 if name in HIDDEN else 0.00390625 for name in names},
                            wd={name: 0.25 if name in HIDDEN else 0.0 for name in names})
        recipe = replace(recipe, matrices={name: recipe.matrices[name] for name in HIDDEN})
        expected = train(Net, lambda *place: place, lambda m, place: m(place), recipe, 3)
        assert_trained_as(module, expected)

    def test_the_table_has_the_rates_of_each_group(self):
        module = Net()
        groups = [{"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.25},
                  {"params": [p for p in module.parameters() if p.dim() < 2], "lr": 0.0625, "weight_decay": 0.0}]
        # A scheduler that is given takes the place of the config's, whose peak then does not count.
        engine, *_ = ds_layerwise.initialize(
            model=module, model_parameters=groups, lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1.0), config=ds_config(scheduler={"type": "WarmupLR", "params": {
                    "warmup_max_lr": 0.5}}))
        lines = engine.optimizer.describe().splitlines()
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
        found = {row[1]: row[4:6] for row in rows if len(row) == 7 and row[4]}
        assert found["matrix"] == ["0.02", "0.25"] and found["embedding"] == ["0.003", "0.25"]
        assert found["fewer than two axes"] == ["0.0625", "0"]

    def test_everything_under_the_scalar_optimizer(self, stage, tmp_path):
        layerwise = {"overrides": [{"name": "*", "optimizer": "scalar"}]}
        engine = start(Net(), ds_config(stage=stage, layerwise=layerwise, clip=1.0))
        assert "muon (" not in engine.optimizer.describe() and "own no matrix" not in engine.optimizer.describe()
        assert "without effect here: optimizer.params.muon_lr" in engine.optimizer.describe()
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        resumed = loaded(start(Net(), ds_config(stage=stage, layerwise=layerwise, clip=1.0)), tmp_path)
        train_engine(resumed, 2, first=2)
        recipe = replace(recipe_for(Net(), clip=1.0), matrices={})
        expected = train(Net, lambda *place: place, lambda m, place: m(place), recipe, 4)
        assert_trained_as(resumed.module, expected)

    def test_a_peak_is_the_rate_where_no_other_optimizer_is_used(self, stage):
        # The peak is not lr, and nothing goes to Muon, whose rate would be multiplied.
        schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.03, "warmup_num_steps": 2,
                                                   "warmup_type": "linear"}}
        engine = start(Net(), ds_config(stage=stage, scheduler=schedule, layerwise={
            "overrides": [{"name": "*", "optimizer": "scalar"}]}))
        rates = []
        for step in range(4):
            rates.append(engine.get_lr()[0])
            train_engine(engine, 1, first=step)
        assert rates[-1] == engine.get_lr()[0] == 0.03
        recipe = replace(recipe_for(Net()), matrices={}, schedule=lambda step: rates[step] / 0.003)
        expected = train(Net, lambda *place: place, lambda m, place: m(place), recipe, 4)
        assert_trained_as(engine.module, expected)

    def test_overrides_reach_the_update(self):
        layerwise = {"overrides": [{"name": "*.bias", "weight_decay": 0.0}, {"name": "tall.*", "lr_scale": 0.5}]}
        engine = train_engine(start(Net(), ds_config(layerwise=layerwise)), 3)
        names = trainable(Net())
        expected = train(Net, lambda *place: place, lambda m, place: m(place), recipe_for(
            Net(), wd={n: 0.0 for n in names if n.endswith(".bias")}, lr={"tall.weight": 0.01, "tall.bias": 0.0015}), 3)
        assert_trained_as(engine.module, expected)

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
        engine = train_engine(start(Net(), ds_config()), 1)
        assert dist.get_world_size() == 1 and engine.global_steps == 1

    def test_other_optimizers_are_built_as_ever(self):
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
        module = torch.nn.Linear(4, 4)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
                  "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
        engine, *_ = ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=config)
        assert type(engine.optimizer) is DeepSpeedZeroOptimizer
