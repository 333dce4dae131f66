"""Products that a device has none of are refused before anything runs."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.config import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.registry import rule_of
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
