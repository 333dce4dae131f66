"""QK-clip: queries and keys of heads whose logits were too large come down after the update, on every rank."""

import csv
import os

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

import ds_layerwise
from ds_layerwise.errors import ConfigError, RoutingError, StepError
from tests.support import internals
from tests.support.attention import (
    KINDS,
    LENGTH,
    Attends,
    attention_modules,
    clip_plainly,
    entry_of,
    largest_by_head,
    model_of,
    plain_logits,
    tokens_of,
)
from tests.support.checkpoints import masters
from tests.support.expected import assert_close
from tests.support.harness import DistributedTest
from tests.support.models import Block
from tests.support.reference import Recipe, Reference, trainable, whole_number_gradients, whole_number_loss
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu, mark, part
from tests.support.training import allow_fp16, assert_same_on_all_ranks, ds_config, start, train_engine
from tests.support.versions import needs

pytestmark = rooms("attention", "attention_hook", "attention_logits", "qk_clip_settings", "row_scaling", "update")

STEPS, ALPHA, THOROUGH = 2, 0.3, os.environ.get("THOROUGH") == "1"


def threshold_of(kind):
    """A logit that some heads are above, and others are not."""
    return 4.5 if "latent" in kind else 7.5


def clip_of(kind):
    return {"qk_clip": {"threshold": threshold_of(kind), "alpha": ALPHA, "attention": [entry_of(kind)]}}


def engine_of(kind, *, layerwise=None, **changes):
    clip = {**clip_of(kind), "auto_split": False}
    return start(Attends(model_of(kind)),
                 ds_config(**{"layerwise": {**clip, **(layerwise or {})}, "bucket_numel": 1500, **changes}))


def oracle_of(kind, *, world_size, gas=1, steps=STEPS, alpha=ALPHA, scalar=(), length=LENGTH):
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
                module.model(input_ids=tokens_of(place)[:, :length])
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
    found = masters(engine)
    assert found.keys() == expected.keys()
    assert_close(found, expected, rtol=2e-5, atol=2e-6)


def stand_still(engine):
    """Let nothing move weights but a clip."""
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0


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
            # Some heads were clipped, some were not.
            over = torch.stack([torch.stack(list(each.values())) for each in seen]) > threshold_of(kind)
            assert over[0].any() and not over.all(), kind
            engine.destroy()


