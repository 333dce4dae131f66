"""Products that a device has none of are refused before anything runs."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers import devices
from ds_layerwise.optimizers.rule_registry import rule_of
from tests.support.rooms import rooms

pytestmark = rooms("devices")


def rule(ns_dtype, **params):
    return rule_of(OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": {
        "lr": 0.003, "muon_lr": 0.02, "ns_dtype": ns_dtype, **params}}).matrix)


@pytest.mark.parametrize("ns_dtype, refused_on", [
    ("bf16", {(7, 0), (7, 5)}), ("fp16", ()), ("fp32", ()), ("auto", ())])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_a_gpu_before_ampere_has_no_bf16(ns_dtype, refused_on, capability, method, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    check = rule(ns_dtype, ns_method=method).check
    if capability not in refused_on:
        check(torch.device("cuda", 0))
        return
    with pytest.raises(ConfigError) as error:
        check(torch.device("cuda", 0))
    assert str(error.value) == (
        "optimizer.params.ns_dtype is 'bf16', and cuda:0 has no products in bfloat16; set it to 'auto'")


def test_other_accelerators_say_what_they_have(monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "supported_dtypes", lambda self: [torch.float32, torch.float16])
    for ns_dtype in ("fp16", "fp32", "auto"):
        rule(ns_dtype).check(torch.device("xpu", 0))
    with pytest.raises(ConfigError, match="ns_dtype is 'bf16', and xpu:0 has no products in bfloat16"):
        rule("bf16").check(torch.device("xpu", 0))


@pytest.mark.parametrize("ns_dtype", ["bf16", "fp16", "fp32", "auto"])
def test_a_cpu_has_all(ns_dtype):
    rule(ns_dtype).check(torch.device("cpu"))


def test_an_mi200_has_no_fp16_that_is_exact_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx90a"))
    for ns_dtype in ("bf16", "fp32", "auto"):
        rule(ns_dtype).check(torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="ns_dtype is 'fp16', and cuda:0 has no products in float16"):
        rule("fp16").check(torch.device("cuda", 0))


CPU = torch.device("cpu")


def test_fast_is_what_noise_does_not_reach(monkeypatch):
    for speed, fast in ((0.06, False), (1.1, False), (1.29, False), (1.3, True), (4.0, True)):
        monkeypatch.setattr(devices, "speed_over_float32", lambda dtype, device, speed=speed: speed)
        assert devices.fast_dtypes(CPU) == (frozenset({torch.bfloat16}) if fast else frozenset())


@pytest.mark.parametrize("device, capability, candidates", [
    ("cpu", None, {torch.bfloat16}), ("xpu", None, {torch.bfloat16}), ("hpu", None, set()), ("meta", None, set()),
    ("cuda", (7, 0), {torch.float16}), ("cuda", (9, 0), {torch.float16, torch.bfloat16}),
    ("gfx90a:sramecc+:xnack-", (9, 0), {torch.bfloat16}), ("gfx942", (9, 4), {torch.float16, torch.bfloat16})])
def test_only_what_a_device_has_and_is_exact_in_is_measured(device, capability, candidates, monkeypatch):
    supported = [torch.float32, *[torch.bfloat16] * (device == "xpu")]
    monkeypatch.setattr(type(get_accelerator()), "supported_dtypes", lambda self: supported)
    arch = {"gcnArchName": device} if device.startswith("gfx") else {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**arch))
    device = "cuda" if arch else device
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asked = set()
    monkeypatch.setattr(devices, "speed_over_float32", lambda dtype, device: asked.add(dtype) or 0.0)
    devices.fast_dtypes(torch.device(device))
    assert asked == candidates


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("disturbed, rounds", [(0, 11), (9, 20), (30, 41), (10**6, 200)])
def test_a_measurement_goes_on_until_other_work_on_the_machine_is_over(kind, disturbed, rounds, monkeypatch):
    # In turns a product in float32 takes 2, one in bfloat16 1, and one of the two ever less of 100 times as long.
    now, calls = 0.0, 0

    def clock():
        nonlocal now, calls
        calls += 1
        if calls % 2 == 0:
            turn, of = divmod(calls // 2 - 1, 2)
            now += (2.0, 1.0)[of] * (100 * 0.94**turn if of == kind and turn < disturbed else 1)
        return now

    monkeypatch.setattr(devices.time, "perf_counter", clock)
    devices.speed_over_float32.cache_clear()
    try:
        found = devices.speed_over_float32(torch.bfloat16, CPU)
    finally:
        devices.speed_over_float32.cache_clear()
    assert calls == 4 * rounds
    assert found == pytest.approx(2.0) or disturbed == 10**6


def test_a_process_measures_once():
    assert 0 < devices.speed_over_float32(torch.bfloat16, CPU) == devices.speed_over_float32(torch.bfloat16, CPU)


@pytest.mark.parametrize("method, fast, taken", [
    ("gram", (torch.float16, torch.bfloat16), torch.float16), ("gram", (torch.bfloat16,), torch.bfloat16),
    ("standard", (torch.float16, torch.bfloat16), torch.bfloat16), ("standard", (torch.float16,), torch.float32),
    ("gram", (), torch.float32)])
def test_auto_takes_the_first_that_is_exact_enough(method, fast, taken):
    assert rule("auto", ns_method=method).on_device(frozenset(fast)).products_in == taken
    assert rule("fp32", ns_method=method).on_device(frozenset(fast)).products_in == torch.float32
    # It diverges in half precision.
    assert rule("auto", ns_coefficients="cans").on_device(frozenset(fast)).products_in == torch.float32
