"""What a user changes between steps: hyper-parameters, weights, what is trained, which engine trains it."""

import copy
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import ds_layerwise
from ds_layerwise.errors import LayerWiseError, StepError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, assert_same_run, masters, whole_states
from tests.support.harness import DistributedTest
from tests.support.oracle import assert_masters_are, assert_trained_as, oracle_step, start_oracle
from tests.support.reference import trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    MATRICES,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    raises_on_rank_1,
    relative_error,
    start,
    start_adamw,
    train_engine,
    train_engines,
    weights,
    whole_gradients,
)

pytestmark = rooms("weight_writes", "weight_checksums", "state_access", "param_groups", "param_guard", "param_owner")


def assert_weights_are_masters(engine):
    for name, value in masters(engine).items():
        p = engine.module.get_parameter(name)
        assert torch.equal(p, value.to(p.dtype)), name


def written_config(stage, ratio, dtype):
    sections = BF16 if dtype == torch.bfloat16 else {}
    config = ds_config(stage=stage, **sections)
    if ratio:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    return config


def write_data(module, values):
    for name, value in values.items():
        module.get_parameter(name).data.copy_(value)


@torch.no_grad()
def write_without_grad(module, values):
    for name, value in values.items():
        module.get_parameter(name).copy_(value)


@torch.no_grad()
def write_at_once(module, values):
    torch._foreach_copy_([module.get_parameter(name) for name in values], list(values.values()))


WAYS_TO_WRITE = {"load_state_dict": lambda module, values: module.load_state_dict(values, strict=False),
                 "data": write_data, "no_grad": write_without_grad, "foreach": write_at_once}


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
            engine = start(Net(), ds_config(stage=stage))
            train_engine(engine, 2)
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
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            for name, param in trainable(engine.module).items():
                owned = [of.get(name, 0) for of in everyone]
                assert sum(owned) == param.numel() and (name not in MATRICES or 0 in owned), name
            assert engine.optimizer.loss_scale == engine.optimizer.cur_scale == 1 and not engine.optimizer.overflow


