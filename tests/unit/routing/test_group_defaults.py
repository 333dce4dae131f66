"""Weight decay of vectors and of element-wise recipes, rates of embeddings and heads, and presets."""

import json

import pytest
import torch
from torch import nn

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import PRESETS, LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.registry import check_recipes
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.forecast.report import plan_table
from ds_layerwise.tools.dry_run import DryRun
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.model_specs import forecast
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("routes", "module_of", "sections", "rate_checks", "param_groups")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.q_norm, self.k_layernorm = nn.Linear(4, 8), nn.LayerNorm(4), nn.LayerNorm(4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.row = nn.Parameter(torch.ones(1, 8))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(10, 4), Attention()
        self.mlp, self.lm_head = nn.Linear(8, 4, bias=False), nn.Linear(4, 10)


#: Parameters with fewer than two axes, and of them those of norms over queries and keys.
QK = {f"attention.{norm}.{what}" for norm in ("q_norm", "k_layernorm") for what in ("weight", "bias")}
VECTORS = QK | {"attention.proj.bias", "attention.norm.weight", "attention.gain", "lm_head.bias"}
MATRICES = {"attention.proj.weight", "mlp.weight"}
SCALAR = {"embed.weight", "attention.row", "lm_head.weight"}


def decays(params, layerwise=None, groups=None, model=None):
    """Return the weight decay that the next step takes, by parameter."""
    model = model or Model()
    config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": params})
    sections = LayerWiseConfig.from_section(layerwise or {})
    optimizer = LayerWiseOptimizer(groups(model) if groups else model.parameters(), config)
    routes = route_parameters(model, optimizer.param_groups, optimizer=config, layerwise=sections,
                              own_decay=optimizer.own_decay)
    now = optimizer.groups_now()
    return {name: route.hyper(now[route.group])["weight_decay"] for name, route in routes.items()}


def expected(*, matrices=0.1, scalar=0.1, vectors=0.0, qk=None):
    return {**dict.fromkeys(MATRICES, matrices), **dict.fromkeys(SCALAR, scalar), **dict.fromkeys(VECTORS, vectors),
            **dict.fromkeys(QK, vectors if qk is None else qk)}


@pytest.mark.parametrize("params, layerwise, kinds", [
    ({}, {}, {}),
    ({"decay_vectors": False}, {}, {}),
    ({"decay_vectors": True}, {}, {"vectors": 0.1}),
    ({"scalar_weight_decay": 0.3}, {}, {"scalar": 0.3}),
    ({"scalar_weight_decay": 0.0}, {}, {"scalar": 0.0}),
    ({"scalar_weight_decay": 0.3, "decay_vectors": True}, {}, {"scalar": 0.3, "vectors": 0.3}),
    ({}, {"apply_wd_to_qk_layernorm": True}, {"qk": 0.1}),
    ({"scalar_weight_decay": 0.3}, {"apply_wd_to_qk_layernorm": True}, {"scalar": 0.3, "qk": 0.3}),
    ({}, {"overrides": [{"module": "LayerNorm", "weight_decay": 0.5}, {"name": "*.proj.*", "weight_decay": 0.25}]},
     {"own": {**dict.fromkeys(QK, 0.5), "attention.norm.weight": 0.5, "attention.proj.weight": 0.25,
              "attention.proj.bias": 0.25}}),
    ({}, {"apply_wd_to_qk_layernorm": True, "overrides": [{"name": "*.q_norm.*", "weight_decay": 0}]},
     {"qk": 0.1, "own": {"attention.q_norm.weight": 0, "attention.q_norm.bias": 0}}),
])
def test_weight_decay_of_each_parameter(params, layerwise, kinds):
    own = kinds.pop("own", {})
    assert decays({"weight_decay": 0.1, **params}, layerwise) == {**expected(**kinds), **own}


def test_a_group_that_says_so_for_itself_decays_its_vectors():
    def groups(model):
        return [{"params": list(model.attention.parameters()), "weight_decay": 0.5},
                {"params": list(model.mlp.parameters()) + list(model.lm_head.parameters())},
                {"params": list(model.embed.parameters()), "weight_decay": 0.1}]

    found = decays({"weight_decay": 0.1, "scalar_weight_decay": 0.3}, groups=groups)
    assert found == {**{name: 0.5 for name in found if name.startswith("attention.")}, "mlp.weight": 0.1,
                     "lm_head.weight": 0.3, "lm_head.bias": 0.0, "embed.weight": 0.1}
    # An override says more than a group.
    found = decays({}, {"overrides": [{"ndim": 1, "weight_decay": 0.0625}]}, groups=groups)
    assert found["attention.norm.weight"] == found["lm_head.bias"] == 0.0625 and found["attention.gain"] == 0.5


@pytest.mark.parametrize("name, is_one", [
    ("layers.0.self_attn.q_norm.weight", True), ("k_norm.bias", True), ("a.q_layernorm.weight", True),
    ("a.key_layernorm.weight", True), ("a.query_layer_norm.weight", True), ("a.q_ln.weight", True),
    ("transformer.norm_k.weight", True), ("a.q_norm.inner.weight", True), ("q_norm", True),
    ("a.norm.weight", False), ("a.q_proj.bias", False), ("seq_norm.weight", False), ("a.q_normal.weight", False),
    ("mask_norm.weight", False)])
def test_norms_over_queries_and_keys_by_name(name, is_one):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Linear(3, 3, bias=False)
            *path, last = name.split(".")
            inner = self
            for part in path:
                inner.add_module(part, nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(last, nn.Parameter(torch.ones(2)))

    assert decays({"weight_decay": 0.5}, {"apply_wd_to_qk_layernorm": True}, model=One())[name] == 0.5 * is_one


# --- embeddings and output heads -------------------------------------------------------------------------------------


def route(layerwise, model=None, **kwargs):
    sections = LayerWiseConfig.from_section(layerwise)
    model = model or Model()
    return route_parameters(model, [{"params": list(model.parameters())}], layerwise=sections, **kwargs)


def test_embeddings_and_heads_have_a_rate_of_their_own():
    routes = route({"decoupled_lr": 0.25, "decoupled_min_lr": 0.125})
    assert {name: (r.lr, r.min_lr) for name, r in routes.items() if (r.lr, r.min_lr) != (None, None)} == {
        "embed.weight": (0.25, 0.125), "lm_head.weight": (0.25, 0.125)}
    # Wherever they go.
    routes = route({"decoupled_lr": 0.25, "overrides": [{"name": "embed.*", "optimizer": "matrix"}]})
    assert (routes["embed.weight"].lr, routes["embed.weight"].whole) == (0.25, True)
    model = Model()
    model.mlp.weight.is_embedding_or_output_parameter = True
    assert route({"decoupled_min_lr": 0.125}, model)["mlp.weight"].min_lr == 0.125


@pytest.mark.parametrize("override, told", [
    ({"lr": 0.5}, r"lm_head.weight: layerwise.overrides\[0\] sets lr to 0.5 and layerwise.decoupled_lr to 0.25"),
    ({"lr_scale": 2}, r"layerwise.decoupled_lr sets lr to 0.25 and layerwise.overrides\[0\] sets lr_scale to 2"),
])
def test_an_override_must_not_say_another_rate(override, told):
    with pytest.raises(RoutingError, match=told):
        route({"decoupled_lr": 0.25, "overrides": [{"name": "lm_head.weight", **override}]})
    assert route({"decoupled_lr": 0.25, "overrides": [{"name": "lm_head.weight", "lr": 0.25}]})["lm_head.weight"].lr


def test_a_bound_above_the_rate_is_refused():
    with pytest.raises(ConfigError, match="layerwise.decoupled_min_lr is 0.5, above layerwise.decoupled_lr, which is"):
        route({"decoupled_lr": 0.25, "decoupled_min_lr": 0.5})
    config, model = OptimizerConfig.from_section({"params": {"adam_lr": 0.25, "muon_lr": 1.0}}), Model()
    optimizer = LayerWiseOptimizer(model.parameters(), config)
    optimizer.require_chosen_rates(route({"decoupled_min_lr": 0.25}, model))
    with pytest.raises(ConfigError, match="embed.weight: min_lr is 0.5, above its learning rate, which is 0.25; lower "
                       "min_lr, or give lr beside it"):
        optimizer.require_chosen_rates(route({"decoupled_min_lr": 0.5}, model))
    optimizer.require_chosen_rates(route({"overrides": [{"name": "mlp.*", "min_lr": 1.0}]}, model))
    with pytest.raises(ConfigError, match="mlp.weight: min_lr is 1.5, above its learning rate, which is 1"):
        optimizer.require_chosen_rates(route({"overrides": [{"name": "mlp.*", "min_lr": 1.5}]}, model))


def test_the_base_of_a_rate_stays_when_a_schedule_moves_the_rate():
    model, config = Model(), OptimizerConfig.from_section({"params": {"lr": 0.5, "muon_lr": 1.0}})
    optimizer = LayerWiseOptimizer([{"params": list(model.parameters()), "lr": 0.25, "muon_lr": 0.5}], config)
    optimizer.param_groups[0]["lr"] = 0.125
    now, = optimizer.groups_now()
    assert (now["lr"], now["configured_lr"]) == (0.125, 0.25) and "params" not in now
    assert route({"decoupled_lr": 3.0}, model)["embed.weight"].hyper(now)["lr"] == 1.5


# --- plans -----------------------------------------------------------------------------------------------------------


class Planned(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.q_norm = nn.Embedding(10, 4, device="meta"), nn.RMSNorm(4, device="meta")
        self.mlp = nn.Linear(8, 8, bias=False, device="meta")


def planned(tmp_path, params=None, layerwise=None):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "layerwise": layerwise or {},
                                                  "optimizer": {"type": "LayerWiseMuon", "params": params or {}}}))
    run = DryRun.of(Planned(), tmp_path / "ds.json", [2])
    return {row["name"]: row for row in run.listed(run.forecasts[0])}


