"""Every way to reach the boundary of a step: a gradient is counted once, or its loss is an error."""

import warnings

import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.models import FailsInBackward
from tests.support.oracle import assert_trained_as, by_the_oracle
from tests.support.reference import whole_number_loss
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    assert_same_on_all_ranks,
    ds_config,
    reduced_gradients,
    start,
    train_engine,
    weights,
)

pytestmark = rooms("grad_sync", "optimizer", "param_guard", "engine_protocol")

STEPS = 3


def assert_as_the_oracle(engine, net=Net, **recipe):
    """After :data:`STEPS` steps."""
    assert_trained_as(engine.module, by_the_oracle(net, STEPS, clip=5.0, **recipe))


class Backward(DistributedTest):
    """Every test in here runs at both stages."""

    stage = 1

    def config(self, **changes):
        return ds_config(stage=self.stage, **changes)


class TestTwoMicroBatches(Backward):
    """Two micro-batches a step, told apart from the engine's own accumulation."""

    def loss(self, engine, step, micro):
        return engine((step, micro, dist.get_rank()))

    def test_plain_backward(self, overlap):
        engine = start(Net(), self.config(gas=2, clip=5.0, overlap=overlap))
        for step in range(STEPS):
            for micro in range(2):
                self.loss(engine, step, micro).backward()
                engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_no_sync(self, overlap):
        engine = start(Net(), self.config(clip=5.0, overlap=overlap))
        for step in range(STEPS):
            with engine.no_sync():
                engine.backward(self.loss(engine, step, 0) / 2)
            engine.backward(self.loss(engine, step, 1) / 2)
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_a_boundary_set_by_hand(self, overlap):
        engine = start(Net(), self.config(clip=5.0, overlap=overlap))
        for step in range(STEPS):
            for micro in range(2):
                engine.set_gradient_accumulation_boundary(micro == 1)
                engine.backward(self.loss(engine, step, micro) / 2)
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_the_callers_own_accumulation(self):
        engine = start(Net(), self.config(gas=2, clip=5.0, overlap=False, managed_gradient_accumulation=False))
        for step in range(STEPS):
            for micro in range(2):
                engine.backward(self.loss(engine, step, micro))
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_coalesced_reduction(self, overlap):
        engine = start(Net(), self.config(clip=5.0, overlap=overlap))
        for step in range(STEPS):
            with engine.coalesce_grad_reduction():
                engine.backward(self.loss(engine, 50, 0))  # thrown away, while it is still on the parameters
                engine.optimizer.zero_grad()
                for micro in range(2):
                    engine.backward(self.loss(engine, step, micro) / 2)
                    assert engine.module.square.weight.grad is not None
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_a_second_coalesced_reduction_is_an_error(self):
        engine = start(Net(), self.config(clip=5.0))
        for micro in range(2):
            with engine.coalesce_grad_reduction():
                engine.backward(self.loss(engine, 0, micro))
        with pytest.raises(StepError, match="after its bucket"):
            engine.step()
        engine.zero_grad()
        train_engine(engine, STEPS)
        assert_as_the_oracle(engine)

    def test_two_forward_passes_then_two_plain_backward_passes(self):
        engine = start(Net(), self.config(clip=5.0, overlap=False))
        for step in range(STEPS):
            losses = [self.loss(engine, step, micro) / 2 for micro in range(2)]
            for micro in range(2):
                engine.set_gradient_accumulation_boundary(micro == 1)
                losses[micro].backward()
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_another_batch_size_in_the_middle_of_a_run(self):
        engine = start(Net(), self.config(clip=5.0))
        engine.set_train_batch_size(2 * dist.get_world_size())
        train_engine(engine, STEPS, gas=2)
        assert_as_the_oracle(engine, gas=2)

    def test_an_evaluation_between_backward_and_step(self):
        engine = start(Net(), self.config(gas=2, clip=5.0))
        for step in range(STEPS):
            for micro in range(2):
                engine.backward(self.loss(engine, step, micro))
                with torch.no_grad():
                    engine.eval()
                    self.loss(engine, 50, 0)
                    engine.train()
                engine.step()
        assert_as_the_oracle(engine, gas=2)

    @pytest.mark.parametrize("who", ["engine", "optimizer"])
    def test_zero_grad_drops_what_was_accumulated(self, who):
        engine = start(Net(), self.config(gas=2, clip=5.0))
        for step in range(STEPS):
            engine.backward(self.loss(engine, 50, 0))
            (engine if who == "engine" else engine.optimizer).zero_grad()
            train_engine(engine, 1, gas=2, first=step)
        assert_as_the_oracle(engine, gas=2)


