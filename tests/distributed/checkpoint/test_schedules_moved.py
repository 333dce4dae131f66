"""Schedules of runs that move from DeepSpeed's AdamW and back: each step has the rate, and the momentum, that it has
where the run stays."""

import contextlib
import io

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.lr_schedules import OneCycle
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, LambdaLR, LRScheduler, OneCycleLR

import ds_layerwise
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import ds_config
from tests.support.universal import WithLoss, convert, train_with_loss

pytestmark = rooms("universal", "regular", "resumed_groups")

STOCK = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
#: The same arithmetic here, so that the steps of stock are the oracle.
OWN = {"type": "LayerWise", "params": {
    "matrix_optimizer": "adamw", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01,
    "decay_vectors": True}}



class OwnCycle(OneCycle):
    """A class of the script, with a state that is a number of steps, as DeepSpeed's."""


class CountAlone(LRScheduler):
    """A class of the script, with a state that has no rates."""

    def get_lr(self):
        return [base / (1 + self.last_epoch) for base in self.base_lrs]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


ONE_CYCLE = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4}
SCHEDULES = {
    "WarmupLR": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9, "warmup_type": "linear"}},
    "OneCycle": {"type": "OneCycle", "params": ONE_CYCLE},
    "a class of its own": lambda optimizer: OwnCycle(optimizer, **ONE_CYCLE),
    "count alone": CountAlone,
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 12),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.01, total_steps=12),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.001, 0.01, 3, base_momentum=0.5, max_momentum=0.9),
}


