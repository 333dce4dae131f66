"""Keys that docs/config_keys.md calls the engine's own or without effect, tried on an engine."""

import math

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime import constants
from torch import nn

from ds_layerwise.errors import ConfigError
from tests.config_table import DOCUMENT, config_with, read_table
from tests.harness import DistributedTest
from tests.training import Net, allow_fp16, assert_same_on_all_ranks, ds_config, start, train_engine


class TestKeysWithoutEffect(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [1, 2])
    def test_none_changes_a_bit(self, stage):
        rows = [row for row in read_table(DOCUMENT.read_text()) if "test_none_changes_a_bit" in row.test]
        paths = {row.path for row in rows}
        # DeepSpeed takes a key in one of its two spellings only.
        rows = [row for row in rows if f"zero_optimization.stage3_{row.key}" not in paths]
        plain = changed = ds_config(gas=2, clip=5.0, stage=stage, bf16={"enabled": True})
        for row in rows:
            changed = config_with(row.path, row.value, changed)
        results = []
        for config in (plain, changed):
            module = Net()
            engine = start(module, config)
            train_engine(engine, 3, gas=2)
            assert_same_on_all_ranks(module)
            results.append({name: p.detach().clone() for name, p in module.named_parameters()})
            engine.destroy()
        for name, value in results[0].items():
            assert torch.equal(results[1][name], value), name


class TestLossScale(DistributedTest):
    world_size = 2

    def test_a_floor_and_a_refilled_patience(self):
        allow_fp16()
        engine = start(Net(), ds_config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 2,
                                              "consecutive_hysteresis": True, "min_loss_scale": 4}))
        scales = []
        for step, bad in enumerate([True, False, True, True, True]):
            self.step(engine, step, bad)
            scales.append(engine.optimizer.loss_scale)
        # The second overflow alone would be enough, had the good step between them not refilled the patience.
        assert scales == [16, 16, 16, 8, 4]
        with pytest.raises(Exception, match="loss scale already at minimum"):
            self.step(engine, 5, True)

    def step(self, engine, step, bad):
        loss = engine((step, 0, dist.get_rank()))
        engine.backward(loss * math.inf if bad else loss)
        engine.step()


class Shifted(nn.Module):
    """A matrix, and two buffers that bf16 cannot hold."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("kept", torch.full((8, ), 1.001))
        self.register_buffer("other", torch.full((8, ), 1.001))

    def forward(self, x):
        return self.layer(x).float().sum()


class TestDataTypes(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("types", [{"buffer_dtype": "bf16"}, {"keep_in_fp32_modules": ["kept"]},
                                       {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["kept"]}])
    def test_buffers(self, types):
        config = ds_config(bf16={"enabled": True}, data_types=types)
        if any(not hasattr(constants, key.upper()) for key in types):
            with pytest.raises(ConfigError, match="is not known to DeepSpeed"):
                start(Shifted(), config)
            return
        buffers = dict(start(Shifted(), config).module.named_buffers())
        rounded = torch.tensor(1.001).to(torch.bfloat16).item()
        kept = "keep_in_fp32_modules" in types or "buffer_dtype" not in types
        assert buffers["kept"].float().unique().item() == pytest.approx(1.001 if kept else rounded, abs=1e-6)
        cast = "buffer_dtype" in types
        assert buffers["other"].float().unique().item() == pytest.approx(rounded if cast else 1.001, abs=1e-6)

    def test_weights_that_differ_from_the_mode_stop_the_engine(self):
        config = ds_config(data_types={"param_dtype": "bf16"})
        known = hasattr(constants, "PARAM_DTYPE")
        with pytest.raises(AssertionError if known else ConfigError, match="data_types.param_dtype"):
            start(Shifted(), config)
        if known:
            engine = start(Shifted(), {**config, "bf16": {"enabled": True}})
            assert engine.module.layer.weight.dtype == torch.bfloat16

    def test_inputs_are_cast(self):
        allow_fp16()
        x = torch.ones(2, 8)
        engine = start(Shifted(), ds_config(fp16={"enabled": True, "auto_cast": True}))
        assert engine(x).isfinite()
        engine.destroy()
        with pytest.raises(RuntimeError, match="dtype"):
            start(Shifted(), ds_config(fp16={"enabled": True}))(x)