def test_a_plan_honours_what_names_and_shapes_answer(tmp_path):
    rows = planned(tmp_path, {"weight_decay": 0.1, "scalar_weight_decay": 0.3, "lr": 0.5, "muon_lr": 1.0}, {
        "apply_wd_to_qk_layernorm": False, "overrides": [
            {"ndim": 2, "min_elements": 50, "lr": 0.25, "min_lr": 0.125}, {"shape": [None, 4], "lr_scale": 2},
            {"regex": r"q_\w+\.weight", "max_elements": 4, "eps": 0.5}]})
    assert {name: [row[key] for key in ("weight_decay", "lr_ratio", "min_lr")] for name, row in rows.items()} == {
        "embed.weight": [0.3, 2, None], "q_norm.weight": [0, 1, None], "mlp.weight": [0.1, 0.5, 0.125]}
    assert planned(tmp_path, {"weight_decay": 0.1}, {"apply_wd_to_qk_layernorm": True})["q_norm.weight"][
        "weight_decay"] == 0.1
    with pytest.raises(RoutingError, match=r"layerwise.overrides\[0\] \(ndim 3\) matches no trainable parameter"):
        planned(tmp_path, layerwise={"overrides": [{"ndim": 3, "lr": 1}]})
    with pytest.raises(ConfigError, match="mlp.weight: min_lr is 0.5, above its learning rate, which is 0.02"):
        planned(tmp_path, layerwise={"overrides": [{"ndim": 2, "min_elements": 50, "min_lr": 0.5}]})


