"""Fused projections of transformers' models are found, and lie as the models themselves read them."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_layerwise.config import Override
from ds_layerwise.orthogonalize.parts import view_of
from ds_layerwise.routing.rules import route_parameters
from tests.support.rooms import rooms

pytestmark = rooms("parts", "heads", "rules")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
         "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GQA = {**SIZES, "num_key_value_heads": 2, "head_dim": 4}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
MLA = {**SIZES, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, "q_lora_rank": 6,
       "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
       "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}

Q_K_V = {"q": (16, 16), "k": (16, 16), "v": (16, 16)}
GATE_UP = {"gate": (24, 16), "up": (24, 16)}
LATENT = {"self_attn.kv_a_proj_with_mqa.weight": {"latent": (10, 16), "rope": (2, 16)},
          "self_attn.kv_b_proj.weight": {"k": (16, 10), "v": (20, 10)},
          "mlp.experts.gate_up_proj": {"gate": (4, 6, 16), "up": (4, 6, 16)}}

#: By model type, its sizes, and the parts of its layer's parameters, by the ends of their names.
MODELS = {
    "gpt2": (GPT2, {"attn.c_attn.weight": Q_K_V}),
    "openai-gpt": (GPT2, {"attn.c_attn.weight": Q_K_V}),
    "llama": (GQA, {}), "qwen3": (GQA, {}), "mistral": (GQA, {}),
    "phi3": (GQA, {"self_attn.qkv_proj.weight": {"q": (16, 16), "k": (8, 16), "v": (8, 16)},
                   "mlp.gate_up_proj.weight": GATE_UP}),
    "glm4": (GQA, {"mlp.gate_up_proj.weight": GATE_UP}),
    "gpt_neox": (SIZES, {"attention.query_key_value.weight": Q_K_V}),
    "bloom": ({"hidden_size": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2},
              {"self_attention.query_key_value.weight": Q_K_V}),
    "persimmon": (SIZES, {"self_attn.query_key_value.weight": Q_K_V}),
    "mpt": ({"d_model": 16, "n_heads": 4, "n_layers": 1, "vocab_size": 40}, {"attn.Wqkv.weight": Q_K_V}),
    "deepseek_v2": ({**MLA, "q_lora_rank": None},
                    {"self_attn.q_proj.weight": {"nope": (16, 16), "rope": (8, 16)}, **LATENT}),
    "deepseek_v3": (MLA, {"self_attn.q_b_proj.weight": {"nope": (16, 6), "rope": (8, 6)}, **LATENT}),
    "mixtral": ({**GQA, "num_local_experts": 2},
                {"mlp.experts.gate_up_proj": {"gate": (2, 24, 16), "up": (2, 24, 16)}}),
    "gpt_oss": ({**GQA, "num_local_experts": 2, "num_experts_per_tok": 2},
                {"mlp.experts.gate_up_proj": {"gate": (2, 16, 24), "up": (2, 16, 24)}}),
}


def build(kind, sizes, device="meta"):
    torch.manual_seed(3)
    with torch.device(device):
        config = AutoConfig.for_model(kind, attn_implementation="eager", experts_implementation="eager", **sizes)
        return AutoModelForCausalLM.from_config(config).eval()


def route(model, *overrides, **kwargs):
    return route_parameters(model, [{"params": list(model.parameters())}], overrides=overrides, **kwargs)


def parts_of(routes):
    """By the end of a parameter's name in its layer."""
    return {name.rpartition(".0.")[2]: each.seen(0) for name, each in routes.items() if each.parts}


@pytest.mark.parametrize("kind", MODELS)
def test_the_parts_of_each_family(kind):
    sizes, expected = MODELS[kind]
    model = build(kind, sizes)
    routes = route(model)
    assert parts_of(routes) == expected
    for each in routes.values():
        assert (", parts " in each.reason) is (each.parts is not None)
    assert parts_of(route(model, auto_split=False)) == {}


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "phi3"])
def test_heads_of_one_width_are_cut_as_before(kind):
    sizes, expected = MODELS[kind]
    routes = route(build(kind, sizes), per_head=True)
    assert parts_of(routes) == {name: parts for name, parts in expected.items() if "gate" in parts}
    stacks = [each.matrix_shape for each in routes.values() if each.matrix_shape and len(each.matrix_shape) == 3]
    assert stacks == [{"gpt2": (12, 16, 4), "gpt_neox": (12, 4, 16), "phi3": (8, 4, 16)}[kind]]


def test_heads_of_latent_attention_are_cut_into_their_parts():
    parts = parts_of(route(build("deepseek_v3", MODELS["deepseek_v3"][0]), per_head=True))
    assert parts["self_attn.q_b_proj.weight"] == {"nope": (4, 4, 6), "rope": (4, 2, 6)}
    assert parts["self_attn.kv_b_proj.weight"] == {"k": (4, 4, 10), "v": (4, 5, 10)}
    assert parts["self_attn.kv_a_proj_with_mqa.weight"] == {"latent": (10, 16), "rope": (2, 16)}


def test_encoders_that_give_keys_and_values_alone():
    model = build("gpt2", {**GPT2, "add_cross_attention": True})
    assert parts_of(route(model))["crossattention.c_attn.weight"] == {"k": (16, 16), "v": (16, 16)}


def test_what_the_user_says_wins():
    model = build("phi3", MODELS["phi3"][0])
    overrides = [Override(name="*.qkv_proj.weight", split={}), Override(name="*.gate_up_proj.weight", num_heads=3)]
    routes = route(model, *overrides)
    assert parts_of(routes) == {}
    shapes = {name.rpartition(".0.")[2]: each.matrix_shape for name, each in routes.items()}
    assert (shapes["self_attn.qkv_proj.weight"], shapes["mlp.gate_up_proj.weight"]) == ((32, 16), (3, 16, 16))


