"""Faults of one rank: gradients that are no numbers, modules that it does not use, its end."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.ranks.sync import transfer
from tests.support import internals
from tests.support.checkpoints import assert_same_run, states
from tests.support.forks import fork_ranks
from tests.support.harness import DistributedTest, OwnDistributedTest, free_port
from tests.support.reference import LossScale, train, trainable
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    allow_fp16,
    assert_same_on_all_ranks,
    ds_config,
    recipe_for,
    relative_error,
    start,
    train_engine,
    train_engines,
)
from tests.support.transports import plan_in_cuts
from tests.support.versions import needs

pytestmark = rooms("step_agreement", "comm", "optimizer", "skipped_steps")

ROOT = Path(__file__).parents[3]


class Sick(Net):
    """A net of which rank 1 has one element of one gradient ``bad`` in the first micro-batch of step 1."""

    def __init__(self, name, bad):
        super().__init__()
        self.name, self.bad = name, bad

    def forward(self, place):
        loss = super().forward(place)
        if place == (1, 0, 1):
            loss = loss + self.get_parameter(self.name).flatten()[5].float() * self.bad
        return loss


#: The config's sections of each precision, the oracle's arguments and whether a sick step is skipped.
PRECISIONS = {
    "fp32": ({}, {"skip": True}, True),
    "fp32 without a norm": ({}, {}, False),
    "bf16": ({"bf16": {"enabled": True, "check_grad_overflow": True}},
             {"skip": True, "param_dtype": torch.bfloat16, "accum_dtype": torch.bfloat16}, True),
    "bf16 unchecked": ({"bf16": {"enabled": True, "check_grad_overflow": False}},
                       {"param_dtype": torch.bfloat16, "accum_dtype": torch.bfloat16}, False),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
             {"loss_scale": LossScale(initial=2.0**4, hysteresis=1), "param_dtype": torch.float16,
              "accum_dtype": torch.float16}, True),
}


def halves(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def sick_config(precision, *, stage, gas, clip):
    config = ds_config(gas=gas, clip=clip, stage=stage, **PRECISIONS[precision][0])
    if precision == "fp32 without a norm":
        config["zero_optimization"]["compute_grad_norm"] = False
    return config


WITHOUT_NORM = needs("deepspeed>=0.19.7", "it has no compute_grad_norm")


class TestNotFinite(DistributedTest):
    @pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.thorough)])
    @pytest.mark.parametrize("precision", [
        pytest.param(name, marks=[WITHOUT_NORM] * (name == "fp32 without a norm")) for name in PRECISIONS])
    def test_a_sick_step_is_as_the_oracle_and_as_if_it_were_not_there(self, precision, stage):
        allow_fp16()
        _, of_oracle, skips = PRECISIONS[precision]
        cases = ((2, "tall.weight", math.nan), (2, "head.weight", -math.inf), (1, "tall.weight", math.inf))
        for gas, sick, bad in cases if skips else cases[:1]:
            clip = 0.0 if precision == "fp32 without a norm" else 5.0
            config = sick_config(precision, stage=stage, gas=gas, clip=clip)
            engine = start(Sick(sick, bad), config, lr_scheduler=halves)
            scale = engine.optimizer.loss_scale
            expected = train(lambda: Sick(sick, bad), lambda *place: place, lambda module, place: module(place),
                             recipe_for(Net(), gas=gas, clip=clip, **of_oracle,
                                        schedule=lambda step: 0.5**(step - (skips and step > 1))), 4)
            for step in range(4):
                train_engine(engine, 1, gas=gas, first=step)
                assert engine.optimizer.overflow is expected.steps[step].skipped is (skips and step == 1)
                assert engine.skipped_steps == (skips and step >= 1)
                assert engine.lr_scheduler.last_epoch == step + 1 - engine.skipped_steps
                norm = engine.get_global_grad_norm()
                if clip:
                    assert norm == pytest.approx(expected.steps[step].norm, rel=1e-6, nan_ok=True)
            assert engine.optimizer.loss_scale == expected.loss_scale == (scale / 2 if precision == "fp16" else 1)
            assert engine.optimizer.step_count == expected.updates
            for name, param in trainable(engine.module).items():
                assert_close(param.detach(), expected.model_params[name], 1e-5 if "fp32" in precision else 2**-8, name)
            if skips:
                healthy = start(Net(), sick_config(precision, stage=stage, gas=gas, clip=clip), lr_scheduler=halves)
                for step in (0, 2, 3):
                    train_engine(healthy, 1, gas=gas, first=step)
                assert_same_run(engine, healthy, of=states)
                assert_same_on_all_ranks(engine.module)
                healthy.destroy()
            engine.destroy()

    @needs("deepspeed>=0.19.7", "its own optimizer does not look at the norm, and never skips in fp32")
    def test_steps_are_skipped_where_stock_skips_them(self):
        for precision in ("fp32", "fp32 without a norm", "bf16", "bf16 unchecked"):
            stage, clip = (1, 0.0) if precision == "fp32 without a norm" else (2 if precision == "bf16" else 1, 5.0)
            config = sick_config(precision, stage=stage, gas=1, clip=clip)
            ours = start(Sick("tall.weight", math.inf), config, lr_scheduler=halves)
            del config["layerwise"]
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}}
            stock = start(Sick("tall.weight", math.inf), config, lr_scheduler=halves)
            train_engines((ours, stock), 2)
            for attribute in ("skipped_steps", "global_steps"):
                assert getattr(ours, attribute) == getattr(stock, attribute), (precision, attribute)
            assert ours.optimizer.overflow == stock.optimizer.overflow == PRECISIONS[precision][2]
            assert ours.get_global_grad_norm() == stock.get_global_grad_norm()
            assert ours.get_lr() == stock.get_lr()
            ours.destroy()


def assert_close(value, expected, tolerance, where):
    """NaN where NaN is expected, and close elsewhere."""
    nan = expected.isnan()
    assert torch.equal(value.isnan(), nan), where
    assert relative_error(value[~nan].float(), expected[~nan].float()) < tolerance, where


def train_until_it_ends(how, moment, folder):
    """Rank 1 ends in step 2, or stops until the others have ended: while gradients are reduced, while it updates, or
    where their sums go from cuts to owners."""
    if moment == "sums":
        plan_in_cuts(pytest.MonkeyPatch())
    engine = train_engine(start(Net(), ds_config(bucket_numel=1, stage=2 if moment == "sums" else 1)), 2)

    def end(*_, **__):
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 150
        while how == "hangs" and len(list(folder.glob("*.ended"))) < 2:
            assert time.monotonic() < deadline, "the others wait for ever"
            time.sleep(0.1)
        raise ZeroDivisionError("rank 1 ends here")

    def no_memory(*_):
        raise torch.OutOfMemoryError("rank 1 ends here")

    if dist.get_rank() == 1:
        if moment == "backward":
            engine.module.tall.weight.register_hook(end)
        elif moment == "sums":
            # What is sent is put together first.
            transfer.torch = SimpleNamespace(**{**vars(torch), "cat": no_memory})
        else:
            internals.owned(engine).update = end
    try:
        train_engine(engine, 2, first=2)
    finally:
        (folder / f"{dist.get_rank()}.ended").touch()


class TestEnd(OwnDistributedTest):
    """This one process starts the ranks itself and has no group."""

    world_size = 1
    init_distributed = False

    @pytest.mark.parametrize("how, moment, collective_timeout", [
        # A rank that is gone closes its connections; one that hangs is found out by the timeout alone.
        ("is killed", "backward", 300), ("is killed", "update", 300), ("raises", "backward", 300),
        ("raises", "sums", 300), ("hangs", "update", 8)])
    def test_the_others_end_with_an_error(self, how, moment, collective_timeout, tmp_path):
        ranks = fork_ranks(3, train_until_it_ends, how, moment, tmp_path, collective_timeout=collective_timeout)
        assert ranks[1][0] == (-signal.SIGKILL if how == "is killed" else 1)
        kind = "OutOfMemoryError" if moment == "sums" else "ZeroDivisionError"
        assert how == "is killed" or ranks[1][1] == f"{kind}: rank 1 ends here"
        for code, raised in (ranks[0], ranks[2]):
            assert code == 1 and raised.startswith(("RuntimeError", "DistBackendError")), raised


SCRIPT = """
import datetime, os, pathlib, signal, sys
import deepspeed, torch

# Only inference uses this operator, and building it takes a compiler.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(timeout=datetime.timedelta(seconds=120))
rank = deepspeed.comm.get_rank()
pathlib.Path(sys.argv[-1], f"{rank}.pid").write_text(str(os.getpid()))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "steps_per_print": 10**9,
    "optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.01, "adam_lr": 0.01}}})
for step in range(10**6):
    engine.backward(engine(torch.ones(1, 8)).sum())
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_launcher_ends_with_an_error_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = Path(sys.executable).parent / "deepspeed"
    done = subprocess.run(
        [sys.executable, str(launcher), "--num_accelerators", "2", "--master_port", str(free_port()), "--module",
         "ds_layerwise.run", str(tmp_path / "script.py"), str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    deadline = time.monotonic() + 120
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 2 and not any(map(is_running, pids)), output
