"""Every way to reach the boundary of a step: a gradient is counted once, or its loss is an error."""

import warnings

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from tests.support import internals
from tests.support.costs import Operations
from tests.support.expected import assert_trained_as, by_the_oracle, compared_to, oracle_step, start_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import whole_number_loss
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    ds_config,
    reduced_gradients,
    start,
    train_engine,
    weights,
)

pytestmark = rooms("grad_sync", "optimizer", "param_guard", "engine_protocol")

STEPS = 3


def assert_as_the_oracle(engine, **recipe):
    """The engine has trained as the oracle in :data:`STEPS` steps."""
    assert_trained_as(engine.module, by_the_oracle(Net, STEPS, clip=5.0, **recipe))


def loss_of(engine, step, micro):
    return engine((step, micro, dist.get_rank()))


def plain_backward(engine, step):
    for micro in range(2):
        loss_of(engine, step, micro).backward()
        engine.step()


def no_sync(engine, step):
    with engine.no_sync():
        engine.backward(loss_of(engine, step, 0) / 2)
        assert internals.launched(engine) == 0
    engine.backward(loss_of(engine, step, 1) / 2)
    engine.step()


def a_boundary_set_by_hand(engine, step):
    for micro in range(2):
        engine.set_gradient_accumulation_boundary(micro == 1)
        engine.backward(loss_of(engine, step, micro) / 2)
    engine.step()


def the_callers_own_accumulation(engine, step):
    for micro in range(2):
        engine.backward(loss_of(engine, step, micro))
    engine.step()


def coalesced_reduction(engine, step):
    with engine.coalesce_grad_reduction():
        engine.backward(loss_of(engine, 50, 0))  # thrown away, while it is still on the parameters
        engine.optimizer.zero_grad()
        for micro in range(2):
            engine.backward(loss_of(engine, step, micro) / 2)
            assert engine.module.square.weight.grad is not None
    engine.step()


def coalesced_twice(engine, step):
    for micro in range(2):
        with engine.coalesce_grad_reduction():
            engine.backward(loss_of(engine, step, micro) / 2)
    engine.step()


def several_at_the_boundary(engine, step):
    for micro in range(2):
        engine.backward(loss_of(engine, step, micro) / 2)
    engine.step()


def two_forward_passes_first(engine, step):
    losses = [loss_of(engine, step, micro) / 2 for micro in range(2)]
    for micro in range(2):
        engine.set_gradient_accumulation_boundary(micro == 1)
        losses[micro].backward()
    engine.step()


def a_gradient_asked_for_in_between(engine, step):
    losses = [loss_of(engine, step, micro) / 2 for micro in range(2)]
    engine.set_gradient_accumulation_boundary(False)
    losses[0].backward()
    engine.set_gradient_accumulation_boundary(True)
    torch.autograd.grad(losses[1], engine.module.square.weight, retain_graph=True)
    losses[1].backward()
    engine.step()


def another_batch_size(engine, step):
    if step == 0:
        engine.set_train_batch_size(2 * dist.get_world_size())
    train_engine(engine, 1, gas=2, first=step)


def an_evaluation_before_the_step(engine, step):
    for micro in range(2):
        engine.backward(loss_of(engine, step, micro))
        with torch.no_grad():
            engine.eval()
            loss_of(engine, 50, 0)
            engine.train()
        engine.step()


def dropped_by_the_engine(engine, step):
    engine.backward(loss_of(engine, 50, 0))
    engine.zero_grad()
    train_engine(engine, 1, gas=2, first=step)


def dropped_by_the_optimizer(engine, step):
    engine.backward(loss_of(engine, 50, 0))
    engine.optimizer.zero_grad()
    train_engine(engine, 1, gas=2, first=step)


#: Ways to run two micro-batches a step, and the config of each.
WAYS = {plain_backward: {"gas": 2}, no_sync: {}, a_boundary_set_by_hand: {}, coalesced_reduction: {},
        the_callers_own_accumulation: {"gas": 2, "overlap": False, "managed_gradient_accumulation": False},
        two_forward_passes_first: {"overlap": False}, a_gradient_asked_for_in_between: {"overlap": False},
        another_batch_size: {"overlap": True}, an_evaluation_before_the_step: {"gas": 2, "overlap": True},
        dropped_by_the_engine: {"gas": 2, "overlap": True}, dropped_by_the_optimizer: {"gas": 2, "overlap": True},
        several_at_the_boundary: {"overlap": True}, coalesced_twice: {"overlap": True}}

#: Ways that one stage alone takes.
ONE_STAGE = {no_sync: 1, several_at_the_boundary: 2, coalesced_twice: 2}