class TestWeights(DistributedTest):
    def test_masters_follow_weights_that_were_written_by_hand(self, stage):
        for sections, dtype in (({}, torch.float32), (BF16, torch.bfloat16)):
            engine = start(Net(), ds_config(stage=stage, **sections))
            oracle = start_oracle(Net(), param_dtype=dtype, accum_dtype=dtype)
            for step in range(4):
                if step == 2:
                    with torch.no_grad():
                        for name, p in trainable(engine.module).items():
                            p.mul_(-0.5).add_(0.01)
                            oracle.params[name] = p.float().clone()
                    engine.optimizer.refresh_fp32_params()
                    for name, value in masters(engine).items():
                        assert torch.equal(value, oracle.params[name]), name
                train_engine(engine, 1, first=step)
                oracle_step(oracle, step)
                assert_masters_are(engine, oracle.params)
            engine.destroy()

    @pytest.mark.parametrize("way", WAYS_TO_WRITE)
    def test_what_is_written_holds(self, way):
        """As in fp32, where the parameters are the masters; Muon's momentum and Adam's averages stay."""
        stage, ratio, dtype = {"load_state_dict": (1, 0, torch.bfloat16), "data": (2, 0, torch.bfloat16),
                               "no_grad": (1, 0.5, torch.bfloat16), "foreach": (2, 0, torch.float32)}[way]
        engine = start(Net(tied=True), written_config(stage, ratio, dtype))
        oracle = start_oracle(Net(tied=True), param_dtype=dtype, accum_dtype=dtype)
        for step in range(4):
            if step in (1, 2):
                written = {name: (p * -0.5).add(0.01) for name, p in trainable(engine.module).items()}
                WAYS_TO_WRITE[way](engine.module, written)
                for name, value in written.items():
                    oracle.params[name] = value.detach().float().clone()
            train_engine(engine, 1, first=step)
            oracle_step(oracle, step)
            assert_masters_are(engine, oracle.params)
        assert_same_on_all_ranks(engine.module)
        if dtype == torch.bfloat16:
            assert_weights_are_masters(engine)

    @pytest.mark.parametrize("way", ["load_state_dict", "foreach"])
    def test_what_one_rank_writes_alone_is_an_error_on_all(self, way):
        stage, dtype = {"load_state_dict": (1, torch.bfloat16), "foreach": (2, torch.float32)}[way]
        engine = start(Net(), written_config(stage, 0, dtype))
        train_engine(engine, 1)
        before = masters(engine)
        values = {"square.weight": engine.module.square.weight.detach() * -0.5}
        if dist.get_rank() == 1:
            WAYS_TO_WRITE[way](engine.module, values)
        for _ in range(2):
            with pytest.raises(LayerWiseError, match="square.weight was written since the last step, and is not the "
                                                     "same on ranks 0 and 1; write the same values on every rank"):
                train_engine(engine, 1, first=1)
            engine.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in masters(engine).items() if "square" not in name)
        # The way out; on the other rank nobody counts this.
        dist.broadcast(engine.module.square.weight.data, 1)
        train_engine(engine, 1, first=1)
        found, (name, value) = masters(engine), *values.items()
        oracle = start_oracle(Net(), param_dtype=dtype, accum_dtype=dtype)
        oracle_step(oracle, 0)
        oracle.params[name] = value.float()
        oracle_step(oracle, 1)
        assert relative_error(found[name], oracle.params[name]) < 1e-5

    def test_it_is_said_once(self):
        engine = start(Net(), written_config(1, 0, torch.bfloat16))
        with redirect_stdout(StringIO()) as out:
            for step in range(5):
                if step in (1, 3):
                    write_data(engine.module, {"square.weight": torch.full((12, 12), 0.1 * step)})
                train_engine(engine, 1, first=step)
        assert out.getvalue().count("float32 masters followed") == (dist.get_rank() == 0)

    def test_what_is_written_is_read_and_saved(self, tmp_path):
        engine = start(Net(), written_config(1, 0.5, torch.bfloat16))
        train_engine(engine, 2)
        written = {name: (p * -0.5).add(0.01) for name, p in trainable(engine.module).items()}
        write_data(engine.module, written)
        assert torch.equal(safe_get_full_fp32_param(engine.module.experts), written["experts"].float())
        engine.save_checkpoint(str(tmp_path))
        other = start(Net(), written_config(1, 0, torch.bfloat16))
        other.load_checkpoint(str(tmp_path))
        for name, value in masters(other).items():
            assert torch.equal(value, written[name].float()), name
            assert torch.equal(other.module.get_parameter(name), written[name]), name

    @pytest.mark.parametrize("ratio, sections", [
        (0, {}), (0.5, {}), (0, {"master_dtype": "bfloat16+remainder"})])
    def test_what_is_saved_or_looked_at_while_an_average_is_tried_leaves_masters_alone(self, ratio, sections, tmp_path):
        engine, plain = (start(Net(), written_config(1, ratio, torch.bfloat16)) for _ in range(2))
        if sections:
            engine, plain = (start(Net(), ds_config(bf16={"enabled": True}, layerwise=sections)) for _ in range(2))
        for step in range(4):
            if step == 2:
                kept = {name: p.detach().clone() for name, p in trainable(engine.module).items()}
                average = {name: p * 0.5 + 0.01 for name, p in kept.items()}
                write_data(engine.module, average)
                assert torch.equal(safe_get_full_fp32_param(engine.module.experts), average["experts"].float())
                engine.save_checkpoint(str(tmp_path), tag="tried")
                engine.optimizer.save_state_dict_to_file(tmp_path / "tried.pt")
                torch.distributed.checkpoint.save(engine.optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "dcp")
                write_data(engine.module, kept)
            train_engines((engine, plain), 1, first=step)
        assert not internals.owned(engine).written
        assert_same_run(engine, plain)
        for load in (lambda: plain.load_checkpoint(str(tmp_path), tag="tried"),
                     lambda: plain.optimizer.load_state_dict_from_file(tmp_path / "tried.pt"),
                     lambda: plain.optimizer.load_sharded_state_dict(tmp_path / "dcp")):
            train_engine(plain, 1)
            load()
            for name, value in masters(plain).items():
                assert torch.equal(value, average[name].float()), name
                assert torch.equal(plain.module.get_parameter(name), average[name]), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_is_saved_while_the_memory_of_an_average_is_swapped_in(self, dtype, tmp_path):
        engine = start(Net(), written_config(1, 0, dtype))
        train_engine(engine, 1)
        param = engine.module.square.weight
        kept, param.data = param.data, param.detach() * 0.5
        for save in (lambda: engine.save_checkpoint(str(tmp_path), tag="swapped"),
                     lambda: engine.optimizer.save_state_dict_to_file(tmp_path / "swapped.pt"),
                     engine.optimizer.sharded_state_dict):
            with pytest.raises(StepError, match="square.weight was replaced since this engine was made.*write into it "
                                                "in place"):
                save()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        param.data = kept
        engine.save_checkpoint(str(tmp_path))
        train_engine(engine, 1, first=1)

    def test_nothing_else_is_taken_for_a_write(self, tmp_path):
        """Masters keep the precision that the parameters lack."""
        engine = start(Net(odd=True), written_config(1, 0.5, torch.bfloat16))
        plain = start(Net(odd=True), written_config(1, 0, torch.bfloat16))
        for step in range(6):
            engine.save_checkpoint(str(tmp_path), tag=str(step))
            if step == 1:
                engine.load_checkpoint(str(tmp_path), tag=str(step))
            if step == 2:
                engine.offload_states()
                engine.reload_states()
            if step == 3:
                average = {name: torch.randn_like(p) for name, p in trainable(engine.module).items()}
                kept = {name: p.detach().clone() for name, p in trainable(engine.module).items()}
                write_data(engine.module, average)
                write_data(engine.module, kept)
            if step == 4:
                # Halfway between two bfloat16 numbers, but for less than float32 tells.
                value = torch.full((3, 6, 9), 1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
                for each in (engine, plain):
                    safe_set_full_fp32_param(each.module.experts, value)
            train_engines((engine, plain), 1, first=step)
        assert not internals.owned(engine).written
        assert_equal_states(whole_states(engine), whole_states(plain))

    def test_one_engine_after_the_other(self, stage):
        module = Net()
        for gas, overlap in ((1, True), (2, False)):
            oracle = start_oracle(module, gas=gas)
            engine = start(module, ds_config(stage=stage, gas=gas, overlap=overlap))
            for step in range(2):
                train_engine(engine, 1, gas=gas, first=step)
                oracle_step(oracle, step, gas=gas)
            assert_trained_as(module, oracle)
            engine.destroy()
            engine.destroy()
            # A model without an engine is as any other.
            module((0, 0, 0)).backward()
            grad = module.experts.grad
            assert torch.equal(grad, whole_number_gradients("experts", grad.shape, 0, 0, 0))
            module.zero_grad()


#: What is written into a running group, and what is said of it.
WRITTEN = [("muon_lr", 0.0, "muon_lr is 0.0, but counts only where.*lr times matrix_lr_ratio; remove it"),
           ("adam_lr", 0.1, "adam_lr is 0.1, but counts only where.*lr times scalar_lr_ratio; remove it"),
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
    def test_what_no_update_could_take_is_an_error_until_it_is_taken_back(self):
        """One rank writes it, and all say so; nothing of the step is lost."""
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


class TestFreezing(DistributedTest):
    @pytest.mark.parametrize("stage, gas, overlap", [(1, 1, True), (1, 2, False), (2, 2, True)])
    def test_what_is_frozen_stays_as_it_is(self, stage, gas, overlap):
        """As it does with torch's optimizers: neither weight decay nor momentum moves it."""
        engine, oracle = start(Net(), ds_config(stage=stage, gas=gas, overlap=overlap)), start_oracle(Net(), gas=gas)
        alone, frozen = start_oracle(Net(), gas=gas), ("square.weight", "experts", "norm.bias")
        for step in range(6):
            now = frozen if step in (2, 3) else ()
            for name in frozen:
                engine.module.get_parameter(name).requires_grad_(not now)
            train_engine(engine, 1, gas=gas, first=step)
            oracle_step(oracle, step, gas=gas, frozen=now)
            if not now:
                oracle_step(alone, step, gas=gas)
            # What was frozen counts its own steps.
            assert relative_error(engine.module.norm.bias.detach(), alone.params["norm.bias"]) < 1e-5
            for name in frozen:
                engine.module.get_parameter(name).requires_grad_()
            assert_trained_as(engine.module, oracle, but=("norm.bias", ))

    def test_what_was_frozen_at_the_start_has_no_optimizer(self):
        for stage in (1, 2):
            engine = start(Net(frozen=True), ds_config(stage=stage))
            train_engine(engine, 1)
            engine.module.tall.weight.requires_grad_()
            with pytest.raises(StepError, match="tall.weight was frozen when this engine was made"):
                train_engine(engine, 1, first=1)
            engine.destroy()

    def test_nor_has_what_no_group_has(self, stage):
        """Scripts leave out of their groups what is frozen. One rank unfreezes; frozen again it goes on."""
        module, oracle = Net(frozen=True), start_oracle(Net(frozen=True))
        before = {name: module.get_parameter(name).detach().clone() for name in ("tall.weight", "norm.bias")}
        engine = start_on([p for p in module.parameters() if p.requires_grad], module, ds_config(stage=stage))
        for step, name in enumerate(before):
            module.get_parameter(name).requires_grad_(dist.get_rank() == 1)
            engine.backward(engine((step, 0, dist.get_rank())))
            with raises_on_rank_1(StepError, f"{name} was frozen when this engine was made"):
                engine.step()
            module.get_parameter(name).requires_grad_(False)
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(module, oracle)
        assert all(torch.equal(module.get_parameter(name), value) for name, value in before.items())

    def test_what_the_user_has_left_out_stays_the_users(self):
        module, oracle = Net(), start_oracle(Net())
        before = module.tall.weight.detach().clone()
        engine = start_on([p for p in module.parameters() if p is not module.tall.weight], module, ds_config())
        for step in range(4):
            module.tall.weight.requires_grad_(step != 1)
            train_engine(engine, 1, first=step)
            oracle_step(oracle, step)
        module.tall.weight.requires_grad_(False)
        assert_trained_as(module, oracle)
        assert torch.equal(module.tall.weight, before)

    @pytest.mark.parametrize("start_other", [lambda module: start(module, ds_config()), start_adamw],
                             ids=["ours", "stock"])
    def test_what_another_engine_trains_is_its_own(self, start_other):
        """A discriminator inside of a generator, each with an engine, the second one made later."""
        both = nn.ModuleDict({"one": Net(), "other": Net()})
        both["other"].requires_grad_(False)
        engine, oracle = start_on([*both["one"].parameters()], both, ds_config()), start_oracle(Net())
        both["other"].requires_grad_(True)
        other = start_other(both["other"])
        for step in range(2):
            train_engine(other, 1, first=step)
            engine.backward(both["one"]((step, 0, dist.get_rank())))
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(both["one"], oracle)


class TestThroughAnother(DistributedTest):
    """The loss of one engine that goes through the model of another, as a generator's through its discriminator."""

    def step_both(self, one, other, step, cure):
        place = step, 0, dist.get_rank()
        one.backward(one(place))
        one.step()
        one.module.requires_grad_(cure != "freeze")
        other.backward(other(place) + sum(p.sum() for p in one.module.parameters()))
        one.module.requires_grad_(True)
        if cure == "zero_grad":
            one.zero_grad()
        other.step()

    @pytest.mark.parametrize("cure", ["freeze", "zero_grad"])
    def test_either_way_out_that_the_error_names_does(self, cure):
        engines, oracles = [start(Net(), ds_config()) for _ in range(2)], [start_oracle(Net()) for _ in range(2)]
        for step in range(3):
            self.step_both(*engines, step, cure)
            for oracle in oracles:
                oracle_step(oracle, step)
        for engine, oracle in zip(engines, oracles, strict=True):
            assert_trained_as(engine.module, oracle)

    def test_neither_is_an_error_that_names_both(self):
        engines = [start(Net(), ds_config()) for _ in range(2)]
        with pytest.raises(StepError, match=r"freeze this model for that pass, or call this engine's zero_grad\(\)"):
            for step in range(2):
                self.step_both(*engines, step, None)

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_one_step_for_two_micro_batches_says_when_to_call_it(self, by_hand):
        engine = start(Net(), ds_config(gas=2))
        with pytest.raises(StepError, match=r"engine.step\(\) after every micro-batch, also of those that accumulate"):
            for step in range(2):
                for micro in range(2):
                    engine.backward(engine((step, micro, dist.get_rank())))
                (engine.optimizer if by_hand else engine).step()


def start_on(params, module, config):
    return ds_layerwise.initialize(model=module, model_parameters=params, config=config)[0]


def recast(engine):
    engine.module.square.to(torch.float64)


def move(engine):
    engine.module.tall.weight.data = engine.module.tall.weight.data.clone()


def assign(engine):
    state = {name: p.detach().clone() for name, p in engine.module.state_dict().items()}
    engine.module.load_state_dict(state, assign=True)


def give_a_gradient(engine):
    engine.module.experts.grad = torch.ones_like(engine.module.experts)


class TestReplaced(DistributedTest):
    def test_what_would_be_lost_is_an_error(self, stage):
        for change, message in ((recast, "square.weight was replaced since"), (move, "tall.weight was replaced since"),
                                (assign, "experts was replaced since"),
                                (give_a_gradient, "experts.grad was set after the gradients were reduced")):
            engine = start(Net(tied=True), ds_config(stage=stage))
            train_engine(engine, 1)
            engine.backward(engine((1, 0, dist.get_rank())))
            change(engine)
            with pytest.raises(StepError, match=message):
                engine.step()
            engine.destroy()

    def test_what_is_written_in_place_is_none(self):
        engine, oracle = start(Net(), ds_config()), start_oracle(Net())
        for step in range(2):
            engine.module.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
            kept = engine.module.tall.weight.data
            engine.module.tall.weight.data = torch.zeros_like(kept)  # as when averaged weights are tried
            engine.module.tall.weight.data = kept
            engine.module.to(torch.float32)
            train_engine(engine, 1, first=step)
            oracle_step(oracle, step)
        assert_trained_as(engine.module, oracle)


def new_head(engine):
    engine.module.twin = nn.Linear(12, 12, bias=False)


def new_layer(engine):
    engine.module.flat.more = nn.Linear(3, 3)


def new_parameter(engine):
    engine.module.square.scale = nn.Parameter(torch.ones(12))


def untie(engine):
    engine.module.head = nn.Linear(12, 17, bias=False)


def factors(engine):
    parametrizations.weight_norm(engine.module.flat)


def take_out(engine):
    del engine.module.tall


def freeze_in_its_place(engine):
    engine.module.tall = nn.Linear(12, 40).requires_grad_(False)


CONTENTS = {new_head: "twin.weight was replaced since", new_layer: "flat.more.weight was added since",
            new_parameter: "square.scale was added since", untie: "head.weight was replaced since",
            factors: "flat.parametrizations.weight.original0 was added since",
            freeze_in_its_place: "tall.weight was replaced since"}


class Steady(nn.Module):
    """Reaches its parameters by the names that they had at the start, wherever they are by now."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.named = [dict(self.net.named_parameters())]

    def forward(self, place):
        return sum((p * whole_number_gradients(name, p.shape, *place)).sum() for name, p in self.named[0].items())


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers, self.first = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3)), 0
        self.all = [list(self.layers)]

    def forward(self, x):
        for layer in self.layers[self.first:]:
            x = layer(x)
        return x


class TestContents(DistributedTest):
    """Modules that come, go and move in a model that is trained."""

    @pytest.mark.parametrize("change", CONTENTS, ids=lambda change: change.__name__)
    def test_what_nobody_would_train_is_an_error_until_it_is_undone(self, change):
        module, oracle = Net(tied=True), start_oracle(Net(tied=True))
        engine = start(module, ds_config())
        modules, params = dict(module._modules), dict(module.square._parameters)
        engine.backward(engine((0, 0, dist.get_rank())))
        change(engine)
        for _ in range(2):
            with pytest.raises(StepError, match=CONTENTS[change]):
                engine.step()
        if change is factors:
            return
        module._modules.update(modules)
        module.square._parameters.pop("scale", None)
        assert module.square._parameters == params
        module.flat._modules.clear()
        engine.step()
        oracle_step(oracle, 0)
        assert_trained_as(module, oracle)

    def test_what_is_taken_out_counts_as_unused_which_is_said_once(self, monkeypatch):
        warned, oracle, gone = [], start_oracle(Net()), ("tall.weight", "tall.bias")
        monkeypatch.setattr(logger, "warning", warned.append)
        engine = start(Net(), ds_config())
        tall = engine.module.tall
        for step, there in enumerate((True, False, False, True)):
            if there:
                engine.module.tall = tall
            else:
                engine.module._modules.pop("tall", None)
            train_engine(engine, 1, first=step)
            oracle.step([[{name: whole_number_gradients(name, p.shape, step, 0, rank)
                           for name, p in oracle.params.items() if there or name not in gone}] for rank in range(2)])
        assert_trained_as(engine.module, oracle)
        told = ("ds_layerwise: tall.weight, tall.bias got no gradient, and no module of the model has it any more: it "
                "counts as not used, as if its gradient were zeros; freeze it to leave it as it is")
        assert [text for text in warned if "no module" in text] == [told] * (dist.get_rank() == 0)

    def test_steps_that_leave_out_layers_by_taking_them_out(self):
        def passed_over(module, step):
            module.first = step % 2

        def taken_out(module, step):
            module.layers = nn.ModuleList(module.all[0][step % 2:])

        modules = []
        for change in (passed_over, taken_out):
            modules.append(Layered())
            engine = start(modules[-1], ds_config())
            for step in range(4):
                change(modules[-1], step)
                engine.backward(engine(torch.ones(2, 6) + dist.get_rank()).square().mean())
                engine.step()
        for one, other in zip(*(module.all[0] for module in modules), strict=True):
            assert torch.equal(one.weight, other.weight)

    @pytest.mark.parametrize("how", ["checkpoint", "one file"])
    def test_weights_that_would_be_saved_by_the_name_of_others_are_refused(self, how, tmp_path):
        engine = start(Layered(), ds_config())
        save = engine.save_checkpoint if how == "checkpoint" else (
            lambda folder: engine.optimizer.save_state_dict_to_file(folder / "file"))
        layers, one, other = engine.module.layers, *engine.module.all[0][:2]
        engine.module.layers = nn.ModuleList(engine.module.all[0][1:])
        with pytest.raises(StepError, match="layers.0.weight is another parameter than when .*; put it back for the "):
            save(tmp_path)
        dist.barrier()
        assert not list(tmp_path.iterdir())
        engine.module.layers, own = layers, other.weight
        other.weight = one.weight
        with pytest.raises(StepError, match="layers.1.weight is another parameter than when"):
            save(tmp_path)
        other.weight = own
        save(tmp_path)

    def test_what_trains_the_same_goes_on(self):
        module, oracle = Steady(), start_oracle(Net())
        engine, net = start_on([*module.parameters()], module, ds_config()), module.net

        def freeze_a_new_one():
            net.adapter = nn.Linear(3, 3).requires_grad_(False)

        def hide():
            tall = net.tall
            net.tall = nn.Identity()
            net.tall.forward = lambda x: tall(x)

        changes = (lambda: setattr(net, "twin", torch.compile(net.twin, backend="eager")),
                   lambda: parametrize.register_parametrization(net.square, "weight", Doubled()),
                   lambda: prune.identity(net.flat, "weight"),
                   lambda: setattr(net, "conv", nn.Sequential(net.conv)), freeze_a_new_one, hide,
                   lambda: net.head.register_forward_hook(lambda *_: None), net.head.compile)
        for step, change in enumerate(changes):
            change()
            engine.backward(engine((step, 0, dist.get_rank())))
            engine.step()
            oracle_step(oracle, step)
        assert len(list(module.parameters())) == len(oracle.params)  # tall's two are out, the adapter's are in
        for name, value in oracle.params.items():
            assert relative_error(module.named[0][name].detach(), value) < 1e-5, name
        # Also what came later is watched.
        net.adapter.requires_grad_(True)
        engine.backward(engine((len(changes), 0, dist.get_rank())))
        with pytest.raises(StepError, match="net.adapter.weight was added since this engine was made, and has no opt"):
            engine.step()


class Sometimes(Net):
    """Runs out of memory at the first attempt of a step."""

    def __init__(self):
        super().__init__()
        self.failed = set()

    def forward(self, place):
        if place not in self.failed and torch.is_grad_enabled():
            self.failed.add(place)
            raise torch.OutOfMemoryError
        return super().forward(place)


class TestInterruptions(DistributedTest):
    @pytest.mark.parametrize("stage, gas, overlap", [(1, 2, True), (1, 1, False), (2, 2, True)])
    def test_a_forward_pass_that_fails_and_one_for_evaluation(self, stage, gas, overlap):
        engine = start(Sometimes(), ds_config(stage=stage, gas=gas, overlap=overlap))
        oracle = start_oracle(Net(), gas=gas)
        for step in range(3):
            for micro in range(gas):
                place = (step, micro, dist.get_rank())
                with pytest.raises(torch.OutOfMemoryError):
                    engine(place)
                loss = engine(place)
                with torch.no_grad():
                    engine((50, 0, 0))
                loss.backward() if step % 2 else engine.backward(loss)
                engine.step()
            oracle_step(oracle, step, gas=gas)
            assert_trained_as(engine.module, oracle)


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class TestAdversaries(DistributedTest):
    def test_two_engines_of_which_one_is_frozen_in_turn(self, stage):
        generator, critic = (start(make(seed), ds_config(stage=stage)) for seed in (1, 2))
        for step in range(3):
            noise = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in (0, 1)]
            plain, judge = copy.deepcopy(generator.module), copy.deepcopy(critic.module)
            for p in critic.module.parameters():
                p.requires_grad_(False)
            generator.backward(critic(generator(noise[dist.get_rank()])).mean())
            self.compare(generator, plain, [judge(plain(x)).mean() for x in noise])
            generator.step()
            for p in critic.module.parameters():
                p.requires_grad_(True)
            with torch.no_grad():
                made = [generator(x) for x in noise]
            judge.zero_grad()
            critic.backward(critic(made[dist.get_rank()]).square().mean())
            self.compare(critic, judge, [judge(x).square().mean() for x in made])
            critic.step()
        assert critic.get_global_grad_norm() > 0

    def compare(self, engine, plain, losses):
        total = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        for loss in losses:
            for (name, p), grad in zip(plain.named_parameters(), torch.autograd.grad(loss, list(plain.parameters())),
                                       strict=True):
                total[name] += grad
        for name, value in whole_gradients(engine).items():
            assert torch.equal(value, total[name].flatten() / 2), name
