"""The whole engine against the oracle: gradients bit for bit, norms, weights and states by value."""

import time

import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_layerwise.optimizers.rules import muon_family
from ds_layerwise.plan.layout.transfer_plan import deal
from ds_layerwise.plan.layout.transport import itemsize, sum_dtype
from ds_layerwise.ranks.comm import nodes
from tests.support import internals
from tests.support.expected import assert_gradients_equal, assert_trained_as, by_the_oracle, compared_to
from tests.support.harness import DistributedTest
from tests.support.models import (
    CONV_NET_MATRICES,
    TINY_GPT_MATRICES,
    conv_net,
    image_batch,
    square_loss,
    tiny_gpt,
    token_batch,
    token_loss,
)
from tests.support.reference import Recipe, train, whole_number_loss
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    VARIANTS,
    Net,
    allow_fp16,
    assert_same_on_all_ranks,
    ds_config,
    from_all_ranks,
    poison,
    relative_error,
    start,
    train_engine,
    weights,
)
from tests.support.transports import plan_in_cuts

pytestmark = rooms("grad_sync", "owned", "comm", "planner", "optimizer", "param_sync", "run_plan", "run_state")

STEPS = 20


class TestAgainstTheOracle(DistributedTest):
    world_size = [1, 2, 3, 4]

    @pytest.mark.parametrize("stage, variant", [
        pytest.param(stage, variant, marks=[pytest.mark.thorough] * (stage == 2 and variant != "odd"))
        for stage in (1, 2) for variant in VARIANTS])
    def test_twenty_steps(self, variant, stage):
        for gas, clip in ((4, 0.0), (1, 5.0)):
            expected = by_the_oracle(lambda: Net(**VARIANTS[variant]), STEPS, gas=gas, clip=clip)
            assert clip == 0 or expected.steps[0].clip_factor > 2, "the bound does not bind"
            module = Net(**VARIANTS[variant])
            engine = start(module, ds_config(gas=gas, clip=clip, stage=stage))

            def check(step, gradients):
                assert_gradients_equal(gradients, expected.steps[step].grads)
                if step:
                    assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step - 1].norm, rel=1e-6)

            train_engine(engine, STEPS, gas=gas, check=check)
            assert_trained_as(module, expected, where=(gas, clip))
            assert_states_equal(engine, expected.state)
            engine.destroy()


def assert_states_equal(engine, expected):
    for piece in internals.pieces(engine):
        state = internals.states(engine)[piece.name]
        for key, wanted in expected[piece.name].items():
            wanted = wanted.flatten()[piece.param_start:piece.param_start + piece.numel]
            assert relative_error(state[key].flatten(), wanted) < 1e-5, (piece.name, key)
        if "step" in state:
            assert state["step"] == engine.optimizer.step_count


class WithLoss(nn.Module):
    """A model and its loss, so that the engine's forward pass takes a batch."""

    def __init__(self, module, loss):
        super().__init__()
        self.inner, self.loss = module, loss

    def forward(self, data):
        return self.loss(self.inner, data)


class TestRealLosses(DistributedTest):
    world_size = [2, 3]
    thorough_on = (3,)

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_language_model(self, tied):
        recipe = Recipe(matrices=TINY_GPT_MATRICES, world_size=dist.get_world_size(), gas=2, clip=1.0, muon_lr=0.02,
                        adam_lr=0.003, weight_decay=0.1, eps=1e-8)
        expected = train(lambda: tiny_gpt(tied=tied), token_batch, token_loss, recipe, STEPS)
        self.compare(tiny_gpt(tied=tied), token_batch, token_loss, expected)

    def test_convolutions(self):
        recipe = Recipe(matrices=CONV_NET_MATRICES, world_size=dist.get_world_size(), gas=2, clip=1.0, muon_lr=0.02,
                        adam_lr=0.003, weight_decay=0.1, eps=1e-8)
        # The last layer maps to classes, which no structure of the model tells from any other matrix.
        layerwise = {"overrides": [{"name": "classifier.weight", "optimizer": "scalar"}]}
        expected = train(conv_net, image_batch, square_loss, recipe, STEPS)
        self.compare(conv_net(), image_batch, square_loss, expected, layerwise=layerwise)

    def compare(self, module, batch, loss, expected, layerwise=None):
        layerwise = {"overrides": [{**o, "name": f"inner.{o['name']}"} for o in (layerwise or {}).get("overrides", [])]}
        engine = start(WithLoss(module, loss), ds_config(gas=2, clip=1.0, layerwise=layerwise, params={"eps": 1e-8}))
        for step in range(STEPS):
            losses = []
            for micro in range(2):
                value = engine(batch(step, micro, dist.get_rank()))
                losses.append(value.detach())
                engine.backward(value)
                engine.step()
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            assert float(mean) / dist.get_world_size() == pytest.approx(expected.losses[step], rel=1e-4)
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step].norm, rel=1e-3)
        assert_same_on_all_ranks(module)


