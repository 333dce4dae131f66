"""Fused matrices with named parts that tensor parallelism has cut, against the same matrices whole."""

import pytest
import torch
from torch import nn

from tests.support.harness import DistributedTest
from tests.support.reference import whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu, mark
from tests.support.training import ds_config, start

pytestmark = rooms("fused_parts", "part_views", "tensor_marks", "tensor_shards")

#: By parameter, its shape, the axis that is cut, in how many runs, and what an override says.
FUSED = {
    "across": ((16, 8), 1, 1, {"split": {"q": 8, "k": 4, "v": 4}}),
    "groups": ((24, 6), 0, 1, {"split": {"q": 4, "k": 2}, "split_groups": 4}),
    "heads": ((24, 6), 0, 1, {"split": {"q": {"size": 4, "heads": 2}, "k": {"size": 2, "heads": 1}},
                              "split_groups": 4}),
    "halves": ((20, 6), 0, 1, {"split": {"gate": 10, "up": 10}}),
    "pieces": ((20, 6), 0, 2, {"split": {"gate": 10, "up": 10}}),
    "columns": ((6, 24), 1, 1, {"split": {"q": 4, "k": 2}, "split_groups": 4, "split_axis": "in"}),
    "experts": ((4, 12, 5), 0, 1, {"split": {"gate": 6, "up": 6}}),
}

OVERRIDES = [{"name": name, **entry} for name, (*_, entry) in FUSED.items()]


def shard_of(whole, name, mpu):
    """The shard of this rank: an equal piece of each run."""
    _, dim, runs, _ = FUSED[name]
    if mpu is None:
        return whole
    rank, size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
    return torch.cat([run.chunk(size, dim)[rank] for run in whole.chunk(runs, dim)], dim).contiguous()


class Net(nn.Module):
    """The parameters, whole or cut and marked, with whole numbers for gradients."""

    def __init__(self, mpu=None):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.mpu = mpu
        for name, (shape, dim, runs, _) in FUSED.items():
            param = nn.Parameter(shard_of(torch.randn(shape, generator=generator), name, mpu))
            if mpu is not None:
                mark(param, dim, partition_stride=runs)
            setattr(self, name, param)
        self.norm = nn.LayerNorm(6)

    def forward(self, place):
        return sum((getattr(self, name) * shard_of(whole_number_gradients(name, shape, *place), name, self.mpu)).sum()
                   for name, (shape, *_) in FUSED.items())


class TestShards(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.parametrize("tp_mode", ["duplicated", "distributed", "owner", "auto"])
    def test_they_train_as_the_whole_does(self, tp_mode):
        mpu, found = Mpu(2), []
        for group in (mpu, None):
            module = Net(group)
            engine = start(module, ds_config(layerwise={"overrides": OVERRIDES}, bucket_numel=200,
                                             params={"muon_tp_mode": tp_mode}), mpu=group or Mpu(1))
            for step in range(3):
                # The ranks of a tensor-parallel group see the same.
                place = (step, 0, mpu.get_data_parallel_rank())
                engine.backward(engine(place))
                engine.step()
            engine.optimizer.wait_for_params()
            found.append({name: param.detach().clone() for name, param in engine.module.named_parameters()})
            engine.destroy()
        shards, whole = found
        for name in FUSED:
            torch.testing.assert_close(shards[name], shard_of(whole[name], name, mpu), rtol=0, atol=1e-6,
                                       msg=lambda text: f"{name}: {text}")

