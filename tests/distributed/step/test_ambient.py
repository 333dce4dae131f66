"""Settings that a script makes around initialize, backward, step, save and load do not reach into a step."""

from contextlib import ExitStack, contextmanager, nullcontext

import deepspeed.comm as dist
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.support import internals
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.harness import DistributedTest, device
from tests.support.rooms import rooms
from tests.support.training import ds_config, start
from tests.support.transports import plan_in_cuts

pytestmark = rooms("numerics_context", "dcp", "whole_states")

PLACES = ("initialize", "backward", "step", "save", "load")


class Several(nn.Module):
    """Matrices large enough for every kind of product, one that is most of its bucket, vectors and an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(9, 16)
        self.square, self.tall, self.flat = nn.Linear(96, 96), nn.Linear(64, 192), nn.Linear(192, 64)

    def forward(self, place):
        """A loss whose gradients are whole numbers, others in every step and on every rank."""
        step, rank = place
        generator = torch.Generator("cpu").manual_seed(100 * step + rank)
        loss = torch.zeros((), dtype=torch.float32, device=device())
        for param in self.parameters():
            factors = torch.randint(-8, 9, param.shape, generator=generator, device="cpu")
            loss = loss + (param.float() * factors.to(device=device(), dtype=torch.float32)).sum()
        return loss


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def short_products():
    """Set precision as ``tf32=True`` and its like do; on a CPU "medium" is bf16."""
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


AROUND = {
    "autocast": lambda: torch.autocast(device().type, dtype=torch.bfloat16),
    "a default dtype": lambda: default_dtype(torch.bfloat16),
    "a double default dtype": lambda: default_dtype(torch.float64),
    "a default device": lambda: torch.device("meta"),
    "short products": short_products,
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
}

#: Settings that a run of the test has at once.
TOGETHER = [("autocast", "a default dtype", "short products", "gradients"),
            ("a double default dtype", "a default device"), ("inference mode",)]

#: Settings that a script makes once, for the whole process.
DEFAULTS = ("a default dtype", "a double default dtype", "a default device")

ADAMW = {"type": "LayerWise", "params": {"lr": 0.004, "matrix_optimizer": "torch.optim:AdamW"}}

#: DeepSpeed's own code, or autograd, makes something else, or nothing, within these.
NOT_AROUND = {("inference mode", "backward"), ("a default device", "backward")}


@contextmanager
def all_of(settings):
    with ExitStack() as stack:
        for each in settings:
            stack.enter_context(AROUND[each]())
        yield


def everything(engine):
    """All that a rank has: parameters, masters, states and the norm, by name."""
    found = {f"param {name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    for name, state in internals.states(engine).items():
        found[f"master {name}"] = internals.master(engine, name).clone()
        found.update({f"{key} {name}": value.clone() for key, value in state.items()})
    found["norm"] = torch.as_tensor(float(engine.get_global_grad_norm()), dtype=torch.float64, device="cpu")
    return found


def train(folder, config, around, places):
    """Three steps, a save and a load into another engine, two steps more."""
    def at(place):
        return around() if place in places else nullcontext()

    def steps(engine, numbers):
        for step in numbers:
            loss = engine((step, dist.get_rank()))
            with at("backward"):
                engine.backward(loss)
            with at("step"):
                engine.step()

    engines = []
    for numbers in (range(3), range(3, 5)):
        model = Several()
        with at("initialize"):
            engines.append(start(model, config))
        if len(engines) > 1:
            with at("load"):
                engines[-1].load_checkpoint(folder)
        steps(engines[-1], numbers)
        if len(engines) == 1:
            with at("save"):
                engines[-1].save_checkpoint(folder)
            engines[-1].destroy()
    found = everything(engines[-1])
    engines[-1].destroy()
    return found


CONFIGS = {
    "cans, fp32, in cuts": {"clip": 1.0, "params": {
        "ns_coefficients": "cans", "ns_dtype": "fp32", "ns_method": "gram"}},
    "bf16, stage 2, on the host": {"stage": 2, "bf16": {"enabled": True}, "params": {"ns_dtype": "bf16"}},
}


class TestAmbient(DistributedTest):
    @pytest.mark.parametrize("case", CONFIGS)
    def test_nothing_around_a_call_changes_a_bit(self, case, tmp_path, monkeypatch):
        config = ds_config(bucket_numel=20_000, **CONFIGS[case])
        if case.endswith("host"):
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if case.endswith("in cuts"):
            plan_in_cuts(monkeypatch)
        expected = train(str(tmp_path / "plain"), config, nullcontext, ())
        for number, what in enumerate(TOGETHER):
            places = [place for place in PLACES if not {(each, place) for each in what} & NOT_AROUND]
            found = train(str(tmp_path / str(number)), config, lambda what=what: all_of(what), places)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert (found[name].dtype, found[name].device) == (value.dtype, value.device), (what, name)
                assert torch.equal(found[name], value), (what, name)

    def test_autocast_around_the_whole_loop_sees_the_new_weights(self):
        """It keeps casts of the weights for as long as it lasts."""
        model = nn.Linear(32, 32)
        engine, x = start(model, ds_config()), torch.ones(4, 32, device=device())
        with torch.autocast(device().type, dtype=torch.bfloat16):
            engine.backward(model(x).float().sum())
            engine.step()
            inside = model(x)
        with torch.autocast(device().type, dtype=torch.bfloat16):
            assert torch.equal(inside, model(x))

    def test_no_default_changes_what_a_file_says(self, tmp_path):
        """Files of whole parameters, shards, and shards of somebody else after more steps than bf16 counts."""
        engine = start(Several(), ds_config(bucket_numel=20_000, optimizer=ADAMW))
        for step in range(3):
            engine.backward(engine((step, dist.get_rank())))
            engine.step()
        expected = whole_states(engine)
        model = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        state = {name: {"step": torch.tensor(1001.0), **{key: expected[name, key].view_as(param) for key in (
            "exp_avg", "exp_avg_sq")}} for name, param in model.items()}
        dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=str(tmp_path / "theirs"))
        of_theirs = {key: torch.tensor(1001.0) if key[1] == "step" else value for key, value in expected.items()}
        other = start(Several(), ds_config(bucket_numel=20_000, optimizer=ADAMW))
        for number, what in enumerate(DEFAULTS):
            with AROUND[what]():
                engine.optimizer.save_state_dict_to_file(tmp_path / f"file {number}")
                dcp.save(engine.optimizer.sharded_state_dict(), checkpoint_id=str(tmp_path / f"shards {number}"))
            for name, states, steps in ((f"file {number}", expected, 3), (f"shards {number}", expected, 3),
                                        ("theirs", of_theirs, 1001)):
                other.backward(other((50, dist.get_rank())))
                other.step()
                load = other.optimizer.load_sharded_state_dict
                with AROUND[what]():
                    (other.optimizer.load_state_dict_from_file if name.startswith("file") else load)(tmp_path / name)
                assert_equal_states(whole_states(other), states, (what, name))
                assert other.optimizer.step_count == steps, (what, name)
                for name, param in other.module.named_parameters():
                    assert torch.equal(param, model[name]), (what, name)
