"""AutoEP: DeepSpeed's ``expert_parallel`` section, whose stacks of experts differ between ranks, against one process
that has all of them."""

import json
import os
from contextlib import nullcontext
from itertools import product

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import ds_layerwise
from ds_layerwise import cli
from ds_layerwise.errors import ConfigError, LayerWiseError, RoutingError
from tests.distributed.parallel.test_experts import train_experts
from tests.support import internals
from tests.support.auto_ep import HIDDEN, NUM_EXPERTS, TOP, WIDTH, Routed, own_part, section, whole_shape
from tests.support.checkpoints import assert_equal_states, on_rank_0, whole_states
from tests.support.cli import check_from_outside
from tests.support.documents import blocks
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import Recipe, Reference, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import BF16, ds_config, from_all_ranks, reduced_gradients, relative_error, start
from tests.support.universal import convert
from tests.support.versions import needs, unmet

pytestmark = rooms("new_names", "layout", "optimizer", "engine_hooks")

VOCABULARY = 20
STEPS = 5
KNOWS_STAGE_3 = "deepspeed>=0.19.8", "its AutoEP has no stage 3"
#: The last one is also trained with a model of ``zero.Init``.
THOROUGH = os.environ.get("THOROUGH") == "1"
STAGES = [1, 2, pytest.param(3, marks=needs(*KNOWS_STAGE_3))]
ENDS = [1, pytest.param(3, marks=needs(*KNOWS_STAGE_3))]
#: Stage 1 differs from 2 in when it sums, which whole numbers show.
FROM_2 = [pytest.param(1, marks=pytest.mark.thorough), *STAGES[1:]]
AT_3 = [*(pytest.param(stage, marks=pytest.mark.thorough) for stage in (1, 2)), STAGES[2]]
ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
ALL_SCALAR = {"overrides": [{"name": "*", "optimizer": "scalar"}]}
#: Some stacks are whole, and others cut by element.
CUT = {"overrides": [{"name": "*.experts.w3", "optimizer": "scalar"}]}
#: The names of AutoEP's router and of the one that it replaces.
RENAME = {"*.router.gate.weight": "*.router.weight"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Routed()

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.mlp(self.norm(x))


class StackNet(nn.Module):
    """Two layers with experts, the same on every rank."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class FakeLoss(nn.Module):
    """Whole numbers for gradients: of a stack of experts, those of this rank's by their numbers among all."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, place):
        total = 0.0
        for name in trainable(self.inner):
            # ``get_parameter`` makes the parameter whole at ZeRO stage 3.
            p = self.inner.get_parameter(name)
            total = total + (p * own_part(p, whole_number_gradients(saved_name(name), whole_shape(p), *place))).sum()
        return total


def start_net(ep_size, *, fake=False, module=None, groups=None, **changes):
    """An engine that has spread the experts; without the section if ``ep_size`` is 0. ``groups`` are arguments of
    ``initialize``."""
    module = module or StackNet()
    if ep_size:
        changes["expert_parallel"] = section(ep_size)
    return start(FakeLoss(module) if fake else module, ds_config(**changes), **(groups or {}))


def saved_name(name):
    return name.removeprefix("inner.").replace("router.gate.weight", "router.weight")


def gradients_of_ranks(whole, step, gas, ep_size):
    """The gradients that :class:`FakeLoss` gives: a rank has gradients of its own experts alone."""
    def held(param, rank):
        if param.dim() < 3:
            return 1.0
        is_own = torch.arange(NUM_EXPERTS) // (NUM_EXPERTS // ep_size) == rank % ep_size
        return is_own.float().view(-1, 1, 1)

    return [[{n: whole_number_gradients(n, p.shape, step, micro, rank) / gas * held(p, rank)
              for n, p in trainable(whole).items()} for micro in range(gas)] for rank in range(dist.get_world_size())]


def recipe(module, num_batches=None, **kwargs):
    matrices = {n: (1, *p.shape) if p.dim() == 2 else tuple(p.shape) for n, p in trainable(module).items()
                if p.dim() > 1 and n.split(".")[0] not in ("embed", "head")}
    return Recipe(matrices=matrices, world_size=num_batches or dist.get_world_size(), muon_lr=0.02, adam_lr=0.003,
                  weight_decay=0.1, **kwargs)


def assert_weights(module, expected, tolerance=1e-5):
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        for name, param in trainable(module).items():
            assert relative_error(param.detach(), own_part(param, expected[saved_name(name)])) < tolerance, name


def ep_sizes(*, most=4):
    return [size for size in (1, 2, 4) if dist.get_world_size() % size == 0 and size <= most]


def batch(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 6), generator=generator)


