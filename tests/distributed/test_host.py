"""``offload_optimizer``: masters and states on the host give the same bits as on the device."""

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.cost import memory_bytes
from tests.checkpoints import assert_equal_states, whole_states
from tests.harness import DistributedTest
from tests.training import Net, assert_same_on_all_ranks, ds_config, start, train_engine, weights, whole_gradients


def offloaded(ratio=1.0, *, stage=1, **changes):
    config = ds_config(stage=stage, clip=5.0, **changes)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    return config


class TestAgainstNone(DistributedTest):
    world_size = [2, 3]

    @pytest.mark.parametrize("stage", [1, 2])
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_the_same_bits(self, stage, precision):
        sections = {"bf16": {"enabled": True}} if precision == "bf16" else {}
        plain = start(Net(odd=True), ds_config(stage=stage, clip=5.0, **sections))
        train_engine(plain, 10)
        for ratio in (0, 0.4, 1):
            engine = start(Net(odd=True), offloaded(ratio, stage=stage, **sections))
            train_engine(engine, 10)
            assert_equal_states(whole_states(engine), whole_states(plain))
            assert torch.equal(weights(engine.module), weights(plain.module))
            print(engine.optimizer.describe())
