"""QK-clip without ranks: logits block by block, what counts of them, whose rows are scaled, and what is refused."""

import gc
import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from pytorch_optimizer import MuonClip
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ds_layerwise
from ds_layerwise.config.qk_clip_settings import QkClip
from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import ConfigError, RoutingError, StepError
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.routing.attention import attentions_of
from ds_layerwise.zero.step import attention_hook
from ds_layerwise.zero.step.attention_hook import counts_for
from ds_layerwise.zero.step.attention_logits import _indices
from tests.support.attention import KINDS, _rows, attention_modules, entry_of, model_of, tokens_of
from tests.support.documents import DOCS, tables_of
from tests.support.rooms import rooms

pytestmark = rooms("attention", "attention_hook", "qk_clip_settings", "row_scaling", "sections")


class Head(nn.Module):
    """The attributes of a module that a mask asks for."""

    is_causal = True


def qkm(batch=2, heads=4, kv_heads=2, length=7, keys=7, width=5):
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(batch, heads, length, width, generator=generator),
            torch.randn(batch, kv_heads, keys, width, generator=generator))


def plainly(query, key, scaling, allowed):
    """``allowed`` (batch, row, key) -> bool."""
    batch, heads, length, _ = query.shape
    group, found = heads // key.shape[1], []
    for head in range(heads):
        logits = [float(scaling * (query[b, head, i] * key[b, head // group, j]).sum())
                  for b in range(batch) for i in range(length) for j in range(key.shape[2]) if allowed(b, i, j)]
        found.append(max(logits, default=-math.inf))
    return torch.tensor(found)


def measured(query, key, implementation, mask=None, module=Head, **kwargs):
    counts = counts_for(implementation, module(), query, key, mask, kwargs)
    return attention_hook.largest_logits(query, key, scaling=0.3, counts=counts)


class Both(Head):
    is_causal = False


LENGTHS = torch.tensor([[1] * 5 + [0] * 2, [0] * 3 + [1] * 4])
ENDS = torch.tensor([0, 3, 7], dtype=torch.int32)

#: Implementation, the mask, more, and what counts.
CASES = {
    "sdpa, added": ("sdpa", torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -3e38)[None, None], {},
                     lambda b, i, j: j <= i),
    "sdpa, added as of old": ("sdpa", torch.ones(7, 7).triu(1)[None, None] * -1e4 - 1, {}, lambda b, i, j: j <= i),
    "sdpa, causal by itself": ("sdpa", None, {}, lambda b, i, j: j <= i),
    "sdpa, told that it is not": ("sdpa", None, {"is_causal": False}, lambda b, i, j: True),
    "sdpa, one for all rows": ("sdpa", LENGTHS[:, None, None].bool(), {}, lambda b, i, j: bool(LENGTHS[b, j])),
    "sdpa, by head": ("sdpa", torch.ones(1, 4, 7, 7).tril(-1).bool(), {}, lambda b, i, j: j < i),
    "flash": ("flash_attention_2", None, {}, lambda b, i, j: j <= i),
    "flash, sliding": ("kernels/flash-attn3", None, {"sliding_window": 3}, lambda b, i, j: i - 3 < j <= i),
    "flash, padded": ("flash_attention_2", LENGTHS, {},
                      lambda b, i, j: j <= i and bool(LENGTHS[b, j] * LENGTHS[b, i])),
    "flash, packed": ("flash_attention_2", None, {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
                      lambda b, i, j: j <= i and (i < 3) == (j < 3)),
}


@pytest.mark.parametrize("at_a_time", [1, 150, 1 << 24])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_logits_are_those_that_count(case, at_a_time, monkeypatch):
    implementation, mask, kwargs, allowed = CASES[case]
    monkeypatch.setattr(attention_hook, "_AT_A_TIME", at_a_time)
    query, key = qkm()
    torch.testing.assert_close(measured(query, key, implementation, mask, **kwargs),
                               plainly(query, key, 0.3, allowed), rtol=1e-5, atol=1e-6)


def test_both_ways_and_with_keys_from_before():
    query, key = qkm(length=3, keys=7)
    window = measured(query, key, "flash_attention_2", None, Both, sliding_window=3)
    torch.testing.assert_close(window, plainly(query, key, 0.3, lambda b, i, j: abs(i + 4 - j) < 3), rtol=1e-5, atol=0)
    later = measured(query, key, "flash_attention_2", None)
    torch.testing.assert_close(later, plainly(query, key, 0.3, lambda b, i, j: j <= i + 4), rtol=1e-5, atol=0)


def test_a_single_row_of_sdpa_sees_all_keys():
    query, key = qkm(length=1)
    torch.testing.assert_close(measured(query, key, "sdpa"), plainly(query, key, 0.3, lambda b, i, j: True),
                               rtol=1e-5, atol=0)


def test_positions_that_start_again_are_sequences_apart():
    query, key = qkm(batch=1)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    number = [0, 0, 0, 1, 2, 2, 2]
    found = measured(query, key, "flash_attention_2", None, position_ids=positions)
    torch.testing.assert_close(found, plainly(query, key, 0.3, lambda b, i, j: j <= i and number[i] == number[j]),
                               rtol=1e-5, atol=0)
    at_once = measured(query, key, "flash_attention_2", None, position_ids=torch.arange(7)[None])
    torch.testing.assert_close(at_once, plainly(query, key, 0.3, lambda b, i, j: j <= i), rtol=1e-5, atol=0)


def test_a_head_that_sees_nothing_has_no_logits():
    query, key = qkm()
    assert measured(query, key, "sdpa", torch.zeros(1, 1, 7, 7).bool()).tolist() == [-math.inf] * 4


def test_products_are_made_in_the_dtype_of_queries_outside_of_autocast():
    query, key = qkm()
    with torch.autocast("cpu", torch.bfloat16):
        exact = measured(query, key, "sdpa")
    assert torch.equal(exact, measured(query, key, "sdpa"))
    halves = measured(query.bfloat16(), key.bfloat16(), "sdpa")
    assert halves.dtype == torch.float32 and torch.equal(halves, halves.bfloat16().float())


@pytest.mark.parametrize("implementation, mask", [("sdpa", object()), ("flash_attention_2", torch.ones(1, 1, 7, 7)),
                                                  ("sdpa", torch.ones(2, 7))])
def test_a_mask_that_is_not_transformers_is_refused(implementation, mask):
    with pytest.raises(StepError, match=r"the attention logits of Head cannot be measured in implementation .* with a "
                                        "mask of .*; pass 2-D masks to flash attention and 4-D ones to 'sdpa'"):
        counts_for(implementation, Head(), *qkm(), mask, {})


# --- whose rows ----------------------------------------------------------------------------------------------------

def names_of(model):
    return dict(model.named_parameters()).keys()


def clip_of(kind, **values):
    return QkClip.from_section("layerwise.qk_clip", {"attention": [entry_of(kind)], **values})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_are_scaled_as_the_plain_clip_scales_them(kind):
    """The plain clip gives the head's number and the power, by output."""
    model = model_of(kind)
    found = attentions_of(model, clip_of(kind, alpha=0.25), trained=names_of(model))
    assert [each.name for each in found] == list(attention_modules(model))
    kv_heads = KINDS[kind][1].get("num_key_value_heads", 4)
    for attention in found:
        assert attention.heads == 4 and attention.units == kv_heads
        for scaled in attention.scaled:
            shape = tuple(model.get_parameter(scaled.name).shape)
            units, powers, cols, axis = _indices(scaled, shape, torch.device("cpu"))
            expected = {}
            for head in range(4):
                kv = head // (4 // kv_heads)
                for layer, rows, power in _rows(kind, head, kv, kv_heads, 0.25, own=True):
                    if f"{attention.name}.{layer}." in scaled.name:
                        expected.update({row: (kv, power) for row in range(rows.start, rows.stop)})
            assert expected and len(units) == shape[axis] and cols == (shape[1] if len(shape) == 2 else 1)
            for row, (unit, power) in enumerate(zip(units.tolist(), powers.tolist())):
                assert (unit, power) == expected.get(row, (unit, 0.0)), (scaled.name, row)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_piece_may_be_cut_anywhere(axis):
    whole, values = torch.arange(1.0, 36.0).view(5, 7), torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0])
    values = values[:5] if axis == 0 else values
    expected = (whole * (values[:, None] if axis == 0 else values)).flatten()
    for start in range(35):
        for stop in range(start + 1, 36):
            piece = whole.flatten()[start:stop].clone()
            Factors(values, axis, 7).scale_(piece, start)
            assert torch.equal(piece, expected[start:stop]), (start, stop)
    bias = torch.ones(3)
    Factors(torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0]), 0, 1).scale_(bias, 1)
    assert bias.tolist() == [3.0, 5.0, 7.0]


