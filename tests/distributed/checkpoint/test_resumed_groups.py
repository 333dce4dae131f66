"""Parameter groups in a checkpoint: written so that they can be read, and what wins where the config changed."""

from __future__ import annotations

import collections
import enum
import math
from pathlib import Path

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import ds_layerwise
from ds_layerwise.checkpoint.files.safe_load import load_safely
from ds_layerwise.checkpoint.plain_values import like, plain
from ds_layerwise.engine.saving import saving
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero.checkpoint import resumed_groups
from tests.support.checkpoints import ONE_FILE, assert_equal_states, assert_same_run, go_on_from, states
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
                 "optim_states.pt cannot be read back: loss_scaler is an object")):
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

    def test_a_config_with_numbers_of_numpy(self, tmp_path):
        """DeepSpeed writes the config into the same files."""
        config = ds_config(params={"lr": np.float64(0.003), "muon_lr": np.float64(0.02)}, layerwise={"fsync": True})
        engine, resumed = start(Net(), config), start(Net(), config)
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        resumed.load_checkpoint(tmp_path)
        assert_equal_states(states(resumed), states(engine))

    def test_a_checkpoint_of_version_0_1_loads(self, tmp_path, monkeypatch, capsys):
        """Version 0.1 wrote groups as they were, and nothing of what they had been given."""
        config = ds_config(layerwise={"save_universal": True})
        written = {key: value for key, (value, _) in VALUES.items() if key != "names"}
        with monkeypatch.context() as patch:
            patch.setattr(saving.regular, "check_readable", lambda *_: None)
            patch.setattr(resumed_groups, "described", lambda groups: [
                {key: value for key, value in group.items() if key != "params"} for group in groups])
            engine = train_engine(start(Net(), config), 1)
            engine.optimizer.param_groups[0].update(written, thing=Thing())
            engine.optimizer.configured = []
            engine.save_checkpoint(tmp_path, tag="tag")
        with pytest.raises(LayerWiseError, match="cannot be read: UnpicklingError"):
            load_safely(tmp_path / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        for tag in ("tag", "tag_universal"):
            resumed = start(Net(), config)
            own = {key: object() for key in ("thing", "pair", "place", "kind")}
            resumed.optimizer.param_groups[0].update(own)
            capsys.readouterr()
            resumed.load_checkpoint(tmp_path, tag=tag)
            found = resumed.optimizer.param_groups[0]
            for key in written.keys() - own.keys():
                assert found[key] == VALUES[key][1] and type(found[key]).__module__ != "numpy", key
            for key, value in own.items():
                assert found[key] is value, key
            if dist.get_rank() == 0:
                said = capsys.readouterr().out
                for key in own:
                    assert f"param_groups[0].{key} is an object in the checkpoint" in said
            assert_equal_states(states(resumed), states(engine))
            resumed.destroy()


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

    @pytest.mark.parametrize("wins", ["checkpoint", "config"])
    def test_a_value_that_the_run_says_otherwise(self, wins, tmp_path, capsys):
        """Whatever wins is of the class that this run has for it."""
        other = {"mode": Kind.SLOW, "pair": Pair(2, Kind.SLOW), "by": {Kind.FAST: 0.25}, "flags": Flags.B}
        engine = with_object(lambda params: Moded(params, **other))
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        capsys.readouterr()
        resumed = with_object(Moded, on_hyper_change=wins)
        expected = other if wins == "checkpoint" else {key: resumed.optimizer.param_groups[0][key] for key in other}
        resumed.load_checkpoint(tmp_path)
        if dist.get_rank() == 0:
            assert "param_groups[0].mode was slow in the saved run and is fast" in capsys.readouterr().out
        found = {key: resumed.optimizer.param_groups[0][key] for key in other}
        assert found == expected and {key: type(each) for key, each in found.items()} == {
            key: type(each) for key, each in expected.items()}

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

    def test_use_muon_is_this_runs(self, tmp_path):
        def started(use_muon):
            module = Net()
            rest = [p for p in module.parameters() if p is not module.square.weight]
            return ds_layerwise.initialize(model=module, config=ds_config(layerwise={
                "on_optimizer_change": "reset"}), model_parameters=[
                    {"params": [module.square.weight], "use_muon": use_muon, "lr": 0.01},
                    {"params": rest, "use_muon": False}])[0]

        engine, resumed = started(False), started(True)
        engine.save_checkpoint(tmp_path)
        resumed.load_checkpoint(tmp_path)
        assert resumed.optimizer.param_groups[0]["use_muon"] is True


#: The values of the saved run below.
RATES = {"lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1}

#: Runs that go on from one of Muon and AdamW with another optimizer, or another scale, for some parameters; and whether
#: the group of those goes by this run's config then.
OTHERWISE = {
    "another rule": ({"matrix_optimizer": "soap", "muon_lr": 0.004}, {}, True),
    "one rule for all": ({"matrix_optimizer": "adamw", "lr": 0.002, "muon_lr": 0.002}, {}, True),
    "the same states": ({"matrix_optimizer": "polargrad", "muon_lr": 0.25}, {}, True),
    "another scale": ({"scale_mode": "match_rms_adamw", "muon_lr": 0.002}, {}, True),
    "another size by a hook": ({"relative_update": True, "muon_lr": 0.01}, {}, True),
    "the scalar one": ({"scalar_optimizer": "lion", "lr": 0.0003, "betas": [0.5, 0.75]}, {}, True),
    "an override": ({"muon_lr": 0.01}, {"optimizer": "normuon"}, True),
    "an override with a rate": ({"muon_lr": 0.01}, {"optimizer": "soap", "lr": 0.004}, False),
    "none": ({"muon_lr": 0.01, "nesterov": False}, {}, False),
}

#: What a config says otherwise than the one before it, and what a group then goes on with.
OTHER = {"lr": 0.006, "muon_lr": 0.01, "weight_decay": 0.5, "momentum": 0.5, "betas": [0.25, 0.5], "eps": 1e-3}


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


#: Schedules that multiply on from the group, set it from a base, and move betas, too.
AFRESH = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=10),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=10,
                                              base_momentum=100 * optimizer.param_groups[0]["lr"]),
    "chained": lambda optimizer: ChainedScheduler([ExponentialLR(optimizer, 0.5), ConstantLR(optimizer, 0.5, 2)]),
    "sequential cycle": lambda optimizer: SequentialLR(optimizer, [
        OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=10),
        ExponentialLR(optimizer, 0.5)], [8]),
    "of DeepSpeed": None,
}

