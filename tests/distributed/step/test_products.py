"""An ``ns_dtype`` of "auto" follows from the device, is the same on all ranks, reported, and compared on resuming."""

from __future__ import annotations

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.optimizers import devices
from ds_layerwise.optimizers.devices import Traits
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("matmul_dtype", "devices")

BF16, FP32 = "bfloat16", "float32"


def on_cpus(monkeypatch, *have_bf16):
    """Let ranks have CPUs with or without units for bfloat16."""
    asked = []
    monkeypatch.setattr(devices, "traits_of", lambda device: asked.append(device) or Traits(
        "cpu", has_bf16=have_bf16[dist.get_rank() % len(have_bf16)]))
    return asked


def trained(ns_dtype):
    engine = train_engine(start(Net(), ds_config(params={"ns_dtype": ns_dtype})), 2)
    return engine


class TestProducts(DistributedTest):
    @pytest.mark.parametrize("have_bf16, taken, told", [
        ((True, True), "bf16", f"matrix products in {BF16} (auto)"),
        ((False, False), "fp32", f"matrix products in {FP32} (auto)"),
        ((False, True), "fp32", f"matrix products in {FP32} ({BF16} is faster on only 1 of 2 ranks: 1)")])
    def test_all_ranks_take_what_all_have(self, have_bf16, taken, told, monkeypatch):
        on_cpus(monkeypatch, *have_bf16)
        engine = trained("auto")
        assert told in " ".join(engine.optimizer.describe().split())
        assert torch.equal(weights(engine.module), weights(trained(taken).module))
        other = {"bf16": "fp32", "fp32": "bf16"}[taken]
        assert not torch.equal(weights(engine.module), weights(trained(other).module))

    def test_nothing_is_asked_where_nothing_is_open(self, monkeypatch):
        asked = on_cpus(monkeypatch, True)
        engine = trained("fp32")
        assert "matrix products in float32" in " ".join(engine.optimizer.describe().split()) and not asked
        start(Net(), ds_config(params={"ns_dtype": "auto"}))
        assert asked

    @pytest.mark.parametrize("before, after, said", [
        (True, True, ""),
        (True, False, f"multiplied matrices in {BF16} where this was saved, and does in {FP32} here")])
    def test_a_resumed_run_says_what_differs(self, before, after, said, tmp_path, monkeypatch, capsys):
        on_cpus(monkeypatch, before)
        trained("auto").save_checkpoint(tmp_path)
        on_cpus(monkeypatch, after)
        resumed = start(Net(), ds_config(params={"ns_dtype": "auto"}))
        capsys.readouterr()
        resumed.load_checkpoint(tmp_path)
        out = capsys.readouterr().out
        assert (said in out if dist.get_rank() == 0 else True) and ("multiplied" in out) == (
            bool(said) and dist.get_rank() == 0)