def test_a_plan_honours_what_the_model_alone_answers(tmp_path):
    rows = planned(tmp_path, {"lr": 0.5, "muon_lr": 0.5}, {
        "decoupled_lr": 0.25, "overrides": [{"module": "Linear", "lr": 0.125}]})
    assert {name: row["lr_ratio"] for name, row in rows.items()} == {
        "embed.weight": 0.5, "q_norm.weight": 1, "mlp.weight": 0.25}


# --- presets ---------------------------------------------------------------------------------------------------------


def optimizer(**params):
    return OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": params})


def test_presets_are_as_published():
    kimi = optimizer(preset="kimi", lr=1e-3)
    assert kimi.matrix == Muon(scale_mode="match_rms_adamw")
    assert (kimi.muon_lr, kimi.adam_lr, kimi.weight_decay, kimi.momentum) == (1e-3, 1e-3, 0.1, 0.95)
    assert (kimi.betas, kimi.eps) == ((0.9, 0.95), 1e-8)
    jordan = optimizer(preset="keller_jordan", lr=1e-3)
    assert jordan.matrix == Muon() and (jordan.muon_lr, jordan.adam_lr, jordan.weight_decay) == (0.02, 1e-3, 0.0)
    beyond = optimizer(preset="soap_muon_beyond", lr=1e-3)
    assert beyond.matrix == Muon(nesterov=False, ns_coefficients="polar_express", ns_steps=16, scale_mode="spectral",
                                 extra_scale_factor=0.2)
    assert (beyond.muon_lr, beyond.adam_lr, beyond.weight_decay, beyond.momentum) == (1e-3, 1e-3, 0.1, 0.9)
    for name in PRESETS:
        check_recipes(optimizer(preset=name).recipes)
    assert optimizer(preset=None) == optimizer()