#: Schedules that go on; what a cosine comes down to is no part of the rate.
ONWARD = {
    "lambda": AFRESH["lambda"],
    "step": AFRESH["step"],
    "sequential": lambda optimizer: SequentialLR(optimizer, [
        LambdaLR(optimizer, lambda step: (1 + step) / 4), LambdaLR(optimizer, lambda step: 1 / (1 + step))], [3]),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=8,
                                              cycle_momentum=False),
    "cyclic": lambda optimizer: CyclicLR(optimizer, base_lr=optimizer.param_groups[0]["lr"] / 4,
                                         max_lr=optimizer.param_groups[0]["lr"], step_size_up=4, cycle_momentum=False),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=8, eta_min=0.002),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 5, eta_min=0.002),
    "sequential cosine": lambda optimizer: SequentialLR(optimizer, [
        LambdaLR(optimizer, lambda step: (1 + step) / 2), CosineAnnealingLR(optimizer, T_max=8, eta_min=0.002)], [1]),
}


class TestAnotherOptimizer(DistributedTest):
    """Rates of another optimizer are this run's, in every form of checkpoint."""

    @pytest.mark.parametrize("policy, stage", [("reset", 1), ("keep_shared", 3)])
    def test_rates_are_those_of_the_config(self, policy, stage, tmp_path, capsys):
        config = ds_config(stage=stage, layerwise={"save_universal": True})
        # A script's scheduler has moved the rate: it goes on from this run's.
        saved = train_engine(start(Net(), config, lr_scheduler=AFRESH["lambda"]), 3)
        saved.save_checkpoint(tmp_path, tag="tag")
        saved.optimizer.save_state_dict_to_file(tmp_path / ONE_FILE)
        dcp.save(saved.optimizer.sharded_state_dict(), checkpoint_id=str(tmp_path / "sharded"))
        for kind, (params, override, is_this_runs) in OTHERWISE.items():
            layerwise = {"on_optimizer_change": policy}
            if override:
                layerwise["overrides"] = [{"name": "square.weight", **override}]
            config = ds_config(stage=stage, layerwise=layerwise, optimizer={
                "type": "LayerWise", "params": {"matrix_optimizer": "muon", **RATES, **params}})
            engine, fresh = (start(Net(), config, lr_scheduler=AFRESH["lambda"]) for _ in range(2))
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
                    assert ("is used, because the saved run used" in said) == is_this_runs, (kind, tag)
            train_engine(engine, 1, first=3)
            engine.destroy()
            fresh.destroy()

    def test_a_group_that_goes_to_another_one(self, tmp_path):
        """The other group goes on as it was saved."""
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


