"""DeepSpeed's functions to look at and to change masters, states and gradients."""

import copy
from contextlib import nullcontext

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

import ds_layerwise
from ds_layerwise.errors import StepError
from tests.support.checkpoints import whole_states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import (
    MATRICES,
    PRECISIONS,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    train_engine,
    whole_gradients,
)
from tests.support.versions import needs

pytestmark = rooms("state_access")


class TestStateAccess(DistributedTest):
    world_size = [1, 2, 3]

    def engine(self, stage=1, precision="bf16", **changes):
        module = Net(odd=True)
        params = list(module.parameters())
        # Two groups: DeepSpeed's own optimizers answer for the first one alone.
        engine, *_ = ds_layerwise.initialize(
            model=module, config=ds_config(stage=stage, **PRECISIONS[precision], **changes),
            model_parameters=[{"params": params[:5]}, {"params": params[5:]}])
        return engine

    def trained(self, engine):
        return {name: p for name, p in engine.module.named_parameters() if p.numel()}

    def test_getters_return_masters_and_states(self, stage, precision):
        engine = self.engine(stage, precision)
        train_engine(engine, 3)
        expected = whole_states(engine)
        for name, p in self.trained(engine).items():
            assert torch.equal(safe_get_full_fp32_param(p), expected[name, "fp32"].view(p.shape)), name
            keys = {key for n, key in expected if n == name} - {"fp32"}
            assert keys == ({"momentum_buffer"} if name in MATRICES else {"exp_avg", "exp_avg_sq", "step"})
            for key in keys:
                found = safe_get_full_optimizer_state(p, key)
                assert torch.equal(found, expected[name, key].view(found.shape)), (name, key)
                assert found.shape == (() if key == "step" else p.shape)
            if name in MATRICES:
                assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"),
                                   safe_get_full_optimizer_state(p, "momentum_buffer"))
                with pytest.raises(StepError, match=f"{name} has no state 'exp_avg_sq'; its optimizer keeps momentum_"):
                    safe_get_full_optimizer_state(p, "exp_avg_sq")

    def test_gradients_between_backward_and_step(self, stage):
        engine = self.engine(stage)
        module = engine.module
        with pytest.raises(StepError, match="averaged gradients exist only between the backward pass"):
            safe_get_full_grad(module.experts)
        engine.backward(engine((0, 0, dist.get_rank())))
        read = {name: safe_get_full_grad(p) for name, p in self.trained(engine).items()}
        for name, value in whole_gradients(engine).items():
            assert torch.equal(read[name].flatten(), value), name
            assert torch.equal(safe_get_full_grad(module.get_parameter(name)).flatten(), value), name
        engine.step()
        with pytest.raises(StepError, match="averaged gradients exist only .*call engine.step.. inside their backward"):
            safe_get_full_grad(module.experts)

    @needs("deepspeed>=0.19.6", "its own optimizer, which is compared with, does not take empty parameters")
    @pytest.mark.world_size(3)
    @pytest.mark.parametrize("within", ["no_sync", "accumulation"])
    def test_before_the_reduction_it_is_this_ranks_own_sum_as_with_stock(self, within, precision):
        """A rank may read alone, as nothing is sent. A value that is set counts, also where there was no gradient."""
        engine = self.engine(1, precision, gas=1 if within == "no_sync" else 3)
        config = ds_config(gas=engine.gradient_accumulation_steps(), overlap=False, **PRECISIONS[precision],
                           optimizer={"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}})
        del config["layerwise"]
        module = Net(odd=True)
        module.transposed = torch.nn.Parameter(module.transposed.detach().contiguous())
        stock = ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
        for each in (engine, stock):
            for micro in range(2):
                with each.no_sync() if within == "no_sync" else nullcontext():
                    each.backward(each((0, micro, dist.get_rank())))
                if within == "accumulation":
                    each.step()
        if dist.get_rank() == dist.get_world_size() - 1:
            for name, p in self.trained(stock).items():
                found = safe_get_full_grad(engine.module.get_parameter(name))
                # Stock has no answer where there is no gradient.
                expected = torch.zeros_like(p) if name.startswith("unused") else safe_get_full_grad(p)
                assert torch.equal(found, expected) and found.dtype == expected.dtype, name
        for name, p in self.trained(engine).items():
            safe_set_full_grad(p, torch.full_like(p, dist.get_rank() + 1.0))
            assert (safe_get_full_grad(p) == dist.get_rank() + 1).all()
        last = engine((0, 2, dist.get_rank())) * 0
        engine.backward(last)
        for name, value in whole_gradients(engine).items():
            assert (value == sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()).all(), name

    @pytest.mark.world_size(3)
    @pytest.mark.parametrize("gas", [1, 2])
    def test_a_gradient_that_is_replaced_is_the_one_that_counts(self, stage, gas):
        engine, other = self.engine(stage, "fp32", gas=gas), self.engine(stage, "fp32", gas=gas)
        train_engine(engine, 1, gas=gas)
        for micro in range(gas):
            other.backward(other((7, micro, dist.get_rank())))
            if micro == gas - 1:
                twin = self.engine(stage, "fp32", gas=gas)
                for m in range(gas):
                    twin.backward(twin((0, m, dist.get_rank())))
                    if m < gas - 1:
                        twin.step()
                for name, p in self.trained(other).items():
                    safe_set_full_grad(p, safe_get_full_grad(twin.module.get_parameter(name)))
            other.step()
        for (name, p), q in zip(engine.module.named_parameters(), other.module.parameters(), strict=True):
            assert torch.equal(p, q), name

    @pytest.mark.world_size(3)
    @pytest.mark.parametrize("overlap", [False, True])
    def test_setters_set_on_all_ranks(self, precision, overlap):
        engine = self.engine(1, precision, layerwise={"overlap_param_gather": overlap})
        train_engine(engine, 2)
        g = torch.Generator().manual_seed(3)
        wanted = {}
        for name, p in self.trained(engine).items():
            for key in ("fp32", "momentum_buffer") if name in MATRICES else ("fp32", "exp_avg", "exp_avg_sq"):
                wanted[name, key] = torch.rand(p.shape, generator=g)
                if key == "fp32":
                    safe_set_full_fp32_param(p, wanted[name, key])
                else:
                    safe_set_full_optimizer_state(p, wanted[name, key], key)
            if name not in MATRICES:
                safe_set_full_optimizer_state(p, torch.tensor(41.0), "step")
                wanted[name, "step"] = torch.tensor(41.0)
        found = whole_states(engine)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value.flatten() if value.dim() else value), key
            if key[1] == "fp32":
                p = engine.module.get_parameter(key[0])
                assert torch.equal(p, value.to(p.dtype)), key
        assert_same_on_all_ranks(engine.module)
        train_engine(engine, 1, first=2)
        engine.optimizer.wait_for_params()
        assert_same_on_all_ranks(engine.module)

    def test_a_value_of_another_size(self):
        engine = self.engine()
        with pytest.raises(StepError, match="experts has 162 elements, got a value of 3"):
            safe_set_full_fp32_param(engine.module.experts, torch.zeros(3))

    def test_neither_a_copy_of_the_model_nor_the_time_after_has_any(self):
        engine = self.engine()
        twin = copy.deepcopy(engine.module)
        assert safe_get_full_fp32_param(twin.experts) is None
        engine.destroy()
        assert safe_get_full_fp32_param(engine.module.experts) is None
