"""Experts that are whole while tensor parallelism cuts other layers: tensor-parallel ranks have different ones."""

import dataclasses

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from ds_layerwise import cli
from ds_layerwise.errors import ConfigError
from tests.distributed.parallel import test_experts as experts
from tests.distributed.parallel.test_meshes import shared, states_of
from tests.support.checkpoints import assert_equal_states, on_rank_0
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import Reference, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Linear, Mpu, enter, leave, part
from tests.support.training import (
    BF16,
    ON_HOST,
    ds_config,
    from_all_ranks,
    reduced_gradients,
    relative_error,
    start,
)

pytestmark = rooms("tensor", "regular", "run_settings", "step_agreement")

GAS, STEPS, TP = 2, 4, 2
CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}


class Mixed(nn.Module):
    """Two layers that tensor parallelism cuts, before layers of experts."""

    def __init__(self, ep_size, mpu):
        super().__init__()
        torch.manual_seed(7)
        self.mpu = mpu
        self.up, self.down = Linear(12, 6, 0, mpu), Linear(6, 12, 1, mpu)
        self.moe = experts.ExpertNet(ep_size)

    def forward(self, x):
        inner = torch.tanh(F.linear(enter(x, self.mpu), self.up.weight, self.up.bias))
        return self.moe(x + leave(F.linear(inner, self.down.weight), self.mpu) + self.down.bias)


def whole_net():
    """All experts in one process, all different."""
    whole = Mixed(1, None)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in whole.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return whole


def mine(name, value, mpu):
    """This rank's part of a whole parameter."""
    return part(value, CUTS[name], mpu) if name in CUTS else value


def names_of(module, ep_size):
    return {name: experts.global_name(name, dist.get_rank() % ep_size, ep_size) for name in trainable(module)}


def own_net(whole, ep_size, mpu):
    module = Mixed(ep_size, mpu)
    with torch.no_grad():
        for name, saved in names_of(module, ep_size).items():
            module.get_parameter(name).copy_(mine(name, whole.get_parameter(saved), mpu))
    return module


class Numbers(nn.Module):
    """Whole numbers for gradients: those of an expert by its number among all."""

    def __init__(self, inner, ep_size, mpu):
        super().__init__()
        self.inner, self.ep_size, self.mpu = inner, ep_size, mpu
        self.shapes = {name: p.shape for name, p in whole_net().named_parameters()}

    def forward(self, place):
        total = 0.0
        for name, saved in names_of(self.inner, self.ep_size).items():
            numbers = whole_number_gradients(saved, self.shapes[saved], *place, self.mpu.get_data_parallel_rank())
            total = total + (self.inner.get_parameter(name) * mine(name, numbers, self.mpu)).sum()
        return total