class TestTwoMicroBatches(DistributedTest):
    @pytest.mark.parametrize("stage, way", [
        pytest.param(stage, way, id=f"{way.__name__}-{stage}") for way in WAYS for stage in (1, 2)
        if ONE_STAGE.get(way, stage) == stage])
    def test_each_is_counted_once(self, stage, way):
        for overlap in (True, False):
            if WAYS[way].get("overlap", overlap) is overlap:
                engine = start(Net(), ds_config(stage=stage, clip=5.0, **{"overlap": overlap, **WAYS[way]}))
                for step in range(STEPS):
                    way(engine, step)
                assert_as_the_oracle(engine, gas=2)
                engine.destroy()

    def test_a_way_of_the_other_stage_is_an_error(self):
        engine = start(Net(), ds_config(clip=5.0))
        with pytest.raises(StepError, match=r"got a gradient after its bucket \d was reduced"):
            coalesced_twice(engine, 0)
        engine.zero_grad()
        train_engine(engine, STEPS)
        assert_as_the_oracle(engine)
        with pytest.raises(AssertionError, match="no_sync context manager is incompatible with gradient partitioning"):
            no_sync(start(Net(), ds_config(stage=2)), 0)


class SometimesUnused(Net):
    """Other parameters take part in every step, micro-batch and rank."""

    def forward(self, place):
        return whole_number_loss(self, place, {"square.weight", "head.weight"} if sum(place) % 2 else {
            "tall.weight", "tall.bias"})


class NeverTogether(Net):
    """Some parameters take no part on any rank in every other step."""

    def forward(self, place):
        return whole_number_loss(self, place, {"square.weight", "norm.weight"} if place[0] % 2 else set())


class TestUnused(DistributedTest):
    @pytest.mark.parametrize("net", [SometimesUnused, NeverTogether])
    @pytest.mark.parametrize("gas", [1, 2])
    def test_a_gradient_of_an_earlier_step_is_never_used_again(self, stage, net, gas):
        expected = by_the_oracle(net, STEPS, gas=gas, clip=5.0)
        for overlap in (True, False):
            engine = start(net(), ds_config(stage=stage, gas=gas, clip=5.0, overlap=overlap,
                                            bucket_numel=1 if overlap else 600))
            train_engine(engine, STEPS, gas=gas, check=compared_to(expected))
            assert_trained_as(engine.module, expected)
            engine.destroy()


class TestWhenBucketsStart(DistributedTest):
    def test_no_bucket_starts_in_a_backward_pass_inside_the_forward_pass(self, stage):
        class Tiled(torch.autograd.Function):  # as DeepSpeed's TiledFusedLogitsLoss
            @staticmethod
            def forward(ctx, module, x):
                with torch.enable_grad():
                    for part in x.detach().chunk(2):
                        module(part).square().mean().div(2).backward()
                return x.new_zeros(())

            @staticmethod
            def backward(ctx, grad):
                return None, None

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

            def forward(self, x):
                hidden = self.first(x)
                return Tiled.apply(self.head, hidden) + hidden.square().mean()

        module, plain = Model(), Model()
        engine = start(module, ds_config(stage=stage, bucket_numel=1))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        engine.backward(engine(x))
        plain(x).backward()
        for name, (first, values) in reduced_gradients(engine).items():
            expected = plain.get_parameter(name).grad.flatten()[first:first + values.numel()]
            torch.testing.assert_close(values, expected, msg=name)

    def test_few_buckets_are_pending_at_a_time(self, stage):
        engine = start(Net(), ds_config(stage=stage, bucket_numel=1))
        under_way = internals.seen_at_launches(engine, lambda: len(internals.pending(engine)), after=True)
        train_engine(engine, 1)
        assert max(under_way) == 2 and len(under_way) > 4

    @pytest.mark.parametrize("most", [1, None])
    def test_on_a_host_the_pass_waits_for_those_beyond_a_bound(self, most, monkeypatch):
        """Nothing is over before somebody waits for it, so without a bound all but two buckets wait for the end."""
        monkeypatch.setattr(comm.Pending, "advance", lambda pending: False)
        engine = start(Net(), ds_config(stage=2, overlap=True, bucket_numel=1, layerwise={"max_waiting_buckets": most}))
        waiting = internals.seen_at(internals.grad_sync(engine), "accumulate", lambda: (
            internals.ready(engine) - internals.launched(engine)), after=True)
        train_engine(engine, 1)
        buckets = len(engine.optimizer.layout.buckets)
        assert max(waiting) == (most or buckets - 2) and buckets > 4
        # One more fills while others wait.
        sizes = sorted(4 * bucket.numel for bucket in engine.optimizer.layout.buckets)
        sums = sum(4 * bucket.cut_numel for bucket in engine.optimizer.layout.buckets)
        assert engine.optimizer.forecast().working.in_pass == sum(sizes[-most - 1:] if most else sizes) + sums
        plain = train_engine(start(Net(), ds_config(stage=2, overlap=False, bucket_numel=1)), 1)
        assert torch.equal(weights(engine.module), weights(plain.module))

    def test_gradients_of_other_owners_are_gone_as_soon_as_their_bucket_is(self):
        engine = start(Net(), ds_config(stage=2, bucket_numel=1))

        def kept():
            gone = engine.optimizer.layout.buckets[:internals.launched(engine)]
            return [slot.name for bucket in gone for slot in bucket.slots
                    if engine.module.get_parameter(slot.name).grad is not None]

        found = internals.seen_at_launches(engine, kept, after=True)
        train_engine(engine, 1)
        assert found and not any(found)
        assert internals.grads(engine) is None

    def test_no_bucket_starts_while_the_engine_reduces_nothing(self, stage):
        engine = start(Net(), ds_config(stage=stage))
        engine.enable_backward_allreduce = False
        for micro in range(2):
            engine.backward(engine((0, micro, dist.get_rank())))
        assert internals.launched(engine) == 0


