"""Second copies of weights within groups of ranks (hpZ) at ZeRO stage 3: the same bits as without."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_set_full_fp32_param
from torch import nn

from ds_layerwise.errors import ConfigError
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import ds_config, start

pytestmark = rooms("param_cuts", "run_config", "ds_config")


class Deep(nn.Module):
    """Layers of which DeepSpeed keeps one whole at a time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(4))
        self.frozen = nn.Linear(15, 15)
        self.frozen.requires_grad_(False)

    def forward(self, seed):
        x = torch.randn(6, 15, generator=torch.Generator().manual_seed(seed))
        for layer in (*self.layers, self.frozen):
            x = torch.tanh(layer(x))
        return x.square().mean()


def config_of(**zero):
    config = ds_config(stage=3, gas=2)
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1,
                                    "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, **zero}
    return config


def whole(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def assert_a_layer_alone_is_new(engine):
    """A script may call a layer without the model."""
    layer, x = engine.module.layers[1], torch.ones(1, 15)
    with torch.no_grad():
        found = layer(x)
        with deepspeed.zero.GatheredParameters(list(layer.parameters())):
            assert torch.equal(found, nn.functional.linear(x, layer.weight, layer.bias))


def passes(engine, copies=None):
    """Train, look at weights between passes, and write one from a script."""
    seen = []
    for step in range(3):
        for micro in range(2):
            loss = engine(100 * step + 10 * micro + dist.get_rank())
            if copies is not None:
                copies.append(sum(p.ds_secondary_tensor is not None for p in engine.module.parameters()))
            engine.backward(loss)
            engine.step()
        assert_a_layer_alone_is_new(engine)
        seen.append(whole(engine))
        for _ in range(2):
            with torch.no_grad():
                engine(step)
            safe_set_full_fp32_param(engine.module.layers[1].weight, torch.full((15, 15), 0.25 * step))
            assert_a_layer_alone_is_new(engine)
        if step == 0:
            # A write of a script into cuts, after a pass that made copies.
            for p in engine.module.parameters():
                p.ds_tensor.mul_(0.5)
        elif step == 1:
            with deepspeed.zero.GatheredParameters(engine.module.layers[0].weight, modifier_rank=0):
                if dist.get_rank() == 0:
                    engine.module.layers[0].weight.data.mul_(2)
    return seen


class TestSecondCopies(DistributedTest):
    world_size = 4

    def test_the_same_bits(self, tmp_path):
        engine = start(Deep(), config_of())
        expected = passes(engine)
        last = whole(engine)
        engine.save_checkpoint(tmp_path)
        plain = engine.optimizer.forecast().working.in_pass
        engine.destroy()
        engine = start(Deep(), config_of(zero_hpz_partition_size=2))
        copies = []
        found = passes(engine, copies)
        assert min(copies) > 0, "no copy was there to be old"
        for one, other in zip(found, expected, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name
        numel = sum(p.ds_numel for p in engine.module.parameters() if p.requires_grad)
        assert engine.optimizer.forecast().working.in_pass == plain + 4 * numel // 2
        with torch.no_grad():
            engine(7)
        for p in engine.module.parameters():
            p.ds_tensor.zero_()
        engine.load_checkpoint(tmp_path)
        assert_a_layer_alone_is_new(engine)
        for name, value in whole(engine).items():
            assert torch.equal(value, last[name]), name
        engine.destroy()

    @pytest.mark.world_size(2)
    def test_sizes_that_do_not_fit(self):
        with pytest.raises(ConfigError, match="zero_hpz_partition_size is 4, which does not divide the 2 ranks"):
            start(Deep(), config_of(zero_hpz_partition_size=4))
        config = config_of(zero_hpz_partition_size=2)
        config["zero_optimization"] = {"stage": 2, "zero_hpz_partition_size": 2}
        with pytest.raises(ConfigError, match="zero_hpz_partition_size is 2, and only ZeRO stage 3 fetches weights"):
            start(Deep(), config)