def test_a_witness_scales_as_we_do():
    """pytorch_optimizer's MuonClip, whose author read the same paper, on latent attention."""
    model, largest = model_of("latent"), torch.tensor([3.0, 5.0, 8.0, 40.0])
    attention = attentions_of(model, clip_of("latent", alpha=0.5), trained=names_of(model))[0]
    name = f"{attention.name}.q_b_proj.weight"
    weight = model.get_parameter(name).detach().clone()
    heads = weight.view(4, 10, -1)
    groups = {"query": heads[:, :6].reshape(24, -1), "query_rotary": heads[:, 6:].reshape(16, -1)}
    params = {role: nn.Parameter(rows.clone()) for role, rows in groups.items()}
    for param in params.values():
        param.grad = torch.zeros_like(param)
    MuonClip([{"params": [param], "use_muon": True, "attention_name": "a", "qk_clip": role}
              for role, param in params.items()], lr=1e-30, qk_clip_threshold=4.0).step(
                  attention_max_logits={"a": largest})
    scaled = next(each for each in attention.scaled if each.name == name)
    units, powers, cols, axis = _indices(scaled, tuple(weight.shape), torch.device("cpu"))
    Factors((4.0 / largest.clamp(min=4.0))[units] ** powers, axis, cols).scale_(weight.view(-1), 0)
    torch.testing.assert_close(weight.view(4, 10, -1)[:, :6].reshape(24, -1), params["query"].detach())
    torch.testing.assert_close(weight.view(4, 10, -1)[:, 6:].reshape(16, -1), params["query_rotary"].detach())


