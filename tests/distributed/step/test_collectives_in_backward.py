"""Collectives in the model's own backward pass, beside those of gradients, where ranks do not use the same layers."""

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.ranks.comm import comm
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.models import FailsInBackward
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, ds_config, reduced_gradients, start, weights
from tests.support.transports import plan_in_cuts

pytestmark = rooms("grad_sync", "streams", "group_pool")


class Meets(torch.autograd.Function):
    """The mean over all ranks of a gradient, as SyncBatchNorm takes it: nobody goes on before all are here."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
        return grad / dist.get_world_size()


class Apart(nn.Module):
    """Rank 0 goes through all layers. The others leave out the last, whose bucket is the first, and ``skipped``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.last = nn.Linear(8, 8)

    def forward(self, x, skipped=()):
        x = Meets.apply(self.first(x))
        for index, layer in enumerate(self.layers):
            x = x if index in skipped else torch.tanh(layer(x))
            x = Meets.apply(x) if index == 1 else x
        return (x if skipped else self.last(x)).square().mean()


class TestACollectiveInBackward(DistributedTest):
    world_size = 3

    def gradients_and_weights(self, stage, overlap, bucket_numel):
        engine, found = start(Apart(), ds_config(stage=stage, overlap=overlap, bucket_numel=bucket_numel, clip=0.1)), []
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            skipped = {0: (), 1: (step, ), 2: (4 - step, 2)}[dist.get_rank()]
            engine.backward(engine(torch.randn(4, 8, generator=generator), skipped))
            found += [values for _, (_, values) in sorted(reduced_gradients(engine).items())]
            engine.step()
        assert_same_on_all_ranks(engine.module)
        found.append(weights(engine.module))
        engine.destroy()
        return found

    @pytest.mark.parametrize("cuts", [False, True])
    def test_no_rank_waits_for_the_backward_pass_of_another(self, stage, cuts, monkeypatch):
        if cuts:
            plan_in_cuts(monkeypatch)
        for bucket_numel in (1, 100):
            expected = self.gradients_and_weights(stage, False, bucket_numel)
            for value, wanted in zip(self.gradients_and_weights(stage, True, bucket_numel), expected, strict=True):
                assert torch.equal(value, wanted)


class TestTwoEnginesInOnePass(DistributedTest):
    def trained(self, stage, overlap):
        engines = []
        for seed in (3, 4):
            torch.manual_seed(seed)
            layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
            engines.append(start(layers, ds_config(stage=stage, overlap=overlap, bucket_numel=1)))
        generator, critic = engines
        for step in range(3):
            draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
            made = generator(torch.randn(4, 8, generator=draw))
            critic.backward(critic(made.detach()).mean() - critic(torch.randn(4, 8, generator=draw)).square().mean())
            critic.step()
            # The critic is not frozen: what it gets here it forgets.
            generator.backward(critic(made).mean())
            generator.step()
            critic.zero_grad()
        for engine in engines:
            assert_same_on_all_ranks(engine.module)
            engine.destroy()
        return torch.cat([weights(engine.module) for engine in engines])

    @pytest.mark.parametrize("in_cuts", [False, True])
    def test_buckets_of_both_begin_at_other_moments_on_each_rank(self, stage, in_cuts, monkeypatch):
        plan_in_cuts(monkeypatch, lambda bucket: in_cuts, even=True)
        expected = self.trained(stage, False)
        # Nothing is over before the end of the pass on rank 1. On rank 0 all is over at once; but a wait in the pass
        # would be for ever where rank 1 ends the critic's part with an exchange, which rank 0 enters after the pass.
        advance = comm.Pending.advance if in_cuts else lambda self: not self.wait()
        monkeypatch.setattr(comm.Pending, "advance", lambda self: dist.get_rank() == 0 and advance(self))
        known = len(torch.distributed.distributed_c10d._world.pg_map)
        for _ in range(2):
            assert torch.equal(self.trained(stage, True), expected)
        assert len(torch.distributed.distributed_c10d._world.pg_map) == known


class TestAnExceptionInBackward(DistributedTest):
    def test_ranks_that_had_started_other_buckets_by_then_go_on(self, stage, monkeypatch):
        def layers():
            torch.manual_seed(5)
            return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

        def loss(engine, step):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            return engine(torch.randn(4, 8, generator=generator, requires_grad=True)).square().mean()

        found = []
        for fails in (True, False):
            engine = start(layers(), ds_config(stage=stage, bucket_numel=1, clip=1.0))
            if fails:
                advance, first = comm.Pending.advance, [dist.get_rank() == 0]
                # One bucket is over on rank 0, and none yet on rank 1.
                monkeypatch.setattr(comm.Pending, "advance", lambda self: first and first.pop() and not self.wait())
                inner = engine.module[1].forward
                engine.module[1].forward = lambda x: inner(FailsInBackward.apply(x))
                with pytest.raises(ZeroDivisionError):
                    engine.backward(loss(engine, 50))
                assert internals.launched(engine) == (2 if dist.get_rank() else 3)
                engine.module[1].forward = inner
                monkeypatch.setattr(comm.Pending, "advance", advance)
                engine.zero_grad()
            for step in range(2):
                engine.backward(loss(engine, step))
                engine.step()
            assert_same_on_all_ranks(engine.module)
            found.append(weights(engine.module))
            engine.destroy()
        assert torch.equal(*found)


class TestALateGradient(DistributedTest):
    @pytest.mark.parametrize("cuts", [False, True])
    def test_on_one_rank_is_an_error_on_all(self, cuts, monkeypatch):
        """The second pass of rank 0 comes when the gradients of the first are on their way."""
        if cuts:
            plan_in_cuts(monkeypatch)
        engine = start(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), ds_config(bucket_numel=1))
        engine.backward(engine(torch.ones(1, 8)).sum())
        if dist.get_rank() == 0:
            (engine.module[2].weight.sum() * 2).backward()
        with pytest.raises(LayerWiseError, match="2.weight got a gradient after its bucket"):
            engine.step()
        engine.zero_grad()
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        assert_same_on_all_ranks(engine.module)
