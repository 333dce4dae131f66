"""Keys that docs/config_keys.md calls the engine's own or without effect, tried on an engine."""

import json
import math
from pathlib import Path

import deepspeed.comm as dist
import numpy as np
import pytest
import torch
from deepspeed.runtime import constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

from ds_layerwise.errors import ConfigError
from tests.support.config_table import DOCUMENT, config_with, read_table
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, allow_fp16, assert_same_on_all_ranks, ds_config, start, train_engine, weights

pytestmark = rooms("ds_config", "run_config")

README = Path(__file__).parents[3] / "README.md"


class TestKeysWithoutEffect(DistributedTest):
    def test_none_changes_a_bit(self, stage):
        rows = [row for row in read_table(DOCUMENT.read_text()) if "test_none_changes_a_bit" in row.test]
        paths = {row.path for row in rows}
        # DeepSpeed takes a key in one of its two spellings only.
        rows = [row for row in rows if f"zero_optimization.stage3_{row.key}" not in paths and (
            row.releases != "newest only" or row.key in DeepSpeedZeroConfig.model_fields)]
        plain = changed = ds_config(gas=2, clip=5.0, stage=stage, bf16={"enabled": True})
        for row in rows:
            changed = config_with(row.path, row.value, changed)
        results = []
        for config in (plain, changed):
            module = Net()
            engine = train_engine(start(module, config), 3, gas=2)
            assert_same_on_all_ranks(module)
            results.append({name: p.detach().clone() for name, p in module.named_parameters()})
            told = engine.optimizer.describe().replace("\n", " ")
            assert ("reduce_scatter, " in told and "prescale_gradients" in told) == (config is changed)
            engine.destroy()
        for name, value in results[0].items():
            assert torch.equal(results[1][name], value), name


class TestNumbers(DistributedTest):
    @pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
    def test_numbers_of_numpy_are_as_good_as_pythons(self, number):
        results = []
        for of_kind, whole, betas in ((float, int, list), (number, np.int64, np.array)):
            engine = start(Net(), ds_config(
                clip=of_kind(0.5), gas=whole(2), params={"lr": of_kind(0.25), "muon_lr": of_kind(0.5),
                                                         "betas": betas([0.5, 0.75]), "ns_steps": whole(4)},
                layerwise={"alignment": whole(32), "overrides": [{"name": "*.bias", "lr_scale": of_kind(0.5)}]}))
            assert type(engine.optimizer.settings.clip_grad) is float
            train_engine(engine, 2, gas=2)
            results.append(weights(engine.module).clone())
            engine.destroy()
        assert torch.equal(*results)


class TestSwitches(DistributedTest):
    world_size = 1

    def test_switches_of_numpy_are_as_good_as_pythons(self):
        engine = start(Net(), ds_config(bf16={"enabled": np.bool_(True)}))
        assert next(engine.module.parameters()).dtype == torch.bfloat16
        train_engine(engine, 1)

    def test_a_ratio_that_nothing_filled_in_is_deepspeeds_default(self):
        config = ds_config(bf16={"enabled": True})
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": "auto"}
        assert start(Net(), config).optimizer.settings.host_ratio == 1.0


class TestReadme(DistributedTest):
    world_size = 1

    def test_the_first_config_trains_a_model_without_biases(self):
        config = json.loads(README.read_text().partition("```json\n")[2].partition("```")[0])
        results = []
        for sections in (config, {key: value for key, value in config.items() if key != "layerwise"}):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16, bias=False))
            engine = start(module, sections)
            engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float()[:, 0].sum())
            engine.step()
            results.append(weights(module).clone())
            engine.destroy()
        assert torch.equal(*results)


class TestLossScale(DistributedTest):
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
        with pytest.raises(ConfigError, match="data_types.param_dtype"):
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