class TestInvariance(DistributedTest):
    world_size = [2, 3]
    thorough_on = (3,)

    def test_neither_buckets_nor_overlap_nor_layout_change_a_bit(self, precision):
        changes = BF16 if precision == "bf16" else {}
        results = []
        for bucket_numel, overlap in ((1, True), (1, False), (600, True), (10**9, False)):
            results.append(self.trained(ds_config(gas=2, clip=5.0, bucket_numel=bucket_numel, overlap=overlap,
                                                  **changes)))
        # Whole numbers that bf16 holds: it does not matter whether ranks or micro-batches are added first.
        for bucket_numel, overlap in ((1, True), (600, False), (10**9, True)):
            results.append(self.trained(ds_config(gas=2, clip=5.0, stage=2, bucket_numel=bucket_numel, overlap=overlap,
                                                  **changes)))
        for layerwise in ({"layout": "lpt"}, {"layout": "size_matching"}, {"overlap_param_gather": True},
                          {"batch_matrices": False}, {"alignment": 1}):
            results.append(self.trained(ds_config(gas=2, clip=5.0, layerwise=layerwise, **changes)))
        for other in results[1:]:
            for name, p in results[0].items():
                assert torch.equal(p, other[name]), name

    def trained(self, config):
        module = Net(odd=True)
        engine = train_engine(start(module, config), 6, gas=2)
        result = {name: p.clone() for name, p in engine.module.state_dict().items()}
        assert_same_on_all_ranks(module)
        engine.destroy()
        return result

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_padding_reaches_nothing(self, precision):
        if precision == "fp16":
            allow_fp16()
        # A gradient of 8 times fp16's default scale would overflow.
        section = {"enabled": True, **({"initial_scale_power": 4} if precision == "fp16" else {})}
        changes = {} if precision == "fp32" else {precision: section}
        for layout, stage in (("balanced", 1), ("lpt", 1), ("balanced", 2)):
            module = Net(odd=True)
            engine = start(module, ds_config(clip=5.0, stage=stage, layerwise={"layout": layout}, **changes))
            assert engine.optimizer.layout.buckets
            for step in range(5):
                assert poison(engine) > 0
                train_engine(engine, 1, first=step)
                assert not engine.optimizer.overflow
                assert engine.get_global_grad_norm() < 1e4
            assert poison(engine) > 0
            for name, p in module.named_parameters():
                assert p.isfinite().all(), name
            for name, state in internals.states(engine).items():
                for key, value in state.items():
                    assert value.isfinite().all(), (name, key)
            engine.destroy()


class Allocations(TorchDispatchMode):
    """Bytes of what was made while this was on and is still alive, at most.

    gloo's own threads let go of what they sent a moment after it was waited for, so more than ``expected`` is looked
    at again until they have.
    """

    def __init__(self, expected):
        super().__init__()
        self.expected, self.most, self._made, self._old = expected, 0, [], []

    def alive(self):
        return sum(size for ref, size in self._made if not ref.expired())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {ref.cdata for ref in self._old} | {ref.cdata for ref, _ in self._made}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in known:
                self._old.append(StorageWeakRef(storage))
                known.add(storage._cdata)
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in known:
                self._made.append((StorageWeakRef(storage), storage.nbytes()))
                known.add(storage._cdata)
        give_up = time.monotonic() + 60
        while self.alive() > self.expected and time.monotonic() < give_up:
            time.sleep(0.01)
        self.most = max(self.most, self.alive())
        return out


def _storages(values):
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class TestMemory(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("sections", [{}, BF16,
                                          {"bf16": {"enabled": True}, "communication_data_type": "fp32"}])
    def test_it_is_what_the_table_says(self, stage, sections):
        self.compare(stage, sections)

    @pytest.mark.world_size(3)
    def test_memory_of_buckets_in_cuts(self, stage, monkeypatch):
        plan_in_cuts(monkeypatch, lambda bucket: bucket.index % 4)
        layout = self.compare(stage, BF16, bucket_numel=1)
        assert {"cuts"} < {bucket.transport for bucket in layout.buckets}
        # There are more rounds than the two that may be pending.
        assert len(deal(layout.buckets)) > 2

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("sections", [{}, pytest.param(BF16, marks=pytest.mark.thorough)])
    def test_memory_of_buckets_in_two_levels(self, stage, sections, monkeypatch):
        monkeypatch.setattr(nodes, "node_of_each_rank", lambda: [0, 0, 1, 1])
        plan_in_cuts(monkeypatch, lambda bucket: bucket.index % 2 == 0)
        self.compare(stage, sections, reduction="ordered")

    def compare(self, stage, sections, bucket_numel=600, **layerwise):
        engine = start(Net(odd=True), ds_config(gas=2, stage=stage, bucket_numel=bucket_numel,
                                                layerwise={"alignment": 1, **layerwise}, **sections))
        optimizer = engine.optimizer
        forecast, sync = optimizer.forecast(), internals.grad_sync(engine)
        allocations = Allocations(forecast.working.transfers + bytes_of_cuts(forecast))

        def counting(do):
            def counted(*args, **kwargs):
                with allocations:
                    return do(*args, **kwargs)
            return counted

        order = sync._scheduler
        order._advance, order._wait = counting(order._advance), counting(order._wait)
        sums, params = internals.exchanges(engine)
        sums.all_to_owners, params.to_cuts = counting(sums.all_to_owners), counting(params.to_cuts)
        train_engine(engine, 2, gas=2)
        assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept(engine)}.values()
                   ) == forecast.memory[optimizer.rank].total
        assert allocations.most <= allocations.expected
        assert bool(allocations.most) is bool(allocations.expected)
        return optimizer.layout


