"""Experts that are whole while tensor parallelism cuts other layers: tensor-parallel ranks have different ones."""

import dataclasses
import shutil
from functools import partial

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe import ep_tp_dispatch, mappings
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups, safe_get_full_grad
from torch import nn

from ds_layerwise import cli
from ds_layerwise.checkpoint.regular import RegularCheckpoint
from ds_layerwise.errors import ConfigError, LayerWiseError
from tests.distributed.parallel import test_auto_ep as auto_ep
from tests.distributed.parallel import test_experts as experts
from tests.distributed.parallel.test_meshes import TensorsAndSequences, sequences, shared, sharing, states_of
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, on_rank_0
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import Recipe, Reference, train, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Linear, Mpu, enter, leave, mark, part
from tests.support.training import (
    BF16,
    ON_HOST,
    ds_config,
    from_all_ranks,
    reduced_gradients,
    relative_error,
    start,
)
from tests.support.versions import needs

pytestmark = rooms("folding", "tensor", "regular", "run_settings", "step_agreement")

GAS, STEPS, TP = 2, 4, 2
#: What training with AutoEP beside AutoTP needs.
FOLDS = ("deepspeed>=0.19.8", "its layers of experts give tensor-parallel ranks different gradients")
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
            numbers = whole_number_gradients(saved, self.shapes[saved], *place, sharing(self.mpu)[0])
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

    @pytest.mark.parametrize("mesh", [
        pytest.param(partial(Mpu, TP), marks=pytest.mark.thorough, id="tensors"),
        pytest.param(TensorsAndSequences, id="tensors_and_sequences")])
    def test_gradients_norm_and_weights(self, mesh, stage):
        mpu = mesh()
        for ep_size in self.ep_sizes():
            whole = whole_net()
            summed = dataclasses.replace(recipe(whole, clip=5.0), world_size=mpu.get_data_parallel_world_size())
            reference = Reference(trainable(whole), summed)
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
        with pytest.raises(ConfigError, match="tensor-parallel ranks .*0.weight belongs to an expert and is not"):
            start(module, ds_config(), mpu=mpu)
        module = own_net(whole_net(), 2, mpu)
        mark(next(iter(module.moe.layers[0].deepspeed_moe.experts.parameters())), 0)
        with pytest.raises(ConfigError, match="0.weight belongs to an expert, and is marked as cut by tensor par"):
            start(module, ds_config(), mpu=mpu)


class TestCorners(DistributedTest):
    world_size = 4

    def begin(self, change=lambda module: None, ep_size=2):
        mpu = Mpu(TP)
        module = own_net(whole_net(), ep_size, mpu)
        change(module)
        return start(Numbers(module, ep_size, mpu), ds_config(), mpu=mpu)

    def step(self, engine, number):
        engine.backward(engine((number, 0)))
        engine.step()

    def test_a_release_whose_gradients_are_of_a_ranks_own_tokens(self, monkeypatch):
        """Before DeepSpeed 0.19.8, ranks would train what is before a layer of experts differently."""
        monkeypatch.delattr(ep_tp_dispatch, "average_gradient_over_tp", raising=False)
        with pytest.raises(ConfigError, match="expert_parallel beside tensor_parallel, .*install DeepSpeed 0.19.8"):
            start(FoldedNet(), ds_config(**folded(2)))

    def test_a_frozen_part_is_loaded_into_its_own_rank(self, tmp_path):
        engine = self.begin(lambda module: module.up.weight.requires_grad_(False))
        part_here = engine.module.inner.up.weight
        saved = part_here.detach().clone()
        self.step(engine, 0)
        engine.save_checkpoint(tmp_path, tag="saved")
        with torch.no_grad():
            part_here.zero_()
        engine.load_checkpoint(tmp_path, tag="saved")
        assert torch.equal(part_here, saved)
        weight = engine.module.inner.moe.layers[0].deepspeed_moe.experts.deepspeed_experts[0][0].weight
        trained = weight.detach().clone()
        self.step(engine, 1)
        engine.load_checkpoint(tmp_path, tag="saved", load_module_only=True)
        assert torch.equal(weight, trained)

    def test_files_of_two_saves(self, tmp_path):
        engine = self.begin()
        for number, tag in enumerate(("one", "two")):
            self.step(engine, number)
            engine.save_checkpoint(tmp_path, tag=tag)

        def check():
            for path in (tmp_path / "two").glob("*mp_rank_01_optim_states.pt"):
                shutil.copy(path, tmp_path / "one")
            with pytest.raises(LayerWiseError, match="mp_rank_01_.* and .*mp_rank_00_.* are not of one save"):
                RegularCheckpoint(tmp_path / "one")

        on_rank_0(check)

    def test_experts_may_be_written(self):
        engine = self.begin()
        self.step(engine, 0)
        with torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(0.5)
        self.step(engine, 1)

    @pytest.mark.parametrize("ep_size", [2, 4])
    def test_an_expert_is_frozen_on_the_ranks_that_have_it(self, ep_size):
        engine = self.begin(ep_size=ep_size)
        self.step(engine, 0)
        weight = engine.module.inner.moe.layers[0].deepspeed_moe.experts.deepspeed_experts[0][0].weight
        before = weight.detach().clone()
        is_frozen = dist.get_rank() % ep_size == 1
        weight.requires_grad_(not is_frozen)
        self.step(engine, 1)
        assert torch.equal(weight, before) == is_frozen