class SometimesUnused(Net):
    """Which parameters take part depends on the step, the micro-batch and the rank."""

    def forward(self, place):
        return whole_number_loss(self, place, {"square.weight", "head.weight"} if sum(place) % 2 else {"tall.weight"})


class NeverTogether(Net):
    """In every other step some parameters take no part on any rank."""

    def forward(self, place):
        return whole_number_loss(self, place, {"square.weight", "norm.weight"} if place[0] % 2 else set())


class TestUnused(Backward):
    @pytest.mark.parametrize("net", [SometimesUnused, NeverTogether])
    @pytest.mark.parametrize("gas", [1, 2])
    def test_a_gradient_of_an_earlier_step_is_never_used_again(self, net, gas):
        for overlap in (True, False):
            engine = start(net(), self.config(gas=gas, clip=5.0, overlap=overlap))
            train_engine(engine, STEPS, gas=gas)
            assert_as_the_oracle(engine, net, gas=gas)
            engine.destroy()


class TestWhenBucketsStart(Backward):
    def launches(self):
        """Of a step of two micro-batches: for every bucket the micro-batch, and whether autograd was at work."""
        engine = start(Net(), self.config(gas=2, bucket_numel=1))
        sync, inside = internals.grad_sync(engine), []
        launch = sync._launch

        def recording():
            inside.append((engine.micro_steps % 2, torch._C._current_graph_task_id() != -1))
            launch()

        sync._launch = recording
        train_engine(engine, 1, gas=2)
        return inside, len(engine.optimizer.layout.buckets)

    def test_only_inside_the_last_backward_pass_of_a_step(self):
        self.check_launches((1, ))

    def check_launches(self, micros):
        """Those after the first two start in the pass or at its end, as the ranks come along."""
        inside, num_buckets = self.launches()
        assert [micro for micro, _ in inside] == [micro for micro in micros for _ in range(num_buckets)]
        assert all(inside[index * num_buckets + i][1] for index in range(len(micros)) for i in range(2))

    def test_not_in_a_backward_pass_inside_the_forward_pass(self):
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
        engine = start(module, self.config(bucket_numel=1))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        engine.backward(engine(x))
        plain(x).backward()
        for name, (first, values) in reduced_gradients(engine).items():
            expected = plain.get_parameter(name).grad.flatten()[first:first + values.numel()]
            torch.testing.assert_close(values, expected, msg=name)

    def test_few_at_a_time(self):
        engine = start(Net(), self.config(bucket_numel=1))
        sync, under_way = internals.grad_sync(engine), []
        launch = sync._launch

        def recording():
            launch()
            under_way.append(len(sync._pending))

        sync._launch = recording
        train_engine(engine, 1)
        assert max(under_way) == 2 and len(under_way) > 4

    @pytest.mark.parametrize("most", [1, None])
    def test_on_a_host_the_pass_waits_for_those_beyond_a_bound(self, most, monkeypatch):
        """Nothing is over before somebody waits for it, so without a bound all but two buckets wait for the end."""
        monkeypatch.setattr(comm.Pending, "advance", lambda pending: False)
        engine = start(Net(), ds_config(stage=2, overlap=True, bucket_numel=1, layerwise={"max_waiting_buckets": most}))
        sync, waiting = internals.grad_sync(engine), []
        accumulate = sync.accumulate

        def recording(name, *, launch):
            accumulate(name, launch=launch)
            waiting.append(sync._ready - sync._launched)

        sync.accumulate = recording
        train_engine(engine, 1)
        buckets = len(engine.optimizer.layout.buckets)
        assert max(waiting) == (most or buckets - 2) and buckets > 4
        waits = f"{engine.optimizer.forecast().waiting / 2**20:.1f} MiB more of gradients that wait"
        assert waits in " ".join(engine.optimizer.describe().replace("│", " ").split())
        plain = start(Net(), ds_config(stage=2, overlap=False, bucket_numel=1))
        train_engine(plain, 1)
        assert torch.equal(weights(engine.module), weights(plain.module))

    def test_never_while_the_engine_reduces_nothing(self):
        engine = start(Net(), self.config())
        engine.enable_backward_allreduce = False
        for micro in range(2):
            engine.backward(engine((0, micro, dist.get_rank())))
        assert internals.launched(engine) == 0


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.reentrant = reentrant
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        for module in (self.b, self.c):
            x = self.a(x) if module is self.b else x
            x = module(x) if self.reentrant is None else checkpoint(module, x, use_reentrant=self.reentrant)
        return x.square().mean()