def bytes_of_cuts(forecast):
    """Return the bytes of a rank's cuts that do not share the memory of the gradients."""
    total = 0
    for bucket, wire in zip(forecast.layout.buckets, forecast.wires, strict=True):
        sums = sum_dtype(wire, forecast.reduction, forecast.stage)
        if bucket.transport == "cuts" and (forecast.stage > 1 or forecast.stored_as[bucket.dtype] != sums):
            total += itemsize(sums) * bucket.cut_numel
    return total


def kept(engine):
    """Every tensor with one element for each of a parameter that the optimizer keeps from step to step."""
    buckets = engine.optimizer.layout.buckets
    return [*(tensor for buffer in internals.buffers(engine) for tensor in buffer.tensors),
            *(shards[bucket.index] for shards in internals.shards(engine) for bucket in buckets),
            *internals.cuts(engine),
            *(value for state in internals.states(engine).values() for key, value in state.items() if key != "step")]


class TestMoreRanksThanMatrices(DistributedTest):
    world_size = 4

    def test_ranks_without_a_matrix_still_agree(self):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 4))
        module.forward = lambda place: whole_number_loss(module, place)
        recipe = Recipe(matrices={"0.weight": (1, 4, 6)}, world_size=4, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1)
        torch.manual_seed(0)
        expected = train(lambda: nn.Sequential(nn.Linear(6, 4)), lambda *place: place, whole_number_loss, recipe, 5)
        engine = train_engine(start(module, ds_config()), 5, check=compared_to(expected))
        assert_trained_as(module, expected)
        assert "3 of 4 ranks own no matrix" in engine.optimizer.describe()


class TestNewtonSchulzRunsOnce(DistributedTest):
    world_size = [1, 2, 4]
    thorough_on = ()

    def test_each_matrix_once_a_step_over_all_ranks(self):
        module = Net()
        engine = start(module, ds_config(params={"ns_method": "gram"}))
        shapes = []
        original = muon_family.newton_schulz

        def counting(matrix, *args, **kwargs):
            shapes.extend([tuple(matrix.shape[-2:])] * matrix[..., 0, 0].numel())
            return original(matrix, *args, **kwargs)

        muon_family.newton_schulz = counting
        train_engine(engine, 1)
        everyone = from_all_ranks(shapes)
        assert sorted(s for shapes in everyone for s in shapes) == sorted(
            [(12, 12), (12, 12), (40, 12), (12, 40), (5, 27)] + [(6, 9)] * 3)


class TestOverlapWithBackward(DistributedTest):
    def test_buckets_start_in_the_last_backward_pass_of_a_step_or_at_stage_2_in_each(self, stage, overlap):
        engine = start(Net(), ds_config(stage=stage, gas=2, overlap=overlap))
        # The first two buckets wait for nobody; whether more have started is a matter of time.
        started = internals.seen_at(internals.grad_sync(engine), "reduce", lambda: (
            internals.ready(engine), internals.launched(engine) >= 2))
        every = len(engine.optimizer.layout.buckets)
        for step in range(2):
            engine.backward(engine((step, 0, dist.get_rank())))
            assert internals.ready(engine) == internals.launched(engine) == 0
            assert len(started) == (step if stage == 1 else 2 * step + 1)
            engine.step()
            engine.backward(engine((step, 1, dist.get_rank())))
            engine.step()
        assert every > 3 and started == [(every, True) if overlap else (0, False)] * 2 * stage


class TestSumsOfNodes(DistributedTest):
    world_size = 4

    def test_the_size_of_a_bucket_does_not_change_what_is_added_to_what(self, monkeypatch):
        monkeypatch.setattr(nodes, "node_of_each_rank", lambda: [0, 0, 1, 1])
        found = {}
        for bucket_numel in (1, 66_000, 400_000):
            torch.manual_seed(1)
            module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(9)))
            engine = start(module, ds_config(bucket_numel=bucket_numel))
            torch.manual_seed(dist.get_rank())
            for _ in range(2):
                engine.backward(engine(torch.randn(4, 128)).square().mean())
                engine.step()
            found[bucket_numel] = weights(module)
        assert len({tuple(value.tolist()) for value in found.values()}) == 1
