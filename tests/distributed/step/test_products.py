"""An ``ns_dtype`` of "auto" is measured once, the same on all ranks, reported, and compared on resuming."""

from __future__ import annotations

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.optimizers import devices
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("matmul_dtype", "devices")

BF16, FP32 = "bfloat16", "float32"


def measured(monkeypatch, *speeds):
    """Let products in half precision be so many times as fast as in float32, by rank."""
    asked = []
    monkeypatch.setattr(devices, "speed_over_float32",
                        lambda dtype, device: asked.append(dtype) or speeds[dist.get_rank() % len(speeds)])
    return asked


def trained(ns_dtype):
    engine = train_engine(start(Net(), ds_config(params={"ns_dtype": ns_dtype})), 2)
    return engine


class TestProducts(DistributedTest):
    @pytest.mark.parametrize("speeds, taken, told", [
        ((3.4, 1.9), "bf16", f"matrix products in {BF16} (measured)"),
        ((1.1, 0.1), "fp32", f"matrix products in {FP32} (measured)"),
        ((1.1, 4.0), "fp32", f"matrix products in {FP32} ({BF16} is faster on only 1 of 2 ranks: 1)")])
    def test_all_ranks_take_what_all_found_faster(self, speeds, taken, told, monkeypatch):
        measured(monkeypatch, *speeds)
        engine = trained("auto")
        assert told in " ".join(engine.optimizer.describe().split())
        assert torch.equal(weights(engine.module), weights(trained(taken).module))
        other = {"bf16": "fp32", "fp32": "bf16"}[taken]
        assert not torch.equal(weights(engine.module), weights(trained(other).module))

    def test_nothing_is_measured_where_nothing_is_open(self, monkeypatch):
        asked = measured(monkeypatch, 4.0)
        engine = trained("fp32")
        assert "matrix products in float32" in " ".join(engine.optimizer.describe().split()) and not asked
        start(Net(), ds_config(params={"ns_dtype": "auto"}))
        assert asked

    @pytest.mark.parametrize("before, after, said", [
        (4.0, 4.0, ""), (4.0, 1.0, f"multiplied matrices in {BF16} where this was saved, and does in {FP32} here")])
    def test_a_resumed_run_says_what_differs(self, before, after, said, tmp_path, monkeypatch, capsys):
        measured(monkeypatch, before)
        trained("auto").save_checkpoint(tmp_path)
        measured(monkeypatch, after)
        resumed = start(Net(), ds_config(params={"ns_dtype": "auto"}))
        capsys.readouterr()
        resumed.load_checkpoint(tmp_path)
        out = capsys.readouterr().out
        assert (said in out if dist.get_rank() == 0 else True) and ("multiplied" in out) == (
            bool(said) and dist.get_rank() == 0)
