"""Schedulers of a config whose peak is not ``lr``."""

import inspect
import re

import pytest
import torch
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.routes.schedule_rates import PEAKS, check_peaks, check_schedule
from tests.support.rooms import rooms

pytestmark = rooms("schedule_rates")

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


class Restarts(lr_scheduler.LRScheduler):
    """A schedule as packages outside of torch have them: it starts below, and keeps its peak as it was given."""

    def __init__(self, optimizer, max_lr, min_lr=1e-6):
        self.max_lr = max_lr
        super().__init__(optimizer)
        self.base_lrs = [min_lr] * len(optimizer.param_groups)

    def get_lr(self):
        return self.base_lrs


class Named:
    """Nothing that is known keeps a rate here."""

    optimizer, max_lr, base_lrs = None, "high", None


def of_lr(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def raised(optimizer):
    optimizer.param_groups[0]["lr"] = 0.001
    return of_lr(optimizer)


def followed(optimizer, *makes):
    return lr_scheduler.SequentialLR(optimizer, [make(optimizer) for make in makes], [3] * (len(makes) - 1))


def cycle(peak):
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=10)


#: How a script may make a schedule with a peak, and what that is called.
WITH_PEAK = {
    "OneCycleLR": ("max_lr", lambda opt, peak: cycle(peak)(opt)),
    "CyclicLR": ("max_lr", lambda opt, peak: lr_scheduler.CyclicLR(opt, base_lr=1e-5, max_lr=peak)),
    "WarmupLR": ("warmup_max_lr", lambda opt, peak: lr_schedules.WarmupLR(opt, warmup_max_lr=peak)),
    "WarmupDecayLR": ("warmup_max_lr", lambda opt, peak: lr_schedules.WarmupDecayLR(opt, 100, warmup_max_lr=peak)),
    "OneCycle": ("cycle_max_lr", lambda opt, peak: lr_schedules.OneCycle(opt, 1e-5, peak)),
    "LRRangeTest": ("lr_range_test_min_lr", lambda opt, peak: lr_schedules.LRRangeTest(opt, peak)),
    "Restarts": ("max_lr", Restarts),
    "in a sequence": ("max_lr", lambda opt, peak: followed(opt, cycle(peak), of_lr)),
    "in a sequence of sequences": ("max_lr", lambda opt, peak: lr_scheduler.ChainedScheduler(
        [followed(opt, cycle(peak), of_lr), of_lr(opt)])),
}


def optimizer_with(*lrs):
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "matrix_lr_ratio": 200 / 3,
                               "scalar_lr_ratio": 1.0} for lr in lrs], lr=3e-4)


def check_made(make, *lrs):
    optimizer = optimizer_with(*lrs)
    config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": PARAMS})
    both = {"matrix_lr_ratio", "scalar_lr_ratio"}
    check_schedule(make(optimizer), lrs, optimizer.param_groups, config, used=dict.fromkeys(range(len(lrs)), both))


@pytest.mark.parametrize("kind", WITH_PEAK)
def test_a_scripts_schedule_with_another_peak_is_refused_with_the_numbers(kind):
    key, make = WITH_PEAK[kind]
    name = "OneCycleLR" if kind.startswith("in a") else kind
    with pytest.raises(ConfigError, match=re.escape(
            f"{name}'s {key} is 0.001, and optimizer.params.lr is 0.0003: both rates follow lr in a fixed ratio, so "
            f"that muon_lr would become 0.06667 instead of 0.02, and adam_lr 0.001 instead of 0.0003; set {key} to "
            "0.0003, or lr to 0.001")):
        check_made(lambda optimizer: make(optimizer, 0.001), 3e-4)
    check_made(lambda optimizer: make(optimizer, 3e-4), 3e-4)
    if kind not in ("Restarts", "OneCycleLR"):
        check_made(lambda optimizer: make(optimizer, [3e-4, 1e-4]), 3e-4, 1e-4)
    with pytest.raises(ConfigError, match=rf"'s {key} is 0.0003, and param_groups\[1\].lr is 0.0001: .* set {key} to "
                       r"\[0.0003, 0.0001\], or lr to 0.0003"):
        check_made(lambda optimizer: make(optimizer, 3e-4), 3e-4, 1e-4)


@pytest.mark.parametrize("make", [
    of_lr, lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10), lambda opt: lr_scheduler.ReduceLROnPlateau(opt),
    lambda opt: lr_scheduler.LinearLR(opt), lambda opt: lr_schedules.WarmupLR(opt),
    lambda opt: lr_schedules.WarmupCosineLR(opt, 10), lambda opt: Named(), lambda opt: None,
    lambda opt: followed(opt, of_lr, of_lr)])
def test_a_scripts_schedule_that_starts_from_lr_is_right(make):
    check_made(make, 3e-4, 1e-4)


def test_a_scripts_schedule_of_a_rate_that_it_has_changed_itself_is_refused():
    with pytest.raises(ConfigError, match="LambdaLR's base_lrs is 0.001, and optimizer.params.lr is 0.0003: .* muon_lr "
                       "would become 0.06667 instead of 0.02, .*; do not change lr of the groups, or set lr to 0.001"):
        check_made(raised, 3e-4)
