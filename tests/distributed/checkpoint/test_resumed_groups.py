"""Parameter groups in a checkpoint: written so that they can be read, and what wins where the config changed."""

from __future__ import annotations

import collections
import enum
from pathlib import Path
from types import SimpleNamespace

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import ds_layerwise
from ds_layerwise.checkpoint.plain_values import like, plain
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero.checkpoint import resumed_groups
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.checkpoints import ONE_FILE, assert_same_run, go_on_from, states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import MUON, Net, ds_config, start, train_engine, train_engines, weights

pytestmark = rooms("resumed_groups", "plain_values")

Pair = collections.namedtuple("Pair", "first second")


class Kind(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Flags(enum.Flag):
    A, B, C = 1, 2, 4


class Thing:
    """Nobody can read it without running its code."""


#: What users and their schedulers put into groups, and what is read back of it.
VALUES = {
    "lr": (np.float64(0.00123), 0.00123), "weight_decay": (np.float32(0.25), 0.25), "eps": (torch.tensor(0.5), 0.5),
    "betas": (np.array([0.5, 0.75]), [0.5, 0.75]), "initial_lr": (np.float64(0.003), 0.003),
    "count": (np.int64(3), 3), "flag": (np.bool_(True), True), "pair": (Pair(1, np.float16(2)), (1, 2.0)),
    "place": (Path("/a/b"), "/a/b"), "kind": (Kind.FAST, "fast"), "ordered": (collections.OrderedDict(a=1), {"a": 1}),
    "dtype": (torch.float16, torch.float16), "names": (frozenset({"x"}), {"x"}), "nothing": (None, None),
    "long": (np.longdouble(1.5), 1.5), "text": (np.str_("yes"), "yes"), "default": (collections.defaultdict(int), {}),
}


def cosine(engine):
    return LambdaLR(engine, lambda step: 0.5 * (1 + np.cos(0.2 * step)))


@pytest.mark.parametrize("before, now, after", [
    (Path("/b"), Path("/a"), Path("/b")), (Kind.SLOW, Kind.FAST, Kind.SLOW),
    ([Kind.SLOW], [Kind.FAST], [Kind.SLOW]),
    (Pair(1, Kind.SLOW), Pair(2, Path("/b")), Pair(1, Path("slow"))), ((1, 2, "c"), Pair(3, 4), (1, 2, "c")),
    ({Kind.SLOW: 1, "b": "fast"}, {Kind.SLOW: 3, "b": Kind.SLOW}, {Kind.SLOW: 1, "b": Kind.FAST}),
    (Flags.A | Flags.C, Flags.B, Flags.A | Flags.C), ("other", Kind.FAST, "other"), (1.0, 1, 1.0),
    (torch.ones(2), [Kind.FAST], torch.ones(2)), ([torch.ones(2)], [torch.zeros(2)], [torch.ones(2)]),
    (np.float64(0.5), Thing(), 0.5),
])
def test_a_value_is_as_what_the_run_has_there(before, now, after):
    found = like(now, plain(before, "it"))
    assert type(found) is type(after) and repr(found) == repr(after)
    if not isinstance(now, (Thing, list)):
        assert like(now, plain(now, "it")) is now


class TestWhatIsWritten(DistributedTest):
    def test_a_schedule_of_numpy_resumes_bit_for_bit(self, stage, tmp_path):
        config = ds_config(stage=stage, layerwise={"save_universal": True})
        engine, resumed, universal = (start(Net(), config, lr_scheduler=cosine) for _ in range(3))
        train_engine(engine, 3)
        assert isinstance(engine.optimizer.param_groups[0]["lr"], np.floating)
        engine.save_checkpoint(tmp_path, tag="tag")
        resumed.load_checkpoint(tmp_path, tag="tag")
        universal.load_checkpoint(tmp_path, tag="tag_universal")
        train_engines((engine, resumed, universal), 3, first=3)
        for each in (resumed, universal):
            assert_same_run(each, engine, of=states)
            assert each.get_lr() == engine.get_lr()

    def test_values_of_all_kinds_become_builtins(self, tmp_path):
        engine, resumed = start(Net(), ds_config()), start(Net(), ds_config())
        engine.optimizer.param_groups[0].update({key: value for key, (value, _) in VALUES.items()})
        engine.save_checkpoint(tmp_path, tag="tag")
        for key, (value, _) in VALUES.items():
            assert engine.optimizer.param_groups[0][key] is value
        resumed.load_checkpoint(tmp_path, tag="tag")
        for key, (_, expected) in VALUES.items():
            found = resumed.optimizer.param_groups[0][key]
            assert found == expected and type(found) is type(expected), key
        # A rate in a tensor stays in it.
        engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
        engine.save_checkpoint(tmp_path, tag="tag")
        held = resumed.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        resumed.load_checkpoint(tmp_path, tag="tag")
        assert resumed.optimizer.param_groups[0]["lr"] is held and held == 0.25

    def test_a_save_that_cannot_be_read_is_refused_on_every_rank(self, tmp_path):
        engine = start(Net(), ds_config())
        engine.save_checkpoint(tmp_path, tag="before")
        train_engine(engine, 1)
        group, scaler = engine.optimizer.param_groups[0], engine.optimizer.loss_scaler
        dist.barrier()
        there = sorted(path.name for path in tmp_path.iterdir())
        no_value = r"param_groups\[0\]\.thing.* which a checkpoint cannot hold"
        for spoil, message in (
                (lambda: group.update(thing={"deep": [1, Thing()]}), no_value),
                (lambda: group.update(thing=np.array([Thing()])), no_value),
                (lambda: setattr(engine.optimizer, "loss_scaler", Thing()),
                 "loss_scaler is a Thing, an object that only code could restore")):
            if dist.get_rank() == 1:
                spoil()
            with pytest.raises(LayerWiseError, match=message):
                engine.save_checkpoint(tmp_path, tag="after")
            dist.barrier()
            assert sorted(path.name for path in tmp_path.iterdir()) == there
            assert (tmp_path / "latest").read_text() == "before"
            dist.barrier()
            group.pop("thing", None)
            engine.optimizer.loss_scaler = scaler
        engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path, tag="after")

