"""Matrices that tensor parallelism has cut, trained with an engine, against the same model whole."""

import deepspeed.comm as dist
import pytest
import torch

from tests.harness import DistributedTest
from tests.reference import Recipe, train
from tests.tensor_parallel import MATRICES, Mpu, Net, batch, dim_of, part
from tests.training import MUON, ds_config, reduced_gradients, relative_error, start

STEPS = 4


def whole_run(dp_size, *, clip, gas=1, num_steps=STEPS):
    recipe = Recipe(matrices=MATRICES, world_size=dp_size, gas=gas, clip=clip, muon_lr=0.02, adam_lr=0.003,
                    weight_decay=0.1, eps=1e-8)
    return train(Net, batch, lambda module, data: module(data), recipe, num_steps)


def assert_part_of(value, whole, name, mpu, bound=1e-5):
    dim = dim_of(name)
    wanted = whole if dim is None else part(whole, dim, mpu)
    assert relative_error(value, wanted) < bound, name


class TestAgainstTheWholeModel(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.parametrize("tp_mode", ["duplicated", "distributed"])
    def test_weights_states_gradients_and_norm(self, tp_mode):
        mpu = Mpu(2)
        dp_size, dp_rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        expected = whole_run(dp_size, clip=0.05, gas=2)
        assert expected.steps[0].clip_factor > 1.5, "the bound does not bind"
        for stage, ns_method in ((1, "standard"), (2, "gram"), (1, "gram")):
            params = {**MUON, "eps": 1e-8, "ns_method": ns_method, "muon_tp_mode": tp_mode}
            module = Net(mpu)
            engine = start(module, ds_config(stage=stage, gas=2, clip=0.05, params=params), mpu=mpu)
            for step, wanted in enumerate(expected.steps):
                for micro in range(2):
                    engine.backward(engine(batch(step, micro, dp_rank)))
                    if micro:
                        for name, (first, values) in reduced_gradients(engine).items():
                            dim = dim_of(name)
                            grad = wanted.grads[name] if dim is None else part(wanted.grads[name], dim, mpu)
                            wanted_values = grad.flatten()[first:first + values.numel()]
                            assert (values - wanted_values).norm() < 1e-5 * (grad.norm() + 1e-3), (name, step)
                    engine.step()
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-6)
            for name, p in module.named_parameters():
                assert_part_of(p.detach(), expected.model_params[name], name, mpu)
            engine.destroy()
