"""QK-clip: queries and keys of heads whose logits were too large come down after the update, on every rank alike."""

import os

import deepspeed.comm as dist
import pytest
import torch

from tests.support import internals
from tests.support.attention import (
    KINDS,
    Attends,
    attention_modules,
    clip_plainly,
    largest_by_head,
    model_of,
    plain_logits,
    tokens_of,
)
from tests.support.checkpoints import masters
from tests.support.harness import DistributedTest
from tests.support.reference import Recipe, Reference, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, ds_config, start, train_engine

pytestmark = rooms("attention", "attention_hook", "attention_logits", "qk_clip", "scaled", "update")

STEPS, ALPHA, THOROUGH = 3, 0.3, os.environ.get("THOROUGH") == "1"


def threshold_of(kind):
    """What some heads are above, and others are not."""
    return 4.5 if "latent" in kind else 7.5


def engine_of(kind, *, layerwise=None, attention="sdpa", **changes):
    clip = {"qk_clip": {"threshold": threshold_of(kind), "alpha": ALPHA}, "auto_split": False}
    return start(Attends(model_of(kind, attention=attention)),
                 ds_config(**{"layerwise": {**clip, **(layerwise or {})}, "bucket_numel": 1500, **changes}))


def oracle_of(kind, *, world_size, gas=1, steps=STEPS, alpha=ALPHA, scalar=()):
    """Masters, and by step the largest logits by module and head: plain updates, each followed by a plain clip."""
    module = Attends(model_of(kind, attention="eager"))
    params = trainable(module)
    tables = {id(each.weight) for each in module.modules() if isinstance(each, torch.nn.Embedding)}
    tables |= {id(module.model.get_output_embeddings().weight)}
    matrices = {name: (1, *p.shape) for name, p in params.items()
                if p.dim() == 2 and id(p) not in tables and not name.endswith(scalar)}
    oracle = Reference(params, Recipe(matrices=matrices, world_size=world_size, gas=gas, muon_lr=0.02, adam_lr=0.003,
                                      weight_decay=0.1))
    seen = []
    for step in range(steps):
        places = [[(step, micro, rank) for micro in range(gas)] for rank in range(world_size)]
        with plain_logits(module.model) as found, torch.no_grad():
            for place in (place for of_rank in places for place in of_rank):
                module.model(input_ids=tokens_of(place))
        seen.append(largest_by_head(found))
        oracle.step([[{name: whole_number_gradients(name, p.shape, *place) / gas for name, p in params.items()}
                      for place in of_rank] for of_rank in places])
        with torch.no_grad():
            for path, largest in seen[-1].items():
                clip_plainly(kind, oracle.params, f"model.{path}", largest, threshold_of(kind), alpha)
            for name, value in oracle.model_params().items():
                module.get_parameter(name).copy_(value)
    return oracle.params, seen


def assert_masters(engine, expected):
    found, params = masters(engine), internals.trained(engine)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].view(params[name].shape), value, rtol=2e-5, atol=2e-6,
                                   msg=lambda text, name=name: f"{name}: {text}")


class TestAgainstAPlainOne(DistributedTest):
    world_size = [1, 2, 3]

    def test_every_kind_of_attention(self):
        world_size = dist.get_world_size()
        for kind in list(KINDS) if THOROUGH else list(KINDS)[world_size - 1::3]:
            engine = engine_of(kind)
            train_engine(engine, STEPS)
            expected, seen = oracle_of(kind, world_size=world_size)
            assert_masters(engine, expected)
            assert_same_on_all_ranks(engine.module)
            found = engine.optimizer.max_attention_logits
            assert list(found) == [f"model.{path}" for path in attention_modules(engine.module.model)]
            for path, largest in seen[-1].items():
                assert found[f"model.{path}"] == pytest.approx(float(largest.max()), rel=1e-5)
            # Some heads were clipped, some were not, and that again after the first clip.
            over = torch.stack([torch.stack(list(each.values())) for each in seen]) > threshold_of(kind)
            assert over[0].any() and over[1:].any() and not over.all(), kind
            engine.destroy()


#: Of one engine each: stage, precision, what is where, and who updates queries.
SCALAR = ("q_proj.weight", "k_proj.bias")
BY_ADAM = {"overrides": [{"name": f"*{name}", "optimizer": "scalar"} for name in SCALAR[:1]]}
ON_HOST = {"stage": 1, "reduce_bucket_size": 1500, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
CHANGES = [{"stage": 2}, {"layerwise": BY_ADAM}, {"layerwise": {"overlap_param_gather": True}},
           {"zero_optimization": ON_HOST}, {"attention": "eager", "gas": 2}]


class TestHow(DistributedTest):
    world_size = 2
    kind = "grouped, with biases"

    def test_all_ways_give_what_the_plain_one_does(self):
        for changes in CHANGES:
            engine, gas = engine_of(self.kind, **changes), changes.get("gas", 1)
            train_engine(engine, STEPS, gas=gas)
            scalar = SCALAR if changes.get("layerwise") is BY_ADAM else ()
            assert_masters(engine, oracle_of(self.kind, world_size=2, gas=gas, scalar=scalar)[0])
            assert_same_on_all_ranks(engine.module)
            engine.destroy()

    def test_masters_are_clipped_and_weights_are_what_they_round_to(self):
        engine = engine_of(self.kind, bf16={"enabled": True})
        before = masters(engine)
        # Nothing moves but by the clip.
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train_engine(engine, 1)
        found, clipped = masters(engine), 0
        largest = engine.optimizer.max_attention_logits
        for name, param in internals.trained(engine).items():
            ratio = found[name] / before[name]
            clipped += int(not torch.equal(ratio, torch.ones_like(ratio)))
            assert torch.equal(found[name].view(param.shape).bfloat16(), param), name
            # A head is scaled as a whole, in float32: no rounding to bfloat16 shows.
            if name.endswith("q_proj.weight"):
                of_heads = ratio.view(2, -1)
                torch.testing.assert_close(of_heads, of_heads[:, :1].expand_as(of_heads), rtol=1e-6, atol=0)
        assert clipped == 8 and min(largest.values()) > threshold_of(self.kind)

    def test_the_same_batch_then_has_logits_at_the_threshold(self):
        for kind in ("separate", "grouped, with biases", "latent"):
            engine = engine_of(kind)
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            place, model = (0, 0, dist.get_rank()), engine.module.model
            plain = model_of(kind, attention="eager")
            found = []
            for _ in range(2):
                plain.load_state_dict(model.state_dict())
                with plain_logits(plain) as logits, torch.no_grad():
                    for rank in range(2):
                        plain.train()(input_ids=tokens_of((0, 0, rank)))
                found.append(largest_by_head(logits))
                engine.backward(engine(place))
                engine.step()
            # The first layer alone: what later ones see has changed.
            before, after = (next(iter(each.values())) for each in found)
            units = before.view(2, -1) if "grouped" in kind else before.view(-1, 1)
            eta = (threshold_of(kind) / units.amax(1, keepdim=True)).clamp(max=1)
            assert (eta < 1).any()
            torch.testing.assert_close(after.view_as(units), units * eta, rtol=1e-5, atol=0)
            assert after.max() <= threshold_of(kind) * (1 + 1e-5)
            engine.destroy()
