"""Fused projections of transformers' models are found, and lie as the models themselves read them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, FunnelModel, XLNetModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.blip.modeling_blip import BlipAttention, BlipVisionConfig
from transformers.models.exaone4_5.modeling_exaone4_5 import Exaone4_5_VisionAttention, Exaone4_5_VisionConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.sam2.modeling_sam2 import Sam2HieraDetConfig, Sam2MultiScaleAttention
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from ds_layerwise.config.sections import Override
from ds_layerwise.routing.part_views import view_of
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("fused_parts", "part_views", "routing_rules")

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
    "llama4_text": ({**GQA, "num_local_experts": 2, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 1},
                    {"feed_forward.experts.gate_up_proj": {"gate": (2, 16, 24), "up": (2, 16, 24)}}),
    "falcon": ({**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
               {"self_attention.query_key_value.weight": {"q": (16, 16), "k": (8, 16), "v": (8, 16)}}),
    "falcon/multi_query": (SIZES, {"self_attention.query_key_value.weight": {"q": (16, 16), "k": (4, 16),
                                                                             "v": (4, 16)}}),
    "falcon/plain": ({**SIZES, "multi_query": False}, {"self_attention.query_key_value.weight": Q_K_V}),
    "gpt_bigcode": (GPT2, {"attn.c_attn.weight": {"q": (16, 16), "k": (4, 16), "v": (4, 16)}}),
    "gpt_bigcode/plain": ({**GPT2, "multi_query": False}, {"attn.c_attn.weight": Q_K_V}),
    "dbrx": ({"d_model": 16, "n_heads": 4, "n_layers": 1, "vocab_size": 40, "max_seq_len": 16,
              "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
              "ffn_config": {"ffn_hidden_size": 6, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": 16}},
             {"norm_attn_norm.attn.Wqkv.weight": {"q": (16, 16), "k": (8, 16), "v": (8, 16)}}),
    "modernbert": (SIZES, {"attn.Wqkv.weight": Q_K_V, "mlp.Wi.weight": GATE_UP}),
    "deberta": ({**SIZES, "max_position_embeddings": 16}, {"attention.self.in_proj.weight": Q_K_V}),
    "imagegpt": (GPT2, {"attn.c_attn.weight": Q_K_V}),
    "qwen3_next": ({**GQA, "layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                    "linear_key_head_dim": 3, "linear_value_head_dim": 5, "mlp_only_layers": [0]},
                   {"linear_attn.in_proj_qkvz.weight": {"q": (6, 16), "k": (6, 16), "v": (20, 16), "z": (20, 16)},
                    "linear_attn.in_proj_ba.weight": {"b": (4, 16), "a": (4, 16)}}),
    "qwen3_next/gated": ({**GQA, "layer_types": ["full_attention"], "mlp_only_layers": [0]},
                         {"self_attn.q_proj.weight": {"q": (16, 16), "gate": (16, 16)}}),
    "qwen3_5_text": ({**GQA, "layer_types": ["linear_attention"], "linear_num_key_heads": 2,
                      "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5},
                     {"linear_attn.in_proj_qkv.weight": {"q": (6, 16), "k": (6, 16), "v": (20, 16)}}),
}


def build(kind, sizes, device="meta"):
    """A model of the type before the first slash of ``kind``."""
    torch.manual_seed(3)
    kind = kind.partition("/")[0]
    auto = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModel
    with torch.device(device):
        config = AutoConfig.for_model(kind, attn_implementation="eager", experts_implementation="eager", **sizes)
        return auto.from_config(config).eval()


def route(model, *overrides, **kwargs):
    return route_parameters(model, [{"params": list(model.parameters())}], overrides=overrides, **kwargs)


def parts_of(routes):
    """Return the parts of parameters by the end of their name in their layer."""
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


def test_parts_of_a_layer_that_tensor_parallelism_has_cut_are_those_of_the_whole_one():
    model = build("phi3", GQA)
    for name, rows in (("gate_up_proj", 24), ("qkv_proj", 16)):
        layer = next(getattr(module, name) for module in model.modules() if hasattr(module, name))
        layer.weight = torch.nn.Parameter(layer.weight[:rows].detach().clone())
        vars(layer.weight).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    routes = route(model, tp_size=2)
    # Half of the rows are one of the two, and not a half of each; a rank with queries alone has no such pieces.
    assert parts_of(routes) == {"mlp.gate_up_proj.weight": {"gate_or_up": (24, 16)}}
    reason, = (each.reason for name, each in routes.items() if "qkv_proj" in name)
    assert reason.endswith(", whole, for its parts q, k, v do not lie whole on a tensor-parallel rank")


def test_heads_of_latent_attention_are_cut_into_their_parts():
    parts = parts_of(route(build("deepseek_v3", MODELS["deepseek_v3"][0]), per_head=True))
    assert parts["self_attn.q_b_proj.weight"] == {"nope": (4, 4, 6), "rope": (4, 2, 6)}
    assert parts["self_attn.kv_b_proj.weight"] == {"k": (4, 4, 10), "v": (4, 5, 10)}
    # Parts of what has no heads stay.
    for name in ("self_attn.kv_a_proj_with_mqa.weight", "mlp.experts.gate_up_proj"):
        assert parts[name] == LATENT[name]


def test_encoders_that_give_keys_and_values_alone():
    model = build("gpt2", {**GPT2, "add_cross_attention": True})
    assert parts_of(route(model))["crossattention.c_attn.weight"] == {"k": (16, 16), "v": (16, 16)}


def test_splits_and_heads_of_the_user_win():
    model = build("phi3", MODELS["phi3"][0])
    overrides = [Override(name="*.qkv_proj.weight", split={}), Override(name="*.gate_up_proj.weight", num_heads=3)]
    routes = route(model, *overrides)
    assert parts_of(routes) == {}
    shapes = {name.rpartition(".0.")[2]: each.matrix_shape for name, each in routes.items()}
    assert (shapes["self_attn.qkv_proj.weight"], shapes["mlp.gate_up_proj.weight"]) == ((32, 16), (3, 16, 16))


def test_a_known_name_with_another_size_stays_whole():
    model = build("phi3", MODELS["phi3"][0])
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = torch.nn.Linear(16, 31, bias=False, device="meta")
    assert list(parts_of(route(model))) == ["mlp.gate_up_proj.weight"]


# --- the layout, by what the model computes from it -------------------------------------------------------------------


def logits(model, **options):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 7, 9, 11, 5]]), **options)[0]


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
    """Return the input of the module called ``leaf`` in a forward pass."""
    seen = []
    module, = [each for path, each in model.named_modules() if f".{path}".endswith(f".{leaf}") and ".0." in path]
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    logits(model)
    hook.remove()
    return seen[0]


FUSED = {"gpt2": "c_attn", "openai-gpt": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value",
         "bloom": "query_key_value", "persimmon": "query_key_value", "mpt": "Wqkv", "falcon": "query_key_value",
         "falcon/multi_query": "query_key_value", "falcon/plain": "query_key_value", "gpt_bigcode": "c_attn",
         "gpt_bigcode/plain": "c_attn", "dbrx": "Wqkv", "modernbert": "Wqkv", "deberta": "in_proj",
         "imagegpt": "c_attn"}


@pytest.mark.parametrize("kind, leaf", FUSED.items())
def test_queries_keys_and_values_are_where_the_model_reads_them(kind, leaf):
    model = build(kind, MODELS[kind][0], "cpu")
    check_queries_keys_and_values(model, leaf, lambda: logits(model))


def check_queries_keys_and_values(model, leaf, output):
    views = weights_of(model, leaf)
    for part in views.values():
        set_(part, None)
    before = output()
    set_(views["q"], None)
    assert not torch.equal(output(), before)
    set_(views["q"], 0.0)
    uniform = output()
    # Without queries all keys weigh the same, whatever they are.
    set_(views["k"], None)
    assert torch.equal(output(), uniform)
    set_(views["v"], None)
    assert not torch.equal(output(), uniform)
    # Without values nothing comes out of attention, whatever asks for it.
    set_(views["v"], 0.0)
    nothing = output()
    set_(views["q"], None)
    set_(views["k"], None)
    assert torch.equal(output(), nothing)


class Tower(nn.Module):
    """A module of a model whose text has other heads."""

    def __init__(self, inner, *args):
        super().__init__()
        self.inner, self.args, self.norm = inner, args, nn.LayerNorm(16)
        self.config = SimpleNamespace(text_config=SimpleNamespace(
            num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=12))

    def output(self):
        with torch.no_grad():
            found = self.inner(*self.args)
        return found[0] if isinstance(found, tuple) else found


def tower(kind):
    torch.manual_seed(3)
    x = torch.randn(1, 5, 16)
    if kind == "torch":
        return Tower(nn.MultiheadAttention(16, 4, batch_first=True), x, x, x)
    if kind == "blip":
        return Tower(BlipAttention(BlipVisionConfig(hidden_size=16, num_attention_heads=4)), x)
    if kind == "sam2":
        config = Sam2HieraDetConfig(hidden_size=24, attn_implementation="eager")
        return Tower(Sam2MultiScaleAttention(config, 16, 32, 4), x.view(1, 1, 5, 16))
    config = Exaone4_5_VisionConfig(hidden_size=16, num_heads=4, num_key_value_heads=2, attn_implementation="eager")
    return Tower(Exaone4_5_VisionAttention(config), x[0], torch.tensor([0, 5]), (torch.ones(5, 4), torch.zeros(5, 4)))


@pytest.mark.parametrize("kind, leaf, sizes", [
    ("torch", "in_proj_weight", (16, 16, 16)), ("blip", "qkv", (16, 16, 16)), ("sam2", "qkv", (32, 32, 32)),
    ("exaone", "qkv", (16, 8, 8))])
def test_attention_of_towers_has_heads_of_its_own(kind, leaf, sizes):
    model = tower(kind)
    assert [rows for rows, _ in next(iter(parts_of(route(model)).values())).values()] == [*sizes]
    check_queries_keys_and_values(model, leaf, model.output)
    if kind == "blip":
        assert route(model, per_head=True)["inner.qkv.weight"].matrix_shape == (12, 4, 16)


def experts(kind):
    torch.manual_seed(3)
    if kind == "step3p7":
        config = SimpleNamespace(num_local_experts=2, hidden_size=16, moe_intermediate_size=6, hidden_act="silu")
        module = Step3p7Experts(config)
    else:
        module = LongcatFlashExperts(SimpleNamespace(
            expert_ffn_hidden_size=6, hidden_size=16, n_routed_experts=2, zero_expert_num=1, hidden_act="silu"))
    for param in module.parameters():
        nn.init.normal_(param)
    return Tower(module, torch.randn(5, 16), torch.tensor([[0, 1]] * 5), torch.ones(5, 2))


@pytest.mark.parametrize("kind, count", [("step3p7", 2), ("longcat_flash", 3)])
def test_experts_whose_module_does_not_say_how_they_lie(kind, count):
    model = experts(kind)
    assert parts_of(route(model)) == {"inner.gate_up_proj": {"gate": (count, 6, 16), "up": (count, 6, 16)}}
    for part in weights_of(model, "gate_up_proj").values():
        before = model.output()
        kept = part[0].clone()
        set_(part, 0.0)
        assert before.abs().min() > 0 and not model.output().any()
        part[0].copy_(kept)


def test_linear_attention_is_split_as_its_module_does():
    model = build("qwen3_next", MODELS["qwen3_next"][0], "cpu")
    layer = model.model.layers[0].linear_attn
    x = torch.randn(2, 3, 16)
    read = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    found = [part for leaf in ("in_proj_qkvz", "in_proj_ba") for part, in weights_of(model, leaf).values()]
    for expected, weight in zip(read, found, strict=True):
        torch.testing.assert_close(x @ weight.reshape(-1, 16).T, expected.flatten(2))


def test_linear_attention_whose_parts_are_in_runs(monkeypatch):
    model, seen, split = build("qwen3_5_text", MODELS["qwen3_5_text"][0], "cpu"), [], torch.split
    monkeypatch.setattr(torch, "split", lambda x, sizes, **axis: seen.append(sizes) or split(x, sizes, **axis))
    logits(model, use_cache=False)
    assert [6, 6, 20] in seen


def test_a_gate_follows_the_queries_of_each_head():
    model = build("qwen3_next/gated", MODELS["qwen3_next/gated"][0], "cpu")
    views = weights_of(model, "q_proj")
    set_(views["gate"], -1e9)
    x = torch.ones(1, 5, 16)
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: x)
    assert not inputs_of(model, "o_proj").any()
    per_head = route(model, per_head=True)["model.layers.0.self_attn.q_proj.weight"]
    assert per_head.seen(0) == {"q": (4, 4, 16), "gate": (4, 4, 16)}


def test_a_fused_name_of_an_unknown_module_is_told_in_the_reason():
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24), "mlp": nn.Linear(8, 8)})
    model["in_proj"], model["conv1d"] = nn.Linear(8, 8), nn.Conv1d(8, 8, 3)
    for options, reason in (({}, "matrix, fused, not split"), ({"auto_split": False}, "matrix")):
        reasons = {name: each.reason for name, each in route(model, **options).items() if each.whole}
        assert reasons == {"qkv.weight": reason, "in_proj.weight": reason, "mlp.weight": "matrix"}
    told = route(model, Override(name="qkv.weight", split={}))["qkv.weight"]
    assert told.reason == "matrix"


@pytest.mark.parametrize("kind", ["xlnet", "funnel"])
def test_outputs_that_are_counted_by_head_are_of_one_matrix(kind):
    sizes = {"vocab_size": 40, "d_model": 16, "n_head": 2, "d_inner": 24}
    with torch.device("meta"):
        model = {"xlnet": XLNetModel, "funnel": FunnelModel}[kind](AutoConfig.for_model(kind, **sizes, **{
            "xlnet": {"n_layer": 1}, "funnel": {"d_head": 8, "block_sizes": [1]}}[kind]))
    routes = route(model)
    names = {name.rpartition(".")[2]: each for name, each in routes.items()}
    for name in {"xlnet": "qkvor", "funnel": ["r_kernel"]}[kind]:
        assert names[name].matrix_shape == (16, 16) and names[name].whole
    # A module's einsum over (inputs, heads, width) is a product with that matrix.
    weight, x = torch.randn(16, 2, 8), torch.randn(5, 3, 16)
    torch.testing.assert_close(torch.einsum("ibh,hnd->ibnd", x, weight).flatten(2), x @ weight.view(16, 16))


@pytest.mark.parametrize("kind, leaf, after", [("phi3", "gate_up_proj", "down_proj"), ("modernbert", "Wi", "Wo"),
                                               ("glm4", "gate_up_proj", "down_proj")])
def test_gate_and_up_are_where_the_model_reads_them(kind, leaf, after):
    model = build(kind, MODELS[kind][0], "cpu")
    after = "mlp.Wo" if after == "Wo" else after
    for part in ("gate", "up"):
        assert inputs_of(model, after).abs().min() > 0
        kept = [view.clone() for view in weights_of(model, leaf)[part]]
        set_(weights_of(model, leaf)[part], 0.0)
        assert inputs_of(model, after).count_nonzero() == 0
        for view, value in zip(weights_of(model, leaf)[part], kept, strict=True):
            view.copy_(value)


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "gpt_oss", "llama4_text"])
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
