"""DeepSpeed's tiled layers, whose parameters get a gradient for each tile inside one backward pass."""

import deepspeed.comm as dist
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import nn

from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, ds_config, start, whole_gradients

pytestmark = rooms("grad_sync")

TILES = 3


class Mlp(nn.Module):
    """Two layers that run over the sequence at once, or, if ``tiled``, tile by tile."""

    def __init__(self, tiled):
        super().__init__()
        self.tiled = tiled
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    @staticmethod
    def plain(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        if self.tiled:
            return TiledMLP.apply(Mlp.plain, self, x, TILES, list(self.parameters()))
        return Mlp.plain(self, x)


class Model(nn.Module):
    def __init__(self, tiled=False):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.mlps = nn.Linear(8, 8), nn.ModuleList(Mlp(tiled) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.last(x).square().mean()


class TestTiles(DistributedTest):
    def test_gradients_are_those_of_the_model_without_tiles(self, stage, overlap):
        inputs = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(0))  # rank, micro-batch
        plain = Model()
        (sum(plain(x[None]) for of_rank in inputs for x in of_rank) / 4).backward()
        engine = start(Model(tiled=True), ds_config(stage=stage, overlap=overlap, gas=2, bucket_numel=1))
        for x in inputs[dist.get_rank()]:
            engine.backward(engine(x[None]))
            if engine.is_gradient_accumulation_boundary():
                for name, value in whole_gradients(engine).items():
                    torch.testing.assert_close(value, plain.get_parameter(name).grad.flatten(), msg=name)
            engine.step()
        assert_same_on_all_ranks(engine.module)
