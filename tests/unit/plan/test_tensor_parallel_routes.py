"""A whole model is cut for a plan of tensor parallelism, by hand, or refused; engines' own numbers are in
tests/distributed/parallel/test_tensor_plans.py."""

import json
import math
import re

import pytest

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.recipes.muon_recipes import Muon
from ds_layerwise.orthogonalize.newton_schulz_cost import newton_schulz_flops
from ds_layerwise.plan.forecast.model_file import find_model, read_model, route_model
from ds_layerwise.plan.network.links import PCIE_ETHERNET, TCP, Links, links_of_run
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.plan.routes.tensor_parallel_routes import cut
from ds_layerwise.tools.dry_run import DryRun
from tests.support.cli import assert_refused, run
from tests.support.rooms import rooms

pytestmark = rooms("model_names", "tensor_parallel_routes", "dry_run", "links", "hf_model")

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
          "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 1e-3, "muon_lr": 0.02}}}


def whole(name, *, auto_split=True):
    params = read_model(find_model(name)).params
    return [(p.name, p.shape) for p in params], route_model(params, auto_split=auto_split)


@pytest.mark.parametrize("cutter, table", [("megatron", (32064, 4096)), ("autotp", (128256, 4096))])
def test_llama_is_cut_along_outputs_where_a_block_opens_and_inputs_where_it_closes(cutter, table):
    shapes, routes = cut(*whole("llama-3-8b"), 4, cutter)
    by_name, layer = dict(shapes), "model.layers.7."
    assert {name.removeprefix(layer): (shape, routes[name].tp_axis, routes[name].is_cut)
            for name, shape in shapes if name.startswith(layer)} == {
        "self_attn.q_proj.weight": ((1024, 4096), -2, True), "self_attn.k_proj.weight": ((256, 4096), -2, True),
        "self_attn.v_proj.weight": ((256, 4096), -2, True), "self_attn.o_proj.weight": ((4096, 1024), -1, True),
        "mlp.gate_proj.weight": ((3584, 4096), -2, True), "mlp.up_proj.weight": ((3584, 4096), -2, True),
        "mlp.down_proj.weight": ((4096, 3584), -1, True), "input_layernorm.weight": ((4096,), None, False),
        "post_attention_layernorm.weight": ((4096,), None, False)}
    assert by_name["model.embed_tokens.weight"] == table and by_name["lm_head.weight"] == (32064, 4096)
    assert routes["model.embed_tokens.weight"].is_cut == (cutter == "megatron")
    assert not routes["lm_head.weight"].whole and routes["lm_head.weight"].is_cut
    for name, shape in shapes:
        assert routes[name].matrix_shape in (None, shape)
    assert routes[f"{layer}mlp.down_proj.weight"].reason == "model file, columns over 4 ranks"
    assert list(by_name) == [name for name, _ in whole("llama-3-8b")[0]]


def test_an_embedding_that_is_the_output_layer_too_is_cut_by_both():
    for cutter in ("megatron", "autotp"):
        shapes, _ = cut(*whole("qwen3-0.6b"), 2, cutter)
        assert dict(shapes)["model.embed_tokens.weight"] == (75968, 1024)
        assert dict(shapes)["model.layers.0.self_attn.q_norm.weight"] == (128,)


def test_layers_that_hold_inputs_first_and_biases():
    shapes, routes = whole("gpt2-124m", auto_split=False)
    shapes[0] = ("transformer.wte.weight", (50304, 768))
    parts, routes = cut(shapes, routes, 2, "megatron")
    block = "transformer.h.3."
    assert {name.removeprefix(block): (shape, routes[name].tp_axis) for name, shape in parts
            if name.startswith(block) and "ln" not in name} == {
        "attn.c_attn.weight": ((768, 1152), -1), "attn.c_attn.bias": ((1152,), None),
        "attn.c_proj.weight": ((384, 768), -2), "attn.c_proj.bias": ((768,), None),
        "mlp.c_fc.weight": ((768, 1536), -1), "mlp.c_fc.bias": ((1536,), None),
        "mlp.c_proj.weight": ((1536, 768), -2), "mlp.c_proj.bias": ((768,), None)}
    assert routes[f"{block}attn.c_attn.bias"].is_cut and not routes[f"{block}attn.c_proj.bias"].is_cut
    assert dict(parts)["transformer.wte.weight"] == (25152, 768)
    assert dict(parts)["transformer.wpe.weight"] == (1024, 768)


def test_parts_of_fused_matrices_are_refused():
    shapes, routes = whole("gpt2-124m")
    shapes[0] = ("transformer.wte.weight", (50304, 768))
    with pytest.raises(ConfigError, match=r"c_attn.weight \(768, 2304\) is updated as matrices of parts q, k, v"
                                          ".*auto_split"):
        cut(shapes, routes, 2, "megatron")


def test_a_single_rank_has_it_all():
    shapes, routes = whole("deepseek-v3")
    assert cut(shapes, routes, 1, "megatron") == (shapes, routes)


@pytest.mark.parametrize("model, cutter, message", [
    ("gpt2-124m", "megatron", r"cuts axis 0 of transformer.wte.weight \(50257, 768\), which they cannot share evenly"),
    ("gpt2-124m", "autotp", r"c_attn.weight \(768, 2304\): shapes of a whole model do not say"),
    ("deepseek-v3", "megatron", r"q_a_proj.weight \(1536, 7168\): shapes of a whole model do not say how .* rank has")])
def test_shapes_that_cannot_be_cut_are_refused_by_name(model, cutter, message):
    shapes, routes = whole(model)
    if cutter == "autotp":
        shapes[0] = ("transformer.wte.weight", (50304, 768))
    with pytest.raises(ConfigError, match=message):
        cut(shapes, routes, 2, cutter)