# --- what is refused ------------------------------------------------------------------------------------------------

def from_config(model_type, **values):
    base = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32,
            "intermediate_size": 16}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**base, **values}))


def refused(model, match, clip, trained=None):
    with pytest.raises(RoutingError, match=match):
        attentions_of(model, clip, trained=names_of(model) if trained is None else trained)


def test_norms_over_queries_and_keys_undo_it():
    model = from_config("qwen3", head_dim=8, num_key_value_heads=2)
    refused(model, r"model\.layers\.0\.self_attn\.q_norm normalises queries or keys, so scaling the weights before it",
            clip_of("grouped, with biases"))
    assert "model.layers.0.self_attn" in [each.name for each in attentions_of(model, None, trained=())]


def test_all_of_a_module_is_trained_or_none():
    model, clip = model_of("separate"), clip_of("separate")
    trained = [name for name in names_of(model) if "layers.0.self_attn.q_proj" not in name]
    refused(model, r"layers\.0\.self_attn\.q_proj\.weight is not trained, and others", clip, trained)
    none = [name for name in trained if "layers.0.self_attn.k_proj" not in name]
    first, second = attentions_of(model, clip, trained=none)
    assert first.scaled == () and len(second.scaled) == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_beside_a_weight():
    model = get_peft_model(model_of("separate"), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    refused(model, r"q_proj has lora_A\.default\.weight in addition to weight and bias", clip_of("separate"))


class Own(nn.Module):
    """Attention with a matrix of its own, as torch's own has it, or with layers."""

    def __init__(self):
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = nn.Parameter(torch.zeros(24, 8)), nn.Parameter(torch.zeros(24))
        self.inner = nn.ModuleDict({"q": nn.Linear(8, 12), "kv": nn.Linear(8, 10)})


def entries(*each):
    return QkClip.from_section("layerwise.qk_clip", {"attention": list(each), "alpha": 0.25})


def blocks(scaled):
    """The number of outputs, the group of heads and the power of each block."""
    return list(zip(*scaled.outputs, strict=True))


def test_own_models_say_where():
    model = nn.ModuleDict({"a": Own(), "b": Own()})
    first, second = attentions_of(model, entries({"name": "a", "heads": 4, "qkv": "in_proj_weight"},
                                                 {"name": "b", "heads": 2, "kv_heads": 1, "q": "inner.q",
                                                  "k": "inner.kv", "rotated": 2, "values": 6}),
                                  trained=names_of(model))
    assert [each.name for each in first.scaled] == ["a.in_proj_weight", "a.in_proj_bias"]
    assert blocks(first.scaled[0]) == [(2, head, power) for power in (0.25, 0.75, 0.0) for head in range(4)]
    assert [each.name for each in second.scaled] == ["b.inner.q.weight", "b.inner.q.bias", "b.inner.kv.weight",
                                                     "b.inner.kv.bias"]
    assert blocks(second.scaled[0]) == [(4, 0, 0.25), (2, 0, 1.0)] * 2
    assert blocks(second.scaled[2]) == [(4, 0, 0.75), (6, 0, 0.0)]
    by_head = attentions_of(model, entries({"name": "a", "heads": 4, "kv_heads": 2, "qkv": "in_proj_weight",
                                            "by_head": True}), trained=names_of(model))
    assert blocks(by_head[0].scaled[0]) == [(3, kv, power) for kv in range(2) for power in (0.25, 0.25, 0.75, 0.0)]


@pytest.mark.parametrize("each, message", [
    ({"name": "a", "heads": 5, "qkv": "in_proj_weight"}, "5 heads of queries and 5 of keys do not fit 24 outputs of "
                                                         "in_proj_weight"),
    ({"name": "a", "heads": 2, "q": "inner.q", "k": "inner.kv"}, "do not fit 12 and 10 outputs of inner.q, inner.kv"),
    ({"name": "*", "heads": 2, "q": "inner.q", "k": "inner.no"}, "has no layer or matrix inner"),
    ({"name": "a", "heads": 2, "q": "inner", "k": "inner"}, "a has no layer or matrix inner;"),
])
def test_entries_that_do_not_fit(each, message):
    refused(nn.ModuleDict({"a": Own()}), message, entries(each))


def test_two_entries_for_one_module_and_one_weight_of_two():
    entry = {"heads": 4, "qkv": "in_proj_weight"}
    model = nn.ModuleDict({"a": Own(), "b": Own()})
    refused(model, r"has 2 entries for a: '\*', 'a'", entries({"name": "*", **entry}, {"name": "a", **entry}))
    model["b"].in_proj_weight = model["a"].in_proj_weight
    refused(model, "a.in_proj_weight makes queries or keys for both a and b", entries({"name": "?", **entry}))


ENTRY = entry_of("separate")


@pytest.mark.parametrize("section, message", [
    (3, r"layerwise.qk_clip must be an object like \{\"threshold\": 100, \"attention\": \[\{.*\}\]\}, got 3"),
    ({"attention": [ENTRY], "treshold": 3}, "layerwise.qk_clip.treshold is not an option; did you mean 'threshold'"),
    ({"attention": [ENTRY], "threshold": 0}, r"layerwise.qk_clip.threshold must be in \(0, inf\), got 0"),
    ({"attention": [ENTRY], "alpha": 1.5}, r"layerwise.qk_clip.alpha must be in \[0, 1\], got 1.5"),
    ({"hook": False}, "layerwise.qk_clip.hook is no option any more: .* what note_attention_logits is given counts as"),
    ({"threshold": 3}, "layerwise.qk_clip.attention has to say where queries and keys are, like .* docs/qk_clip.md"),
    ({"attention": {}}, "layerwise.qk_clip.attention must be a list"),
    ({"attention": [3]}, r"layerwise.qk_clip.attention\[0\] must be an object like"),
    ({"attention": [{"heads": 3}]}, r"layerwise.qk_clip.attention\[0\].name is missing; it needs name, heads"),
    ({"attention": [{"name": "a", "heads": 3}]}, "needs q and k, or only qkv"),
    ({"attention": [{"name": "a", "heads": 3, "q": "q"}]}, "needs q and k, or only qkv"),
    ({"attention": [{"name": "a", "heads": 3, "q": "q", "k": "k", "by_head": True}]}, "by_head says how qkv lies"),
    ({"attention": [{"name": "a", "heads": 3, "qkv": "q", "values": 2}]}, "values is for q and k"),
    ({"attention": [{"name": "a", "heads": 3, "kv_heads": 2, "qkv": "q"}]}, "kv_heads is 2, which does not divide"),
])
def test_a_bad_section_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        LayerWiseConfig.from_section({"qk_clip": section})


def test_defaults_are_megatrons():
    clip = LayerWiseConfig.from_section({"qk_clip": {"attention": [ENTRY]}}).qk_clip
    assert (clip.threshold, clip.alpha, len(clip.attention)) == (100.0, 0.5, 1)
    assert LayerWiseConfig.from_section({"qk_clip": None}).qk_clip is None


def test_the_entries_of_the_page_are_those_that_are_tested():
    """All but the sizes of the models."""
    _, table, *_ = tables_of(DOCS / "qk_clip.md")
    found = [json.loads(row[1].strip("`")) for row in table[1:]]
    wanted = [entry_of(kind) for kind in KINDS]
    kinds = [[{key: value for key, value in entry.items() if isinstance(value, str | bool)} for entry in entries]
             for entries in (found, wanted)]
    assert len(found) == 6 and all(entry in kinds[1] for entry in kinds[0])
    assert all(entry in kinds[0] for entry in kinds[1])
    QkClip.from_section("layerwise.qk_clip", {"attention": found})


# --- in transformers --------------------------------------------------------------------------------------------------

class Notes:
    def __init__(self):
        self.found = []

    def note(self, module, largest):
        self.found.append((module, largest))


PLAIN = AttentionInterface()["sdpa"]


def is_plain():
    return AttentionInterface()["sdpa"] is PLAIN


def test_attention_is_measured_while_somebody_watches_and_only_in_training():
    notes, model, other = Notes(), model_of("separate"), model_of("separate")
    attention_hook.MEASURED.watch(list(model.modules()), notes.note)
    with torch.no_grad():
        plain = other.train()(input_ids=tokens_of((0, 0, 0))).logits
        watched = model.train()(input_ids=tokens_of((0, 0, 0))).logits
        model.eval()(input_ids=tokens_of((0, 0, 0)))
    assert torch.equal(plain, watched)
    assert [module for module, _ in notes.found] == list(attention_modules(model).values())
    attention_hook.MEASURED.forget(Notes().note)  # another's
    assert not is_plain()
    attention_hook.MEASURED.forget(notes.note)
    assert is_plain()


def test_an_observer_may_go():
    notes, model = Notes(), model_of("separate")
    attention_hook.MEASURED.watch(list(model.modules()), notes.note)
    del notes
    gc.collect()
    model.train()(input_ids=tokens_of((0, 0, 0)))
    attention_hook.MEASURED.forget()
    assert is_plain()


def test_implementations_that_a_script_asks_for_stay_when_engines_go_and_have_to_be_measurable():
    notes = Notes()
    ds_layerwise.measure_attention("sdpa", "flash_attention_2")
    ours = AttentionInterface()["sdpa"]
    attention_hook.MEASURED.watch(list(model_of("separate").modules()), notes.note)
    attention_hook.MEASURED.forget(notes.note)
    # Asked for again, it does not measure twice.
    ds_layerwise.measure_attention("sdpa")
    assert AttentionInterface()["sdpa"] is ours
    ds_layerwise.unregister()
    assert is_plain() and not hasattr(AttentionInterface()["flash_attention_2"], "func")
    for name in ("eager", "flex_attention", "flash_of_nobody"):
        with pytest.raises(ConfigError, match=f"measure_attention got '{name}'; it measures 'sdpa' and what has 'fl"):
            ds_layerwise.measure_attention(name)
