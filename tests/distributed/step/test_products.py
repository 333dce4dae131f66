"""An ``ns_dtype`` of "auto" follows from the device, is the same on all ranks, reported, and compared on resuming."""

from __future__ import annotations

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.errors import ConfigError, LayerWiseError
from ds_layerwise.optimizers import devices
from ds_layerwise.optimizers.devices import Traits
from ds_layerwise.zero.setup import matmul_dtype
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

    @pytest.mark.parametrize("with_kernel", [True, False])
    def test_the_table_says_who_multiplies(self, with_kernel, monkeypatch):
        monkeypatch.setattr(matmul_dtype, "kernel_on", lambda device: len if with_kernel else None)
        told = start(Net(), ds_config()).optimizer.describe()
        assert ("symmetric products in half precision from 1,024 rows on: one half, by quack" in told) is with_kernel

    def test_all_ranks_have_a_kernel_or_none(self, monkeypatch):
        monkeypatch.setattr(matmul_dtype, "kernel_on", lambda device: [None, len][dist.get_rank()])
        with pytest.raises(ConfigError, match="rank 1 multiplies .* by quack-kernels, and rank 0 does not"):
            start(Net(), ds_config())

    def test_a_kernel_that_fails_on_one_rank_is_an_error_on_all(self, monkeypatch):
        def kernel_on(device):
            if dist.get_rank():
                raise ConfigError("quack-kernels is installed, and cannot multiply")
            return len

        monkeypatch.setattr(matmul_dtype, "kernel_on", kernel_on)
        with pytest.raises(LayerWiseError, match="cannot multiply"):
            start(Net(), ds_config())

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
