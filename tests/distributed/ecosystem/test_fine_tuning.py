"""Parts of a model are trained: adapters, a head on a frozen backbone, groups with their own rates, empty groups."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

import ds_layerwise
from ds_layerwise.errors import RoutingError, StepError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, loaded, whole_states
from tests.support.expected import assert_trained_as, by_the_oracle, compared_to
from tests.support.harness import DistributedTest
from tests.support.models import token_batch
from tests.support.reference import Recipe, train, trainable
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    assert_same_on_all_ranks,
    ds_config,
    recipe_for,
    reduced_gradients,
    relative_error,
    start,
    train_engine,
)

# peft 0.21 asks transformers 5 for what that one has renamed.
pytestmark = [*rooms("routing_rules", "param_groups"),
              pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")]

WIDTH, VOCAB = 16, 24
BLOCK = "inner.base_model.model.transformer.h.0."


class Lora(nn.Module):
    """A block of GPT-2 with adapters of rank 4 at its attention and its embedding, and its last norm trained."""

    adapters = {"target_modules": ["c_attn", "wte"], "modules_to_save": ["ln_f"]}

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            base = GPT2LMHeadModel(GPT2Config(
                vocab_size=VOCAB, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM"))
            self.inner = get_peft_model(base, LoraConfig(r=4, fan_in_fan_out=True, **self.adapters))

    def forward(self, tokens):
        return self.inner(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss


class SomeTokens(Lora):
    """The same with adapters at its attention, and three rows of its embedding trained."""

    adapters = {"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [1, 2, 3]}}


#: The factors, which have a matrix's two axes each.
FACTORS = {"inner.base_model.model.transformer.wte.lora_embedding_A.default": (1, 4, VOCAB),
           "inner.base_model.model.transformer.wte.lora_embedding_B.default": (1, WIDTH, 4),
           f"{BLOCK}attn.c_attn.lora_A.default.weight": (1, 4, WIDTH),
           f"{BLOCK}attn.c_attn.lora_B.default.weight": (1, 3 * WIDTH, 4)}
NORM = {f"inner.base_model.model.transformer.ln_f.modules_to_save.default.{name}" for name in ("weight", "bias")}


def frozen(module):
    return {name: param.detach().clone() for name, param in module.named_parameters() if not param.requires_grad}


def train_on_tokens(engine, num_steps, *, first=0):
    losses = []
    for step in range(first, first + num_steps):
        losses.append(engine(token_batch(step, 0, dist.get_rank())))
        engine.backward(losses[-1])
        engine.step()
    mean = torch.stack(losses).detach()
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


class TestLora(DistributedTest):
    def test_training_is_as_the_oracle(self, stage):
        to_adam = {"overrides": [{"name": "*.lora_embedding_*", "optimizer": "scalar"}]}
        fewer = {name: view for name, view in FACTORS.items() if "lora_embedding" not in name}
        all_to_adam = {"overrides": [{"name": "*.lora_*", "optimizer": "scalar"}]}
        for layerwise, matrices in (({}, FACTORS), (to_adam, fewer), (all_to_adam, {})):
            recipe = Recipe(matrices=matrices, world_size=2, clip=1.0, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1,
                            eps=1e-8)
            expected = train(Lora, token_batch, lambda module, tokens: module(tokens), recipe, 6)
            module = Lora()
            before = frozen(module)
            engine = start(module, ds_config(stage=stage, clip=1.0, layerwise=layerwise, params={"eps": 1e-8}))
            assert engine.optimizer.routes.keys() == FACTORS.keys() | NORM
            assert train_on_tokens(engine, 6) == pytest.approx(expected.losses, rel=1e-5)
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[-1].norm, rel=1e-4)
            assert_trained_as(module, expected, 1e-4)
            assert_equal_states(frozen(module), before)
            assert_same_on_all_ranks(module)
            # Padding apart, there is memory for what is trained alone.
            largest = sum(param.numel() + 64 for param in trainable(module).values()) + 64 * 2
            assert all(tensor.numel() <= largest for buffer in internals.buffers(engine) for tensor in buffer.tensors)
            engine.destroy()

    def test_rows_of_an_embedding_go_where_embeddings_go(self):
        matrices = {name: view for name, view in FACTORS.items() if name.startswith(BLOCK)}
        recipe = Recipe(matrices=matrices, world_size=2, clip=1.0, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1,
                        eps=1e-8)
        expected = train(SomeTokens, token_batch, lambda module, tokens: module(tokens), recipe, 4)
        engine = start(SomeTokens(), ds_config(clip=1.0, params={"eps": 1e-8}))
        name = "inner.base_model.model.transformer.wte.token_adapter.trainable_tokens_delta.default"
        assert engine.optimizer.routes.keys() == {*matrices, name}
        assert engine.optimizer.routes[name].reason == "embedding (rows of one, by peft)"
        assert train_on_tokens(engine, 4) == pytest.approx(expected.losses, rel=1e-5)
        assert_trained_as(engine.module, expected, 1e-4)

    def test_saved_alone_then_resumed_then_all_is_unfrozen(self, tmp_path):
        engine = start(Lora(), ds_config(layerwise={"save_universal": True}))
        train_on_tokens(engine, 3)
        engine.save_checkpoint(tmp_path, tag="saved", exclude_frozen_parameters=True)
        saved = torch.load(tmp_path / "saved" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        # DeepSpeed leaves out what is frozen by one name each, and the head is the embedding under another.
        assert saved.keys() == FACTORS.keys() | NORM | {"inner.base_model.model.lm_head.weight"}
        expected, weights = whole_states(engine), trainable(engine.module)
        losses = train_on_tokens(engine, 2, first=3)

        for tag in ("saved", "saved_universal"):
            resumed = start(Lora(), ds_config())
            train_on_tokens(resumed, 1)
            resumed.load_checkpoint(tmp_path, tag=tag, load_module_strict=False)
            assert resumed.optimizer.fresh_states == {}
            assert_equal_states(whole_states(resumed), expected, tag)
            assert train_on_tokens(resumed, 2, first=3) == losses
            for name, param in weights.items():
                assert torch.equal(resumed.module.get_parameter(name), param), (tag, name)
            resumed.destroy()

            module = Lora().requires_grad_(True)
            before = {name: param.detach().clone() for name, param in module.named_parameters()}
            full = loaded(start(module, ds_config()), tmp_path, tag=tag, load_module_strict=False)
            base = before.keys() - FACTORS.keys() - NORM
            assert full.optimizer.fresh_states == dict.fromkeys(base, "no state in the checkpoint")
            found = whole_states(full)
            assert_equal_states({key: value for key, value in found.items() if key[0] not in base}, expected, tag)
            for (name, key), value in found.items():
                if name in base:
                    assert torch.equal(value, before[name].flatten()) if key == "fp32" else not value.any(), (name, key)
            train_on_tokens(full, 1, first=3)
            full.destroy()


class TestFrozenBackbone(DistributedTest):
    world_size = 3

    def make(self):
        module = Net().requires_grad_(False)
        for layer in (module.head, module.twin):
            layer.requires_grad_(True)
        return module

    def test_it_stays_and_takes_no_memory(self):
        expected = by_the_oracle(self.make, 4, clip=5.0)
        for stage in (1, 2):
            module = self.make()
            before = frozen(module)
            engine = train_engine(start(module, ds_config(clip=5.0, stage=stage)), 4)
            assert_trained_as(module, expected)
            assert_equal_states(frozen(module), before)
            layout = engine.optimizer.layout
            assert {slot.name for bucket in layout.buckets for slot in bucket.slots} == {"head.weight", "twin.weight"}
            assert all(param.grad is None for param in module.parameters())
            engine.destroy()

    @pytest.mark.world_size(1)
    def test_unfreezing_in_the_middle_of_a_run_is_an_error(self):
        engine = train_engine(start(self.make(), ds_config()), 1)
        engine.module.tall.weight.requires_grad = True
        with pytest.raises(StepError, match="tall.weight requires .* was frozen when this engine was made"
                                             ".*resume in a new engine"):
            train_engine(engine, 1)

    @pytest.mark.world_size(1)
    def test_a_group_more_in_the_middle_of_a_run_is_an_error(self):
        engine = start(self.make(), ds_config())
        with pytest.raises(StepError, match="parameter groups cannot be added to an engine"):
            engine.basic_optimizer.add_param_group({"params": [engine.module.tall.weight]})
        assert len(engine.optimizer.param_groups) == 1


#: A factor of the learning rate by the place of a group, as a scheduler of the user would have it.
FACTOR = (lambda step: 1.0, lambda step: 0.5**step, lambda step: 0.1, lambda step: 1 / (1 + step), lambda step: 1.0)


class TestGroups(DistributedTest):
    def groups(self, module):
        """Group 0 is empty, group 2 holds what is frozen; ``embed`` is in none."""
        module.experts.requires_grad = False
        slow = [module.square.weight, module.square.bias]
        last = [module.flat.weight, module.norm.bias, module.flat.bias]
        taken = {id(p) for p in [*slow, *last, module.experts, module.embed.weight]}
        rest = [p for p in module.parameters() if id(p) not in taken]
        yield {"params": [], "lr": 0.5}
        yield {"params": slow, "lr": 0.004, "muon_lr": 0.004, "weight_decay": 0.3}
        yield {"params": [module.experts]}
        yield {"params": iter(rest), "name": "rest"}
        yield {"params": last, "muon_lr": 0.01, "adam_lr": 0.001, "weight_decay": 0.0}

    def oracle(self, num_steps):
        def make():
            module = Net()
            # What is in no group is not trained.
            module.embed.requires_grad_(False)
            module.experts.requires_grad = False
            return module

        lr = {"square.weight": 0.004, "square.bias": 0.004, "flat.weight": 0.01, "flat.bias": 0.001, "norm.bias": 0.001}
        wd = {"square.weight": 0.3, "square.bias": 0.3, "flat.weight": 0.0, "flat.bias": 0.0, "norm.bias": 0.0}
        place = dict.fromkeys(trainable(make()), 3)
        place.update(dict.fromkeys(("square.weight", "square.bias"), 1))
        place.update(dict.fromkeys(("flat.weight", "flat.bias", "norm.bias"), 4))

        class Scheduled(Recipe):
            def lr_of(self, name, step):
                return super().lr_of(name, step) * FACTOR[place[name]](step)

        recipe = recipe_for(make(), lr=lr, wd=wd, clip=5.0)
        return train(make, lambda *place: place, lambda module, place: module(place),
                     Scheduled(**vars(recipe)), num_steps)

    def start(self, module, **config):
        return ds_layerwise.initialize(
            model=module, model_parameters=self.groups(module), config=ds_config(clip=5.0, **config),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, list(FACTOR)))[0]

    def test_they_keep_their_place_their_rates_and_their_decay(self, stage, tmp_path):
        expected, module = self.oracle(5), Net()
        initial = {name: getattr(module, name).weight.detach().clone() for name in ("embed",)}
        engine = self.start(module, stage=stage)
        groups = engine.optimizer.param_groups
        assert [len(group["params"]) for group in groups] == [0, 2, 1, 7, 3]
        assert [group["lr"] for group in groups] == [pytest.approx(lr) for lr in (0.5, 0.004, 0.0003, 0.003, 0.003)]
        assert groups[3]["name"] == "rest" and groups is engine.basic_optimizer.param_groups

        train_engine(engine, 3, check=compared_to(expected))
        assert engine.get_lr() == [pytest.approx(lr) for lr in (0.5, 0.004 / 8, 0.0003, 0.003 / 4, 0.003)]
        engine.save_checkpoint(tmp_path, tag="tag")
        engine.destroy()

        resumed = self.start(Net(), stage=stage)
        resumed.load_checkpoint(tmp_path, tag="tag")
        train_engine(resumed, 2, first=3, check=compared_to(expected))
        for name, param in trainable(resumed.module).items():
            if name != "embed.weight":
                assert relative_error(param.detach(), expected.model_params[name]) < 1e-5, name
        assert torch.equal(resumed.module.embed.weight, initial["embed"])
        assert_same_on_all_ranks(resumed.module)

    def test_every_way_to_say_all_parameters(self):
        results = []
        for give in (lambda module: None, lambda module: module.parameters(), lambda module: list(module.parameters()),
                     lambda module: (p for p in module.parameters() if p.requires_grad),
                     lambda module: [{"params": module.parameters()}], lambda module: module.named_parameters(),
                     lambda module: iter([{"params": list(module.parameters())}, {"params": []}])):
            module = Net(frozen=True)
            ds_layerwise.register()
            engine, *_ = deepspeed.initialize(model=module, model_parameters=give(module), config=ds_config())
            train_engine(engine, 2)
            results.append((reduced_gradients(engine), {n: p.detach().clone() for n, p in module.named_parameters()}))
            engine.destroy()
        for gradients, params in results[1:]:
            assert gradients.keys() == results[0][0].keys()
            assert_equal_states(params, results[0][1])

    @pytest.mark.world_size(1)
    def test_groups_that_cannot_be_meant(self):
        module = Net()
        groups = [{"params": list(module.parameters())}, {"params": [module.tall.weight]}]
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            ds_layerwise.initialize(model=module, model_parameters=groups, config=ds_config())
        module.experts.requires_grad = False
        for groups in ([], [{"params": []}], [{"params": [module.experts]}]):
            with pytest.raises((RoutingError, ValueError), match="there is nothing to train|empty parameter list"):
                ds_layerwise.initialize(model=module, model_parameters=groups, config=ds_config())
