"""Schedulers of a config whose peak is not ``lr``."""

import inspect
import re

import pytest
from deepspeed.runtime import lr_schedules

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.zero.setup import rate_checks
from ds_layerwise.zero.setup.rate_checks import PEAKS, check_peaks
from tests.support.rooms import rooms

pytestmark = rooms("rate_checks")

PARAMS = {"lr": 3e-4, "muon_lr": 0.02}


def check(kind, params, *, optimizer=None, groups=None, **kwargs):
    config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": optimizer or PARAMS})
    own = {"lr": config.lr, "matrix_lr_ratio": config.matrix_lr_ratio, "scalar_lr_ratio": config.scalar_lr_ratio}
    both = {"matrix_lr_ratio", "scalar_lr_ratio"}
    kwargs.setdefault("used", dict.fromkeys(range(len(groups or [own])), both))
    check_peaks({"type": kind, "params": params}, groups or [own], config, **kwargs)


@pytest.mark.parametrize("kind, key", [(kind, key) for kind, (key, _) in PEAKS.items()])
def test_a_peak_that_is_not_lr_is_refused_with_the_numbers(kind, key):
    with pytest.raises(ConfigError, match=re.escape(
            f"scheduler.params.{key} is 0.02, and optimizer.params.lr is 0.0003: both rates follow lr in a fixed "
            f"ratio, so that muon_lr would become 1.333 instead of 0.02, and adam_lr 0.02 instead of 0.0003; set {key} "
            "to 0.0003, or lr to 0.02")):
        check(kind, {key: 0.02})
    for peak in (3e-4, [3e-4], (3e-4, )):
        check(kind, {key: peak})
    with pytest.raises(ConfigError, match=f"scheduler.params.{key} is 'auto', which only Hugging Face"):
        check(kind, {key: "auto"})
    with pytest.raises(ConfigError, match=f"scheduler.params.{key} must be a number, got 'high'"):
        check(kind, {key: "high"})


def test_defaults_are_those_of_the_scheduler():
    for kind in ("WarmupLR", "WarmupCosineLR", "OneCycle", "LambdaLR", "Misspelt"):
        check(kind, {"total_num_steps": 10})
    for kind in ("WarmupDecayLR", "LRRangeTest"):
        with pytest.raises(ConfigError, match=rf"is 0.001 \(the default of {kind}\), and .* 0.06667"):
            check(kind, {})
        check(kind, {}, optimizer={"lr": 1e-3, "muon_lr": 0.02})


@pytest.mark.parametrize("kind", [kind for kind in PEAKS if hasattr(lr_schedules, kind)])
def test_defaults_are_those_of_the_installed_release(kind):
    key, omitted = PEAKS[kind]
    default = inspect.signature(getattr(lr_schedules, kind)).parameters[key].default
    assert omitted == (None if default is inspect.Parameter.empty else default)


def test_each_group_has_its_own_peak():
    groups = [{"lr": 3e-4, "matrix_lr_ratio": 1, "scalar_lr_ratio": 1},
              {"lr": 1e-4, "matrix_lr_ratio": 50, "scalar_lr_ratio": 1}]
    check("WarmupLR", {"warmup_max_lr": [3e-4, 1e-4]}, groups=groups)
    with pytest.raises(ConfigError, match=r"is 0.0003, and param_groups\[1\].lr is 0.0001: .* muon_lr would become "
                       r"0.015 instead of 0.005.* set warmup_max_lr to \[0.0003, 0.0001\]"):
        check("WarmupLR", {"warmup_max_lr": 3e-4}, groups=groups)


def test_a_single_rate_as_adamws_is_the_peak():
    check("WarmupLR", {"warmup_max_lr": 5e-5}, optimizer={"lr": 3e-4, "scale_mode": "match_rms_adamw"})
    with pytest.raises(ConfigError, match="muon_lr would become 0.00333"):
        check("WarmupLR", {"warmup_max_lr": 5e-5},
              optimizer={"lr": 3e-4, "muon_lr": 0.02, "scale_mode": "match_rms_adamw"})


@pytest.mark.parametrize("used, refused", [
    ({0: {"scalar_lr_ratio"}}, False), ({0: {"matrix_lr_ratio"}}, True), ({}, False),
    ({0: {"matrix_lr_ratio", "scalar_lr_ratio"}}, True)])
def test_a_rate_that_no_parameter_has_is_not_multiplied(used, refused):
    if refused:
        with pytest.raises(ConfigError, match="muon_lr would become"):
            check("WarmupLR", {"warmup_max_lr": 0.02}, used=used)
    else:
        check("WarmupLR", {"warmup_max_lr": 0.02}, used=used)
    # With a rate of its own, AdamW's is multiplied, too.
    with pytest.raises(ConfigError, match="adam_lr 0.06667 instead of 0.001"):
        check("WarmupLR", {"warmup_max_lr": 0.02}, used={0: {"scalar_lr_ratio"}},
              optimizer={**PARAMS, "adam_lr": 1e-3})


@pytest.mark.parametrize("shape, ep_size, is_wrong", [
    ((4, 9, 8), 2, True), ((4, 9, 8), 1, False), ((4, 8, 8), 2, False), ((9, 8), 2, False)])
def test_no_block_of_mxfp8_holds_parts_of_two_experts(shape, ep_size, is_wrong):
    config = LayerWiseConfig.from_section({"param_wire": "mxfp8", "alignment": 512})
    specs = [ParamSpec("experts", shape, "bfloat16", True, ep_size=ep_size),
             ParamSpec("norm.weight", (7,), "bfloat16", False)]
    if is_wrong:
        with pytest.raises(ConfigError, match="the matrices of experts are 9 x 8: blocks of 32 elements would hold"):
            rate_checks._check_param_wire(specs, config)
    else:
        rate_checks._check_param_wire(specs, config)
