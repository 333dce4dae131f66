"""Named parts of fused matrices train as the same parts do that are parameters of their own."""

import os

import pytest
import torch

from tests.support import internals
from tests.support.checkpoints import assert_equal_states, masters, whole_states
from tests.support.expected import assert_close
from tests.support.fused import FUSED, OVERRIDES, Fused, parts_in, taken_apart
from tests.support.harness import DistributedTest
from tests.support.reference import Recipe, Reference, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import ds_config, start, train_engine

pytestmark = rooms("fused_parts", "part_views", "owned", "muon_family")

STEPS, THOROUGH = 4, os.environ.get("THOROUGH") == "1"

ON_HOST = {"stage": 1, "reduce_bucket_size": 200, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}


#: Every third of them for each number of ranks, from one to three.
CHANGES = [
    {}, {"stage": 2, "bf16": {"enabled": True}}, {"zero_optimization": ON_HOST},
    {"zero_optimization": ON_HOST, "bf16": {"enabled": True}}, {"layerwise": {"batch_matrices": False}}, {"stage": 2},
    {"params": {"scale_mode": "spectral", "ns_method": "gram", "nesterov": False}}, {},
    {"layerwise": {"layout": "lpt"}, "bucket_numel": 10**6},
]


def engine_of(*, apart=False, layerwise=None, **changes):
    entries = [] if apart else OVERRIDES
    return start(Fused(apart=apart), ds_config(layerwise={"overrides": entries, **(layerwise or {})},
                                               **{"bucket_numel": 200, **changes}))


def trained(steps=STEPS, **kwargs):
    engine = engine_of(**kwargs)
    train_engine(engine, steps)
    return engine


def momenta(engine):
    shapes = {name: param.shape for name, param in internals.trained(engine).items()}
    return {name: value.view(shapes[name]) for (name, key), value in whole_states(engine).items()
            if key == "momentum_buffer"}


def by_the_oracle(world_size):
    """Masters by the plain implementation, on parts cut out by index."""
    apart = trainable(Fused(apart=True))
    matrices = {name: tuple(p.shape) if p.dim() == 3 else (1, *p.shape) for name, p in apart.items() if p.dim() > 1}
    oracle = Reference(apart, Recipe(matrices=matrices, world_size=world_size, muon_lr=0.02, adam_lr=0.003,
                                     weight_decay=0.1))
    shapes = {**{name: shape for name, (shape, _) in FUSED.items()}, "plain": (6, 6), "norm": (6,)}
    for step in range(STEPS):
        grads = [taken_apart({name: whole_number_gradients(name, shape, step, 0, rank)
                              for name, shape in shapes.items()}) for rank in range(world_size)]
        oracle.step([[{**{k: v for k, v in of_rank.items() if k != "norm"}, "norm.weight": of_rank["norm"]}]
                     for of_rank in grads])
    return oracle.params


@pytest.mark.usefixtures("wide_tables")
class TestParts(DistributedTest):
    @pytest.mark.world_size([1, 2, 3])
    def test_they_train_as_parameters_of_their_own(self):
        for changes in CHANGES if THOROUGH else CHANGES[torch.distributed.get_world_size() - 1::3]:
            engines = fused, apart = trained(**changes), trained(apart=True, **changes)
            for of in (masters, momenta):
                found, expected = taken_apart(of(fused)), of(apart)
                assert found.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(found[name], value), (name, changes)
            for engine in engines:
                engine.destroy()

    @pytest.mark.world_size([1, 3])
    def test_they_train_as_the_oracle_does(self):
        found = taken_apart(masters(trained()))
        expected = by_the_oracle(torch.distributed.get_world_size())
        assert found.keys() == expected.keys()
        assert_close(found, expected)

    @pytest.mark.world_size(2)
    def test_the_table_the_work_and_the_memory_are_those_of_the_parts(self):
        fused, apart = engine_of(), engine_of(apart=True)
        for name in FUSED:
            parts = parts_in(name)
            groups = f" of {parts.groups} groups" if parts.groups > 1 else ""
            assert fused.optimizer.routes[name].reason.endswith(f", parts {', '.join(parts.names)}{groups}")
        assert "matrix, parts q, k, v " in fused.optimizer.describe()
        reports = [engine.optimizer.forecast().report for engine in (fused, apart)]
        assert sum(reports[0].work) == sum(reports[1].work) > 0
        # Parameters that are copied for their update are copied one after another.
        sets = [update.names for of_bucket in internals.update_sets(fused) for update in of_bucket]
        copied = {name for name in FUSED if fused.optimizer.routes[name].copied}
        assert {"groups", "latent"} <= copied and "qkv" not in copied
        assert all(len(names) == 1 for names in sets if not copied.isdisjoint(names))
        planned = fused.optimizer.forecast().memory[fused.global_rank]
        assert planned.states == internals.bytes_of_states(fused)

    @pytest.mark.world_size(2)
    def test_a_step_that_is_clipped(self):
        fused, apart = trained(clip=0.5), trained(apart=True, clip=0.5)
        found, expected = taken_apart(masters(fused)), masters(apart)
        assert fused.get_global_grad_norm() > 1
        # Norms add up parameter by parameter, in another order.
        assert found.keys() == expected.keys()
        assert_close(found, expected, rtol=0)


class TestWithoutThem(DistributedTest):
    def test_whole_matrices_are_something_else(self):
        split, whole = trained(), start(Fused(), ds_config(bucket_numel=200))
        train_engine(whole, STEPS)
        assert_equal_states({k: v for k, v in whole_states(split).items() if k[0] not in FUSED},
                            {k: v for k, v in whole_states(whole).items() if k[0] not in FUSED})
        for name in FUSED:
            assert not torch.allclose(masters(split)[name], masters(whole)[name], atol=1e-3), name
