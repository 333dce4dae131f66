"""Batches that are filled from several buckets, against runs in which every matrix is updated by itself."""

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from tests.distributed.step.test_interrupted import hooked
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.reference import whole_number_loss
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu
from tests.support.tensor_parallel import Net as CutNet
from tests.support.tensor_parallel import batch as cut_batch
from tests.support.training import assert_same_on_all_ranks, ds_config, start, train_engine, train_engines, weights

pytestmark = rooms("update_sets", "owned", "update")

STEPS = 5


class Layers(nn.Module):
    """Ten matrices of two shapes; with buckets of one or two of them, an owner has few of each bucket."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(16, 24 if i % 3 else 16) for i in range(10))

    def forward(self, place):
        return whole_number_loss(self, place)


class Twice(nn.Module):
    """Two models of the same cut matrices."""

    def __init__(self, mpu):
        super().__init__()
        self.first, self.second = CutNet(mpu), CutNet(mpu)

    def forward(self, tokens):
        return self.first(tokens) + self.second(tokens)


def most_buckets(engine):
    """The largest number of buckets from which an update has matrices, on any rank."""
    most = torch.tensor([len(each.buckets) for of_bucket in internals.update_sets(engine) for each in of_bucket
                         if each.route.whole] + [0]).max()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


#: Arguments of ``ds_config``, and the layerwise section.
CASES = {
    "clipped": ({"clip": 5.0}, {}),
    "stage 2, two micro-batches, late wait": ({"stage": 2, "gas": 2, "clip": 5.0}, {"overlap_param_gather": True}),
    "bf16": ({"bf16": {"enabled": True}, "clip": 5.0}, {}),
    "norm groups of their own": ({"clip": 5.0}, {"norm_groups": {
        "few": {"regex": r"layers\.[2468]\.weight", "gradient_clipping": 0.5}}}),
    "watched": ({}, {"monitor": {"update_rms": True, "momentum_norm": True, "every": 1}}),
    "overrides": ({"clip": 5.0}, {"overrides": [{"name": "layers.4.weight", "momentum": 0.5},
                                                {"name": "layers.7.weight", "nesterov": False}]}),
}


class TestAgainstOneByOne(DistributedTest):
    @pytest.mark.parametrize("case", CASES)
    def test_the_same_bits(self, case):
        settings, layerwise = CASES[case]
        found, norms = [], []
        for batched in (True, False):
            engine = start(Layers(), ds_config(bucket_numel=700, layerwise={**layerwise, "batch_matrices": batched},
                                               **settings))
            assert (most_buckets(engine) > 1) is batched
            train_engine(engine, STEPS, gas=settings.get("gas", 1))
            engine.optimizer.wait_for_params()
            found.append(weights(engine.module))
            norms.append(engine.get_global_grad_norm())
            assert_same_on_all_ranks(engine.module)
            engine.destroy()
        assert torch.equal(*found) and norms[0] == norms[1]

    def test_frozen_in_turn_and_written_by_hand(self):
        found = []
        for batched in (True, False):
            engine = start(Layers(), ds_config(bucket_numel=700, clip=5.0, bf16={"enabled": True},
                                               layerwise={"batch_matrices": batched}))
            for step in range(STEPS):
                fixed = [p for i, layer in enumerate(engine.module.layers) for p in layer.parameters()
                         if (i + step) % 3 == 0]
                for p in engine.module.parameters():
                    p.requires_grad = not any(p is other for other in fixed)
                train_engine(engine, 1, first=step)
                with torch.no_grad():
                    engine.module.layers[(2 * step) % 10].weight.mul_(0.5)
            found.append(weights(engine.module))
            assert_same_on_all_ranks(engine.module)
            engine.destroy()
        assert torch.equal(*found)

    @pytest.mark.parametrize("ratio", [0.05, 0.5, 1.0])
    def test_nothing_is_taken_along_where_something_is_on_the_host(self, ratio):
        config = ds_config(bucket_numel=700, clip=5.0, bf16={"enabled": True})
        plain = start(Layers(), config)
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
        hosted = start(Layers(), config)
        assert most_buckets(plain) > 1 == most_buckets(hosted)
        train_engines((plain, hosted), STEPS)
        assert torch.equal(weights(plain.module), weights(hosted.module))

    def test_remainders_are_opened_a_bucket_at_a_time(self):
        found = []
        for dtype in ("float32", "bfloat16+remainder"):
            engine = start(Layers(), ds_config(bucket_numel=700, bf16={"enabled": True},
                                               layerwise={"master_dtype": dtype}))
            assert (most_buckets(engine) > 1) is (dtype == "float32")
            train_engine(engine, STEPS)
            found.append(weights(engine.module))
        assert torch.equal(*found)


class TestInterrupted(DistributedTest):
    @pytest.mark.parametrize("calls", [0, 1])
    def test_an_update_that_ended_among_several_buckets_leaves_nothing_behind(self, calls, tmp_path, monkeypatch):
        config = ds_config(bucket_numel=700, clip=5.0, bf16={"enabled": True})
        memory = hooked("newton_schulz", monkeypatch)
        healthy, engine = start(Layers(), config), start(Layers(), config)
        assert most_buckets(engine) > 1
        train_engine(healthy, 4)
        train_engine(engine, 2)
        engine.save_checkpoint(str(tmp_path))
        engine.backward(engine((2, 0, dist.get_rank())))
        if dist.get_rank() == 1:
            memory.left = calls
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
        else:
            engine.step()
        engine.load_checkpoint(str(tmp_path))
        train_engine(engine, 2, first=2)
        assert torch.equal(weights(engine.module), weights(healthy.module))
        assert_same_on_all_ranks(engine.module)


class TestParts(DistributedTest):
    @pytest.mark.parametrize("tp_mode", ["duplicated", "distributed", "owner", "blockwise"])
    def test_peers_make_the_same_batches(self, tp_mode):
        """Peers with other batches would wait for each other in different products."""
        found, mpu = [], Mpu(2)
        for batched in (True, False):
            engine = start(Twice(mpu), ds_config(bucket_numel=1, clip=0.05, params={"muon_tp_mode": tp_mode},
                                                  layerwise={"batch_matrices": batched}), mpu=mpu)
            made: list = [None] * 2
            dist.all_gather_object(made, [[each.names for each in of] for of in internals.update_sets(engine)])
            assert made[0] == made[1]
            assert (most_buckets(engine) > 1) is batched
            for step in range(3):
                engine.backward(engine(cut_batch(step, 0, 0)))
                engine.step()
            found.append(weights(engine.module))
            engine.destroy()
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
