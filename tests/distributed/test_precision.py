"""bf16, bf16 with float32 accumulation, fp16 with dynamic loss scaling: the same class, the same oracle."""

import math

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise import LayerWiseZeroOptimizer
from tests.harness import DistributedTest
from tests.reference import LossScale, train, trainable
from tests.training import (Net, allow_fp16, assert_same_on_all_ranks, ds_config, recipe_for, relative_error, start,
                            train_engine)

STEPS = 8

#: The oracle's arguments and the config's sections.
DTYPES = {
    "bf16": ({"param_dtype": torch.bfloat16, "accum_dtype": torch.bfloat16}, {"bf16": {"enabled": True}}),
    "bf16, fp32 accumulation": ({"param_dtype": torch.bfloat16, "accum_dtype": torch.float32},
                                {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "bf16, fp32 on the wire": ({"param_dtype": torch.bfloat16, "accum_dtype": torch.bfloat16},
                               {"bf16": {"enabled": True}, "communication_data_type": "fp32"}),
    "fp32, bf16 accumulation": ({"accum_dtype": torch.bfloat16}, {"data_types": {"grad_accum_dtype": "bf16"}}),
    "fp16": ({"param_dtype": torch.float16, "accum_dtype": torch.float16, "loss_scale": LossScale(initial=2.0**4)},
             {"fp16": {"enabled": True, "initial_scale_power": 4}}),
}


class TestPrecision(DistributedTest):
    world_size = [1, 2, 4]

    @pytest.mark.parametrize("case", DTYPES)
    def test_masters_and_gradients(self, case):
        allow_fp16()
        of_oracle, sections = DTYPES[case]
        for gas in (1, 4):
            expected = train(Net, lambda *place: place, lambda module, place: module(place),
                             recipe_for(Net(), gas=gas, clip=5.0, **of_oracle), STEPS)
            module = Net()
            engine = start(module, ds_config(gas=gas, clip=5.0, **sections))
            assert type(engine.optimizer) is LayerWiseZeroOptimizer
            scale = engine.optimizer.loss_scale

            def check(step, gradients):
                for name, (first, values) in gradients.items():
                    wanted = expected.steps[step].grads[name].flatten()[first:first + values.numel()]
                    assert torch.equal(values / scale, wanted), (step, name)

            train_engine(engine, STEPS, gas=gas, check=check)
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[-1].norm, rel=1e-6)
            for pieces in engine.optimizer._owned.pieces:
                for piece in pieces:
                    wanted = expected.params[piece.name].flatten()[piece.param_start:piece.param_start + piece.numel]
                    assert relative_error(engine.optimizer._owned.masters.piece(piece.name), wanted) < 1e-5, piece.name
            dtype = of_oracle.get("param_dtype", torch.float32)
            for name, p in trainable(module).items():
                assert p.dtype == dtype
                assert relative_error(p.detach().float(), expected.params[name]) < 2**-8
            assert_same_on_all_ranks(module)
            engine.destroy()


class TestOverflow(DistributedTest):
    world_size = 2

    def snapshot(self, optimizer):
        tensors = {f"master {n}": optimizer._owned.masters.piece(n) for n in optimizer._owned.states}
        tensors |= {f"{key} {n}": t for n, state in optimizer._owned.states.items() for key, t in state.items()}
        tensors |= {f"weight {n}": p for n, p in optimizer._params.items()}
        return {name: t.detach().clone() for name, t in tensors.items()}

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_an_overflowed_step_changes_nothing(self, precision, bad):
        allow_fp16()
        module = Net()
        section = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
                   # Since 0.19.4 the default.
                   "bf16": {"enabled": True, "check_grad_overflow": True}}[precision]
        engine = start(module, ds_config(clip=5.0, **{precision: section}))
        train_engine(engine, 2)
        before, scale = self.snapshot(engine.optimizer), engine.optimizer.loss_scale
        loss = engine((2, 0, dist.get_rank()))
        if dist.get_rank() == 1:
            loss = loss * bad
        engine.backward(loss)
        engine.step()
        assert engine.optimizer.overflow and engine.skipped_steps == 1
        assert engine.get_global_grad_norm() == math.inf
        for name, value in self.snapshot(engine.optimizer).items():
            assert torch.equal(value, before[name]), name
        assert engine.optimizer.loss_scale == (scale / 2 if precision == "fp16" else 1)
        train_engine(engine, 1, first=3)
        assert not engine.optimizer.overflow and engine.optimizer.step_count == 3
        assert not torch.equal(self.snapshot(engine.optimizer)["weight square.weight"], before["weight square.weight"])

    def test_bf16_can_be_told_not_to_look(self):
        engine = start(Net(), ds_config(clip=0.0, bf16={"enabled": True, "check_grad_overflow": False}))
        engine.backward(engine((0, 0, dist.get_rank())) * math.inf)
        engine.step()
        assert not engine.optimizer.overflow and engine.skipped_steps == 0

    def test_the_scale_follows_the_oracle_over_overflows(self):
        allow_fp16()
        engine = start(Net(), ds_config(clip=0.0, fp16={
            "enabled": True, "initial_scale_power": 6, "hysteresis": 2, "loss_scale_window": 2}))
        rules, overflows = LossScale(initial=2.0**6, hysteresis=2, window=2), []
        for step, bad in enumerate([False, True, True, False, False, False, True, True, False]):
            assert engine.optimizer.loss_scale == rules.after(overflows), step
            loss = engine((step, 0, dist.get_rank()))
            engine.backward(loss * math.inf if bad and dist.get_rank() == 0 else loss)
            engine.step()
            overflows.append(bad)
            assert engine.optimizer.overflow == bad