class TestAutograd(DistributedTest):
    def test_a_gradient_penalty(self, stage, overlap):
        def loss(module, x):
            x = x.clone().requires_grad_()
            value = module(x).square().mean()
            grad, = torch.autograd.grad(value, x, create_graph=True)
            return value + grad.square().mean()

        def make():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        plain, inputs = make(), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
        engine = start(make(), ds_config(stage=stage, overlap=overlap))
        engine.backward(loss(engine, inputs[dist.get_rank()]))
        (sum(loss(plain, x) for x in inputs) / 2).backward()
        for name, (first, values) in reduced_gradients(engine).items():
            expected = plain.get_parameter(name).grad.flatten()[first:first + values.numel()]
            torch.testing.assert_close(values, expected, msg=name)
        engine.step()

    def test_create_graph_does_not_keep_the_graph(self, stage):
        engine = start(Net(), ds_config(stage=stage))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the cycle between a parameter and its gradient
            engine((0, 0, dist.get_rank())).square().backward(create_graph=True)
        kept = [*internals.owned(engine).reduced.tensors]
        if stage == 1:
            kept += internals.grads(engine).tensors
        assert not any(gradient.requires_grad for gradient in kept)


class Sometimes(Net):
    """Runs out of memory at the first attempt of a step."""

    def __init__(self):
        super().__init__()
        self.failed = set()

    def forward(self, place):
        if place not in self.failed and torch.is_grad_enabled():
            self.failed.add(place)
            raise torch.OutOfMemoryError
        return super().forward(place)


class TestInterruptions(DistributedTest):
    @pytest.mark.parametrize("stage, gas, overlap", [(1, 2, True), (1, 1, False), (2, 2, True)])
    def test_a_forward_pass_that_fails_and_one_for_evaluation(self, stage, gas, overlap):
        engine = start(Sometimes(), ds_config(stage=stage, gas=gas, overlap=overlap))
        oracle = start_oracle(Net(), gas=gas)
        for step in range(3):
            for micro in range(gas):
                place = (step, micro, dist.get_rank())
                with pytest.raises(torch.OutOfMemoryError):
                    engine(place)
                loss = engine(place)
                with torch.no_grad():
                    engine((50, 0, 0))
                loss.backward() if step % 2 else engine.backward(loss)
                engine.step()
            oracle_step(oracle, step, gas=gas)
            assert_trained_as(engine.module, oracle)


class TestOperations(DistributedTest):
    world_size = 1

    def counted(self, backward, loss):
        with Operations() as found:
            backward(loss)
        return found.count

    def test_a_backward_pass_dispatches_two_operations_more_for_each_gradient(self):
        layers = 30
        models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(2)]
        engine = start(models[0], ds_config())
        for _ in range(2):
            x = torch.ones(2, 4)
            bare = self.counted(torch.Tensor.backward, models[1](x).sum())
            ours = self.counted(engine.backward, engine(x).sum())
            engine.step()
        few = 10 + 3 * len(engine.optimizer.layout.buckets)
        assert bare + 2 * layers <= ours <= bare + 2 * layers + few


class TestDropped(DistributedTest):
    def test_pending_sums_are_over_before_the_next_gradient(self, stage):
        engine = start(Net(), ds_config(stage=stage, clip=5.0))
        sync = internals.grad_sync(engine)
        reduce, sync.reduce = sync.reduce, lambda: None
        engine.backward(engine((50, 0, dist.get_rank())))
        assert internals.pending(engine)
        engine.zero_grad()
        assert not internals.pending(engine)
        sync.reduce = reduce
        train_engine(engine, STEPS)
        assert_as_the_oracle(engine)