#: Changes of an engine each: stage, update of queries, time of sending, host, micro-batches.
SCALAR = ("q_proj.weight", "k_proj.bias")
BY_ADAM = {"overrides": [{"name": f"*{name}", "optimizer": "scalar"} for name in SCALAR[:1]]}
ON_HOST = {"stage": 1, "reduce_bucket_size": 1500, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
CHANGES = [{"stage": 2}, {"layerwise": BY_ADAM}, {"layerwise": {"overlap_param_gather": True}},
           {"zero_optimization": ON_HOST}, {"gas": 2}]


class TestHow(DistributedTest):
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
        for changes in ({}, {"zero_optimization": {**ON_HOST, "offload_optimizer": {"device": "cpu"}}}):
            self.clip_and_round(engine_of(self.kind, bf16={"enabled": True}, **changes))

    def clip_and_round(self, engine):
        before = masters(engine)
        stand_still(engine)
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
            stand_still(engine)
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


class OwnAttention(torch.nn.Module):
    """Queries and keys of two heads, whose largest logits are what it is told."""

    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(6, 8), torch.nn.Linear(6, 8, bias=False)


class Own(torch.nn.Module):
    """A model of nobody's: ``forward`` calls ``before`` with itself, then has whole numbers for gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.attn, self.other, self.before = OwnAttention(), torch.nn.Linear(6, 6), lambda module: None
        self.dropped = OwnAttention()

    def forward(self, place):
        self.before(self)
        return whole_number_loss(self, place)


ENTRY = {"name": "attn", "heads": 2, "q": "q", "k": "k"}


def start_own(layerwise=None, **changes):
    own = {"qk_clip": {"threshold": 2.0, "attention": [ENTRY]}}
    return start(Own(), ds_config(layerwise=own if layerwise is None else layerwise, **changes))


def step_of(engine, *noted, number=0):
    """Take a step, in whose forward pass rank r notes ``noted[r]``, if that is not None."""
    own = noted[dist.get_rank()] if dist.get_rank() < len(noted) else None

    def before(module):
        if own is not None:
            engine.optimizer.note_attention_logits(module.attn, own)
    engine.module.before = before
    stand_still(engine)
    held = masters(engine)
    engine.backward(engine((number, 0, dist.get_rank())))
    engine.step()
    ratios = {name: value / held[name] for name, value in masters(engine).items()}
    return {name: ratio.view(2, -1)[:, 0].tolist() for name, ratio in ratios.items() if name.startswith("attn")}


class TestGiven(DistributedTest):
    def test_the_largest_of_all_ranks_and_passes_counts(self):
        engine = start_own()
        found = step_of(engine, [1.0, 3.0], torch.tensor([8.0, 1.0], dtype=torch.float64))
        root = (2 / 3) ** 0.5
        for name in ("attn.q.weight", "attn.q.bias", "attn.k.weight"):
            assert found[name] == pytest.approx([0.5, root], rel=1e-6)
        assert engine.optimizer.max_attention_logits == {"attn": 8.0}
        # Every step forgets; a rank may note nothing, and so may all.
        assert step_of(engine, None, [1.0, 4.0])["attn.q.weight"] == pytest.approx([1.0, 0.5 ** 0.5], rel=1e-6)
        assert step_of(engine)["attn.q.weight"] == [1.0, 1.0]
        assert engine.optimizer.max_attention_logits == {}
        assert "QK-clip: threshold 2, alpha 0.5, 1 attention module" in engine.optimizer.describe()

    def test_evaluation_does_not_count(self):
        engine = start_own()
        engine.eval()
        engine.module.before = lambda module: engine.optimizer.note_attention_logits("attn", [99.0, 99.0])
        engine((0, 0, 0))
        engine.train()
        assert step_of(engine, [1.0, 4.0])["attn.q.weight"] == pytest.approx([1.0, 0.5 ** 0.5], rel=1e-6)

    def test_evaluation_does_not_count_where_nothing_is_known_of_modules(self):
        engine = start_own({"log_max_attention_logit": True})
        engine.eval()
        for attention in ("attn", engine.module.attn):
            engine.optimizer.note_attention_logits(attention, [99.0, 99.0])
        engine.train()
        step_of(engine, [1.0, 4.0])
        assert engine.optimizer.max_attention_logits == {"": 4.0}
        # A name of the script's own will do, too.
        engine.optimizer.note_attention_logits("mine", [7.0, 6.0])
        step_of(engine, [1.0, 4.0], number=1)
        assert engine.optimizer.max_attention_logits == {"": 7.0}

    def test_a_skipped_step_forgets_them(self):
        allow_fp16()
        engine = start_own(fp16={"enabled": True, "loss_scale": 8})
        engine.module.before = lambda module: engine.optimizer.note_attention_logits("attn", [99.0, 99.0])
        engine.backward(engine((0, 0, 0)) * (float("nan") if dist.get_rank() else 1.0))
        engine.step()
        assert engine.skipped_steps == 1
        assert step_of(engine, [1.0, 4.0])["attn.k.weight"] == pytest.approx([1.0, 0.5 ** 0.5], rel=1e-6)

    @pytest.mark.parametrize("options", [{}, {"load_module_only": True}], ids=["all", "weights alone"])
    def test_a_load_forgets_them(self, options, tmp_path):
        engine = start_own()
        step_of(engine, [1.0, 1.0])
        engine.save_checkpoint(str(tmp_path))
        # The load replaces the weights of these: a run that has diverged goes on from the checkpoint.
        engine.optimizer.note_attention_logits("attn", [99.0, float("nan")])
        engine.load_checkpoint(str(tmp_path), **options)
        assert step_of(engine, [1.0, 4.0], number=1)["attn.q.weight"] == pytest.approx([1.0, 0.5 ** 0.5], rel=1e-6)

    def test_a_step_that_is_repeated_has_what_its_own_passes_noted(self, stage, tmp_path):
        found = []
        for resumes in (False, True):
            engine = start_own(gas=2, stage=stage)
            stand_still(engine)
            if resumes:
                engine.optimizer.note_attention_logits("attn", [99.0, 99.0])
                engine.load_checkpoint(str(tmp_path))
            for micro, noted in enumerate(([8.0, 1.0], [1.0, 3.0])):
                # Each comes from another rank.
                engine.module.before = lambda module, micro=micro, noted=noted: dist.get_rank() == micro and (
                    engine.optimizer.note_attention_logits(module.attn, noted))
                engine.backward(engine((0, micro, dist.get_rank())))
                engine.step()
                if not resumes and not micro:
                    engine.save_checkpoint(str(tmp_path))
            assert engine.optimizer.max_attention_logits == {"attn": 8.0}
            found.append(masters(engine))
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())

    def test_a_logit_that_is_not_finite_is_an_error_on_every_rank(self):
        engine = start_own()
        for wrong in (float("nan"), float("inf")):
            with pytest.raises(StepError, match="an attention logit of attn is not finite, though all gradients are"):
                step_of(engine, [1.0, wrong])
            assert engine.optimizer.step_count == 0
            engine.optimizer.zero_grad()
        assert step_of(engine, [1.0, float("-inf")])["attn.q.weight"] == [1.0, 1.0]

    def test_no_logits_at_all_are_an_error_in_the_first_update(self):
        none = "need attention logits of modules in training, and none came in the first update"
        for layerwise in (None, {"log_max_attention_logit": True}):
            engine = start_own(layerwise)
            with pytest.raises(ConfigError, match=f"{none}.*this model attends by none"):
                step_of(engine)
            assert engine.optimizer.step_count == 0
        engine = start(Attends(model_of("separate", attention="eager")), ds_config(layerwise=clip_of("separate")))
        with pytest.raises(ConfigError, match=f"{none}.*by eager.*own gives its logits to engine.optimizer.note_atten"):
            train_engine(engine, 1)

    def test_attention_without_logits_is_an_error_after_ten_updates(self):
        entry = {**ENTRY, "name": "*"}
        engine = start_own({"qk_clip": {"attention": [ENTRY, {**entry, "name": "dropped"}]}})
        for number in range(9):
            step_of(engine, [1.0, 1.0], number=number)
        with pytest.raises(StepError, match="got no attention logits of dropped in 10 updates"):
            step_of(engine, [1.0, 1.0], number=9)

    def test_wrong_calls(self):
        engine = start_own()
        note = engine.optimizer.note_attention_logits
        with pytest.raises(StepError, match="got 3 logits for attn, which has 2 heads on this rank"):
            note("attn", [1.0, 2.0, 3.0])
        with pytest.raises(StepError, match="got other, which is not among the attention modules of this model: attn"):
            note("other", [1.0, 2.0])
        with pytest.raises(StepError, match="is set; set one, or do not call"):
            start_own({}).optimizer.note_attention_logits("attn", [1.0, 2.0])

    def test_entries_must_be_for_something(self):
        with pytest.raises(ConfigError, match=r"qk_clip.attention\[0\].name is 'atn', and no module is called so"):
            start_own({"qk_clip": {"attention": [{**ENTRY, "name": "atn"}]}})

    def test_a_norm_that_is_kept_undoes_it(self):
        entry = {"name": "attn.k.weight", "hyperball": 1.0}
        with pytest.raises(RoutingError, match="qk_clip scales attn.k.weight down, but hyperball restores its"):
            start_own({"qk_clip": {"attention": [ENTRY]}, "overrides": [entry]})

    def test_weights_frozen_after_the_start_are_left(self):
        engine = start_own()
        step_of(engine, [1.0, 1.0])
        engine.module.attn.q.requires_grad_(False)
        engine.module.attn.k.requires_grad_(False)
        assert step_of(engine, [9.0, 9.0], number=1)["attn.k.weight"] == [1.0, 1.0]


class RootAttention(LlamaAttention):
    """All of a model."""

    def forward(self, place):
        x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(place[0]))
        cos, sin = torch.ones(1, 5, 8), torch.zeros(1, 5, 8)
        return super().forward(x, (cos, sin), None)[0].square().mean()


def written(folder):
    return {path.stem: [row for row in csv.reader(path.open())][1:] for path in (folder / "job").glob("*.csv")}


class TestReported(DistributedTest):
    def monitor(self, folder):
        return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}

    def test_the_monitor_has_them_either_way(self, tmp_path):
        for way in ({"qk_clip": {"threshold": 2.0, "attention": [ENTRY]}}, {"log_max_attention_logit": True}):
            clips, folder = "qk_clip" in way, tmp_path / str(len(way["qk_clip"]) if "qk_clip" in way else 0)
            engine = start_own(way, **self.monitor(folder))
            assert step_of(engine, [1.0, 4.0], [3.0, 2.0])["attn.k.weight"][1] == pytest.approx(
                0.5 ** 0.5 if clips else 1.0, rel=1e-6)
            step_of(engine, [1.5, 1.0], number=1)
            told = {key: value for key, value in engine.optimizer.report().items() if "logit" in key}
            assert told == {"max_attention_logit": 1.5, **({"max_attention_logit/attn": 1.5} if clips else {})}
            dist.barrier()
            found = written(folder)
            assert found["Train_Samples_max_attention_logit"] == [["2", "4.0"], ["4", "1.5"]]
            # The engine counts samples so.
            assert [row[0] for row in found["Train_Samples_lr"]] == ["2", "4"]
            assert ("Train_Samples_max_attention_logit_attn" in found) is clips
            dist.barrier()

    def test_a_model_of_transformers_is_measured_by_itself(self, tmp_path):
        engine = start(Attends(model_of("latent")), ds_config(layerwise={"log_max_attention_logit": True},
                                                              **self.monitor(tmp_path)))
        assert "attention logits: the largest are reported" in engine.optimizer.describe()
        train_engine(engine, 1)
        _, (seen,) = oracle_of("latent", world_size=2, steps=1)
        dist.barrier()
        found = written(tmp_path)
        for path, largest in seen.items():
            label = f"Train/Samples/max_attention_logit/model.{path}".replace("/", "_")
            # The writer takes what is behind the last point for a suffix of a file.
            name = next(each for each in found if label.startswith(each) and each.count(".") == label.count("."))
            assert float(found[name][0][1]) == pytest.approx(float(largest.max()), rel=1e-5)

    def test_a_model_that_is_an_attention_module_itself(self):
        config = LlamaConfig(hidden_size=32, intermediate_size=16, num_hidden_layers=1, vocab_size=32,
                             num_attention_heads=4, attn_implementation="sdpa")
        engine = start(RootAttention(config, 0), ds_config(layerwise={"log_max_attention_logit": True}))
        train_engine(engine, 1)
        assert engine.optimizer.max_attention_logits.keys() == {""}
        assert engine.optimizer.report()["max_attention_logit"] == engine.optimizer.max_attention_logits[""]

    def test_it_takes_one_collective_a_step_and_none_where_it_is_off(self, monkeypatch):
        counts = {}
        for on in (False, True):
            engine = start_own(None if on else {})
            calls, plain = [], dist.all_reduce

            def counted(*args, calls=calls, plain=plain, **kwargs):
                calls.append(args[0].numel())
                return plain(*args, **kwargs)
            monkeypatch.setattr(dist, "all_reduce", counted)
            engine.module.before = lambda module, on=on, engine=engine: (
                engine.optimizer.note_attention_logits("attn", [1.0, 1.0]) if on else None)
            train_engine(engine, 1)
            monkeypatch.undo()
            counts[on] = calls
        assert len(counts[True]) == len(counts[False]) + 1 and 3 in counts[True]


class TestTensorParallel(DistributedTest):
    world_size = 4

    def test_every_rank_clips_the_heads_that_it_has(self):
        """Two ranks have a head each, two copies of the model."""
        mpu, config = Mpu(2), ds_config(layerwise={"qk_clip": {"threshold": 2.0, "attention": [ENTRY]}})
        module = Own()
        for layer in (module.attn.q, module.attn.k):
            layer.weight = torch.nn.Parameter(part(layer.weight.data, 0, mpu))
            mark(layer.weight, 0, partition_stride=1)
        module.attn.q.bias = torch.nn.Parameter(part(module.attn.q.bias.data, 0, mpu))
        mark(module.attn.q.bias, 0, partition_stride=1)
        for layer in (module.dropped, module.other):
            layer.requires_grad_(False)
        engine = start(module, config, mpu=mpu)
        stand_still(engine)
        before = {name: p.detach().clone() for name, p in engine.module.attn.named_parameters()}
        logits = {0: 3.0, 1: 1.0, 2: 8.0, 3: 4.0}[dist.get_rank()]
        engine.module.before = lambda module: engine.optimizer.note_attention_logits(module.attn, [logits])
        engine.backward(engine((0, 0, dist.get_rank() // 2)))
        engine.step()
        eta = 2 / (8.0 if mpu.get_model_parallel_rank() == 0 else 4.0)
        for name, param in engine.module.attn.named_parameters():
            torch.testing.assert_close(param.detach(), before[name] * eta ** 0.5, rtol=1e-6, atol=1e-7)
        assert engine.optimizer.max_attention_logits == {"attn": 8.0}

    def test_weights_not_cut_into_heads_are_refused(self):
        mpu, module = Mpu(2), Own()
        with pytest.raises(RoutingError, match="attn.q.weight has to lie on 2 tensor-parallel ranks as whole heads"):
            start(module, ds_config(layerwise={"qk_clip": {"attention": [ENTRY]}}), mpu=mpu)


class AttendsToItsPart(Attends):
    """A model of which every rank sees its part of a sequence; the first rank of a sequence has its gradients."""

    def forward(self, place):
        step, micro, rank = place
        sequence, part = divmod(rank, self.parts)
        own = slice(part * 8 // self.parts, (part + 1) * 8 // self.parts)
        tokens = tokens_of((step, micro, sequence))[:, own]
        with torch.no_grad():
            self.model(input_ids=tokens, position_ids=torch.arange(8)[own].expand(2, -1))
        return whole_number_loss(self, (step, micro, sequence)) * (part == 0)


@needs("deepspeed>=0.19.8", "its groups of sequence parallelism cannot be made again in a process")
class TestSequences(DistributedTest):
    """Ulysses in transformers, where a rank's attention has whole sequences and a share of the heads."""

    world_size = [2, 4]
    thorough_on = (2,)

    @pytest.fixture
    def share(self):
        """Let so many ranks share each sequence of a model; its arguments of ``initialize``."""
        def share(model, size):
            assert parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None
            return {"mpu": UlyssesSPAttentionHF.register_with_transformers(
                model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=size,
                micro_batch_size=2)}
        ds_layerwise.measure_attention("sdpa")
        yield share
        self.forget()
        ds_layerwise.unregister()

    def forget(self):
        """Forget the sequences of an engine: DeepSpeed makes no groups again, and Ulysses stays."""
        parallel_state_sp._release_sequence_parallel_groups()
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)

    def test_logits_and_weights_are_those_of_whole_sequences(self, share):
        """Two heads share a key head, which four ranks of a sequence repeat; in "separate" each head has its own."""
        world_size = dist.get_world_size()
        for size, kind, changes in ((world_size, "grouped, with biases", {}), (2, "separate", {"stage": 2}),
                                    (2, "grouped, with biases", {"layerwise": {"verify_first_step": True}})):
            model = AttendsToItsPart(model_of(kind))
            model.parts = size
            layerwise = {**clip_of(kind), "auto_split": False, **changes.pop("layerwise", {})}
            engine = start(model, ds_config(layerwise=layerwise, bucket_numel=1500, **changes),
                           **share(model.model, size))
            train_engine(engine, STEPS)
            expected, seen = oracle_of(kind, world_size=world_size // size, length=8)
            assert_close(masters(engine), expected, rtol=1e-6, atol=1e-6)
            assert_same_on_all_ranks(engine.module)
            assert engine.optimizer.max_attention_logits == pytest.approx(
                {f"model.{path}": float(each.max()) for path, each in seen[-1].items()}, rel=1e-6)
            over = torch.stack([torch.stack(list(each.values())) for each in seen]) > threshold_of(kind)
            assert over[0].any() and not over.all()
            engine.destroy()
            self.forget()

    def test_logits_that_are_only_reported(self, share):
        model = AttendsToItsPart(model_of("separate"))
        model.parts = dist.get_world_size()
        engine = start(model, ds_config(layerwise={"log_max_attention_logit": True}), **share(model.model, model.parts))
        train_engine(engine, 1)
        _, (seen,) = oracle_of("separate", world_size=1, steps=1, length=8)
        assert engine.optimizer.max_attention_logits == pytest.approx(
            {f"model.{path}": float(each.max()) for path, each in seen.items()}, rel=1e-6)

    def test_attention_that_ulysses_took_before_it_is_measured_is_an_error_in_the_first_step(self, share):
        ds_layerwise.unregister()
        for layerwise in (clip_of("separate"), {"log_max_attention_logit": True}):
            model = AttendsToItsPart(model_of("separate"))
            model.parts = dist.get_world_size()
            engine = start(model, ds_config(layerwise=layerwise), **share(model.model, model.parts))
            with pytest.raises(ConfigError, match=r"none came in the first update\. .*; this model attends by sdpa\. "
                                                  r"Call ds_layerwise\.measure_attention\('sdpa'\) before sequence"):
                train_engine(engine, 1)
            assert engine.optimizer.step_count == 0
            engine.destroy()
            self.forget()

    def test_logits_that_are_given(self, share):
        """Each rank of a sequence has some of the heads, and gives -inf for the others."""
        model = AttendsToItsPart(model_of("separate", attention="eager"))
        model.parts = dist.get_world_size()
        parallel_state_sp.initialize_sequence_parallel(model.parts)
        engine = start(model, ds_config(layerwise=clip_of("separate")), mpu=parallel_state_sp)
        stand_still(engine)
        logits, given = torch.tensor([30.0, 5.0, 15.0, 60.0]), torch.full((4,), -torch.inf)
        own = slice(dist.get_rank() * 4 // model.parts, (dist.get_rank() + 1) * 4 // model.parts)
        given[own] = logits[own]
        before = masters(engine)
        name = "model.model.layers.1.self_attn"
        engine.optimizer.note_attention_logits(name, given)
        engine.backward(engine((0, 0, dist.get_rank())))
        engine.step()
        assert engine.optimizer.max_attention_logits == {name: 60.0}
        clip_plainly("separate", before, name, logits, threshold_of("separate"), ALPHA)
        assert_close(masters(engine), before, rtol=1e-6, atol=0)


class Noting(Block):
    """A block that calls ``note`` in every forward pass, if it has one."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.note = None

    def forward(self, x):
        if self.note is not None:
            self.note()
        return super().forward(x)


class TestAutoTp(DistributedTest):
    def test_heads_that_deepspeed_deals_out(self):
        """Each rank has two heads of queries and one of keys; the logits of both are those of the whole model."""
        kind = "grouped, with biases"
        plain = model_of(kind, attention="eager")
        with plain_logits(plain) as found, torch.no_grad():
            plain.train()(input_ids=tokens_of((0, 0, 0)))
        largest = largest_by_head(found)
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        for path, each in largest.items():
            clip_plainly(kind, before, path, each, threshold_of(kind), ALPHA)
        engine = start(model_of(kind), ds_config(layerwise=clip_of(kind), tensor_parallel={"autotp_size": 2}))
        stand_still(engine)
        tokens = tokens_of((0, 0, 0))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        assert engine.optimizer.max_attention_logits == pytest.approx(
            {path: float(each.max()) for path, each in largest.items()}, rel=1e-5)
        for name, param in engine.module.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                torch.testing.assert_close(param.detach(), before[name].chunk(2)[dist.get_rank()], rtol=2e-5, atol=1e-6)


class TestPipeline(DistributedTest):
    world_size = 4

    @pytest.mark.filterwarnings("ignore:c10d")
    def test_stages_clip_what_they_have_and_know_of_all(self):
        """Two stages, two pipes."""
        layers = [LayerSpec(torch.nn.Linear, 8, 8), LayerSpec(Noting, 8, 2), LayerSpec(Noting, 8, 2),
                  LayerSpec(torch.nn.Linear, 8, 8, bias=False)]
        module = PipelineModule(layers, num_stages=2, seed_layers=True, partition_method="uniform",
                                loss_fn=lambda x, y: (x * y).sum())
        clip = {"threshold": 2.0, "attention": [{"name": "[12]", "heads": 2, "qkv": "qkv"}]}
        engine = start(module, ds_config(gas=2, layerwise={"qk_clip": clip}))
        stand_still(engine)
        pipe, before = engine.grid.get_data_parallel_id(), {}
        for name, block in engine.module.named_children():
            if isinstance(block, Noting):
                before[name] = block.qkv.weight.detach().clone()
                largest = [int(name) + pipe, 8.0 * int(name)]
                block.note = lambda name=name, largest=largest: engine.optimizer.note_attention_logits(name, largest)
        assert len(before) == 1
        data = [(torch.ones(1, 3, 8), torch.ones(1, 3, 8))] * 2
        engine.train_batch(iter(data))
        assert engine.optimizer.max_attention_logits == {"1": 8.0, "2": 16.0}
        for name, value in before.items():
            eta = torch.tensor([min(1.0, 2.0 / (int(name) + 1)), 2.0 / (8.0 * int(name))]).sqrt()
            factors = torch.cat([eta.repeat_interleave(4).repeat(2), torch.ones(8)])
            torch.testing.assert_close(engine.module.get_submodule(name).qkv.weight.detach(), value * factors[:, None],
                                       rtol=1e-6, atol=1e-7)
