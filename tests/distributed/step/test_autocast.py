"""Mixed precision by torch.autocast, switched on by the user or by the torch_autocast section."""

import copy
import re

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import internals
from tests.support.checkpoints import loaded
from tests.support.expected import assert_trained_as
from tests.support.harness import DistributedTest
from tests.support.reference import LossScale, Recipe, Reference, trainable
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, ds_config, start, whole_gradients

pytestmark = rooms("engine_protocol", "grad_sync")

STEPS = 3


class Mixed(nn.Module):
    """Two modules that are safe in a lower precision, two that are not, and a matrix that no module multiplies with."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.first = nn.Embedding(11, 8), nn.Linear(8, 16)
        self.norm, self.second = nn.LayerNorm(16), nn.Linear(16, 8)
        self.loose = nn.Parameter(torch.randn(8, 8))

    def forward(self, tokens):
        return F.cross_entropy((self.second(self.norm(self.first(self.embed(tokens)))) @ self.loose).float(),
                               tokens % 8)


class Small(Mixed):
    """A loss whose gradients float16 holds at one of the first loss scales."""

    def forward(self, tokens):
        return super().forward(tokens) / 3


class AutocastInside(Mixed):
    """A model that switches autocast on in its forward pass, as a user's would."""

    def forward(self, tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens)


SAFE = ("first.weight", "first.bias", "second.weight", "second.bias")
MATRICES = {"first.weight": (1, 16, 8), "second.weight": (1, 8, 16), "loose": (1, 8, 8)}


def tokens(step, micro, rank):
    return torch.randint(0, 11, (6, ), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


class Oracle:
    """Plain training on all ranks' data, with gradients that are rounded as they are sent."""

    def __init__(self, module, *, stage, gas, dtype, wire, loss_scale=None):
        self.stage, self.gas, self.dtype, self.wire = stage, gas, dtype, wire
        self.reference = Reference(trainable(module), Recipe(
            matrices=MATRICES, world_size=dist.get_world_size(), gas=gas, clip=1.0, muon_lr=0.02, adam_lr=0.003,
            weight_decay=0.1, loss_scale=loss_scale))

    def step(self, module, step):
        """Take a step on gradients at the weights of ``module``."""
        grads = []
        for rank in range(dist.get_world_size()):
            micros = []
            for micro in range(self.gas):
                plain = copy.deepcopy(module)
                with torch.autocast("cpu", dtype=self.dtype):
                    loss = plain(tokens(step, micro, rank))
                (loss / self.gas * self.reference.loss_scale).backward()
                micros.append({name: p.grad for name, p in trainable(plain).items()})
            if self.stage == 1:  # sent once a step
                micros = [{name: sum(of_micro[name] for of_micro in micros) for name in micros[0]}]
            grads.append([{name: g.to(self.wire.get(name, g.dtype)).float() for name, g in of_micro.items()}
                          for of_micro in micros])
        return self.reference.step(grads)


def train_and_compare(module, config, oracle, *, gas):
    """Compare reduced gradients bit for bit, then what the step does with them; returns who skipped and the scales."""
    engine = start(module, config)
    seen = []
    for step in range(STEPS):
        expected = oracle.step(module, step)
        for micro in range(gas):
            engine.backward(engine(tokens(step, micro, dist.get_rank())))
            if micro == gas - 1 and not expected.skipped:
                for name, value in whole_gradients(engine).items():
                    unscaled = value / engine.optimizer.loss_scale
                    assert torch.equal(unscaled, expected.grads[name].flatten()), name
            engine.step()
        assert engine.optimizer.overflow == expected.skipped
        seen.append((expected.skipped, engine.optimizer.loss_scale))
        assert_trained_as(module, oracle.reference)
    assert_same_on_all_ranks(module)
    return engine, seen


class TestSection(DistributedTest):
    def config(self, dtype, **kwargs):
        return ds_config(clip=1.0, torch_autocast={"enabled": True, "dtype": dtype}, **kwargs)

    @pytest.mark.parametrize("gas, overlap", [(1, False), (2, True)])
    def test_bf16(self, stage, gas, overlap):
        oracle = Oracle(Mixed(), stage=stage, gas=gas, dtype=torch.bfloat16, wire=dict.fromkeys(SAFE, torch.bfloat16))
        config = self.config("bfloat16", stage=stage, gas=gas, overlap=overlap)
        engine, _ = train_and_compare(Mixed(), config, oracle, gas=gas)
        assert all(p.dtype == torch.float32 for p in engine.module.parameters())
        forecast = engine.optimizer.forecast()
        assert forecast.wire_as("float32") == "bfloat16 and float32"
        assert re.search(r"of float32 +│ +float32, bfloat16 +and +float32", engine.optimizer.describe())

    def test_fp16_scales_the_loss(self, stage, class_tmpdir):
        oracle = Oracle(Small(), stage=stage, gas=1, dtype=torch.float16, wire=dict.fromkeys(SAFE, torch.float16),
                        loss_scale=LossScale(initial=2.0**16, window=2000, hysteresis=1))
        config = self.config("float16", stage=stage)
        engine, seen = train_and_compare(Small(), config, oracle, gas=1)
        assert seen == [(False, 2.0**16), (True, 2.0**15), (False, 2.0**15)]
        assert engine.skipped_steps == 1 and engine.optimizer.cur_scale == 2.0**15
        folder = str(class_tmpdir / str(stage))
        engine.save_checkpoint(folder)
        resumed = loaded(start(Small(), config), folder)
        assert resumed.optimizer.loss_scale == 2.0**15
        with pytest.raises(RuntimeError, match="Loss scaling is required"):
            engine(tokens(STEPS, 0, dist.get_rank())).backward()
        engine.zero_grad()
        engine.scale(engine(tokens(STEPS, 0, dist.get_rank()))).backward()
        resumed.backward(resumed(tokens(STEPS, 0, dist.get_rank())))
        for name, value in whole_gradients(resumed).items():
            assert torch.equal(whole_gradients(engine)[name], value), name

    def test_the_modules_are_the_configs(self):
        section = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.LayerNorm"]}
        for stage in (1, 2):
            module, kind = Mixed(), {"norm.weight": torch.bfloat16, "norm.bias": torch.bfloat16}
            oracle = Oracle(Mixed(), stage=stage, gas=1, dtype=torch.bfloat16, wire=kind)
            config = ds_config(clip=1.0, stage=stage, torch_autocast=section)
            engine, _ = train_and_compare(module, config, oracle, gas=1)
            for other in (None, self.config("bfloat16", stage=stage)):
                # The next engine on the same module is not told anything by the one before.
                engine.destroy()
                engine = start(module, other or ds_config(stage=stage))
                lower = {spec.name for spec in internals.specs(engine) if spec.wire == "bfloat16"}
                assert lower == (set(SAFE) if other else set())

    def test_a_module_that_cannot_be_found(self):
        section = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.Lineer"]}
        with pytest.raises(ValueError, match="torch.nn.Lineer"):
            start(Mixed(), ds_config(torch_autocast=section))


class TestByTheUser(DistributedTest):
    @pytest.mark.parametrize("gas, overlap", [(1, False), (2, True)])
    def test_gradients_stay_float32(self, stage, gas, overlap):
        oracle = Oracle(AutocastInside(), stage=stage, gas=gas, dtype=torch.bfloat16, wire={})
        config = ds_config(clip=1.0, stage=stage, gas=gas, overlap=overlap)
        train_and_compare(AutocastInside(), config, oracle, gas=gas)