class TestResume(DistributedTest):
    """On another number of ranks, with another number of experts a rank."""

    world_size = [4, 8]
    thorough_on = (4, 8)

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


class FoldedLayer(nn.Module):
    """Two layers that AutoTP cuts, before experts of AutoEP."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(auto_ep.WIDTH, 16), nn.Linear(16, auto_ep.WIDTH)
        self.norm, self.mlp = nn.LayerNorm(auto_ep.WIDTH), auto_ep.Routed()

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.mlp(self.norm(x))


class FoldedNet(auto_ep.StackNet):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([FoldedLayer(), FoldedLayer()])
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)


AUTO_TP = {"autotp_size": TP, "partition_config": {"use_default_specs": False, "layer_specs": [
    {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.down\.weight$"], "partition_type": "row"}]}}


def folded(ep_size):
    return {"expert_parallel": auto_ep.section(ep_size), "tensor_parallel": AUTO_TP}


def place():
    """This rank's number of the copy of the model, and of its part."""
    return divmod(dist.get_rank(), TP)


def own_part(name, param, whole):
    """This rank's part of a whole parameter."""
    if param.dim() == 3:
        return auto_ep.own_part(param, whole)
    axis = CUTS.get(".".join(name.split(".")[-2:]))
    return whole if axis is None else whole.chunk(TP, axis)[place()[1]]


class Halves(nn.Module):
    """Layers that AutoTP cuts, on this rank's part of a sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.layer = nn.Embedding(16, auto_ep.WIDTH), FoldedLayer()
        del self.layer.mlp, self.layer.norm

    def forward(self, tokens):
        x = self.embed(tokens)
        return (x + self.layer.down(torch.tanh(self.layer.up(x)))).square().mean()


class TestPartsOfSequences(DistributedTest):
    world_size = 4

    def test_they_train_as_data_beside_autotp(self, stage):
        def half(step, micro, copy):
            return sequences(step, micro, 0).chunk(2, dim=1)[copy]

        # The last layer is an output head, which AdamW trains.
        matrices = {"layer.up.weight": (1, 16, 8)}
        recipe = Recipe(matrices=matrices, world_size=2, gas=GAS, clip=0.05, muon_lr=0.02, adam_lr=0.003,
                        weight_decay=0.1, eps=1e-8)
        expected = train(Halves, half, lambda module, data: module(data), recipe, STEPS)
        assert expected.steps[0].clip_factor > 1.5
        engine = start(Halves(), ds_config(gas=GAS, clip=0.05, stage=stage, params={"eps": 1e-8},
                                           tensor_parallel=AUTO_TP))
        for step in range(STEPS):
            for micro in range(GAS):
                engine.backward(engine(half(step, micro, place()[0])))
                engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step].norm, rel=1e-5)
        for name, p in engine.module.named_parameters():
            assert relative_error(p.detach(), own_part(name, p, expected.params[name])) < 1e-5, name


class FoldedNumbers(nn.Module):
    """Whole numbers for gradients, as DeepSpeed's layers would leave them: of experts, too large by the number of
    parts; of routers, of this rank's tokens alone."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.shapes = {name: p.shape for name, p in FoldedNet().named_parameters()}

    def forward(self, step):
        total = 0.0
        for name, p in trainable(self.inner).items():
            saved = auto_ep.saved_name(name)
            rank = dist.get_rank() if "router" in name else place()[0]
            numbers = own_part(name, p, whole_number_gradients(saved, self.shapes[saved], *step, rank))
            total = total + (p * numbers).sum() * (TP if p.dim() == 3 else 1)
        return total


