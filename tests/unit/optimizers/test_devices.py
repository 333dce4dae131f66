"""Products that a device has none of are refused before anything runs."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers import devices
from ds_layerwise.optimizers.devices import Traits
from tests.support.rooms import rooms

pytestmark = rooms("devices")


def rule(ns_dtype, **params):
    return OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": {
        "lr": 0.003, "muon_lr": 0.02, "ns_dtype": ns_dtype, **params}}).matrix


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


BOTH, BF16, FP16 = {torch.float16, torch.bfloat16}, {torch.bfloat16}, {torch.float16}


def no_sets(value):
    """Return the id of a value; of a set none, because each worker writes a set in its own order."""
    return None if isinstance(value, set) else str(value)


@pytest.mark.parametrize("traits, fast", [
    (Traits("cpu", has_bf16=True), BF16), (Traits("cpu"), set()), (Traits("meta"), set()),
    (Traits("cuda", (6, 0)), set()), (Traits("cuda", (7, 0)), FP16), (Traits("cuda", (7, 5)), FP16),
    (Traits("cuda", (8, 0)), BOTH), (Traits("cuda", (8, 6)), BOTH), (Traits("cuda", (9, 0)), BOTH),
    (Traits("cuda", (10, 0)), BOTH), (Traits("cuda", (9, 0), "gfx90a:sramecc+:xnack-"), BF16),
    (Traits("cuda", (9, 0), "gfx908"), BOTH), (Traits("cuda", (9, 4), "gfx942"), BOTH),
    (Traits("cuda", (9, 5), "gfx950"), BOTH), (Traits("cuda", (11, 0), "gfx1100"), BOTH),
    (Traits("cuda", (12, 0), "gfx1201"), BOTH), (Traits("cuda", (9, 0), "gfx906"), set()),
    (Traits("cuda", (10, 3), "gfx1030"), set()), (Traits("xpu", has_bf16=True), BF16), (Traits("hpu"), set())],
    ids=no_sets)
def test_each_kind_of_device_is_fast_in_its_dtypes(traits, fast, monkeypatch):
    monkeypatch.setattr(devices, "traits_of", lambda device: traits)
    assert devices.fast_dtypes(CPU) == fast


@pytest.mark.parametrize("units, has_bf16", [
    ({"avx512_bf16": True, "amx_bf16": False}, True), ({"avx512_bf16": False, "amx_bf16": True}, True),
    ({"avx512_f": True, "avx512_bf16": False, "amx_tile": True}, False), ({"architecture": "aarch64"}, False)])
def test_a_cpu_is_asked_for_units_of_bfloat16(units, has_bf16, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    assert devices.traits_of(CPU) == Traits("cpu", has_bf16=has_bf16)
    assert devices.fast_dtypes(CPU) == (BF16 if has_bf16 else set())


@pytest.mark.parametrize("properties, arch", [({}, ""), ({"gcnArchName": "gfx942:sramecc+"}, "gfx942:sramecc+")])
def test_a_gpu_is_asked_for_its_generation(properties, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert devices.traits_of(torch.device("cuda")) == Traits("cuda", (9, 4), arch)


@pytest.mark.parametrize("device, supported, has_bf16", [
    ("xpu", [torch.float32, torch.bfloat16], True), ("hpu", [torch.float32], False), ("meta", [torch.bfloat16], False)])
def test_another_accelerator_is_asked_for_its_dtypes(device, supported, has_bf16, monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "supported_dtypes", lambda self: supported)
    assert devices.traits_of(torch.device(device)) == Traits(device, has_bf16=has_bf16)


@pytest.mark.parametrize("method, fast, taken", [
    ("gram", (torch.float16, torch.bfloat16), torch.float16), ("gram", (torch.bfloat16,), torch.bfloat16),
    ("standard", (torch.float16, torch.bfloat16), torch.bfloat16), ("standard", (torch.float16,), torch.float32),
    ("gram", (), torch.float32)])
def test_auto_takes_the_first_that_is_exact_enough(method, fast, taken):
    assert rule("auto", ns_method=method).products_in(frozenset(fast)) == taken
    assert rule("fp32", ns_method=method).products_in(frozenset(fast)) == torch.float32
    # It diverges in half precision.
    assert rule("auto", ns_coefficients="cans").products_in(frozenset(fast)) == torch.float32
