"""Groups that users and schedulers see: they stay, and the ratio of their rates holds."""

import math
from dataclasses import replace

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import ds_layerwise
from ds_layerwise.errors import ConfigError
from tests.support.checkpoints import loaded
from tests.support.expected import assert_trained_as, by_the_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import train, trainable
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, raises_on_rank_1, recipe_for, start, train_engine

pytestmark = rooms("param_groups", "rate_checks", "engine_hooks")

STEPS = 8

HIDDEN = ("square.weight", "tall.weight")


def warmup(peak, num_steps):
    return {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": peak, "warmup_num_steps": num_steps,
                                           "warmup_type": "linear"}}


def warmed_up(step, num_steps):
    """The part of the peak in a step; DeepSpeed has the first one twice."""
    return min(max(step - 1, 0) / num_steps, 1)


#: The section of a config or the function for ``initialize``, and the factor of every rate in a step.
SCHEDULES = {
    "WarmupLR": (warmup(0.003, 4), None, lambda step: warmed_up(step, 4)),
    "LambdaLR": (None, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
                 lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": ({"type": "CosineAnnealingLR", "params": {"T_max": 6}}, None,
                          lambda step: (1 + math.cos(math.pi * step / 6)) / 2),
    "by hand": (None, None, lambda step: (1 + math.cos(math.pi * step / 6)) / 2),
}


@pytest.mark.usefixtures("wide_tables")
class TestSchedulers(DistributedTest):
    @pytest.mark.parametrize("how", SCHEDULES)
    def test_a_schedule_is_followed_as_the_oracle_does(self, how):
        section, function, factor = SCHEDULES[how]
        engine = start(Net(), ds_config(**{"scheduler": section} if section else {}), lr_scheduler=function)
        after = lr_scheduler.CosineAnnealingLR(engine.optimizer.optimizer, T_max=6) if how == "by hand" else None
        for step in range(STEPS):
            assert engine.get_lr() == [pytest.approx(0.003 * factor(step))]
            train_engine(engine, 1, first=step)
            if after:
                after.step()
        assert_trained_as(engine.module, by_the_oracle(Net, STEPS, schedule=factor))

    def test_a_scripts_schedule_of_another_optimizer_is_refused(self):
        schedule = lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.003), 1)
        with pytest.raises(ConfigError, match=r"lr_scheduler is a StepLR of another optimizer \(SGD\), so that no rate "
                           r"of this engine would ever move; give a function: lr_scheduler=lambda optimizer: StepLR"):
            start(Net(), ds_config(), lr_scheduler=schedule)

    @pytest.mark.world_size(2)
    def test_a_function_that_fails_on_one_rank_is_an_error_on_all(self):
        """The text has what a file system and a user may put into it."""
        def make(optimizer):
            if dist.get_rank() == 1:
                raise OSError("no Länge of 重.\udcff")
            return lr_scheduler.StepLR(optimizer, 1)

        with raises_on_rank_1(OSError, "no Länge of 重"):
            start(Net(), ds_config(), lr_scheduler=make)

    @pytest.mark.world_size(2)
    def test_a_state_that_fails_on_one_rank_is_an_error_of_the_load_on_all(self, tmp_path):
        class Schedule(lr_scheduler.StepLR):
            fails = False

            def state_dict(self):
                if self.fails:
                    raise OSError("no state")
                return super().state_dict()

        engine = start(Net(), ds_config(), lr_scheduler=lambda optimizer: Schedule(optimizer, 1))
        engine.save_checkpoint(tmp_path)
        engine.lr_scheduler.fails = dist.get_rank() == 1
        with raises_on_rank_1(OSError, "no state"):
            engine.load_checkpoint(tmp_path)
        engine.lr_scheduler.fails = False
        engine.load_checkpoint(tmp_path)

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
        # The peak is not lr, and nothing goes to Muon, whose rate would be multiplied.
        config = ds_config(stage=stage, clip=1.0, scheduler=warmup(0.03, 2), layerwise={
            "overrides": [{"name": "*", "optimizer": "scalar"}]})
        engine = start(Net(), config)
        assert "muon (" not in engine.optimizer.describe() and "own no matrix" not in engine.optimizer.describe()
        assert "without effect here: optimizer.params.muon_lr" in engine.optimizer.describe()
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        resumed = loaded(start(Net(), config), tmp_path)
        train_engine(resumed, 2, first=2)
        assert resumed.get_lr() == [0.03]
        recipe = replace(recipe_for(Net(), clip=1.0, schedule=lambda step: 10 * warmed_up(step, 2)), matrices={})
        expected = train(Net, lambda *place: place, lambda m, place: m(place), recipe, 4)
        assert_trained_as(resumed.module, expected)