def whole_step(whole, reference, step, gas):
    """A step of the one process; return the losses of ranks, and the step."""
    grads, losses = [], []
    for rank in range(dist.get_world_size()):
        grads.append([])
        for micro in range(gas):
            whole.zero_grad()
            loss = whole(batch(step, micro, rank))
            (loss / gas).backward()
            losses.append(float(loss.detach()))
            grads[-1].append({n: p.grad.clone() for n, p in trainable(whole).items() if p.grad is not None})
    done = reference.step(grads)
    with torch.no_grad():
        for name, value in reference.params.items():
            whole.get_parameter(name).copy_(value)
    return losses, done


def train_step(engine, step, gas):
    """A step of an engine; return the losses of this rank."""
    losses = []
    for micro in range(gas):
        loss = engine(batch(step, micro, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def check_whole_numbers(ep_size, gas, groups=None, *, num_batches=None, **changes):
    """Compare reduced gradients and norms exactly, and weights; ``num_batches`` is that of ranks with their own."""
    whole = StackNet()
    reference = Reference(trainable(whole), recipe(whole, num_batches, gas=gas, clip=5.0))
    engine = start_net(ep_size, fake=True, gas=gas, clip=5.0, groups=groups, **changes)
    for step in range(STEPS):
        wanted = reference.step(gradients_of_ranks(whole, step, gas, ep_size))
        for micro in range(gas):
            engine.backward(engine((step, micro, dist.get_rank())))
            if micro == gas - 1:
                for name, (first, values) in reduced_gradients(engine).items():
                    param = engine.module.get_parameter(name)
                    grad = own_part(param, wanted.grads[saved_name(name)]).flatten()
                    assert torch.equal(values, grad[first:first + values.numel()]), name
            engine.step()
        assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
    assert_weights(engine.module.inner, reference.params)
    engine.destroy()


def check_forward_pass(ep_size, groups=None, *, silent=False, under_init=False, num_batches=None, **changes):
    """Compare losses, norms and weights; some experts, and so some ranks, get no token if ``silent``."""
    whole = StackNet()
    if silent:
        with torch.no_grad():
            for layer in whole.layers:
                layer.norm.weight.zero_()
                layer.norm.bias.fill_(1.0)
                layer.mlp.router.weight.copy_(torch.tensor([[4.0], [3.0], [-8.0], [-9.0]]).expand(-1, WIDTH))
    module = with_weights_of(whole, ds_config(**changes) if under_init else None)
    engine = start_net(ep_size, gas=2, clip=0.5, params={"eps": 1e-8}, module=module, groups=groups, **changes)
    reference = Reference(trainable(whole), recipe(whole, num_batches, gas=2, clip=0.5, eps=1e-8))
    for step in range(STEPS):
        losses, done = whole_step(whole, reference, step, 2)
        if silent:
            assert all(float(done.grads[f"layers.{i}.mlp.experts.w1"][2:].abs().max()) == 0 for i in (0, 1))
        own = losses[2 * dist.get_rank():2 * dist.get_rank() + 2]
        assert train_step(engine, step, 2) == pytest.approx(own, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(done.norm, rel=1e-5)
    assert_weights(engine.module, reference.params, tolerance=2e-5)
    engine.destroy()


class TestTraining(DistributedTest):
    world_size = [2, 4]
    thorough_on = (2,)

    @pytest.mark.parametrize("stage", FROM_2)
    def test_gradients_norm_and_weights(self, stage):
        for ep_size, gas in zip(ep_sizes(), (2, 1, 2)):
            check_whole_numbers(ep_size, gas, stage=stage)

    @pytest.mark.parametrize("stage", AT_3)
    @pytest.mark.parametrize("silent", [pytest.param(False, marks=pytest.mark.thorough), True])
    def test_a_real_forward_pass(self, stage, silent):
        for ep_size in ep_sizes():
            check_forward_pass(ep_size, silent=silent, stage=stage)
            if stage == 3 and (THOROUGH or ep_size == 2):
                check_forward_pass(ep_size, silent=silent, under_init=True, zero_optimization={
                    "stage": 3, "stage3_param_persistence_threshold": 0})

    @pytest.mark.parametrize("stage", AT_3)
    def test_adamw_trains_like_stock(self, stage):
        for ep_size in ep_sizes():
            module = StackNet()
            config = ds_config(gas=2, clip=0.5, stage=stage, expert_parallel=section(ep_size),
                               optimizer={"type": "AdamW", "params": {**ADAM, "torch_adam": True}})
            del config["layerwise"]
            stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
            params = {**ADAM, "matrix_optimizer": "muon", "muon_lr": 0.02, "decay_vectors": True}
            engine = start_net(ep_size, gas=2, clip=0.5, stage=stage, layerwise=ALL_SCALAR,
                               optimizer={"type": "LayerWise", "params": params})
            for step in range(STEPS):
                assert train_step(engine, step, 2) == pytest.approx(train_step(stock, step, 2), abs=1e-6)
                assert engine.get_global_grad_norm() == pytest.approx(float(stock.get_global_grad_norm()), rel=1e-6)
            for each in (stock, engine):
                each.destroy()

    @pytest.mark.world_size(2)
    def test_routes(self):
        override = {"name": "layers.1.*.router.gate.weight", "optimizer": "scalar"}
        engine = start_net(2, layerwise={"overrides": [override]})
        routes = engine.optimizer.routes
        assert [routes[f"layers.{i}.mlp.router.gate.weight"].recipe.rule for i in (0, 1)] == ["muon", "adamw"]
        assert {routes[f"layers.0.mlp.experts.{w}"].recipe.rule for w in ("w1", "w2", "w3")} == {"muon"}

    @pytest.mark.world_size(2)
    def test_errors(self):
        with pytest.raises(ConfigError, match=r"w1 is a stack of experts, of which 2 ranks .* normuon has a state"):
            start_net(2, optimizer={"type": "LayerWise", "params": {
                "matrix_optimizer": "normuon", "lr": 0.01, "muon_lr": 0.02}})
        module = StackNet()
        module.layers[0].mlp.experts.w2.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"save_universal is true, and layers.0.*w2 belongs to an expert"):
            start_net(2, module=module, layerwise={"save_universal": True})
        with pytest.raises(ConfigError, match=r"load_balance_coeff=0.001 is not supported in this AutoEP build"):
            start(StackNet(), ds_config(expert_parallel=section(2, load_balance_coeff=1e-3)))
        with pytest.raises(RoutingError, match="there is nothing to train"):
            ds_layerwise.initialize(model=StackNet(), model_parameters=[], config=ds_config(expert_parallel=section(2)))
        with pytest.raises(ConfigError, match=r"no MoE layers detected for moe_layer_pattern='none'"):
            start(StackNet(), ds_config(expert_parallel=section(2, moe_layer_pattern="none")))


class Listed(nn.Module):
    """Experts as the page wants those of one's own model: modules in a list."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(NUM_EXPERTS))

    def forward(self, x):
        best, chosen = self.gate(x).softmax(-1).topk(TOP, -1)
        best = best / best.sum(-1, keepdim=True)
        out = 0
        for number, expert in enumerate(self.experts):
            hidden = nn.functional.silu(expert["gate_proj"](x)) * expert["up_proj"](x)
            out = out + expert["down_proj"](hidden) * (best * (chosen == number)).sum(-1, keepdim=True)
        return out


class TestOwnModel(DistributedTest):
    world_size = 2

    def test_the_section_of_the_page(self):
        """The first loss is that of the model as it is: so each name of the section has found its part."""
        block, = (block for block in blocks("json") if "moe_layer_pattern" in block.text)
        given = json.loads(block.text)["expert_parallel"]
        torch.manual_seed(0)
        module = StackNet()
        for layer in module.layers:
            layer.mlp = Listed()
        ids = torch.arange(12).view(2, 6)
        expected = module(ids).item()
        engine = start(module, ds_config(expert_parallel={**given, "use_grouped_mm": False}))
        loss = engine(ids)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        engine.backward(loss)
        engine.step()
        rules = {name: route.recipe.rule for name, route in engine.optimizer.routes.items() if ".mlp." in name}
        assert rules == {f"layers.{layer}.mlp.{name}": "muon" for layer in (0, 1)
                         for name in ("router.gate.weight", "experts.w1", "experts.w2", "experts.w3")}


def with_weights_of(whole, config=None, make=StackNet):
    """A model of the weights of ``whole``; with a config it is cut from the start."""
    with deepspeed.zero.Init(config_dict_or_path=config) if config else nullcontext():
        module = make()
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0), torch.no_grad():
        for own, value in zip(module.parameters(), whole.parameters(), strict=True):
            own.copy_(value)
    return module


def qwen():
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True))


class TestQwen(DistributedTest):
    """Qwen3-MoE of transformers, by DeepSpeed's preset."""

    world_size = 2

    def losses(self, ep_size, stage=1):
        changes = {"expert_parallel": {"enabled": True, "autoep_size": ep_size, "use_grouped_mm": False}}
        config = ds_config(clip=0.5, stage=stage, layerwise=ALL_SCALAR, **changes if ep_size else {})
        engine = start(with_weights_of(qwen(), config if stage == 3 else None, qwen), config)
        losses = []
        for step in range(STEPS):
            ids = batch(step, 0, dist.get_rank())
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses += [float(loss.detach()), float(engine.get_global_grad_norm())]
        return losses

    def test_trains_like_one_without_where_deepspeed_can(self):
        if unmet("transformers<5.23", "AutoEP of DeepSpeed 0.19.8 fails with newer ones") is None:
            plain = self.losses(0)
            for stage in (1, 3)[:1 + (unmet(*KNOWS_STAGE_3) is None)]:
                assert self.losses(2, stage) == pytest.approx(plain, rel=1e-5)
        else:
            with pytest.raises(ConfigError, match="AutoEP of DeepSpeed .* install 'transformers<5.23'"):
                self.losses(2)


def check_verified(folder):
    assert cli.main(["verify", str(folder)]) == 0


def all_weights(engine):
    """Every parameter, with the experts of all ranks, by its name in a checkpoint."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        everyone = from_all_ranks({name: p.detach().clone() for name, p in trainable(engine.module).items()})
    whole = {}
    for name, first in everyone[0].items():
        whole[name] = first
        if first.dim() == 3:
            whole[name] = torch.cat([of_rank[name] for of_rank in everyone[:NUM_EXPERTS // first.shape[0]]])
            assert torch.equal(own_part(first, whole[name]), everyone[dist.get_rank()][name]), name
    return whole


class TestCheckpoints(DistributedTest):
    """Any number of ranks and any placement of experts onto any other: a stack is one parameter in a file."""

    world_size = [1, 2, 4]
    thorough_on = (1, 2)
    #: By ranks and placement, and at ZeRO stage 3.
    SAVED = ("1_1", "2_1", "2_2", "4_2", "4_4", *("2_2_3", "4_2_3", "4_4_3") * (unmet(*KNOWS_STAGE_3) is None))

    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints in folders that are called as ranks_placement."""
        return made_once(class_tmpdir / "runs", type(self).world_size, self.save)

    def save(self, folder):
        for ep_size, at_stage_3 in product(ep_sizes(), (False, True)):
            run = folder / (f"{dist.get_world_size()}_{ep_size}" + "_3" * at_stage_3)
            if run.name in self.SAVED:
                stage = 3 if at_stage_3 else 1 + ep_size % 2
                engine = start_net(ep_size, fake=True, layerwise={"save_universal": True, **CUT}, stage=stage)
                train_experts(engine, 0, 3)
                engine.save_checkpoint(run, tag="saved")
                states, now = whole_states(engine), all_weights(engine)
                train_experts(engine, 3, 5)
                later = all_weights(engine)
                if dist.get_rank() == 0:
                    torch.save((states, now, later), run / "expected.pt")
                engine.destroy()
                if run.name.startswith("4_2"):
                    on_rank_0(lambda: check_from_outside(run, states))

    @pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), ENDS[1]])
    def test_resume(self, runs, stage):
        world = dist.get_world_size()
        for ep_size in ep_sizes():
            engine = start_net(ep_size, fake=True, layerwise=CUT, stage=stage)
            # From fewer and from as many ranks as there may be, from stages 1, 2 and 3.
            for saved in self.SAVED if THOROUGH else {"2_1", "4_2", self.SAVED[-1]}:
                states, now, later = torch.load(runs / saved / "expected.pt")
                tags = ["saved"]
                # A stack is whole in a universal checkpoint, whoever has saved it.
                if THOROUGH or saved in ("4_2", self.SAVED[-1]):
                    tags.append("saved_universal")
                for tag in tags:
                    train_experts(engine, 9, 10)
                    engine.load_checkpoint(runs / saved, tag=tag)
                    where = (saved, tag, "onto", world, ep_size)
                    assert engine.optimizer.fresh_states == {}, where
                    assert_equal_states(whole_states(engine), states, where)
                    assert_equal_states(all_weights(engine), now, where)
                    if saved.removesuffix("_3") == f"{world}_{ep_size}":
                        train_experts(engine, 3, 5)
                        assert_equal_states(all_weights(engine), later, where)
            engine.destroy()

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("stage", ENDS)
    def test_bf16_on_the_host(self, tmpdir, stage):
        offload = {"stage": stage, "reduce_bucket_size": 200, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        plain = start_net(2, fake=True, layerwise=CUT, **BF16)
        engine = start_net(2, fake=True, layerwise=CUT, **BF16, zero_optimization=offload)
        for each in (engine, plain):
            train_experts(each, 0, 3)
        assert internals.host_tensors(engine)
        assert_equal_states(whole_states(engine), whole_states(plain))
        engine.save_checkpoint(tmpdir, tag="saved")
        train_experts(engine, 3, 5)
        plain.load_checkpoint(tmpdir, tag="saved")
        train_experts(plain, 3, 5)
        assert_equal_states(whole_states(engine), whole_states(plain))
        assert_equal_states(all_weights(engine), all_weights(plain))

    @pytest.mark.world_size(4)
    def test_frozen_experts(self, tmpdir):
        expected = {}
        for ep_size in (2, 4):
            module = StackNet()
            module.layers[0].mlp.experts.w1.requires_grad_(False)
            engine = start_net(ep_size, module=module, fake=True)
            frozen = engine.module.get_parameter("inner.layers.0.mlp.experts.w1")
            if ep_size == 2:
                train_experts(engine, 0, 2)
                engine.save_checkpoint(tmpdir, tag="saved")
                on_rank_0(lambda: check_verified(tmpdir / "saved"))
                expected = whole_states(engine)
            else:
                frozen.data.zero_()
                engine.load_checkpoint(tmpdir, tag="saved")
                assert_equal_states(whole_states(engine), expected)
                with pytest.raises(LayerWiseError, match="w1 belongs to an expert and is not trained"):
                    engine.optimizer.sharded_state_dict()
            assert torch.equal(frozen, own_part(frozen, StackNet().layers[0].mlp.experts.w1))

    @pytest.mark.world_size(4)
    @needs("deepspeed>=0.19.8", "its ds_to_universal.py converts no AutoEP at these stages")
    def test_converted(self, runs, tmpdir):
        convert(runs / "4_2" / "saved", tmpdir / "converted", inject=True)
        engine = start_net(4, fake=True, layerwise=CUT)
        engine.load_checkpoint(tmpdir, tag="converted")
        states, now, _ = torch.load(runs / "4_2" / "expected.pt")
        assert_equal_states(whole_states(engine), states)
        assert_equal_states(all_weights(engine), now)

    @pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), ENDS[1]])
    def test_resume_what_was_saved_without(self, runs, tmpdir, stage):
        engine = start_net(0, fake=True, layerwise={"save_universal": True, **CUT})
        train_experts(engine, 0, 3)
        engine.save_checkpoint(tmpdir, tag="saved")
        states, now = whole_states(engine), all_weights(engine)
        engine.destroy()
        for ep_size in ep_sizes():
            rename = {new: old for old, new in RENAME.items()}
            engine = start_net(ep_size, fake=True, layerwise={"rename": rename, **CUT}, stage=stage)
            for tag, weights_alone in (("saved", False), ("saved_universal", False), ("saved", True)):
                train_experts(engine, 9, 10)
                engine.load_checkpoint(tmpdir, tag=tag, load_module_only=weights_alone)
                for name, value in all_weights(engine).items():
                    assert torch.equal(value, now[f"inner.{saved_name(name)}"]), (ep_size, tag, name)
                if weights_alone:
                    continue
                found = {(f"inner.{saved_name(name)}", key): value
                         for (name, key), value in whole_states(engine).items()}
                assert_equal_states(found, states, (ep_size, tag))
            engine.destroy()

    @pytest.mark.parametrize("dense_stage", [pytest.param(1, marks=pytest.mark.thorough), 3])
    def test_resume_without(self, runs, dense_stage):
        engine = start_net(0, fake=True, layerwise={"rename": RENAME, **CUT}, stage=dense_stage)
        for saved in {"2_2", "4_2", "2_2_3", "4_2_3"}.intersection(self.SAVED):
            states, now, _ = torch.load(runs / saved / "expected.pt")
            for tag in ("saved", "saved_universal"):
                engine.load_checkpoint(runs / saved, tag=tag)
                renamed = {(f"inner.{saved_name(name)}", key): value for (name, key), value in states.items()}
                assert_equal_states(whole_states(engine), renamed, (saved, tag))
                found = all_weights(engine)
                for name, value in now.items():
                    assert torch.equal(found[f"inner.{saved_name(name)}"], value), (saved, tag, name)
        _, now, _ = torch.load(runs / "2_2" / "expected.pt")
        engine.load_checkpoint(runs / "2_2", tag="saved", load_module_only=True)
        found = all_weights(engine)
        for name, value in now.items():
            assert torch.equal(found[f"inner.{saved_name(name)}"], value), name