def groups_of(module, count):
    """The parameters of ``module`` in ``count`` groups: those with weight decay, and the others."""
    params = list(module.parameters())
    if count == 1:
        return params
    return [{"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]


def started(optimizer, stage, schedule=None, groups=1, **sections):
    module = WithLoss()
    config = {**ds_config(clip=1.0, **sections), "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    if optimizer is STOCK:
        del config["layerwise"]
    make = SCHEDULES.get(schedule)
    if isinstance(make, dict):
        config["scheduler"] = make
        make = None
    engine, *_ = ds_layerwise.initialize(
        model=module, model_parameters=groups_of(module, groups), config=config, lr_scheduler=make)
    return engine


def settings(engine):
    """Return the values that the next step takes from the groups."""
    return [pytest.approx((float(group["lr"]), *map(float, group["betas"]))) for group in engine.optimizer.param_groups]


def steps(engine, first, last, schedule=None):
    """Train; return the settings of each step, and all losses. ``schedule`` is one that the script steps by itself."""
    found, losses = [], []
    for step in range(first, last):
        found.append([value.expected for value in settings(engine)])
        losses.append(train_with_loss(engine, step, step + 1))
        if schedule:
            schedule.step()
    return found, torch.cat(losses)


def assert_as(found, expected):
    """Compare two results of ``steps``."""
    for own, other in zip(found[0], expected[0], strict=True):
        assert [pytest.approx(values) for values in own] == other
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)


class TestFromStock(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("kind, stage", [
        ("OneCycle", 1), ("OneCycleLR", 2), ("CyclicLR", 3), ("a class of its own", 1)])
    def test_a_momentum_that_cycles_goes_on_in_the_first_step(self, kind, stage, tmp_path):
        stock = started(STOCK, stage, kind)
        train_with_loss(stock, 0, 2)
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        own = started(OWN, 2, kind)
        assert settings(own) != settings(stock)
        own.load_checkpoint(tmp_path, tag="converted")
        assert_as(steps(own, 2, 5), steps(stock, 2, 5))

    @pytest.mark.parametrize("kind, stage", [("CosineAnnealingLR", 1), ("OneCycleLR", 3)])
    def test_a_schedule_that_the_script_restores(self, kind, stage, tmp_path):
        stock, own = started(STOCK, stage), started(OWN, 1)
        schedule = SCHEDULES[kind](stock.basic_optimizer)
        restored = SCHEDULES[kind](own.basic_optimizer)
        steps(stock, 0, 2, schedule)
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            own.load_checkpoint(tmp_path, tag="converted")
        if dist.get_rank() == 0:
            assert f"; a schedule that goes on has lr {stock.get_lr()[0]:g}, and other rates in" in printed.getvalue()
        restored.load_state_dict(schedule.state_dict())
        assert_as(steps(own, 2, 5, restored), steps(stock, 2, 5, schedule))

    def test_a_schedule_that_came_to_its_end_leaves_no_rate(self, tmp_path):
        stock, own = started(STOCK, 1, "CosineAnnealingLR"), started(OWN, 1)
        train_with_loss(stock, 0, 12)
        assert stock.get_lr()[0] < 1e-9
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            own.load_checkpoint(tmp_path, tag="converted")
        assert own.get_lr() == [0.01] and "a schedule that goes on" not in printed.getvalue()

    def test_a_rate_that_the_script_has_set_is_named(self, tmp_path):
        stock = started(STOCK, 1)
        stock.optimizer.param_groups[0]["lr"] = 0.002
        train_with_loss(stock, 0, 1)
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        own = started(OWN, 1)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            own.load_checkpoint(tmp_path, tag="converted")
        assert own.get_lr() == [0.01]
        if dist.get_rank() == 0:
            assert "lr was 0.002 and is 0.01; this run's values are used" in printed.getvalue()

    def test_a_schedule_of_other_groups_starts_afresh(self, tmp_path):
        """torch would fail in a step, or leave the second group where the schedule begins."""
        stock = started(STOCK, 1, "CosineAnnealingLR")
        train_with_loss(stock, 0, 2)
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        own, fresh = (started(OWN, 1, "CosineAnnealingLR", groups=2) for _ in range(2))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            own.load_checkpoint(tmp_path, tag="converted")
        if dist.get_rank() == 0:
            assert "CosineAnnealingLR starts afresh, because the checkpoint has no state" in printed.getvalue()
            assert "or of other parameter groups" in printed.getvalue()
        for step in range(3):
            assert own.get_lr() == fresh.get_lr(), step
            train_with_loss(own, 2 + step, 3 + step)
            train_with_loss(fresh, 2 + step, 3 + step)

    @pytest.mark.parametrize("before, now", [(1, 2), (2, 1)])
    def test_a_schedule_of_the_script_over_other_groups_has_its_own_rates(self, before, now, tmp_path):
        stock, own = started(STOCK, 1, "CosineAnnealingLR", groups=before), started(OWN, 1, groups=now)
        train_with_loss(stock, 0, 2)
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        LambdaLR(own.basic_optimizer, lambda step: (1 + step) / 4)
        own.load_checkpoint(tmp_path, tag="converted")
        assert own.get_lr() == [0.0025] * now

    @pytest.mark.parametrize("before, now", [(1, 2), (2, 1)])
    def test_a_schedule_without_rates_in_its_state_counts_on_over_other_groups(self, before, now, tmp_path):
        """No group of the saved run is one of these, so its rate is nobody's until the schedule has the next one."""
        stock, own = started(STOCK, 1, "count alone", before), started(OWN, 1, "count alone", now)
        train_with_loss(stock, 0, 3)
        stock.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        own.load_checkpoint(tmp_path, tag="converted")
        rates = [own.get_lr()]
        train_with_loss(own, 3, 4)
        assert [*rates, own.get_lr()] == [[0.01] * now, [pytest.approx(0.01 / 5)] * now]


class TestBackToStock(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("kind, form, stage, groups", [
        ("WarmupLR", "own_universal", 1, 1), ("CosineAnnealingLR", "converted", 2, 2),
        ("WarmupLR", "own_universal", 3, 1)])
    def test_the_first_step_has_the_rate_of_the_schedule(self, kind, form, stage, groups, tmp_path):
        own = started(OWN, 2, kind, groups, layerwise={"save_universal": True})
        train_with_loss(own, 0, 3)
        own.save_checkpoint(tmp_path, tag="own")
        if form == "converted":
            convert(tmp_path / "own", tmp_path / "converted")
        stock = started(STOCK, stage, kind, groups, checkpoint={"load_universal": True})
        assert settings(stock) != settings(own)
        stock.load_checkpoint(tmp_path, tag=form)
        assert_as(steps(stock, 3, 6), steps(own, 3, 6))

    def test_groups_at_stage_3_keep_rates_of_the_config_that_differ(self, tmp_path):
        """Stock's stage 3 would give both the first one. (It counts the steps of several groups in one tensor.)"""
        own = started(OWN, 2, None, 2, layerwise={"save_universal": True})
        for rates, expected in (((0.004, 0.002), [0.01, 0.01]), ((0.004, 0.004), [0.004, 0.004])):
            for rate, group in zip(rates, own.optimizer.param_groups, strict=True):
                group["lr"] = rate
            train_with_loss(own, 0, 1)
            own.save_checkpoint(tmp_path, tag="own")
            for stage, of_stage in ((3, expected), (2, list(rates))):
                stock = started(STOCK, stage, None, 2, checkpoint={"load_universal": True})
                stock.load_checkpoint(tmp_path, tag="own_universal")
                assert stock.get_lr() == of_stage, (rates, stage)


class TestRatesAlone(DistributedTest):
    def rates(self, engine):
        """Return the rates of the next five steps."""
        return [[rate for rate, *_ in step] for step in steps(engine, 3, 8)[0]]

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("kind, module_only", [
        ("WarmupLR", False), ("CosineAnnealingLR", False), ("CosineAnnealingLR", True),
        pytest.param("OneCycle", False, marks=pytest.mark.thorough)])
    def test_without_states_the_schedule_goes_on(self, kind, module_only, tmp_path):
        engine = started(OWN, 2, kind)
        start = engine.get_lr()
        train_with_loss(engine, 0, 3)
        engine.save_checkpoint(tmp_path, tag="saved")
        expected = self.rates(engine)
        assert start != expected[0]
        later = started(OWN, 2, kind)
        later.load_checkpoint(tmp_path, tag="saved", load_optimizer_states=False, load_module_only=module_only)
        if module_only:
            assert later.get_lr() == start
        else:
            assert self.rates(later) == [pytest.approx(step) for step in expected]

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("kind", ["CosineAnnealingLR", "count alone"])
    def test_another_lr_multiplies_a_schedule_of_torch(self, kind, tmp_path):
        engine = started(STOCK, 2, kind)
        train_with_loss(engine, 0, 3)
        engine.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        expected = self.rates(engine)
        own = started({**OWN, "params": {**OWN["params"], "lr": 0.03}}, 2, kind)
        own.load_checkpoint(tmp_path, tag="converted")
        assert self.rates(own) == [pytest.approx([3 * rate for rate in step]) for step in expected]


class TestClients(DistributedTest):
    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("goes_on", [True, False])
    @pytest.mark.parametrize("kind, stage", [("OneCycleLR", 1), ("CyclicLR", 3)])
    def test_the_momentum_of_sgd_is_that_of_the_schedule(self, kind, stage, goes_on, tmp_path):
        """With this run's values the schedule goes on; one that starts afresh begins with its own momentum."""
        policy = "config" if goes_on else "checkpoint"

        def started(lr):
            module = WithLoss()
            config = ds_config(stage=stage, layerwise={"on_hyper_change": policy})
            del config["optimizer"]
            sgd = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
            return ds_layerwise.initialize(model=module, optimizer=sgd, config=config, lr_scheduler=SCHEDULES[kind])[0]

        def of_steps(engine, first):
            found = []
            for step in range(first, first + 3):
                found.append([pytest.approx(float(group["momentum"])) for group in engine.optimizer.param_groups])
                train_with_loss(engine, step, step + 1)
            return found

        engine = started(0.01)
        at_start = of_steps(engine, 0)
        engine.save_checkpoint(tmp_path, tag="saved")
        going_on = of_steps(engine, 3)
        assert at_start[0] != going_on[0]
        later = started(0.02 if goes_on else 0.01)
        later.load_checkpoint(tmp_path, tag="saved", load_lr_scheduler_states=goes_on)
        expected = going_on if goes_on else at_start
        assert of_steps(later, 3) == [[value.expected for value in step] for step in expected]
