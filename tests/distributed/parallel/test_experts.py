"""Expert parallelism: layers whose experts differ between ranks, against one process that has all of them."""

import re

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from torch import nn

from ds_layerwise.errors import RoutingError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, on_rank_0, whole_states
from tests.support.cli import check_from_outside
from tests.support.costs import memory_bytes
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import Recipe, Reference, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import ds_config, from_all_ranks, reduced_gradients, relative_error, start

pytestmark = rooms("new_names", "layout", "optimizer")

WIDTH, NUM_EXPERTS = 8, 4
STEPS = 6
_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d+)(\..*)")


class ExpertNet(nn.Module):
    """Two layers of experts between dense ones."""

    def __init__(self, ep_size):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(
            MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)),
                num_experts=NUM_EXPERTS, ep_size=ep_size, k=1, capacity_factor=2.0, min_capacity=1, use_rts=False)
            for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x, aux = self.first(x), 0.0
        for layer in self.layers:
            y, loss, _ = layer(x)
            x, aux = x + y, aux + loss
        return self.last(x).square().mean() + 0.01 * aux


def global_name(name, ep_rank, ep_size):
    """The name of the same expert in a model that holds all of them."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}{ep_rank * (NUM_EXPERTS // ep_size) + int(match[2])}{match[3]}"


class TestOverrides(DistributedTest):
    FIRST = "layers.0.deepspeed_moe.experts.deepspeed_experts"

    def run(self, ep_size, *overrides):
        engine = start(part_of(whole_model(), ep_size), ds_config(layerwise={"overrides": list(overrides)}))
        names = {saved: name for name, saved in names_of(engine.module, ep_size).items()}
        everyone = from_all_ranks({saved: engine.optimizer.routes[name].lr_scale
                                  for saved, name in names.items()})
        return {name: scale for routes in everyone for name, scale in routes.items()}

    def test_the_same_experts_whoever_has_them(self):
        overrides = [{"name": f"{self.FIRST}.{expert}.*", "lr_scale": scale}
                     for expert, scale in ((1, 0.5), (3, 0.5), (0, 2.0), (2, 2.0))]
        expected = self.run(1, *overrides)
        assert {scale for name, scale in expected.items() if name.startswith(f"{self.FIRST}.3.")} == {0.5}
        assert self.run(2, *overrides) == expected

    @pytest.mark.parametrize("entry", [0, 3])
    def test_experts_that_go_by_one_name_must_be_alike(self, entry):
        other = (entry + 2) % 4
        with pytest.raises(RoutingError, match=rf"experts.{entry}\.0\..*: .* sets lr_scale to 0.5, and for .*"
                                                f"experts.{other}.* to 'nothing'.*give both the same"):
            self.run(2, {"name": f"{self.FIRST}.{entry}.*", "lr_scale": 0.5})

    def test_all_of_a_layer(self):
        assert self.run(2, {"name": "layers.0.*", "lr_scale": 0.5}) == self.run(1, {"name": "layers.0.*",
                                                                                   "lr_scale": 0.5})


def names_of(module, ep_size):
    """This rank's parameters: by name, the name in a model that holds all experts."""
    return {name: global_name(name, dist.get_rank() % ep_size, ep_size) for name in trainable(module)}


def whole_model():
    """All experts in one process, all different; the same on every rank."""
    module = ExpertNet(1)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return module


def part_of(whole, ep_size):
    """This rank's part of ``whole``."""
    module = ExpertNet(ep_size)
    params = trainable(whole)
    with torch.no_grad():
        for name, saved in names_of(module, ep_size).items():
            module.get_parameter(name).copy_(params[saved])
    return module


def recipe(module, **kwargs):
    return Recipe(matrices={n: (1, *p.shape) for n, p in trainable(module).items()
                            if p.dim() == 2 and n != "last.weight"},
                  world_size=dist.get_world_size(), muon_lr=0.02, adam_lr=0.003, weight_decay=0.1, **kwargs)


def fake_loss(module, place, ep_size):
    total = 0.0
    for name, saved in names_of(module, ep_size).items():
        p = module.get_parameter(name)
        total = total + (p * whole_number_gradients(saved, p.shape, *place)).sum()
    return total