def gradients(whole, step, ep_size):
    """The gradients of the copies of the model, as :class:`Numbers` gives them: one has some of the experts."""
    def held(name, copy):
        match = experts._EXPERT.fullmatch(name)
        owner = match and int(match[2]) // (experts.NUM_EXPERTS // ep_size)
        return match is None or owner // TP == copy % (ep_size // TP)

    return [[{name: whole_number_gradients(name, p.shape, step, micro, copy) / GAS
              for name, p in trainable(whole).items() if held(name, copy)} for micro in range(GAS)]
            for copy in range(dist.get_world_size() // TP)]


def recipe(whole, **changes):
    made = experts.recipe(whole, gas=GAS, **changes)
    matrices = {name: shape for name, shape in made.matrices.items() if name != "moe.last.weight"}
    return dataclasses.replace(made, matrices=matrices, world_size=dist.get_world_size() // TP)


def gather_tokens(x, dim=0):
    """DeepSpeed's gather, which asks for a shape that gloo does not take."""
    group = groups.mpu.get_model_parallel_group()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def rows(step, micro, copy):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + copy))


def run_step(engine, mpu, step):
    """A step; return the losses of this rank."""
    losses = []
    for micro in range(GAS):
        loss = engine(rows(step, micro, mpu.get_data_parallel_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


class TestNumbers(DistributedTest):
    world_size = [4, 8]
    thorough_on = (4,)

    def ep_sizes(self):
        return [size for size in (2, 4) if dist.get_world_size() % size == 0]

    def test_gradients_norm_and_weights(self, stage):
        mpu = Mpu(TP)
        for ep_size in self.ep_sizes():
            whole = whole_net()
            reference = Reference(trainable(whole), recipe(whole, clip=5.0))
            engine = start(Numbers(own_net(whole, ep_size, mpu), ep_size, mpu),
                           ds_config(gas=GAS, clip=5.0, stage=stage, params={"muon_tp_mode": "owner"}), mpu=mpu)
            names = {f"inner.{name}": saved for name, saved in names_of(engine.module.inner, ep_size).items()}
            for step in range(STEPS):
                wanted = reference.step(gradients(whole, step, ep_size))
                for micro in range(GAS):
                    engine.backward(engine((step, micro)))
                    if micro == GAS - 1:
                        for name, (first, values) in reduced_gradients(engine).items():
                            grad = mine(name.removeprefix("inner."), wanted.grads[names[name]], mpu).flatten()
                            assert torch.equal(values, grad[first:first + values.numel()]), name
                    engine.step()
                assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
            for name, p in engine.module.inner.named_parameters():
                saved = names[f"inner.{name}"]
                assert relative_error(p.detach(), mine(name, reference.params[saved], mpu)) < 1e-5, name
            engine.destroy()


class TestTraining(DistributedTest):
    world_size = 4

    def test_against_one_piece(self, stage, monkeypatch):
        monkeypatch.setattr(mappings, "_gather_tokens", gather_tokens)
        mpu = Mpu(TP)
        for ep_size in (2, 4):
            whole = whole_net()
            groups.mpu = None
            for module in whole.modules():
                if isinstance(module, MoE):
                    module.set_deepspeed_parallelism()
            reference = Reference(trainable(whole), recipe(whole, clip=0.5, eps=1e-8))
            engine = start(own_net(whole, ep_size, mpu), ds_config(gas=GAS, clip=0.5, stage=stage,
                                                                   params={"eps": 1e-8}), mpu=mpu)
            for step in range(STEPS):
                grads, losses = [], []
                # DeepSpeed's layers ask the last engine's groups for the parts of theirs.
                groups.mpu = None
                for copy in range(2):
                    grads.append([])
                    for micro in range(GAS):
                        whole.zero_grad()
                        loss = whole(rows(step, micro, copy))
                        (loss / GAS).backward()
                        losses.append(float(loss.detach()))
                        grads[-1].append({n: None if p.grad is None else p.grad.clone()
                                          for n, p in trainable(whole).items()})
                groups.mpu = mpu
                wanted = reference.step(grads)
                assert wanted.clip_factor > 1.5
                own = losses[GAS * mpu.get_data_parallel_rank():][:GAS]
                assert run_step(engine, mpu, step) == pytest.approx(own, rel=1e-5)
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-5)
                with torch.no_grad():
                    for name, value in reference.params.items():
                        whole.get_parameter(name).copy_(value)
            for name, saved in names_of(engine.module, ep_size).items():
                value = mine(name, reference.params[saved], mpu)
                assert relative_error(engine.module.get_parameter(name).detach(), value) < 1e-5, name
            engine.destroy()

    def test_adamw_trains_like_stock(self, stage, monkeypatch):
        monkeypatch.setattr(mappings, "_gather_tokens", gather_tokens)
        mpu = Mpu(TP)
        for ep_size in (2, 4):
            module = own_net(whole_net(), ep_size, mpu)
            config = ds_config(gas=GAS, stage=stage, optimizer={"type": "AdamW",
                                                                "params": {**ADAM, "torch_adam": True}})
            del config["layerwise"]
            stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config, mpu=mpu)
            params = {**ADAM, "matrix_optimizer": "muon", "muon_lr": 0.02, "decay_vectors": True}
            engine = start(own_net(whole_net(), ep_size, mpu), ds_config(
                gas=GAS, stage=stage, layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]},
                optimizer={"type": "LayerWise", "params": params}), mpu=mpu)
            for step in range(STEPS):
                assert run_step(engine, mpu, step) == pytest.approx(run_step(stock, mpu, step), abs=1e-6)
            for each in (stock, engine):
                each.destroy()

    def test_errors(self):
        mpu = Mpu(TP)
        with pytest.raises(ConfigError, match="whole on each of 2 tensor-parallel ranks, .* a multiple of 2: Deep"):
            start(own_net(whole_net(), 1, mpu), ds_config(), mpu=mpu)
        module = own_net(whole_net(), 2, mpu)
        next(iter(module.moe.layers[0].deepspeed_moe.experts.parameters())).requires_grad_(False)
        with pytest.raises(ConfigError, match="0.weight belongs to an expert and is not trained, and tensor-parallel"):
            start(module, ds_config(), mpu=mpu)


