"""Heads of a layer that holds (inputs, outputs) train as those of a linear layer, which holds the transpose."""

import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import ds_config, start, train_engines

pytestmark = rooms("fused_parts", "routes", "muon_family")


class Layers(nn.Module):
    """Two layers, either of them nn.Linear or Conv1D, with gradients of whole numbers that differ by rank and step."""

    def __init__(self, transposed):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.transposed = transposed
        for name, outputs in (("first", 24), ("second", 12)):
            weight = torch.randn(outputs, 8, generator=generator)
            layer = Conv1D(outputs, 8) if transposed else nn.Linear(8, outputs)
            layer.weight = nn.Parameter(weight.t().contiguous() if transposed else weight)
            layer.bias = nn.Parameter(torch.zeros(outputs))
            setattr(self, name, layer)
        self.norm = nn.LayerNorm(4)

    def forward(self, place):
        generator = torch.Generator().manual_seed(1 + sum(n * 10**i for i, n in enumerate(place)))
        loss = 0.0
        for layer in (self.first, self.second):
            shape = layer.weight.t().shape if self.transposed else layer.weight.shape
            factor = torch.randint(-8, 9, shape, generator=generator).float()
            loss = loss + (layer.weight * (factor.t() if self.transposed else factor)).sum()
        return loss


NAMED = [{"name": "first.weight", "num_heads": 6}, {"name": "second.weight", "num_heads": 2}]


class TestBlocksOfColumns(DistributedTest):
    @pytest.mark.world_size([1, 2])
    def test_they_train_as_blocks_of_rows_do(self, tmp_path):
        on_host = {"stage": 2, "reduce_bucket_size": 50, "offload_optimizer": {"device": "cpu"}}
        for changes in ({}, {"bf16": {"enabled": True}, "zero_optimization": on_host}):
            engines = [start(Layers(transposed), ds_config(layerwise={"overrides": NAMED}, bucket_numel=50, params={
                "scale_mode": "spectral"}, **changes)) for transposed in (False, True)]
            train_engines(engines, 3)
            rows, columns = engines
            for name in ("first", "second"):
                expected, found = (getattr(engine.module, name).weight for engine in engines)
                torch.testing.assert_close(found.float(), expected.t().float(), rtol=1e-5, atol=1e-5)
                states = [safe_get_full_optimizer_state(p, "momentum_buffer") for p in (expected, found)]
                assert torch.equal(states[1], states[0].t())
            assert columns.optimizer.routes["first.weight"].seen(0) == {"": (6, 8, 4)}
            columns.save_checkpoint(tmp_path, tag="saved")
            resumed = start(Layers(True), ds_config(layerwise={"overrides": NAMED}, params={"scale_mode": "spectral"},
                                                    **changes))
            resumed.load_checkpoint(tmp_path)
            assert_equal_states(whole_states(resumed), whole_states(columns))
            for engine in (rows, columns, resumed):
                engine.destroy()