class TestWhatWins(DistributedTest):
    def resumed(self, folder, wins, *, tag="tag", **changes):
        engine = start(Net(), ds_config(params=OTHER, layerwise={"on_hyper_change": wins} if wins else {}), **changes)
        engine.load_checkpoint(folder, tag=tag)
        return engine

    @pytest.mark.parametrize("wins, tag", [
        (None, "tag"), ("checkpoint", "tag_universal"), ("config", "tag"), ("config", "tag_universal"),
        pytest.param(None, "tag_universal", marks=pytest.mark.thorough),
        pytest.param("checkpoint", "tag", marks=pytest.mark.thorough)])
    def test_without_a_schedule(self, wins, tag, tmp_path, capsys):
        old = train_engine(start(Net(), ds_config(layerwise={"save_universal": True})), 2)
        old.save_checkpoint(tmp_path, tag="tag")
        capsys.readouterr()
        engine = self.resumed(tmp_path, wins, tag=tag)
        if dist.get_rank() == 0:
            said = [line for line in capsys.readouterr().out.splitlines() if "param_groups[0]." in line]
            assert len(said) == 7
            for key, before, now in (("lr", 0.003, 0.006), ("muon_lr", 0.02, 0.01), ("adam_lr", 0.003, 0.006),
                                     ("weight_decay", 0.1, 0.5), ("momentum", 0.95, 0.5),
                                     ("betas", (0.9, 0.95), (0.25, 0.5)), ("eps", 1e-10, 1e-3)):
                line, = (line for line in said if f"param_groups[0].{key} was {before} " in line)
                assert f"is {now} in this run's config; {now if wins == 'config' else before} is used" in line
        fresh = start(Net(), ds_config(params=OTHER))
        assert effective(engine) == effective(fresh if wins == "config" else old)
        # What is in force decides the next step.
        old.optimizer.param_groups[0].update(
            {key: value for key, value in engine.optimizer.param_groups[0].items() if key != "params"})
        train_engine(old, 2, first=2)
        train_engine(engine, 2, first=2)
        assert torch.equal(weights(engine.module), weights(old.module))
        # The next resume is told of what goes on by then.
        engine.save_checkpoint(tmp_path, tag="again")
        capsys.readouterr()
        self.resumed(tmp_path, wins, tag="again")
        if dist.get_rank() == 0:
            assert capsys.readouterr().out.count("param_groups[0].") == (0 if wins == "config" else 7)

    @pytest.mark.parametrize("kind", ONWARD)
    def test_a_schedule_of_torch_goes_on_from_the_new_rate(self, kind, tmp_path):
        """The run goes on as if it had had that rate from the start."""
        schedule = ONWARD[kind]
        old, always = (start(Net(), ds_config(params=params), lr_scheduler=schedule) for params in ({}, OTHER))
        train_engine(old, 3)
        train_engine(always, 3)
        old.save_checkpoint(tmp_path, tag="tag")
        engine, stays = (self.resumed(tmp_path, wins, lr_scheduler=schedule) for wins in ("config", "checkpoint"))
        for step in range(3, 6):
            assert engine.get_lr() == pytest.approx(always.get_lr(), rel=1e-12), step
            assert engine.lr_scheduler.get_last_lr() == pytest.approx(always.lr_scheduler.get_last_lr(), rel=1e-12)
            assert effective(engine) == effective(always)
            assert stays.get_lr() == old.get_lr() and effective(stays) == effective(old)
            train_engines((old, always, engine, stays), 1, first=step)

    @pytest.mark.parametrize("wins", ["checkpoint", "config"])
    @pytest.mark.parametrize("kind", ["of DeepSpeed", "afresh"])
    def test_a_schedule_that_starts_from_the_config_has_its_rates(self, kind, wins, tmp_path, capsys):
        """Whatever wins, ``lr`` is the config's then; the ratio of another one would make a rate that nobody chose."""
        def scheduled(params, **layerwise):
            lr = {**MUON, **params}["lr"]
            if kind == "of DeepSpeed":
                warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": lr, "warmup_num_steps": 4}}
                return start(Net(), ds_config(params=params, layerwise=layerwise, scheduler=warmup))
            return start(Net(), ds_config(params=params, layerwise=layerwise),
                         lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)))

        old, engine, always = scheduled({}), scheduled(OTHER, on_hyper_change=wins), scheduled(OTHER)
        train_engine(old, 3)
        old.save_checkpoint(tmp_path)
        capsys.readouterr()
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=kind == "of DeepSpeed")
        if dist.get_rank() == 0:
            said = capsys.readouterr().out
            assert "param_groups[0].muon_lr was 0.02 in the saved run and is 0.01 in this run's config; " \
                   "0.01 is used" in said
            assert (f"because {type(engine.lr_scheduler).__name__} starts" in said) == (wins == "checkpoint")
            assert ("0.1 is used" in said) == (wins == "checkpoint")
        train_engine(always, 3 if kind == "of DeepSpeed" else 0)
        for step in range(3, 5):
            train_engines((engine, always), 1, first=step)
            now, wanted = effective(engine), effective(always)
            assert engine.get_lr() == pytest.approx(always.get_lr(), rel=1e-12)
            assert all(now[key] == wanted[key] for key in ("muon_lr", "adam_lr"))
            assert now["weight_decay"] == (0.1 if wins == "checkpoint" else 0.5)

    @pytest.mark.parametrize("kind", AFRESH)
    def test_a_schedule_that_starts_afresh_is_one_of_this_run(self, kind, tmp_path):
        """Step for step what it is in a run that loads nothing: most of torch's multiply on from what a group says."""
        def scheduled(params=None, **layerwise):
            lr = {**MUON, **(params or {})}["lr"]
            if kind == "of DeepSpeed":
                return start(Net(), ds_config(params=params or {}, layerwise=layerwise, scheduler={
                    "type": "OneCycle", "params": {"cycle_min_lr": lr / 4, "cycle_max_lr": lr,
                                                   "cycle_first_step_size": 4, "cycle_min_mom": 0.5}}))
            return start(Net(), ds_config(params=params or {}, layerwise=layerwise), lr_scheduler=AFRESH[kind])

        def said(engine):
            return {key: value for key, value in engine.optimizer.param_groups[0].items()
                    if key in ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "betas")}

        old = scheduled()
        train_engine(old, 5)
        old.save_checkpoint(tmp_path)
        for params, wins in (({}, "checkpoint"), (OTHER, "checkpoint"), (OTHER, "config")):
            engine, always = scheduled(params, on_hyper_change=wins), scheduled(params)
            engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
            for step in range(3):
                expected = said(always)
                if wins == "checkpoint" and "cycle" not in kind.lower() and kind != "of DeepSpeed":
                    expected["betas"] = (0.9, 0.95)
                assert said(engine) == expected, (params, wins, step)
                assert engine.get_lr() == always.get_lr()
                train_engines((engine, always), 1, first=5 + step)
            for each in (engine, always):
                each.destroy()

    def test_a_schedule_of_an_object_that_starts_afresh(self, tmp_path):
        old, engine = (with_object(lambda params: torch.optim.AdamW(params, lr=0.01),
                                   lambda optimizer: CosineAnnealingLR(optimizer, T_max=10)) for _ in range(2))
        train_engine(old, 8)
        old.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        for step in range(4):
            assert engine.get_lr() == [pytest.approx(0.005 * (1 + math.cos(math.pi * step / 10)))]
            train_engine(engine, 1, first=8 + step)

    @pytest.mark.parametrize("before, kind", [
        ("a config", "lambda"), ("a config", "cosine"), ("an object", "exponential"),
        *(pytest.param(*each, marks=pytest.mark.thorough)
          for each in (("a config", "exponential"), ("an object", "lambda"), ("an object", "cosine")))])
    def test_a_schedule_goes_on_where_the_values_of_a_group_do_not(self, before, kind, tmp_path):
        """The saved run had another optimizer: the schedule is at the same place, from the rate of this run."""
        def descends(lr, **layerwise):
            return with_object(lambda params: torch.optim.SGD(params, lr=lr), AFRESH[kind], **layerwise)

        old = start(Net(), ds_config(), lr_scheduler=AFRESH[kind]) if before == "a config" else with_object(
            lambda params: torch.optim.AdamW(params, lr=0.003), AFRESH[kind])
        engine, always = descends(0.0625, on_optimizer_change="reset"), descends(0.0625)
        train_engines((old, always), 3)
        old.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        for step in range(3, 6):
            assert engine.get_lr() == pytest.approx(always.get_lr(), rel=1e-12), step
            train_engines((engine, always), 1, first=step)

    @pytest.mark.parametrize("before", ["a config", "an object"])
    def test_a_rate_that_a_script_moves_is_this_runs_where_the_values_of_a_group_do_not_go_on(self, before, tmp_path):
        old = start(Net(), ds_config()) if before == "a config" else with_object(
            lambda params: torch.optim.AdamW(params, lr=0.003))
        engine = with_object(lambda params: torch.optim.SGD(params, lr=0.0625), on_optimizer_change="reset")
        old.optimizer.param_groups[0]["lr"] /= 10
        train_engine(old, 1)
        old.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        assert engine.optimizer.param_groups[0]["lr"] == 0.0625

    @pytest.mark.parametrize("scheduled", [False, True])
    def test_a_rate_that_began_at_0(self, scheduled, tmp_path):
        """There is no ratio to it: what this run says of it is taken."""
        def started(lr, **layerwise):
            return with_object(lambda params: torch.optim.SGD(params, lr=lr), scheduled and (
                lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))), **layerwise)

        old = started(0.0)
        for step in range(2):
            old.optimizer.param_groups[0]["lr"] = 0.01
            train_engine(old, 1, first=step)
        old.optimizer.param_groups[0]["lr"] = 0.01
        old.save_checkpoint(tmp_path)
        engine = started(0.0625, on_hyper_change="config")
        engine.load_checkpoint(tmp_path)
        assert engine.optimizer.param_groups[0]["lr"] == 0.0625
        train_engine(engine, 1, first=2)
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.0625 / 4 if scheduled else 0.0625)
        # A rate of its own stands to this run's where the checkpoint's is none.
        deltas = []
        for overrides in ([], [{"name": "embed.weight", "lr": 0.001}]):
            engine = started(0.05, overrides=overrides)
            engine.load_checkpoint(tmp_path)
            assert engine.optimizer.param_groups[0]["lr"] == 0.01
            before = engine.module.embed.weight.detach().clone()
            train_engine(engine, 1, first=2)
            deltas.append(engine.module.embed.weight.detach() - before)
        assert deltas[0].abs().max() > 1e-4
        # 0.001 * 0.01 / 0.05, and 0.01
        assert torch.allclose(deltas[1], deltas[0] * 0.02, rtol=1e-3, atol=1e-7)

    def test_values_that_have_not_changed_go_on_as_they_were(self, tmp_path, capsys):
        """A momentum that the script has moved is no change of the config."""
        old = start(Net(), ds_config())
        old.optimizer.param_groups[0].update(momentum=0.75, lr=0.001)
        old.save_checkpoint(tmp_path, tag="tag")
        engine = start(Net(), ds_config(layerwise={"on_hyper_change": "config"}, params={"weight_decay": 0.5}))
        engine.load_checkpoint(tmp_path, tag="tag")
        group, = engine.optimizer.param_groups
        assert (group["momentum"], group["lr"], group["weight_decay"]) == (0.75, 0.001, 0.5)

    def test_each_group_by_itself(self, tmp_path, capsys):
        def start_groups(decays, wins):
            module = Net()
            params = list(module.parameters())
            groups = [{"params": params[i::3], "weight_decay": decay} for i, decay in enumerate(decays)]
            config = ds_config(layerwise={"on_hyper_change": wins})
            return ds_layerwise.initialize(model=module, model_parameters=groups, config=config)[0]

        start_groups((0.1, 0.2, 0.1), "config").save_checkpoint(tmp_path, tag="tag")
        engine = start_groups((0.3, 0.2, 0.3), "config")
        capsys.readouterr()
        engine.load_checkpoint(tmp_path, tag="tag")
        assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.3, 0.2, 0.3]
        if dist.get_rank() == 0:
            assert "param_groups[0, 2].weight_decay was 0.1 in the saved run" in capsys.readouterr().out
