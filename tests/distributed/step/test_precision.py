"""bf16, bf16 with float32 accumulation, fp16 with dynamic loss scaling: the same class, the same oracle."""

import math

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise import LayerWiseZeroOptimizer
from tests.support import internals
from tests.support.expected import by_the_oracle, compared_to
from tests.support.harness import DistributedTest, device
from tests.support.reference import LossScale, trainable
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    Net,
    allow_fp16,
    assert_same_on_all_ranks,
    ds_config,
    reduced_gradients,
    relative_error,
    start,
    train_engine,
    weights,
    whole_gradients,
)
from tests.support.transports import plan_in_cuts
from tests.support.versions import needs

pytestmark = rooms("optimizer", "grad_sync", "buffers", "engine_protocol")

STEPS = 8

#: The oracle's arguments and the config's sections.
DTYPES = {
    "bf16": ({"param_dtype": torch.bfloat16, "accum_dtype": torch.bfloat16}, BF16),
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

    @pytest.mark.parametrize("case, stage", [(case, 1) for case in DTYPES] + [
        (case, 2) for case in DTYPES if case != "fp32, bf16 accumulation"])
    def test_masters_and_gradients(self, case, stage):
        allow_fp16()
        of_oracle, sections = DTYPES[case]
        for gas in (1, 4):
            expected = by_the_oracle(Net, STEPS, gas=gas, clip=5.0, **of_oracle)
            module = Net()
            engine = start(module, ds_config(gas=gas, clip=5.0, stage=stage, **sections))
            assert type(engine.optimizer) is LayerWiseZeroOptimizer
            scale = engine.optimizer.loss_scale

            def check(step, gradients):
                for name, (first, values) in gradients.items():
                    wanted = expected.steps[step].grads[name].flatten()[first:first + values.numel()]
                    assert torch.equal(values / scale, wanted), (step, name)

            train_engine(engine, STEPS, gas=gas, check=check)
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[-1].norm, rel=1e-6)
            for piece in internals.pieces(engine):
                wanted = expected.params[piece.name].flatten()[piece.param_start:piece.param_start + piece.numel]
                assert relative_error(internals.master(engine, piece.name), wanted) < 1e-5, piece.name
            dtype = of_oracle.get("param_dtype", torch.float32)
            for name, p in trainable(module).items():
                assert p.dtype == dtype
                assert relative_error(p.detach().float(), expected.params[name]) < 2**-8
            assert_same_on_all_ranks(module)
            engine.destroy()


class TestOverflow(DistributedTest):
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


class TestLossScale(DistributedTest):
    @pytest.mark.parametrize("clip", [0.0, 5.0])
    def test_the_update_does_not_see_it(self, clip):
        """Vectors have SGD, as Muon and Adam forget the scale of a gradient."""
        allow_fp16()
        results = []
        for scale in (1, 16):
            engine = start(Net(), ds_config(clip=clip, fp16={"enabled": True, "loss_scale": scale},
                                            params={"scalar_optimizer": "sgd"}))
            assert engine.optimizer.loss_scale == scale and not engine.optimizer.dynamic_loss_scale
            train_engine(engine, 1)
            results.append({name: internals.master(engine, name).clone() for name in internals.states(engine)})
            engine.destroy()
        for name, value in results[0].items():
            assert relative_error(results[1][name], value) < 1e-6, name

    @pytest.mark.parametrize("cuts", [False, True], ids=["to owners", "in cuts"])
    def test_sums_of_the_backend_leave_it_as_much_room(self, cuts, stage, monkeypatch):
        """Gradients of 40,000 on both ranks, of which the sum is no float16."""
        allow_fp16()
        if cuts:
            plan_in_cuts(monkeypatch)
        for reduction in ("ordered", "native"):
            engine = start(Net(), ds_config(stage=stage, clip=0.0, fp16={"enabled": True, "loss_scale": 1},
                                            layerwise={"reduction": reduction}))
            engine.backward(sum(p.sum() for p in engine.module.parameters()) * 40000)
            gradients = whole_gradients(engine)
            engine.step()
            assert not engine.optimizer.overflow and math.isfinite(engine.get_global_grad_norm())
            assert all((value == 40000).all() for value in gradients.values())

    def test_a_static_one_stays_after_an_overflow(self):
        allow_fp16()
        engine = start(Net(), ds_config(fp16={"enabled": True, "loss_scale": 8}))
        engine.backward(engine((0, 0, dist.get_rank())) * math.inf)
        engine.step()
        assert engine.optimizer.overflow and engine.skipped_steps == 1 and engine.optimizer.loss_scale == 8