class Moded(torch.optim.Optimizer):
    """Descends as far as what its groups say is this class's own."""

    def __init__(self, params, **values):
        super().__init__(params, {"lr": 0.01, "mode": Kind.FAST, "pair": Pair(1, Kind.FAST),
                                  "by": {Kind.FAST: 0.5}, "flags": Flags.A | Flags.C, **values})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            kinds = (group["mode"] is Kind.FAST, hasattr(group["pair"], "first") and group["pair"].second is Kind.FAST,
                     group["by"].get(Kind.FAST) == 0.5, group["flags"] == Flags.A | Flags.C)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.add_(p.grad, alpha=-group["lr"] * (1 + sum(2**i * kind for i, kind in enumerate(kinds))))


class TestWhatGroupsOfAnObjectGoOnWith(DistributedTest):
    def test_a_value_of_a_class_stays_of_it(self, tmp_path, capsys):
        """An enum is compared by ``is``; the resumed run goes on as the one that was not interrupted."""
        engine, resumed = with_object(Moded), with_object(Moded)
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        capsys.readouterr()
        resumed.load_checkpoint(tmp_path)
        assert "param_groups[0]" not in capsys.readouterr().out
        group, = resumed.optimizer.param_groups
        assert group["mode"] is Kind.FAST and group["pair"] == Pair(1, Kind.FAST) and type(group["pair"]) is Pair
        train_engines((engine, resumed), 2, first=1)
        assert torch.equal(weights(resumed.module), weights(engine.module))

    def test_names_and_routes_of_parameters_are_this_runs(self, tmp_path):
        class Wrapped(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Net()

            def forward(self, place):
                return self.inner(place)

        def named(module, split):
            def make(_):
                return torch.optim.SGD([{"params": list(module.named_parameters()), "split": split}], lr=0.01)
            return make

        module = Net()
        engine = with_object(named(module, "whole"), module=module)
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        module = Wrapped()
        resumed = with_object(named(module, "element"), module=module, rename={"*": "inner.*"})
        resumed.load_checkpoint(tmp_path)
        group, = resumed.optimizer.param_groups
        assert group["param_names"] == [name for name, _ in module.named_parameters()]
        assert group["split"] == "element"
        assert torch.equal(weights(module), weights(engine.module))


#: The values of the saved run below.
RATES = {"lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1}

#: Runs that go on from one of Muon and AdamW with another optimizer, or another scale, for some parameters; and whether
#: the group of those holds this run's values then.
OTHERWISE = {
    "another rule": ({"matrix_optimizer": "soap", "muon_lr": 0.004}, {}, True),
    "another scale": ({"scale_mode": "match_rms_adamw", "muon_lr": 0.002}, {}, True),
    "the scalar one": ({"scalar_optimizer": "lion", "lr": 0.0003, "betas": [0.5, 0.75]}, {}, True),
    "an override with a rate": ({"muon_lr": 0.01}, {"optimizer": "soap", "lr": 0.004}, False),
    "none": ({"muon_lr": 0.01, "nesterov": False}, {}, False),
}

#: What a config says otherwise than the one before it, and what a group may go on with then.
OTHER = {"lr": 0.006, "muon_lr": 0.01, "weight_decay": 0.5, "momentum": 0.5, "betas": [0.25, 0.5], "eps": 1e-3}

class Plateau(ReduceLROnPlateau):
    """A scheduler that leaves no key in a group."""

    def step(self, *_):
        super().step(1.0)


class CountAlone(LRScheduler):
    """A state without rates."""

    def get_lr(self):
        return [base / (1 + self.last_epoch) for base in self.base_lrs]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


class OfNoLibrary:
    """A scheduler that leaves no key in a group, and knows its rate only after a step, as older ones of DeepSpeed's."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]

    def step(self):
        self.count += 1
        self.last = [base / (1 + self.count) for base in self.base_lrs]
        for group, lr in zip(self.optimizer.param_groups, self.last, strict=True):
            group["lr"] = lr

    def get_last_lr(self):
        assert hasattr(self, "last"), "need to call step() first"
        return self.last

    def state_dict(self):
        return {"count": self.count, "base_lrs": self.base_lrs}

    def load_state_dict(self, state):
        vars(self).update(state)


#: Schedules: one from a base, one that multiplies on from the group, one with parts, one that keeps its peak and cycles
#: the momentum, one whose part has parts, and classes of scripts.
SCHEDULES = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "sequential": lambda optimizer: SequentialLR(optimizer, [
        LambdaLR(optimizer, lambda step: (1 + step) / 4), LambdaLR(optimizer, lambda step: 1 / (1 + step))], [3]),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=8),
    "parts of parts": lambda optimizer: ChainedScheduler([SequentialLR(optimizer, [
        ConstantLR(optimizer, 0.5, 4), LambdaLR(optimizer, lambda step: 1 / (1 + step))], [5])]),
    "plateau": lambda optimizer: Plateau(optimizer, factor=0.5, patience=0),
    "count alone": CountAlone,
    "of no library": OfNoLibrary,
}


def effective(engine):
    """The values that the next step will use."""
    group, = engine.optimizer.param_groups
    rates = {key: pytest.approx(group["lr"] * group[ratio], rel=1e-12)
             for key, ratio in (("muon_lr", "matrix_lr_ratio"), ("adam_lr", "scalar_lr_ratio"))}
    return {**rates, **{key: group[key] for key in ("momentum", "weight_decay", "eps")}, "betas": tuple(group["betas"])}


def with_object(make, schedule=None, module=None, **layerwise):
    """An engine that ``make(parameters)`` trains, and what ``schedule`` makes of that."""
    module = module or Net()
    optimizer = make(list(module.parameters()))
    config = ds_config(layerwise={"client_optimizer": {"split": "whole"}, **layerwise})
    del config["optimizer"]
    return ds_layerwise.initialize(model=module, optimizer=optimizer, config=config,
                                   lr_scheduler=schedule(optimizer) if schedule else None)[0]


class TestAnotherOptimizer(DistributedTest):
    """Groups hold this run's values, in every form of checkpoint."""

    @pytest.mark.parametrize("policy, stage", [("reset", 1), ("keep_shared", 3)])
    def test_rates_are_those_of_the_config(self, policy, stage, tmp_path, capsys):
        config = ds_config(stage=stage, layerwise={"save_universal": True})
        saved = train_engine(start(Net(), config, lr_scheduler=SCHEDULES["lambda"]), 3)
        saved.save_checkpoint(tmp_path, tag="tag")
        saved.optimizer.save_state_dict_to_file(tmp_path / ONE_FILE)
        dcp.save(saved.optimizer.sharded_state_dict(), checkpoint_id=str(tmp_path / "sharded"))
        for kind, (params, override, is_this_runs) in OTHERWISE.items():
            layerwise = {"on_optimizer_change": policy}
            if override:
                layerwise["overrides"] = [{"name": "square.weight", **override}]
            config = ds_config(stage=stage, layerwise=layerwise, optimizer={
                "type": "LayerWise", "params": {"matrix_optimizer": "muon", **RATES, **params}})
            engine, fresh = (start(Net(), config, lr_scheduler=SCHEDULES["lambda"]) for _ in range(2))
            expected = effective(fresh if is_this_runs else saved)
            for key in ("muon_lr", "adam_lr"):
                if is_this_runs:
                    expected[key] = pytest.approx(expected[key].expected / 4, rel=1e-12)
            for tag in ("tag", "tag_universal", None, "sharded"):
                capsys.readouterr()
                if tag == "sharded":
                    engine.optimizer.load_sharded_state_dict(tmp_path / tag)
                else:
                    go_on_from(engine, tmp_path, tag)
                if tag in ("tag", "tag_universal"):
                    assert effective(engine) == expected, (kind, tag)
                else:
                    # A script restores the scheduler of these.
                    assert engine.optimizer.param_groups[0]["matrix_lr_ratio"] == pytest.approx(
                        (fresh if is_this_runs else saved).optimizer.param_groups[0]["matrix_lr_ratio"]), (kind, tag)
                if dist.get_rank() == 0:
                    said = capsys.readouterr().out
                    assert ("are used, because the saved run used" in said) == is_this_runs, (kind, tag)
            engine.destroy()
            fresh.destroy()

    def test_a_group_that_goes_to_another_one(self, tmp_path):
        """The other group goes on as it was saved; ``use_muon`` is this run's."""
        def started(use_muon, lr, other):
            module = Net()
            rest = [p for p in module.parameters() if p is not module.square.weight]
            return ds_layerwise.initialize(model=module, config=ds_config(layerwise={
                "on_optimizer_change": "reset"}), model_parameters=[
                    {"params": [module.square.weight], "use_muon": use_muon, "lr": lr},
                    {"params": rest, "use_muon": False, "lr": other}])[0]

        engine, resumed = started(False, 0.004, 0.001), started(True, 0.02, 0.002)
        engine.save_checkpoint(tmp_path)
        resumed.load_checkpoint(tmp_path)
        assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.02, 0.001]
        assert [group["use_muon"] for group in resumed.optimizer.param_groups] == [True, False]

    @pytest.mark.parametrize("before", ["a config", "an object"])
    def test_a_schedule_goes_on_from_the_rate_of_this_run(self, before, tmp_path):
        def descends(lr, **layerwise):
            return with_object(lambda params: torch.optim.SGD(params, lr=lr), SCHEDULES["lambda"], **layerwise)

        old = start(Net(), ds_config(), lr_scheduler=SCHEDULES["lambda"]) if before == "a config" else with_object(
            lambda params: torch.optim.AdamW(params, lr=0.003), SCHEDULES["lambda"])
        engine, always = descends(0.0625, on_optimizer_change="reset"), descends(0.0625)
        train_engines((old, always), 3)
        old.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        for step in range(3, 6):
            assert engine.get_lr() == pytest.approx(always.get_lr(), rel=1e-12), step
            train_engines((engine, always), 1, first=step)
        assert {"matrix_lr_ratio", "betas"}.isdisjoint(engine.optimizer.param_groups[0])

    @pytest.mark.parametrize("kind", ["step", "one cycle"])
    def test_a_schedule_that_the_script_restores(self, kind, tmp_path):
        """The first step, and each of one that multiplies on from the group, are those of a run of this config."""
        def started(**params):
            engine = start(Net(), ds_config(layerwise={"on_optimizer_change": "reset"}, optimizer={
                "type": "LayerWise", "params": {**RATES, "matrix_optimizer": "muon", **params}}))
            return engine, SCHEDULES[kind](engine.optimizer.optimizer)

        def trained(pair, step):
            train_engine(pair[0], 1, first=step)
            pair[1].step()

        factor = 1 + (kind == "step")
        other = {"matrix_optimizer": "soap", "lr": 0.003 * factor, "muon_lr": 0.004}
        old, always, resumed = started(), started(**other), started(**other)
        for step in range(3):
            trained(old, step)
            trained(always, step)
        old[0].save_checkpoint(tmp_path)
        resumed[0].load_checkpoint(tmp_path)
        resumed[1].load_state_dict(old[1].state_dict())
        for step in range(3, 6):
            assert resumed[0].get_lr() == pytest.approx(always[0].get_lr(), rel=1e-12), step
            assert effective(resumed[0]) == effective(always[0]), step
            trained(always, step)
            trained(resumed, step)

    @pytest.mark.parametrize("changes", [{"on_hyper_change": "config"}, {"on_optimizer_change": "reset"}], ids=str)
    def test_a_schedule_of_the_script_that_the_saved_run_did_not_have(self, changes, tmp_path):
        """It begins with a warm-up, and not with the rate of the saved run."""
        old = train_engine(start(Net(), ds_config()), 1)
        old.save_checkpoint(tmp_path)
        optimizer = {"matrix_optimizer": "muon" if "on_hyper_change" in changes else "soap", **RATES, "lr": 0.006}
        engine = start(Net(), ds_config(layerwise=changes, optimizer={"type": "LayerWise", "params": optimizer}))
        schedule = LambdaLR(engine.optimizer.optimizer, lambda step: (1 + step) / 4)
        engine.load_checkpoint(tmp_path)
        for step in range(1, 4):
            assert engine.get_lr() == [pytest.approx(0.0015 * step)]
            train_engine(engine, 1, first=step)
            schedule.step()


class TestWhatWins(DistributedTest):
    def resumed(self, folder, wins, **changes):
        engine = start(Net(), ds_config(params=OTHER, layerwise={"on_hyper_change": wins}), **changes)
        engine.load_checkpoint(folder)
        return engine

    def test_a_group_is_of_one_side_as_a_whole(self, tmp_path, capsys):
        """A value that a script has moved is the checkpoint's, too."""
        old, fresh = start(Net(), ds_config()), start(Net(), ds_config(params=OTHER))
        old.optimizer.param_groups[0].update(lr=0.001, mine=3)
        train_engine(old, 2)
        old.save_checkpoint(tmp_path)
        capsys.readouterr()
        for wins, source, outcome in (("checkpoint", old, "the checkpoint's are used, set layerwise.on_hyper_change"),
                                      ("config", fresh, "this run's values are used, because layerwise.on_hyper_ch")):
            engine = self.resumed(tmp_path, wins)
            assert effective(engine) == effective(source)
            assert engine.optimizer.param_groups[0].get("mine") == source.optimizer.param_groups[0].get("mine")
            if dist.get_rank() == 0:
                line, = (line for line in capsys.readouterr().out.splitlines() if "param_groups[0]" in line)
                assert outcome in line
                for text in ("lr was 0.003 and is 0.006", "muon_lr was 0.02 and is 0.01", "weight_decay was 0.1 and is",
                             "adam_lr was 0.003 and is 0.006", "betas was (0.9, 0.95) and is (0.25, 0.5)",
                             "momentum was 0.95 and is 0.5", "eps was 1e-10 and is 0.001"):
                    assert text in line
        engine = start(Net(), ds_config(layerwise={"on_hyper_change": "config"}))
        engine.load_checkpoint(tmp_path)
        assert effective(engine) == effective(old) and "param_groups[0]" not in capsys.readouterr().out

    @pytest.mark.parametrize("kind", SCHEDULES)
    def test_a_schedule_of_torch_goes_on_from_its_state(self, kind, tmp_path):
        """With this run's values, as if it had had their rate from the start."""
        schedule = SCHEDULES[kind]
        old, always = (start(Net(), ds_config(params=params), lr_scheduler=schedule) for params in ({}, OTHER))
        train_engines((old, always), 3)
        old.save_checkpoint(tmp_path)
        engine, stays = (self.resumed(tmp_path, wins, lr_scheduler=schedule) for wins in ("config", "checkpoint"))
        for step in range(3, 6):
            assert engine.get_lr() == pytest.approx(always.get_lr(), rel=1e-12), step
            assert effective(engine) == effective(always)
            if kind != "count alone":
                # That one's rates are in no checkpoint.
                assert stays.get_lr() == old.get_lr() and effective(stays) == effective(old)
            train_engines((old, always, engine, stays), 1, first=step)

    @pytest.mark.parametrize("kind", ["of DeepSpeed", "afresh", "of another kind"])
    def test_a_schedule_that_starts_from_the_config_has_its_rates(self, kind, tmp_path, capsys):
        """Whatever wins; the ratio of another rate would make one that nobody chose."""
        def scheduled(params, key="lambda", **layerwise):
            lr = {**MUON, **params}["lr"]
            if kind == "of DeepSpeed":
                warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 4}}
                return start(Net(), ds_config(params=params, layerwise=layerwise, scheduler=warmup))
            return start(Net(), ds_config(params=params, layerwise=layerwise), lr_scheduler=SCHEDULES[key])

        old = scheduled({}, "step" if kind == "of another kind" else "lambda")
        train_engine(old, 3)
        old.save_checkpoint(tmp_path)
        for params in (OTHER, {}):
            engine, always = scheduled(params), scheduled(params)
            capsys.readouterr()
            engine.load_checkpoint(tmp_path, load_lr_scheduler_states=kind != "afresh")
            if dist.get_rank() == 0:
                said = capsys.readouterr().out
                assert ("are used, because" in said) == bool(params)
                assert ("LambdaLR starts afresh, because" in said) == (kind == "of another kind")
            train_engine(always, 3 if kind == "of DeepSpeed" else 0)
            for step in range(3, 5):
                assert engine.get_lr() == pytest.approx(always.get_lr(), rel=1e-12)
                assert effective(engine) == effective(always)
                train_engines((engine, always), 1, first=step)

    @pytest.mark.parametrize("now", ["one cycle", "lambda"])
    def test_a_schedule_that_starts_afresh_has_its_momentum(self, now, tmp_path):
        """The cycle of the saved run has ended somewhere between its two bounds."""
        old = train_engine(start(Net(), ds_config(), lr_scheduler=SCHEDULES["one cycle"]), 3)
        old.save_checkpoint(tmp_path)
        engine, always = (start(Net(), ds_config(), lr_scheduler=SCHEDULES[now]) for _ in range(2))
        assert effective(old)["betas"] != effective(always)["betas"]
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=now == "lambda")
        for step in range(3, 6):
            assert engine.get_lr() == always.get_lr() and effective(engine) == effective(always), step
            train_engines((engine, always), 1, first=step)

    def test_a_save_right_after_a_load_has_the_new_rates(self, tmp_path):
        """A composed scheduler of torch says there what its rate was before."""
        old = train_engine(start(Net(), ds_config(), lr_scheduler=SCHEDULES["parts of parts"]), 3)
        old.save_checkpoint(tmp_path)
        self.resumed(tmp_path, "config", lr_scheduler=SCHEDULES["parts of parts"]).save_checkpoint(tmp_path, tag="next")
        back = start(Net(), ds_config(layerwise={"on_hyper_change": "config"}),
                     lr_scheduler=SCHEDULES["parts of parts"])
        back.load_checkpoint(tmp_path, tag="next")
        for step in range(3, 6):
            assert back.get_lr() == pytest.approx(old.get_lr(), rel=1e-12), step
            train_engines((old, back), 1, first=step)

    def test_the_scheduler_keeps_its_rates_where_one_file_is_loaded(self, tmp_path):
        """The script restores it, and its rates are this run's until then."""
        old = train_engine(start(Net(), ds_config(), lr_scheduler=SCHEDULES["lambda"]), 3)
        old.optimizer.save_state_dict_to_file(tmp_path / ONE_FILE)
        engine = start(Net(), ds_config(params=OTHER, layerwise={"on_hyper_change": "config"}),
                       lr_scheduler=SCHEDULES["lambda"])
        engine.optimizer.load_state_dict_from_file(tmp_path / ONE_FILE)
        assert engine.lr_scheduler.base_lrs == [OTHER["lr"]]
        assert engine.get_lr() == pytest.approx([OTHER["lr"] / 4], rel=1e-12)

    def test_weights_alone_leave_a_scheduler_that_does_not_know_its_rate(self, tmp_path):
        old = train_engine(start(Net(), ds_config(), lr_scheduler=OfNoLibrary), 3)
        old.save_checkpoint(tmp_path)
        engine = start(Net(), ds_config(), lr_scheduler=OfNoLibrary)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert engine.get_lr() == [MUON["lr"]]
        train_engines((old, engine), 1, first=3)
        assert engine.get_lr() == old.get_lr()

    def test_each_group_by_itself(self, tmp_path, capsys):
        def start_groups(decays):
            module = Net()
            params = list(module.parameters())
            groups = [{"params": params[i::3], "weight_decay": decay} for i, decay in enumerate(decays)]
            config = ds_config(layerwise={"on_hyper_change": "config"})
            return ds_layerwise.initialize(model=module, model_parameters=groups, config=config)[0]

        start_groups((0.1, 0.2, 0.1)).save_checkpoint(tmp_path)
        engine = start_groups((0.3, 0.2, 0.3))
        capsys.readouterr()
        engine.load_checkpoint(tmp_path)
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.3, 0.2, 0.3]
        if dist.get_rank() == 0:
            said = capsys.readouterr().out
            assert "param_groups[0]: weight_decay was 0.1 and is 0.3; " in said and "param_groups[1]" not in said


def test_a_schedule_without_a_mark_goes_on_in_proportion_to_a_saved_one():
    """The saved group, of another package, has the rate from which its schedule starts; this run's has none."""
    optimizer = LayerWiseOptimizer(nn.Linear(2, 2).parameters(), OptimizerConfig(lr=0.004))
    header = SimpleNamespace(configured=[{"lr": 0.005, "initial_lr": 0.01}])
    schedule = SimpleNamespace(get_last_lr=lambda: [0.005])
    group, = resumed_groups.after_another(optimizer, header, schedule, True)
    assert group.values["lr"] == pytest.approx(0.002) and group.factor == pytest.approx(0.4)