class TestAutograd(Backward):
    @pytest.mark.parametrize("direct", [True, False])
    def test_activation_checkpointing_changes_nothing(self, direct):
        results = []
        for reentrant in (None, True, False):
            engine = start(Checkpointed(reentrant=reentrant), self.config(gas=2, bucket_numel=1, clip=1.0))
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(6):
                loss = engine(torch.randn(4, 8, generator=generator))
                loss.backward() if direct else engine.backward(loss)
                engine.step()
            results.append(weights(engine.module))
            engine.destroy()
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

    def test_a_gradient_penalty(self, overlap):
        def loss(module, x):
            x = x.clone().requires_grad_()
            value = module(x).square().mean()
            grad, = torch.autograd.grad(value, x, create_graph=True)
            return value + grad.square().mean()

        def make():
            torch.manual_seed(3)
            return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        plain, inputs = make(), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
        engine = start(make(), self.config(overlap=overlap))
        engine.backward(loss(engine, inputs[dist.get_rank()]))
        (sum(loss(plain, x) for x in inputs) / 2).backward()
        for name, (first, values) in reduced_gradients(engine).items():
            expected = plain.get_parameter(name).grad.flatten()[first:first + values.numel()]
            torch.testing.assert_close(values, expected, msg=name)
        engine.step()

    def test_a_gradient_is_asked_for_between_two_backward_passes(self):
        engine = start(Net(), self.config(clip=5.0, overlap=False))
        for step in range(STEPS):
            losses = [engine((step, micro, dist.get_rank())) / 2 for micro in range(2)]
            engine.set_gradient_accumulation_boundary(False)
            losses[0].backward()
            engine.set_gradient_accumulation_boundary(True)
            torch.autograd.grad(losses[1], engine.module.square.weight, retain_graph=True)
            losses[1].backward()
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_a_rank_whose_loss_reaches_no_parameter(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x):
                return (self.layer(x) if dist.get_rank() else x).sum()

        engine = start(Model(), self.config(clip=1.0))
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8, requires_grad=True)))
            engine.step()
        assert engine.get_global_grad_norm() > 0
        assert_same_on_all_ranks(engine.module)

    def test_create_graph_does_not_keep_the_graph(self):
        engine = start(Net(), self.config())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the cycle between a parameter and its gradient
            engine((0, 0, dist.get_rank())).square().backward(create_graph=True)
        buckets = engine.optimizer.layout.buckets
        kept = [internals.owned(engine).reduced.bucket(b.index) for b in buckets]
        if self.stage == 1:
            kept += [internals.grads(engine).bucket(b) for b in buckets]
        assert not any(gradient.requires_grad for gradient in kept)

    @pytest.mark.parametrize("direct", [True, False])
    def test_after_an_exception_in_backward(self, direct):
        class SometimesFailing(Net):
            def forward(self, place):
                loss = super().forward(place)
                return FailsInBackward.apply(loss) if place[0] == 50 else loss

        engine = start(SometimesFailing(), self.config(clip=5.0, overlap=False))
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine((50, 0, dist.get_rank())))
        engine.zero_grad()
        for step in range(STEPS):
            loss = engine((step, 0, dist.get_rank()))
            loss.backward() if direct else engine.backward(loss)
            engine.step()
        assert_as_the_oracle(engine)