class FakeLoss(nn.Module):
    """Whole numbers for gradients: those of an expert by its number among all."""

    def __init__(self, inner, ep_size):
        super().__init__()
        self.inner, self.ep_size = inner, ep_size

    def forward(self, place):
        return fake_loss(self.inner, place, self.ep_size)


def gradients_of_ranks(whole, step, gas, ep_size):
    """The gradients that :class:`FakeLoss` gives: a rank has gradients of its own experts alone."""
    params = trainable(whole)

    def held(name, rank):
        match = _EXPERT.fullmatch(name)
        return match is None or int(match[2]) // (NUM_EXPERTS // ep_size) == rank % ep_size

    return [[{n: whole_number_gradients(n, p.shape, step, micro, rank) / gas for n, p in params.items()
              if held(n, rank)} for micro in range(gas)] for rank in range(dist.get_world_size())]


def assert_weights(module, expected, ep_size, tolerance=1e-5):
    for name, saved in names_of(module, ep_size).items():
        assert relative_error(module.get_parameter(name).detach(), expected[saved]) < tolerance, saved


def ep_sizes():
    return [size for size in (2, 4) if dist.get_world_size() % size == 0]


class TestExperts(DistributedTest):
    world_size = [2, 4]
    thorough_on = (2,)

    def test_gradients_norm_and_weights(self, stage):
        for ep_size, gas in zip(ep_sizes(), (2, 1)):
            whole = whole_model()
            reference = Reference(trainable(whole), recipe(whole, gas=gas, clip=5.0))
            engine = start(FakeLoss(part_of(whole, ep_size), ep_size), ds_config(gas=gas, clip=5.0, stage=stage))
            for step in range(STEPS):
                wanted = reference.step(gradients_of_ranks(whole, step, gas, ep_size))
                for micro in range(gas):
                    engine.backward(engine((step, micro, dist.get_rank())))
                    if micro == gas - 1:
                        for name, (first, values) in reduced_gradients(engine).items():
                            saved = global_name(name, dist.get_rank() % ep_size, ep_size).removeprefix("inner.")
                            grad = wanted.grads[saved].flatten()[first:first + values.numel()]
                            assert torch.equal(values, grad), saved
                    engine.step()
                assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
            assert_weights(engine.module.inner, reference.params, ep_size)
            engine.destroy()

    def test_a_real_forward_pass(self):
        for ep_size in ep_sizes():
            whole = whole_model()
            for module in whole.modules():
                if isinstance(module, MoE):
                    module.set_deepspeed_parallelism()
            reference = Reference(trainable(whole), recipe(whole, clip=1.0, eps=1e-8))
            engine = start(part_of(whole, ep_size), ds_config(clip=1.0, params={"eps": 1e-8}))
            for step in range(STEPS):
                batches = [torch.randn(12, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                           for rank in range(dist.get_world_size())]
                grads, losses = [], []
                for batch in batches:
                    whole.zero_grad()
                    losses.append(whole(batch))
                    losses[-1].backward()
                    grads.append([{n: None if p.grad is None else p.grad.clone()
                                   for n, p in trainable(whole).items()}])
                wanted = reference.step(grads)
                loss = engine(batches[dist.get_rank()])
                assert float(loss.detach()) == pytest.approx(float(losses[dist.get_rank()].detach()), rel=1e-5)
                engine.backward(loss)
                engine.step()
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-5)
                with torch.no_grad():
                    for name, value in reference.params.items():
                        whole.get_parameter(name).copy_(value)
            assert_weights(engine.module, reference.params, ep_size)
            engine.destroy()

    @pytest.mark.world_size(2)
    def test_masters_and_states_on_the_host(self):
        plain = start_experts(2, bf16={"enabled": True})
        offload = {"stage": 1, "reduce_bucket_size": 200, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        engine = start_experts(2, bf16={"enabled": True}, zero_optimization=offload)
        for each in (engine, plain):
            train_experts(each, 0, STEPS)
        assert_equal_states(whole_states(engine), whole_states(plain))
        for name, p in plain.module.named_parameters():
            assert torch.equal(engine.module.get_parameter(name), p), name
        optimizer = engine.optimizer
        memory = memory_bytes(optimizer.layout, host_ratio=0.5)[optimizer.rank]
        found = {kind.value: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
                 for kind, tensors in optimizer.offloading.memory().items()}
        assert (found["hp_params"], found["optim_states"]) == (memory.masters, memory.states)
        assert sum(t.nbytes for t in internals.host_tensors(engine)) == memory.host > 0


def start_experts(ep_size, **kwargs):
    return start(FakeLoss(part_of(whole_model(), ep_size), ep_size), ds_config(**kwargs))


def train_experts(engine, first, last):
    for step in range(first, last):
        engine.backward(engine((step, 0, dist.get_rank())))
        engine.step()


def all_weights(engine, ep_size):
    """Every parameter of every rank, by its name in a model that holds all experts."""
    everyone = from_all_ranks({saved: engine.module.inner.get_parameter(name).detach().clone()
                              for name, saved in names_of(engine.module.inner, ep_size).items()})
    merged = {}
    for mine in everyone:
        for name, value in mine.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return merged


class TestCheckpoints(DistributedTest):
    """Any number of ranks and any placement of experts onto any other: experts have names of their own in a file."""

    world_size = [1, 2, 4]
    thorough_on = (1, 2)

    def placements(self):
        return {1: [1], 2: [2], 4: [2, 4]}[dist.get_world_size()]

    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints in folders that are called as ranks_placement."""
        return made_once(class_tmpdir / "runs", type(self).world_size, self.save)

    def save(self, folder):
        for ep_size in self.placements():
            engine = start_experts(ep_size, layerwise={"save_universal": True}, stage=2 if ep_size == 2 else 1)
            train_experts(engine, 0, 3)
            # As in the checkpoints of earlier versions, and a load wants as many.
            assert [group.get("moe", False) for group in engine.optimizer.param_groups] == [False, True]
            run = folder / f"{dist.get_world_size()}_{ep_size}"
            engine.save_checkpoint(run, tag="saved")
            states, now = whole_states(engine), all_weights(engine, ep_size)
            train_experts(engine, 3, 6)
            later = all_weights(engine, ep_size)
            if dist.get_rank() == 0:
                torch.save((states, now, later), run / "expected.pt")
            engine.destroy()
            if ep_size == 2:
                on_rank_0(lambda: check_from_outside(run, states))

    def test_resume(self, runs):
        world = dist.get_world_size()
        for ep_size in self.placements():
            engine = start_experts(ep_size)
            for saved in ("1_1", "2_2", "4_2", "4_4"):
                states, now, later = torch.load(runs / saved / "expected.pt")
                for tag in ("saved", "saved_universal"):
                    train_experts(engine, 9, 10)
                    engine.load_checkpoint(runs / saved, tag=tag)
                    where = (saved, tag, "onto", world, ep_size)
                    assert engine.optimizer.fresh_states == {}, where
                    assert_equal_states(whole_states(engine), states, where)
                    assert_equal_states(all_weights(engine, ep_size), now, where)
                    if saved == f"{world}_{ep_size}":
                        train_experts(engine, 3, 6)
                        assert_equal_states(all_weights(engine, ep_size), later, where)
            engine.destroy()


class TestAccess(DistributedTest):
    world_size = 4

    def test_every_rank_sees_its_own_experts(self):
        whole = whole_model()
        reference = Reference(trainable(whole), recipe(whole))
        engine = start_experts(2)
        reference.step(gradients_of_ranks(whole, 0, 1, 2))
        train_experts(engine, 0, 1)
        wanted = reference.step(gradients_of_ranks(whole, 1, 1, 2))
        engine.backward(engine((1, 0, dist.get_rank())))
        gradients = {name: safe_get_full_grad(engine.module.inner.get_parameter(name))
                     for name in names_of(engine.module.inner, 2)}
        engine.step()
        for name, saved in names_of(engine.module.inner, 2).items():
            param = engine.module.inner.get_parameter(name)
            assert torch.equal(gradients[name], wanted.grads[saved]), saved
            assert relative_error(safe_get_full_fp32_param(param), reference.params[saved]) < 1e-5, saved
            for key, value in reference.state[saved].items():
                assert relative_error(safe_get_full_optimizer_state(param, key), value) < 1e-5, (saved, key)
