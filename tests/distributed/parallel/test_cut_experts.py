"""AutoEP at ZeRO stage 3, where experts are cut over the ranks that hold the same ones: what scripts read and write,
the order of collectives, and files."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.moe.layer import MoE
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn
from torch.distributed import checkpoint as dcp

from ds_layerwise.errors import ConfigError, LayerWiseError, StepError
from tests.distributed.parallel.test_auto_ep import (
    ADAM,
    ALL_SCALAR,
    CUT,
    KNOWS_STAGE_3,
    STEPS,
    StackNet,
    all_weights,
    check_verified,
    start_net,
    train_step,
)
from tests.distributed.parallel.test_experts import train_experts
from tests.support.auto_ep import WIDTH, section, shape_of
from tests.support.checkpoints import assert_equal_states, on_rank_0, whole_states
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import BF16, ds_config, from_all_ranks, start
from tests.support.universal import convert, converter_options
from tests.support.versions import needs

pytestmark = [*rooms("cut_sync", "param_cuts", "group_pool", "stage3_files", "run_state"), needs(*KNOWS_STAGE_3)]


def zero(stage, *, kept_whole=None, **more):
    if stage == 3 and kept_whole is not None:
        more["stage3_param_persistence_threshold"] = kept_whole
    return {"stage": stage, "reduce_bucket_size": 200, "overlap_comm": True, **more}


def start_fake(ep_size, stage, *, kept_whole=None, **more):
    return start_net(ep_size, fake=True, layerwise=CUT, zero_optimization=zero(stage, kept_whole=kept_whole, **more))


def assert_same(engine, expected):
    assert_equal_states(whole_states(engine), whole_states(expected))
    assert_equal_states(all_weights(engine), all_weights(expected))


class Sometimes(nn.Linear):
    """A layer whose bias has a gradient on rank 0 alone, while all ranks fetch it."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, None if dist.get_rank() else self.bias)