class Operations(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class TestOperations(DistributedTest):
    """Each is microseconds of a host, in the middle of a backward pass."""

    world_size = 1

    def counted(self, backward, loss):
        with Operations() as found:
            backward(loss)
        return found.count

    def test_one_for_each_gradient(self):
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


class TestDropped(Backward):
    def test_what_is_under_way_is_over_before_the_next_gradient(self):
        engine = start(Net(), self.config(clip=5.0))
        sync = internals.grad_sync(engine)
        reduce, sync.reduce = sync.reduce, lambda: None
        engine.backward(engine((50, 0, dist.get_rank())))
        assert sync._pending
        engine.zero_grad()
        assert not sync._pending
        sync.reduce = reduce
        train_engine(engine, STEPS)
        assert_as_the_oracle(engine)


class TestTwoMicroBatchesAtStage2(TestTwoMicroBatches):
    stage = 2

    def test_no_sync(self, overlap):
        engine = start(Net(), self.config(clip=5.0, overlap=overlap))
        with pytest.raises(AssertionError, match="no_sync context manager is incompatible with gradient partitioning"):
            with engine.no_sync():
                pass

    def test_a_second_coalesced_reduction_is_an_error(self):
        """It is none here: it adds up, as two backward passes do."""
        engine = start(Net(), self.config(clip=5.0))
        for step in range(STEPS):
            for micro in range(2):
                with engine.coalesce_grad_reduction():
                    engine.backward(self.loss(engine, step, micro) / 2)
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_several_backward_passes_at_the_boundary(self):
        engine = start(Net(), self.config(clip=5.0))
        for step in range(STEPS):
            for micro in range(2):
                engine.backward(self.loss(engine, step, micro) / 2)
            engine.step()
        assert_as_the_oracle(engine, gas=2)

    def test_a_step_without_a_backward_pass(self):
        engine = start(Net(), self.config())
        with pytest.raises(StepError, match="before the gradients were reduced"):
            engine.step()


class TestUnusedAtStage2(TestUnused):
    stage = 2


class TestWhenBucketsStartAtStage2(TestWhenBucketsStart):
    stage = 2

    def test_only_inside_the_last_backward_pass_of_a_step(self):
        """Inside every one of them, rather."""
        self.check_launches((0, 1))

    def test_gradients_of_other_owners_are_gone_as_soon_as_their_bucket_is(self):
        engine = start(Net(), self.config(bucket_numel=1))
        sync, kept = internals.grad_sync(engine), []
        launch = sync._launch

        def recording():
            launch()
            names = {slot.name for bucket in sync.layout.buckets[:sync._launched] for slot in bucket.slots}
            kept.extend(name for name in names if engine.module.get_parameter(name).grad is not None)

        sync._launch = recording
        train_engine(engine, 1)
        assert not kept
        assert internals.grads(engine) is None


class TestAutogradAtStage2(TestAutograd):
    stage = 2


class TestDroppedAtStage2(TestDropped):
    stage = 2


class TestSeveralEngines(DistributedTest):
    def test_on_two_models(self):
        one, two = start(Net(), ds_config(clip=5.0)), start(Net(odd=True), ds_config(gas=2, clip=5.0))
        for step in range(STEPS):
            train_engine(one, 1, first=step)
            train_engine(two, 1, gas=2, first=step)
        assert_as_the_oracle(one)
        assert_as_the_oracle(two, lambda: Net(odd=True), gas=2)

    def test_on_one_model_one_after_the_other(self):
        module = Net()
        for layerwise in ({"overlap_param_gather": True}, {}):
            engine = start(module, ds_config(layerwise=layerwise))
            engine.destroy()
            engine.destroy()
            hooks = [hook for m in module.modules() for hook in m._forward_pre_hooks.values()]
            assert not [hook for hook in hooks if hook.__module__.startswith("ds_layerwise")]
        engine = start(module, ds_config(clip=5.0))
        train_engine(engine, STEPS)
        assert_as_the_oracle(engine)

    def test_one_through_the_other(self):
        generator, critic = start(nn.Linear(8, 8), ds_config()), start(nn.Linear(8, 8), ds_config())
        for _ in range(2):
            generator.backward(critic(generator(torch.randn(4, 8))).mean())
            generator.step()
            critic.zero_grad()
            critic.backward(critic(torch.randn(4, 8)).square().mean())
            critic.step()
        assert critic.get_global_grad_norm() > 0