def test_keys_of_the_config_win_over_the_preset():
    mine = optimizer(preset="kimi", weight_decay=0.3, ns_steps=6)
    assert (mine.weight_decay, mine.matrix.ns_steps, mine.matrix.scale_mode) == (0.3, 6, "match_rms_adamw")
    assert set(mine.from_preset) == PRESETS["kimi"].keys() - {"weight_decay", "ns_steps"}
    # A rate, and a factor, are for the scale that they were published with.
    scaled = optimizer(preset="keller_jordan", scale_mode="match_rms_adamw", lr=1e-3)
    assert (scaled.muon_lr, scaled.matrix.scale_mode) == (1e-3, "match_rms_adamw")
    scaled = optimizer(preset="soap_muon_beyond", scale_mode="original", lr=1e-3, muon_lr=0.02)
    assert (scaled.matrix.extra_scale_factor, scaled.muon_lr, scaled.matrix.ns_steps) == (1.0, 0.02, 16)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("hook", [{"hyperball": "own"}, {"relative_update": True}])
def test_a_hook_that_says_how_large_updates_are_replaces_the_scale_of_a_preset(preset, hook):
    found = optimizer(preset=preset, lr=1e-3, muon_lr=0.02, **hook)
    assert (found.matrix.scale_mode, found.matrix.extra_scale_factor, found.muon_lr) == ("original", 1.0, 0.02)
    assert found.matrix.ns_steps == PRESETS[preset]["ns_steps"] and not {"scale_mode", "muon_lr"} & {*found.from_preset}
    off = dict.fromkeys(hook, None if "hyperball" in hook else False)
    assert optimizer(preset=preset, lr=1e-3, **off).matrix.scale_mode == PRESETS[preset]["scale_mode"]


@pytest.mark.parametrize("params, told", [
    ({"preset": "kimmi"}, "optimizer.params.preset must be one of 'kimi', 'keller_jordan', 'soap_muon_beyond', got"),
    ({"preset": "soap_muon_beyond", "scale_mode": "original", "lr": 1e-3}, "lr is 0.001 without muon_lr"),
    ({"decay_vectors": 1}, "optimizer.params.decay_vectors must be true or false, got 1"),
    ({"scalar_weight_decay": -1}, r"optimizer.params.scalar_weight_decay must be in \[0, inf\), got -1"),
])
def test_a_wrong_preset_or_decay_is_refused(params, told):
    with pytest.raises(ConfigError, match=told):
        optimizer(**params)


def test_a_group_cannot_have_a_preset_or_a_rule_of_decay_of_its_own():
    for key, value in (("preset", "kimi"), ("decay_vectors", True), ("scalar_weight_decay", 0.5)):
        with pytest.raises(ConfigError, match=rf"param_groups\[0\].{key} is .*, which a group cannot change"):
            LayerWiseOptimizer([{"params": [nn.Parameter(torch.ones(2))], key: value}], OptimizerConfig())


@pytest.mark.parametrize("params, told", [
    ({"preset": "keller_jordan"}, "preset keller_jordan: muon_lr 0.02, momentum 0.95, nesterov True, ns_coefficients "
     "simple, ns_steps 5, scale_mode original, weight_decay 0.0, betas [0.9, 0.95], eps 1e-10 preset end"),
    ({"preset": "soap_muon_beyond", "weight_decay": 0.3, "ns_steps": 8}, "preset soap_muon_beyond: momentum 0.9, "
     "nesterov False, ns_coefficients polar_express, scale_mode spectral, extra_scale_factor 0.2; the config replaces "
     "its ns_steps, weight_decay preset end"),
    ({}, None),
])
def test_the_table_tells_the_preset(params, told):
    run = RunConfig.from_ds_config({"zero_optimization": {"stage": 1, "round_robin_gradients": True},
                                    "optimizer": {"type": "LayerWiseMuon", "params": params}})
    model = Model()
    routes = route_parameters(model, [{"params": list(model.parameters())}], recipes=run.optimizer.recipes)
    specs = specs_of(((name, tuple(p.shape), "float32") for name, p in model.named_parameters()), routes)
    text = " ".join(plan_table(routes, specs, [forecast(specs, routes, run, 2)], run.optimizer,
                                   without_effect=["preset end"]).split())
    assert (told or "").replace(" preset end", " gradient_clipping: 1 without effect here") in text
    assert ("preset" in text.replace("preset end", "")) is (told is not None)