def folded_gradients(whole, step, ep_size):
    count = auto_ep.NUM_EXPERTS // ep_size

    def of_copy(name, p, micro, copy):
        if "router" in name:
            ranks = [whole_number_gradients(name, p.shape, step, micro, TP * copy + lane) for lane in range(TP)]
            return sum(ranks) / TP
        numbers = whole_number_gradients(name, p.shape, step, micro, copy)
        if p.dim() == 3:
            owners = torch.arange(auto_ep.NUM_EXPERTS) // count // TP
            numbers = numbers * (owners == copy % (ep_size // TP)).float().view(-1, 1, 1)
        return numbers

    return [[{name: of_copy(name, p, micro, copy) / GAS for name, p in trainable(whole).items()}
             for micro in range(GAS)] for copy in range(dist.get_world_size() // TP)]


def folded_recipe(whole, **changes):
    return dataclasses.replace(auto_ep.recipe(whole, gas=GAS, **changes), world_size=dist.get_world_size() // TP)


@needs(*FOLDS)
class TestFolding(DistributedTest):
    """AutoEP beside AutoTP."""

    world_size = 4
    thorough_on = (8,)

    @pytest.mark.world_size([4, 8])
    def test_gradients_norm_and_weights(self, stage):
        for ep_size in (2, 4):
            whole = FoldedNet()
            reference = Reference(trainable(whole), folded_recipe(whole, clip=5.0))
            engine = start(FoldedNumbers(FoldedNet()), ds_config(gas=GAS, clip=5.0, stage=stage, **folded(ep_size)))
            router = engine.module.inner.layers[0].mlp.router.gate.weight
            for step in range(STEPS):
                wanted = reference.step(folded_gradients(whole, step, ep_size))
                for micro in range(GAS):
                    engine.backward(engine((step, micro)))
                    # It averages over parts, and the next pass adds to that.
                    seen = safe_get_full_grad(router)
                    engine.step() if micro < GAS - 1 else None
                assert torch.equal(seen, wanted.grads["layers.0.mlp.router.weight"])
                for name, (first, values) in reduced_gradients(engine).items():
                    name = name.removeprefix("inner.")
                    if "router" not in name:
                        grad = wanted.grads[auto_ep.saved_name(name)]
                        grad = own_part(name, engine.module.inner.get_parameter(name), grad).flatten()
                        assert torch.equal(values, grad[first:first + values.numel()]), name
                engine.step()
                assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
            self.check_weights(engine.module.inner, reference.params)
            engine.destroy()

    def check_weights(self, module, expected, tolerance=1e-5):
        for name, param in trainable(module).items():
            value = own_part(name, param, expected[auto_ep.saved_name(name)])
            assert relative_error(param.detach(), value) < tolerance, name

    def run_step(self, engine, step):
        losses = []
        for micro in range(GAS):
            loss = engine(auto_ep.batch(step, micro, place()[0]))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    def test_against_one_piece(self, stage):
        for ep_size in (2, 4):
            whole = FoldedNet()
            reference = Reference(trainable(whole), folded_recipe(whole, clip=0.5, eps=1e-8))
            engine = start(FoldedNet(), ds_config(gas=GAS, clip=0.5, stage=stage, params={"eps": 1e-8},
                                                  **folded(ep_size)))
            for step in range(STEPS):
                grads, losses = [], []
                for copy in range(2):
                    grads.append([])
                    for micro in range(GAS):
                        whole.zero_grad()
                        loss = whole(auto_ep.batch(step, micro, copy))
                        (loss / GAS).backward()
                        losses.append(float(loss.detach()))
                        grads[-1].append({n: p.grad.clone() for n, p in trainable(whole).items()})
                wanted = reference.step(grads)
                assert wanted.clip_factor > 1.5
                assert self.run_step(engine, step) == pytest.approx(losses[GAS * place()[0]:][:GAS], rel=1e-5)
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-5)
                with torch.no_grad():
                    for name, value in reference.params.items():
                        whole.get_parameter(name).copy_(value)
            self.check_weights(engine.module, reference.params, tolerance=2e-5)
            engine.destroy()

    def test_adamw_trains_like_stock(self, stage):
        for ep_size in (2, 4):
            module = FoldedNet()
            config = ds_config(gas=GAS, stage=stage, **folded(ep_size),
                               optimizer={"type": "AdamW", "params": {**ADAM, "torch_adam": True}})
            del config["layerwise"]
            stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
            params = {**ADAM, "matrix_optimizer": "muon", "muon_lr": 0.02, "decay_vectors": True}
            engine = start(FoldedNet(), ds_config(gas=GAS, stage=stage, layerwise=auto_ep.ALL_SCALAR, **folded(ep_size),
                                                  optimizer={"type": "LayerWise", "params": params}))
            for step in range(STEPS):
                assert self.run_step(engine, step) == pytest.approx(self.run_step(stock, step), abs=1e-6)
            for each in (stock, engine):
                each.destroy()

    def test_errors(self):
        with pytest.raises(ConfigError, match="whole on each of 4 tensor-parallel ranks, .* a multiple of 4"):
            parts = {"tensor_parallel": {**AUTO_TP, "autotp_size": 4}}
            start(FoldedNet(), ds_config(expert_parallel=auto_ep.section(2), **parts))
        with pytest.raises(ConfigError, match="offload with AutoEP\\+AutoTP folding is not validated"):
            start(FoldedNet(), ds_config(**folded(2), **ON_HOST))


@needs(*FOLDS)
class TestFoldedResume(DistributedTest):
    """On another number of ranks, with another number of experts a rank."""

    world_size = [4, 8]
    thorough_on = (4, 8)

    def begin(self, ep_size, stage=1):
        return start(FoldedNumbers(FoldedNet()), ds_config(gas=GAS, stage=stage, **BF16, **folded(ep_size)))

    def run(self, engine, steps):
        for step in steps:
            for micro in range(GAS):
                engine.backward(engine((step, micro)))
                engine.step()

    def found_in(self, engine):
        """All weights and states of the model; of a parameter that is cut, this rank's part."""
        weights, states = {}, {}
        for name, p in trainable(engine.module.inner).items():
            everyone = from_all_ranks(p.detach().clone())
            if p.dim() == 3:
                weights[name] = torch.cat(everyone[:auto_ep.NUM_EXPERTS // p.shape[0]])
                assert torch.equal(p, auto_ep.own_part(p, weights[name])), name
            else:
                weights[name] = p.detach().clone()
                assert all(map(p.equal, everyone[place()[1]::TP])), name
        pieces = {}
        for theirs in from_all_ranks([(place()[1], each) for each in internals.records(engine)]):
            for lane, piece in theirs:
                if ".experts." in piece.name or lane == place()[1]:
                    for key, value in piece.tensors.items():
                        pieces.setdefault((piece.name, key), {})[piece.param_start] = value.clone()
        for key, parts in pieces.items():
            states[key] = parts[0] if key[1] == "step" else torch.cat([parts[first] for first in sorted(parts)])
        return weights, states

    @pytest.fixture
    def runs(self, class_tmpdir):
        return made_once(class_tmpdir / "runs", type(self).world_size, self.save)

    def save(self, folder):
        for ep_size in (2, 4):
            engine = self.begin(ep_size, stage=ep_size // 2)
            self.run(engine, [0, 1])
            tag = f"{dist.get_world_size()}_{ep_size}"
            engine.save_checkpoint(folder, tag=tag)
            found = [self.found_in(engine)]
            self.run(engine, [2, 3])
            found.append(self.found_in(engine))
            if dist.get_rank() < TP:
                torch.save(found, folder / f"{tag}_{dist.get_rank()}.pt")
            engine.destroy()
            on_rank_0(lambda: auto_ep.check_verified(folder / tag))

    def test_resumes(self, runs):
        for ep_size in (2, 4):
            engine = self.begin(ep_size)
            for saved in ("4_2", "4_4", "8_4"):
                if not (runs / saved).exists():
                    continue
                now, later = torch.load(runs / f"{saved}_{place()[1]}.pt")
                self.run(engine, [9])
                engine.load_checkpoint(runs, tag=saved)
                assert engine.optimizer.fresh_states == {}
                for one, other in zip(self.found_in(engine), now, strict=True):
                    assert_equal_states(one, other, (saved, ep_size))
                if saved == f"{dist.get_world_size()}_{ep_size}":
                    self.run(engine, [2, 3])
                    for one, other in zip(self.found_in(engine), later, strict=True):
                        assert_equal_states(one, other, (saved, ep_size))
            engine.destroy()

    @pytest.mark.world_size(4)
    def test_with_and_without_autoep(self, tmp_path):
        def begin(old, new, **sections):
            return start(FoldedNumbers(FoldedNet()), ds_config(
                gas=GAS, **BF16, tensor_parallel=AUTO_TP, layerwise={"rename": {f"*.{old}": f"*.{new}"}}, **sections))

        def assert_found(engine, wanted):
            for now, then in zip(self.found_in(engine), wanted, strict=True):
                renamed = {}
                for key, value in then.items():
                    first, *more = (key,) if isinstance(key, str) else key
                    first = first.replace("router.gate.weight", "router.weight")
                    if ".gate." in str(now.keys()):
                        first = first.replace("router.weight", "router.gate.weight")
                    renamed[(first, *more) if more else first] = value
                assert_equal_states(now, renamed)

        engine = self.begin(2)
        self.run(engine, [0, 1])
        engine.save_checkpoint(tmp_path, tag="folded")
        wanted = self.found_in(engine)
        engine.destroy()
        engine = begin("router.gate.weight", "router.weight")
        engine.load_checkpoint(tmp_path, tag="folded")
        assert_found(engine, wanted)
        engine.save_checkpoint(tmp_path, tag="plain")
        engine.destroy()
        engine = begin("router.weight", "router.gate.weight", expert_parallel=auto_ep.section(4))
        engine.load_checkpoint(tmp_path, tag="plain")
        assert_found(engine, wanted)


def in_one_piece(weights):
    """Whole parameters of what each rank has of them."""
    parts = {}
    for theirs in from_all_ranks(weights):
        for name, value in theirs.items():
            parts.setdefault(name, []).append(value)
    whole = {}
    for name, values in parts.items():
        axis = CUTS.get(".".join(name.split(".")[-2:]))
        if ".experts.w" in name:
            whole[name] = torch.cat(values[:auto_ep.NUM_EXPERTS // len(values[0])])
        else:
            whole[name] = values[0] if axis is None else torch.cat(values[:TP], axis)
    return whole


class TestOtherParts(DistributedTest):
    """A checkpoint of experts beside tensor parallelism, in a run without it, and the other way round. Groups of an
    engine stay for the rest of a process."""

    world_size = 4

    def trained(self, engine, folder, tag, names):
        for step in range(2):
            engine.backward(engine((step, 0)))
            engine.step()
        engine.save_checkpoint(folder, tag=tag)
        inner = engine.module.inner
        return {saved: inner.get_parameter(name).detach().clone() for name, saved in names.items()}

    @pytest.fixture
    def folded_run(self, class_tmpdir):
        return made_once(class_tmpdir / "folded", [4], self.save_folded)

    def save_folded(self, folder):
        engine = start(FoldedNumbers(FoldedNet()), ds_config(**BF16, **folded(4)))
        names = {name: name for name in trainable(engine.module.inner)}
        whole = in_one_piece(self.trained(engine, folder, "saved", names))
        on_rank_0(lambda: torch.save(whole, folder / "whole.pt"))

    @pytest.fixture
    def native_run(self, class_tmpdir):
        return made_once(class_tmpdir / "native", [4], self.save_native)

    def save_native(self, folder):
        mpu = Mpu(TP)
        engine = start(Numbers(own_net(whole_net(), 4, mpu), 4, mpu), ds_config(**BF16), mpu=mpu)
        whole = in_one_piece(self.trained(engine, folder, "saved", names_of(engine.module.inner, 4)))
        on_rank_0(lambda: torch.save(whole, folder / "whole.pt"))

    def test_autoep_without_parts_and_with_them_again(self, folded_run, tmp_path):
        whole = torch.load(folded_run / "whole.pt")
        engine = start(FoldedNumbers(FoldedNet()), ds_config(**BF16, expert_parallel=auto_ep.section(2)))
        engine.load_checkpoint(folded_run, tag="saved")
        assert engine.optimizer.fresh_states == {}
        for name, p in trainable(engine.module.inner).items():
            assert torch.equal(p.detach(), auto_ep.own_part(p, whole[name])), name
        engine.save_checkpoint(tmp_path, tag="without")
        engine.destroy()
        engine = start(FoldedNumbers(FoldedNet()), ds_config(**BF16, **folded(4)))
        engine.load_checkpoint(tmp_path, tag="without")
        assert engine.optimizer.fresh_states == {}
        for name, p in trainable(engine.module.inner).items():
            assert torch.equal(p.detach(), own_part(name, p, whole[name])), name

    def test_native_layers_without_parts(self, native_run):
        whole = torch.load(native_run / "whole.pt")
        engine = start(Numbers(own_net(whole_net(), 2, None), 2, Mpu(1)), ds_config(**BF16))
        engine.load_checkpoint(native_run, tag="saved")
        assert engine.optimizer.fresh_states == {}
        for name, saved in names_of(engine.module.inner, 2).items():
            assert torch.equal(engine.module.inner.get_parameter(name).detach(), whole[saved]), name