class TestCutExperts(DistributedTest):
    world_size = 4

    def test_a_rank_without_a_gradient(self):
        """Reductions begin later on it than on others, between other fetches."""
        losses = []
        for stage in (2, 3):
            module = StackNet()
            for layer in module.layers:
                sometimes = Sometimes(WIDTH, WIDTH)
                sometimes.load_state_dict(layer.mix.state_dict())
                layer.mix = sometimes
            settings = {**zero(stage, kept_whole=0), "reduce_bucket_size": 1}
            engine = start_net(2, module=module, gas=2, clip=0.5, zero_optimization=settings)
            losses.append([loss for step in range(STEPS) for loss in train_step(engine, step, 2)])
            engine.destroy()
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)

    @pytest.mark.parametrize("kept_whole, ep_size", [(0, 4), (10**6, 2)])
    def test_written_weights(self, kept_whole, ep_size):
        engines = []
        for stage in (2, 3):
            engine = start_fake(ep_size, stage, kept_whole=kept_whole)
            train_experts(engine, 0, 2)
            params = list(engine.module.parameters())
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
                for param in params:
                    param.data.mul_(1.5)
            train_experts(engine, 2, 3)
            for param in params:
                safe_set_full_fp32_param(param, 0.5 * safe_get_full_fp32_param(param))
            train_experts(engine, 3, 4)
            engines.append(engine)
        assert_same(*engines)

    def test_different_writes(self):
        engine = start_fake(2, 3, kept_whole=10**6)
        train_experts(engine, 0, 2)
        weight = engine.module.inner.layers[0].mlp.experts.w1
        weight.data.add_(1 + dist.get_rank() % 2)
        train_experts(engine, 2, 3)
        if dist.get_rank() == 3:
            weight.data.add_(1)
        engine.backward(engine((3, 0, 3)))
        with pytest.raises(StepError, match=r"layers.0.mlp.experts.w1 .* ranks 1 and 3"):
            engine.step()

    def test_cuts(self):
        engine = start_fake(2, 3)
        engine.backward(engine((0, 0, dist.get_rank())))
        whole = {}
        for name, param in trainable(engine.module).items():
            assert safe_get_full_grad(param).shape == shape_of(param)
            assert safe_get_local_grad(param).numel() == param.ds_tensor.numel()
        engine.step()
        for name, param in trainable(engine.module).items():
            whole[name] = safe_get_full_fp32_param(param)
            holders = dist.get_world_size(param.ds_process_group)
            assert holders == (2 if "experts" in name else 4)
            cut = safe_get_local_fp32_param(param)
            padded = nn.functional.pad(whole[name].flatten(), (0, holders * cut.numel() - whole[name].numel()))
            assert torch.equal(cut, padded.chunk(holders)[dist.get_rank(param.ds_process_group)])
            safe_set_local_fp32_param(param, 2 * cut)
            assert torch.equal(safe_get_full_fp32_param(param), 2 * whole[name])

    def test_on_the_host(self):
        expected = start_fake(2, 2)
        train_experts(expected, 0, 4)
        engine = start_fake(2, 3, offload_param={"device": "cpu"})
        train_experts(engine, 0, 4)
        assert_same(engine, expected)
        engine = start_fake(2, 3)
        train_experts(engine, 0, 2)
        engine.offload_states()
        engine.reload_states()
        train_experts(engine, 2, 4)
        assert_same(engine, expected)

    def test_files_of_whole_parameters(self, tmpdir):
        engine = start_fake(2, 3)
        train_experts(engine, 0, 2)
        states = whole_states(engine)
        engine.optimizer.save_state_dict_to_file(tmpdir / "whole.safetensors")
        dcp.save(engine.optimizer.sharded_state_dict(), checkpoint_id=str(tmpdir / "sharded"))
        with pytest.raises(LayerWiseError, match="save_16bit_model.* would write what one rank has"):
            engine.save_16bit_model(str(tmpdir))
        for ep_size, stage in ((4, 3), (1, 1)):
            other = start_fake(ep_size, stage)
            other.optimizer.load_state_dict_from_file(tmpdir / "whole.safetensors")
            assert_equal_states(whole_states(other), states)
            train_experts(other, 0, 1)
            other.optimizer.load_sharded_state_dict(str(tmpdir / "sharded"))
            assert_equal_states(whole_states(other), states)

    def test_scripts_of_deepspeed_that_know_one_rank_s_shapes_stop(self, tmpdir):
        engine = start_fake(2, 3)
        engine.save_checkpoint(tmpdir, tag="saved", client_state={"mine": 3})
        assert from_all_ranks(engine.save_non_zero_checkpoint).count(True) == 1  # writes the model's file

        def run():
            with pytest.raises(ValueError, match="consumed .* numels out of"):
                get_fp32_state_dict_from_zero_checkpoint(str(tmpdir), tag="saved")
            with pytest.raises(RuntimeError, match="AutoEP layer metadata is missing fields"):
                ds_to_universal.main(converter_options(tmpdir / "saved", tmpdir / "converted"))
            check_verified(tmpdir / "saved")

        on_rank_0(run)
        assert engine.load_checkpoint(tmpdir, tag="saved")[1]["mine"] == 3

    @pytest.mark.parametrize("stage", [1, 3])
    def test_a_universal_checkpoint_of_stock_deepspeed(self, tmpdir, stage):
        module = StackNet()
        config = ds_config(stage=stage, expert_parallel=section(2), **BF16,
                           optimizer={"type": "AdamW", "params": {**ADAM, "torch_adam": True}})
        del config["layerwise"]
        stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        for step in range(2):
            train_step(stock, step, 1)
        stock.save_checkpoint(tmpdir, tag="saved")
        convert(tmpdir / "saved", tmpdir / "universal")
        parts = from_all_ranks({name: safe_get_full_fp32_param(p) for name, p in module.named_parameters()})
        stock.destroy()
        params = {**ADAM, "matrix_optimizer": "muon", "muon_lr": 0.02, "decay_vectors": True}
        engine = start_net(4, stage=3, layerwise=ALL_SCALAR, optimizer={"type": "LayerWise", "params": params}, **BF16)
        engine.load_checkpoint(tmpdir, tag="universal")
        assert engine.optimizer.fresh_states == {}
        found = whole_states(engine)
        for name, part in parts[0].items():
            whole = torch.cat([part, parts[1][name]]) if "experts" in name else part
            assert torch.equal(found[name, "fp32"], whole.flatten()), name
        train_step(engine, 2, 1)

    def test_first_step(self):
        groups = {"experts": {"name": "*experts*"}}
        engine = start_net(2, layerwise={"verify_first_step": True, "norm_groups": groups}, zero_optimization=zero(3))
        train_step(engine, 0, 1)

    def test_errors(self):
        with pytest.raises(ConfigError, match="zero_hpz_partition_size is 2, and expert_parallel.enabled is true"):
            start_net(2, zero_optimization=zero(3, zero_hpz_partition_size=2))
        with pytest.raises(ConfigError, match="gather_16bit_weights_on_model_save is true, and .*ds-layerwise consol"):
            start_net(2, zero_optimization=zero(3, stage3_gather_16bit_weights_on_model_save=True))
        module = StackNet()
        module.layers[0].mlp.experts.w2.requires_grad_(False)
        with pytest.raises(ConfigError, match="stage is 3, and layers.0.*w2 belongs to an expert .*set stage to 2"):
            start_net(2, module=module, stage=3)
        layers = nn.Sequential(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=2))
        with pytest.raises(ConfigError, match="stage is 3, and experts of deepspeed.moe"):
            start(layers, ds_config(stage=3))