def test_heads_are_refused():
    route = Route(name="a.q_proj.weight", recipe=Muon(), reason="model file, 4 heads", group=0, matrix_shape=(4, 2, 8))
    with pytest.raises(ConfigError, match=r"is updated as matrices of \(4, 2, 8\), .* plan without num_heads"):
        cut([("a.q_proj.weight", (8, 8))], {"a.q_proj.weight": route}, 2, "megatron")


@pytest.fixture
def plan(tmp_path):
    def of(model="llama-3-8b", ranks=(8,), *, config=CONFIG, **kwargs):
        (tmp_path / "ds.json").write_text(json.dumps(config))
        return DryRun.of(model, tmp_path / "ds.json", ranks, **kwargs)

    return of


@pytest.mark.parametrize("mode, part", [("duplicated", 1), ("distributed", 1), ("blockwise", 4)])
def test_newton_schulz_sees_whole_matrices_unless_it_works_on_blocks(plan, mode, part):
    config = {**CONFIG, "optimizer": {"type": "LayerWiseMuon", "params": {
        "lr": 1e-3, "muon_lr": 0.02, "muon_tp_mode": mode}}}
    found = plan(config=config, tp_size=4)
    work = {spec.name: spec.work for spec in found.specs}
    assert work["model.layers.0.mlp.down_proj.weight"] == newton_schulz_flops(4096, 14336 // part)
    assert work["model.layers.0.self_attn.k_proj.weight"] == newton_schulz_flops(1024 // part, 4096)
    held, numel = found.forecasts[0].memory[0], sum(math.prod(spec.shape) for spec in found.specs)
    # All but 65 norms of 4096 are in four parts.
    assert numel == (8_030_261_248 - 65 * 4096) / 4 + 65 * 4096
    assert 2 * numel <= held.params < 2.01 * numel


def test_the_config_may_say_it(plan, tmp_path):
    autotp = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    assert plan(config=autotp).tp_size == 2 == plan(config=autotp, tp_size=2).tp_size
    assert plan(config=autotp).specs[0].shape == (128256, 4096) and plan(tp_size=2).specs[0].shape == (64128, 4096)
    for section in ({"autotp_size": 1}, {"autotp_size": 0}, {}):
        assert plan(config={**CONFIG, "tensor_parallel": section}).tp_size == 1
    for section, tp_size, message in [
            ({"autotp_size": 2}, 4, "autotp_size is 2, and tp_size 4; leave one of them out"),
            ({"autotp_size": True}, None, "autotp_size must be a whole number from 0 on, got True"),
            ({"autotp_size": 2.5}, None, "autotp_size is 2.5, which DeepSpeed refuses: Input should be"),
            ({"autotp_size": 2, "preset_model": "llama"}, None, "tensor_parallel.preset_model may change how AutoTP")]:
        with pytest.raises(ConfigError, match=message):
            plan(config={**CONFIG, "tensor_parallel": section}, tp_size=tp_size)
    with pytest.raises(ConfigError, match="ep_size is 2 and tp_size 2; experts and tensor parallelism do not go"):
        plan("deepseek-v3", tp_size=2, ep_size=2)


def test_ranks_with_the_same_part_have_their_share_of_a_node(plan, tmp_path):
    nodes = Links(inside_gb_s=100, between_gb_s=20, inside_us=1, between_us=5, ranks_per_node=8, rails=8)
    (tmp_path / "links.json").write_text(json.dumps(nodes.model_dump()))

    def found(tp_size, **kwargs):
        links = plan(tp_size=tp_size, **kwargs).predictions[0].links
        return links.ranks_per_node, links.rails, links.between_gb_s

    of_file = str(tmp_path / "links.json")
    assert found(2, links=of_file) == (4, 4, 20) and found(8, links=of_file) == (1, 1, 20)
    # Two nodes hold one part of each place, which has an interface to itself.
    assert found(16, links=of_file) == (1, 1, 20)
    assert found(2, links="pcie-ethernet") == (4, 4, PCIE_ETHERNET.between_gb_s)
    assert found(4, links="tcp", ranks_per_node=4) == (1, 1, TCP.between_gb_s / 4)
    (tmp_path / "links.json").write_text(json.dumps({**nodes.model_dump(), "rails": 3}))
    # Half of three interfaces of 20 each.
    assert found(2, links=of_file) == (4, 1, 30)
    with pytest.raises(ConfigError, match=r"tp_size 3 and the 8 ranks per node \(links\), one must divide the other"):
        found(3, links=of_file)
    assert links_of_run("tcp", on_host=True, ranks_per_node=4).between_gb_s == TCP.between_gb_s


def test_the_command_says_of_what_ranks_it_speaks(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    arguments = ["plan", "--model", "llama-3-8b", "--config", tmp_path / "ds.json", "--ranks", "8"]
    code, out, _ = run(*arguments, "--tp_size", "2")
    assert code == 0 and out.startswith("tensor parallelism over 2 ranks: numbers are of one of them")
    assert "tensor parallelism" not in run(*arguments)[1]
    listed = run(*arguments, "--tp_size", "2", "--list")[1]
    assert re.search(r"model.layers.0.mlp.down_proj.weight +4096x7168 .* model file, columns over 2 ranks\n", listed)
    assert_refused("cannot share evenly", *arguments, "--tp_size", "3", "--ranks_per_node", "3")


def test_heads_of_a_config_of_hugging_faces_are_not_cut(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}))
    arguments = ["plan", "--model", tmp_path / "config.json", "--config", tmp_path / "ds.json", "--ranks", "2"]
    assert run(*arguments, "--tp_size", "2")[0] == 0
    assert_refused("over 4 ranks does not divide num_key_value_heads 2", *arguments, "--tp_size", "4")
