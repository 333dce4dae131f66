"""Parameter groups that a user changes in a run: rates, other hyper-parameters, and values that none can have."""

from dataclasses import replace

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.errors import LayerWiseError, StepError
from tests.support.expected import assert_trained_as, oracle_step, start_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import (
    MATRICES,
    Net,
    ds_config,
    from_all_ranks,
    raises_on_rank_1,
    start,
    train_engine,
    weights,
)

pytestmark = rooms("param_groups", "state_access")


class TestHyperParameters(DistributedTest):
    @pytest.mark.parametrize("stage, gas, overlap", [(1, 1, True), (1, 2, False), (2, 2, True)])
    def test_they_are_read_at_every_step(self, stage, gas, overlap):
        engine, oracle = start(Net(), ds_config(stage=stage, gas=gas, overlap=overlap)), start_oracle(Net(), gas=gas)
        group, = engine.optimizer.param_groups
        assert engine.get_lr() == [0.003] and engine.get_mom() == [(0.9, 0.95)]
        changes = [{}, {"lr": 0.0015}, {"weight_decay": 0.02}, {"betas": (0.8, 0.99)}, {"momentum": 0.7}, {"eps": 1e-3},
                   {"lr": torch.tensor(0.003), "betas": [0.9, 0.95]}]
        for step, change in enumerate(changes):
            group.update(change)
            changed = {key: tuple(value) if key == "betas" else value for key, value in change.items() if key != "lr"}
            if "lr" in change:
                changed |= {"muon_lr": 0.02 * float(change["lr"]) / 0.003, "adam_lr": float(change["lr"])}
            oracle.recipe = replace(oracle.recipe, **changed)
            train_engine(engine, 1, gas=gas, first=step)
            oracle_step(oracle, step, gas=gas)
            assert_trained_as(engine.module, oracle)
        assert engine.optimizer.param_groups[0] is group and engine.get_mom() == [[0.9, 0.95]]
        engine.optimizer.set_lr(0.001)
        assert engine.get_lr() == [0.001] and engine.optimizer.get_lr() == 0.001

    def test_the_state_of_a_parameter_is_what_this_rank_owns_of_it(self):
        for stage in (1, 2):
            engine = train_engine(start(Net(), ds_config(stage=stage)), 2)
            engine.empty_partition_cache()
            mine = {}
            for name, param in trainable(engine.module).items():
                state = engine.optimizer.state.get(param, {})
                assert state is engine.optimizer.optimizer.state.get(param, state)
                if name in MATRICES and state:
                    assert state.keys() == {"momentum_buffer"}
                    assert tuple(state["momentum_buffer"].shape) in (MATRICES[name], MATRICES[name][1:])
                    mine[name] = state["momentum_buffer"].numel()
                elif state:
                    assert state.keys() == {"exp_avg", "exp_avg_sq", "step"} and int(state["step"]) == 2
                    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (mine.setdefault(
                        name, state["exp_avg"].numel()), )
            everyone = from_all_ranks(mine)
            for name, param in trainable(engine.module).items():
                owned = [of.get(name, 0) for of in everyone]
                assert sum(owned) == param.numel() and (name not in MATRICES or 0 in owned), name
            assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == 1 and not engine.optimizer.overflow


#: Values that are written into a running group, and the error.
WRITTEN = [("muon_lr", 0.0, "muon_lr is 0.0, but has no effect after.*lr times matrix_lr_ratio; remove it"),
           ("adam_lr", 0.1, "adam_lr is 0.1, but has no effect after.*lr times scalar_lr_ratio; remove it"),
           ("use_muon", False, "use_muon is False and was None when"),
           ("lr", float("nan"), r"lr must be in \[0, inf\), got nan; nothing was updated"),
           ("lr", torch.tensor(float("inf")), r"lr must be in \[0, inf\), got inf"),
           ("lr", -0.1, r"lr must be in \[0, inf\), got -0.1"), ("lr", None, "lr must be a number, got None"),
           ("momentum", 1.5, r"momentum must be in \[0, 1\), got 1.5"),
           ("betas", (0.9, 1.0), r"betas.* must be in \[0, 1\), got 1.0"),
           ("weight_decay", -1, r"weight_decay must be in \[0, inf\), got -1"),
           ("eps", "tiny", "eps must be a number, got 'tiny'"),
           ("matrix_lr_ratio", float("nan"), r"matrix_lr_ratio must be in \[0, inf\), got nan")]


class TestGroups(DistributedTest):
    def test_a_value_that_no_update_could_take_is_an_error_until_it_is_taken_back(self):
        """A single rank writes it, and all say so; nothing of the step is lost."""
        engine, oracle = start(Net(), ds_config()), start_oracle(Net())
        group, = engine.optimizer.param_groups
        for step, (key, value, message) in enumerate(WRITTEN):
            engine.backward(engine((step, 0, dist.get_rank())))
            before = dict(group)
            if dist.get_rank():
                group[key] = value
            with raises_on_rank_1(StepError, rf"param_groups\[0\].{message}"):
                engine.step()
            group.clear()
            group.update(before)
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(engine.module, oracle)

    def test_a_rate_that_a_schedule_has_rounded_to_less_than_0_is_none(self):
        engine = start(Net(), ds_config())
        schedule = torch.optim.lr_scheduler.LinearLR(engine.optimizer.optimizer, 0.3, 0.0, total_iters=3)
        for step in range(3):
            train_engine(engine, 1, first=step)
            schedule.step()
        group, = engine.optimizer.param_groups
        before = weights(engine.module).clone()
        assert -1e-15 < group["lr"] < 0
        train_engine(engine, 1, first=3)
        assert torch.equal(weights(engine.module), before)
        group["lr"] = -1e-9
        with pytest.raises(LayerWiseError, match=r"param_groups\[0\].lr must be"):
            train_engine(engine, 1, first=4)