class TestResume(DistributedTest):
    """On another number of ranks, with another number of experts a rank."""

    world_size = [4, 8]
    thorough_on = (4,)

    def begin(self, ep_size, mpu, stage=1):
        zero = {**ON_HOST["zero_optimization"], "stage": stage}
        return start(Numbers(own_net(whole_net(), ep_size, mpu), ep_size, mpu),
                     ds_config(gas=GAS, **BF16, zero_optimization=zero), mpu=mpu)

    def run(self, engine, steps):
        for step in steps:
            for micro in range(GAS):
                engine.backward(engine((step, micro)))
                engine.step()

    def found_in(self, engine, ep_size, mpu):
        """All weights and states of the model; of a parameter that is cut, this rank's part."""
        names = names_of(engine.module.inner, ep_size)
        weights = {names[name]: p.detach().clone() for name, p in engine.module.inner.named_parameters()}
        everyone = {}
        for theirs in from_all_ranks({saved: value for saved, value in weights.items() if saved not in CUTS}):
            for saved, value in theirs.items():
                assert torch.equal(everyone.setdefault(saved, value), value), saved
        everyone |= shared({saved: value for saved, value in weights.items() if saved in CUTS}, mpu)
        states = {}
        for theirs in from_all_ranks(states_of(engine, mpu)):
            states |= {key: value for key, value in theirs.items() if "deepspeed_experts" in key[0]}
        return everyone, {**states, **states_of(engine, mpu)}

    @pytest.fixture
    def runs(self, class_tmpdir):
        return made_once(class_tmpdir / "runs", type(self).world_size, self.save)

    def save(self, folder):
        mpu, world = Mpu(TP), dist.get_world_size()
        for ep_size in (2, 4):
            engine = self.begin(ep_size, mpu, stage=ep_size // 2)
            self.run(engine, [0, 1])
            engine.save_checkpoint(folder, tag=f"{world}_{ep_size}")
            found = [self.found_in(engine, ep_size, mpu)]
            self.run(engine, [2, 3])
            found.append(self.found_in(engine, ep_size, mpu))
            if dist.get_rank() < TP:
                torch.save(found, folder / f"{world}_{ep_size}_{dist.get_rank()}.pt")
            engine.destroy()
            on_rank_0(lambda: self.check_verified(folder / f"{world}_{ep_size}"))

    def check_verified(self, folder):
        assert cli.main(["verify", str(folder)]) == 0

    def test_resumes(self, runs):
        mpu = Mpu(TP)
        for ep_size in (2, 4):
            engine = self.begin(ep_size, mpu)
            for saved in ("4_2", "4_4", "8_4"):
                if not (runs / saved).exists():
                    continue
                now, later = torch.load(runs / f"{saved}_{dist.get_rank() % TP}.pt")
                self.run(engine, [9])
                engine.load_checkpoint(runs, tag=saved)
                assert engine.optimizer.fresh_states == {}
                for one, other in zip(self.found_in(engine, ep_size, mpu), now, strict=True):
                    assert_equal_states(one, other, (saved, ep_size))
                if saved == f"{dist.get_world_size()}_{ep_size}":
                    self.run(engine, [2, 3])
                    for one, other in zip(self.found_in(engine, ep_size, mpu), later, strict=True):
                        assert_equal_states(one, other, (saved, ep_size))
            engine.destroy()