class TestNorm(DistributedTest):
    def test_a_norm_as_small_as_the_bound_is_hardly_clipped(self):
        """The denominator has 1e-6 more, as that of torch.nn.utils.clip_grad_norm_."""
        engine = start(Net(), ds_config(clip=1e-6))
        engine.backward(engine((0, 0, dist.get_rank())) * 2**-28)
        decision = internals.decision(engine)
        assert decision.norm < 1e-5 and decision.factor == pytest.approx(1e-6 / (decision.norm + 1e-6))

    def test_it_is_a_tensor_as_stock_has_it_that_no_finite_gradient_overflows(self):
        engine = start(Net(), ds_config(clip=1.0))
        engine.backward(engine((0, 0, dist.get_rank())) * 2.0**80)
        engine.step()
        norm = engine.get_global_grad_norm()
        assert (norm.shape, norm.dtype, norm.device.type) == ((), torch.float32, device().type)
        assert math.isfinite(norm)

    @needs("deepspeed>=0.19.7", "it has no compute_grad_norm")
    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
    def test_finite_gradients_too_large_for_float32_skip_the_step_on_every_rank(self, stage, checked):
        """Stock's norm is not finite beyond 3.4e38, or 1.8e19 where nothing clips; no rule sees either."""
        sections = {} if checked else {"bf16": {"enabled": True, "check_grad_overflow": False}}
        cases = [({"gradient_clipping": clip, **sections}, factor, skips)
                 for clip, factor, skips in ((1.0, 1e38, True), (1.0, 1e30, False), (0.0, 1e30, True))]
        for rule in () if checked or stage > 1 else ("muon", "namo", "polargrad", "soap", "adamw"):
            for factor, skips in ((1e38, True), (1.0, False)):
                cases.append(({"optimizer": {"type": "LayerWise", "params": {"matrix_optimizer": rule}},
                               "zero_optimization": {"stage": stage, "compute_grad_norm": False}}, factor, skips))
        for sections, factor, skips in cases:
            engine = start(Sum(), ds_config(stage=stage, **{"gradient_clipping": 0.0, **sections}))
            for one, skipped in ((factor, skips), (1.0, False)):
                # Of the average, which has 64 such elements.
                engine.backward(engine(one * dist.get_world_size() * (dist.get_rank() == 1)))
                before = engine.optimizer.step_count
                engine.step()
                said = (sections, one)
                assert engine.optimizer.overflow is skipped, said
                assert engine.optimizer.step_count == before + (not skipped), said
                norm = engine.get_global_grad_norm()
                assert norm is None or norm == pytest.approx(math.inf if skipped else 8 * one, rel=2**-8), said
            assert weights(engine.module).isfinite().all(), sections
            engine.destroy()

    @needs("deepspeed>=0.19.7", "it has no compute_grad_norm")
    def test_it_need_not_be_computed(self):
        config = ds_config(clip=0.0)
        config["zero_optimization"]["compute_grad_norm"] = False
        engine = train_engine(start(Net(), config), 1)
        assert engine.get_global_grad_norm() is None

    @needs("deepspeed>=0.19.6", "it has no gradient_allreduce_op")
    def test_sums_instead_of_means(self):
        expected = by_the_oracle(Net, 1)
        engine = start(Net(), ds_config(gradient_allreduce_op="sum"))

        train_engine(engine, 1, check=compared_to(expected, factor=dist.get_world_size()))


class Sum(torch.nn.Module):
    """A matrix whose every gradient is the factor that the model is called with."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, factor):
        return (self.weight * factor).float().sum()


class TestRounding(DistributedTest):
    """257 is no bf16, and rounds to 256: what two micro-batches of 256 and 1 give says what they were added up in."""

    @pytest.mark.parametrize("sections, expected", [
        (BF16, 256),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 257),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"},
         256),
        ({}, 257),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 256),
        ({"communication_data_type": "bf16"}, 256),
    ])
    def test_it_happens_where_the_config_says(self, sections, expected):
        engine = start(Sum(), ds_config(**sections))
        for micro, factor in enumerate((256.0, 1.0)):
            engine.set_gradient_accumulation_boundary(micro == 1)
            engine.backward(engine(factor))
        reduced = internals.owned(engine).reduced
        for piece in (piece for pieces in reduced.pieces for piece in pieces):
            assert reduced.piece(piece.name).unique().tolist() == [expected]

    @pytest.mark.parametrize("stage", [1, 2, 3])
    @pytest.mark.world_size([1, 2])
    def test_gradients_travel_in_the_dtype_of_communication(self, stage):
        """A rank alone rounds them, too, as stock does, so that stages and numbers of ranks give the same."""
        # 2049 is no fp16, 257 no bf16; both are float32.
        for dtype, expected in (("fp32", (2049, 257)), ("fp16", (2048, 257)), ("bf16", (2048, 256))):
            found, engine = [], start(Sum(), ds_config(stage=stage, communication_data_type=dtype))
            for factor in (2049.0, 257.0):
                engine.backward(engine(factor))
                found += whole_gradients(engine)["weight"].unique().tolist()
                engine.zero_grad()
            assert found == list(expected), dtype

    @pytest.mark.parametrize("sections", [{}, BF16])
    def test_owners_add_up_in_float32_at_stage_2(self, sections):
        engine = start(Sum(), ds_config(stage=2, **sections))
        for factor in (256.0, 1.0):
            engine.backward(engine(factor))
        for _, values in reduced_gradients(engine).values():
            assert values.unique().tolist() == [257]