def test_what_has_the_name_and_another_size_stays_whole():
    model = build("phi3", MODELS["phi3"][0])
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = torch.nn.Linear(16, 31, bias=False, device="meta")
    assert list(parts_of(route(model))) == ["mlp.gate_up_proj.weight"]


# --- the layout, by what the model computes from it -------------------------------------------------------------------


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 7, 9, 11, 5]])).logits


def weights_of(model, leaf):
    """The parts of the one parameter whose name has ``leaf``, as views, and those of its bias, if it has one."""
    routes = route(model)
    name, = [each for each in routes if leaf in each.split(".") and routes[each].parts]
    param, parts = model.get_parameter(name), routes[name].parts
    found = {part: [view_of(param.data, place)] for part, place in parts.places(tuple(param.shape)).items()}
    holder = model.get_submodule(name.rpartition(".")[0])
    bias = getattr(holder, "bias", None)
    if isinstance(bias, torch.nn.Parameter):
        column = bias.data.view(-1, 1) if parts.axis == -2 else bias.data.view(1, -1)
        for part, place in parts.places(tuple(column.shape)).items():
            found[part].append(view_of(column, place))
    return found


def set_(views, value):
    for view in views:
        view.copy_(torch.randn(view.shape) if value is None else torch.full(view.shape, value))


def inputs_of(model, leaf):
    """What goes into the module called ``leaf`` in a forward pass."""
    seen = []
    module, = [each for path, each in model.named_modules() if path.split(".")[-1] == leaf and ".0." in path]
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    logits(model)
    hook.remove()
    return seen[0]


FUSED = {"gpt2": "c_attn", "openai-gpt": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value",
         "bloom": "query_key_value", "persimmon": "query_key_value", "mpt": "Wqkv"}


@pytest.mark.parametrize("kind, leaf", FUSED.items())
def test_queries_keys_and_values_are_where_the_model_reads_them(kind, leaf):
    model = build(kind, MODELS[kind][0], "cpu")
    views = weights_of(model, leaf)
    for part in views.values():
        set_(part, None)
    before = logits(model)
    set_(views["q"], None)
    assert not torch.equal(logits(model), before)
    set_(views["q"], 0.0)
    uniform = logits(model)
    # Without queries all keys weigh the same, whatever they are.
    set_(views["k"], None)
    assert torch.equal(logits(model), uniform)
    set_(views["v"], None)
    assert not torch.equal(logits(model), uniform)
    # Without values nothing comes out of attention, whatever asks for it.
    set_(views["v"], 0.0)
    nothing = logits(model)
    set_(views["q"], None)
    set_(views["k"], None)
    assert torch.equal(logits(model), nothing)


@pytest.mark.parametrize("kind", ["phi3", "glm4"])
def test_gate_and_up_are_where_the_model_reads_them(kind):
    model = build(kind, MODELS[kind][0], "cpu")
    for part in ("gate", "up"):
        assert inputs_of(model, "down_proj").abs().min() > 0
        kept = [view.clone() for view in weights_of(model, "gate_up_proj")[part]]
        set_(weights_of(model, "gate_up_proj")[part], 0.0)
        assert inputs_of(model, "down_proj").count_nonzero() == 0
        for view, value in zip(weights_of(model, "gate_up_proj")[part], kept, strict=True):
            view.copy_(value)


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "gpt_oss"])
def test_gate_and_up_of_experts_are_where_the_model_reads_them(kind):
    model = build(kind, MODELS[kind][0], "cpu")
    views = weights_of(model, "gate_up_proj")
    for part in views.values():
        set_(part, None)
    experts, = [module for path, module in model.named_modules() if path.endswith(".experts")]
    bias = getattr(experts, "gate_up_proj_bias", None)
    if bias is not None:
        bias.data.zero_()
    set_(views["gate"], 0.0)
    seen = []
    # A gate of zeros lets nothing through, whatever up is.
    for _ in range(2):
        set_(views["up"], None)
        seen.append(logits(model))
    assert torch.equal(*seen)
    set_(views["gate"], None)
    with_up = logits(model)
    set_(views["up"], None)
    assert not torch.equal(logits(model), with_up)


@pytest.mark.parametrize("kind, queries", [("deepseek_v2", "q_proj"), ("deepseek_v3", "q_b_proj")])
def test_latent_attention_is_split_where_the_model_reads_it(kind, queries):
    model = build(kind, MODELS[kind][0], "cpu")
    q, kv_a, kv_b = (weights_of(model, leaf) for leaf in (queries, "kv_a_proj_with_mqa", "kv_b_proj"))
    for views in (q, kv_a, kv_b):
        for part in views.values():
            set_(part, None)
    # Keys without their part that is not rotated are not asked by that part of the queries.
    set_(kv_b["k"], 0.0)
    before = logits(model)
    set_(q["nope"], None)
    assert torch.equal(logits(model), before)
    set_(q["rope"], None)
    assert not torch.equal(logits(model), before)
    # The other way round.
    set_(kv_b["k"], None)
    set_(kv_a["rope"], 0.0)
    before = logits(model)
    set_(q["rope"], None)
    assert torch.equal(logits(model), before)
    set_(q["nope"], None)
    assert not torch.equal(logits(model), before)
    # Without values, or what they are made of, nothing comes out of attention.
    set_(kv_b["v"], 0.0)
    nothing = logits(model)
    set_(kv_b["v"], None)
    assert not torch.equal(logits(model), nothing)
    set_(kv_a["latent"], 0.0)
    assert torch.equal(logits(model), nothing)
