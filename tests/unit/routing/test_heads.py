"""Attention heads as matrices of their own: separate and fused projections, as rows and as columns."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_layerwise.config.overrides import Override
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.rules.muon_family import NorMuon
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("fused_parts")


def route(model, *overrides, **kwargs):
    return route_parameters(model, [{"params": list(model.parameters())}], overrides=overrides, **kwargs)


def build(kind, **sizes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=40, **sizes))


GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 4}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}


@pytest.mark.parametrize("kind, sizes, expected", [
    ("gpt2", GPT2, {"attn.c_attn": (12, 16, 4)}),
    ("gpt2", {**GPT2, "add_cross_attention": True}, {
        "attn.c_attn": (12, 16, 4), "crossattention.c_attn": (8, 16, 4), "crossattention.q_attn": (4, 16, 4)}),
    ("gpt_neox", SIZES, {"attention.query_key_value": (12, 4, 16)}),
    ("gpt_bigcode", {**GPT2, "multi_query": True}, {"attn.c_attn": (6, 4, 16)}),
    ("phi3", {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}, {"self_attn.qkv_proj": (8, 4, 16)}),
    ("llama", {**SIZES, "num_key_value_heads": 2}, {
        "self_attn.q_proj": (4, 4, 16), "self_attn.k_proj": (2, 4, 16), "self_attn.v_proj": (2, 4, 16)}),
])
def test_per_head_muon_in_transformers(kind, sizes, expected):
    routes = route(build(kind, **sizes), per_head=True)
    seen = {name: r.seen(0).get("", ()) for name, r in routes.items() if r.whole}
    cut = {name: shape for name, shape in seen.items() if len(shape) == 3}
    assert {".".join(name.split(".")[-3:-1]): shape for name, shape in cut.items()} == expected
    assert all((routes[name].parts is not None) is (kind == "gpt2") for name in cut)


def test_per_head_muon_of_fused_rows():
    model = nn.ModuleDict({"c_attn": nn.Linear(16, 48, bias=False), "attn": nn.MultiheadAttention(16, 4),
                           "norm": nn.LayerNorm(16)})
    model.config = SimpleNamespace(n_head=4, n_embd=16)
    routes = route(model, per_head=True)
    assert routes["c_attn.weight"].matrix_shape == routes["attn.in_proj_weight"].matrix_shape == (12, 4, 16)


def test_num_heads_cuts_the_outputs_of_a_conv1d():
    routes = route(build("gpt2", **GPT2), Override(name="*.c_attn.weight", num_heads=3))
    c_attn = routes["transformer.h.0.attn.c_attn.weight"]
    assert (c_attn.matrix_shape, c_attn.seen(0)) == ((16, 48), {"": (3, 16, 16)})
    # Heads are blocks of columns, and a state of their own has no other name than that of rows.
    kept = replace(c_attn, recipe=NorMuon())
    assert {key: spec.shape for key, spec in kept.states(0).items()} == {
        "momentum_buffer": (16, 48), "moment2_buffer": (3, 16, 1)} and kept.meaning == ""
    # What divides the rows and not the columns would cut inputs.
    with pytest.raises(RoutingError, match=r"c_attn.weight: num_heads 32 needs a matrix whose columns it divides, got"):
        route(build("gpt2", **GPT2), Override(name="*.c_attn.weight", num_heads=32))


def test_a_transposed_layer_that_tensor_parallelism_has_cut_is_refused():
    model = build("gpt2", **GPT2)
    for param in model.parameters():
        param.tensor_model_parallel, param.partition_dim = param.dim() == 2, 1
    with pytest.raises(RoutingError, match="c_attn.weight: 24 heads of a Conv1D that tensor parallelism has cut are "
                                           "not supported; orthogonalise it as one matrix"):
        route(model, per_head=True, tp_size=2)


class Attention(nn.Module):
    """Projections whose names nobody knows."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)


@pytest.mark.parametrize("config", [None, SimpleNamespace(num_heads=[2, 4]), SimpleNamespace(num_attention_heads=4)])
def test_the_advice_in_the_error_of_per_head_muon_works(config):
    model = Attention()
    if config is not None:
        model.config = config
    with pytest.raises(RoutingError) as caught:
        route(model, per_head=True)
    advice = re.search(r"name (?:the projections|them) in layerwise\.overrides with num_heads$", str(caught.value))
    assert advice, caught.value
    routes = route(model, Override(name="a.weight", num_heads=4), per_head=True)
    assert (routes["a.weight"].matrix_shape, routes["b.weight"].matrix_shape) == ((4, 2, 8), (8, 8))


def test_num_heads_of_the_user_wins_over_the_config():
    model = build("llama", **SIZES)
    routes = route(model, Override(name="*.q_proj.weight", num_heads=1), per_head=True)
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert (routes[name.format("q")].matrix_shape, routes[name.format("k")].matrix_shape) == ((1, 16, 16), (4, 4, 16))
