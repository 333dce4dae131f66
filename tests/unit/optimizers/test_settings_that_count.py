"""Keys that are accepted: each changes something, is refused, or is said to be without effect."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, params_model
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.fields import merged_keys
from ds_layerwise.optimizers.registry import names
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.routing.routes import idle_keys
from ds_layerwise.zero.setup.param_groups import GROUP_KEYS, LayerWiseOptimizer
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("routes", "rate_checks", "routing_rules", "param_groups", "sections")

TESTS = Path(__file__).parents[2]


class Model(nn.Module):
    """A model of each kind: a table, a fused matrix of known parts, a matrix, a norm over queries, vectors, a head."""

    def __init__(self, *, scalars=True):
        super().__init__()
        self.config = SimpleNamespace(model_type="gpt2", num_attention_heads=2, hidden_size=8)
        self.up, self.q_proj = nn.Linear(8, 16, bias=scalars), nn.Linear(8, 8, bias=False)
        if scalars:
            self.embed, self.q_norm, self.norm = nn.Embedding(32, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.down = nn.Linear(16, 8, bias=False)
        self.act = nn.LayerNorm(8) if scalars else nn.Identity()


def matrices():
    """A model without anything that is not a matrix; what lies in a list is no head."""
    return nn.ModuleList([Model(scalars=False)])


def parsed(params=None, layerwise=None):
    section = {"type": "LayerWise", "params": {"lr": 1e-3, "muon_lr": 0.02, **(params or {})}}
    return OptimizerConfig.from_section(section), LayerWiseConfig.from_section(layerwise or {})


def outcome(params=None, layerwise=None, groups=None, model=None):
    """The settings that train each parameter, and the keys that are without effect."""
    model = model or Model()
    config, section = parsed(params, layerwise)
    everything = [p for p in model.parameters()]
    optimizer = LayerWiseOptimizer([{"params": everything, **groups}] if groups else everything, config)
    routes = route_parameters(model, optimizer.param_groups, optimizer=config, layerwise=section,
                              own_decay=optimizer.own_decay)
    optimizer.require_chosen_rates(routes)
    now = optimizer.groups_now()
    return ({name: (route.recipe, route.matrix_shape, route.parts, route.hyper(now[0]), route.min_lr)
             for name, route in routes.items()}, idle_keys(config, section, routes.values(), optimizer.own_keys))


# --- what no optimizer takes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params, key", [
    ({"matrix_optimizer": "soap"}, "momentum"), ({"scalar_optimizer": "sgd"}, "betas"),
    ({"scalar_optimizer": "lion"}, "eps"), ({"matrix_optimizer": "muon", "scalar_optimizer": "sgd"}, "eps"),
    ({"matrix_optimizer": "torch.optim:SGD"}, "momentum")])
def test_a_key_that_no_optimizer_takes_is_refused(params, key):
    given = {key: [0.9, 0.95] if key == "betas" else 0.5}
    for params, groups in (({**params, **given}, {}), (params, {**given, "muon_lr": 0.02})):
        where = "param_groups[0]" if groups else "optimizer.params"
        with pytest.raises(ConfigError) as caught:
            outcome(params, groups=groups)
        told = str(caught.value)
        assert re.match(rf"no optimizer of this run \(.*\) uses {re.escape(where)}\.{key}; ", told) or (
            f" does not read {where}.{key}, but has an argument {key}; " in told and "matrix_params" in told)


def test_a_key_is_taken_if_an_override_names_an_optimizer_that_takes_it():
    params, layerwise = {"scalar_optimizer": "lion", "eps": 1e-6}, {"overrides": [
        {"name": "embed.*", "optimizer": "adamw"}]}
    after, idle = outcome(params, layerwise)
    assert after["embed.weight"][3]["eps"] == 1e-6 and idle == []


def test_a_class_that_would_take_it_as_an_argument_does_not_leave_it_to_the_other():
    params = {"matrix_optimizer": "torch.optim:AdamW", "betas": [0.9, 0.95]}
    with pytest.raises(ConfigError, match="torch.optim:AdamW does not read optimizer.params.betas, but has an argument "
                       "betas; set it in optimizer.params.matrix_params, and here only for another optimizer"):
        outcome(params)
    outcome({**params, "matrix_params": {"betas": [0.9, 0.95]}})
    outcome({"matrix_optimizer": "torch.optim:Adafactor", "betas": [0.9, 0.95]})  # it has no such argument
    # If no other optimizer takes it, it has to go from where it is.
    with pytest.raises(ConfigError, match="in optimizer.params.matrix_params, and here only for another optimizer"):
        outcome({"matrix_optimizer": "torch.optim:SGD", "momentum": 0.9})
    outcome({"matrix_optimizer": "torch.optim:SGD", "matrix_params": {"momentum": 0.9}})


@pytest.mark.parametrize("kind", ["matrix", "scalar"])
def test_arguments_of_a_class_need_one(kind):
    with pytest.raises(ConfigError, match=rf"{kind}_params is for a class, named as .* in {kind}_optimizer .*; write"):
        outcome({f"{kind}_params": {"eps": 1e-6}})


def test_a_config_of_stock_muon_needs_one_word():
    params = {"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.9, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1,
              "bias_correction": True}
    assert outcome(params)[1] == []
    # A model without anything for the auxiliary Adam is told, not refused.
    assert outcome(params, model=matrices())[1] == ["optimizer.params.betas", "optimizer.params.eps"]


def test_bias_is_corrected_anyway():
    with pytest.raises(ConfigError, match="optimizer.params.bias_correction must be true"):
        parsed({"bias_correction": False})


# --- one for everything -----------------------------------------------------------------------------------------------

FILE = {"lr": 1e-3, "muon_lr": 0.02, "momentum": 0.9, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1,
        "ns_steps": 3, "scale_mode": "spectral", "per_head_muon": True, "scalar_weight_decay": 0.05}
OVERRIDES = {"overrides": [{"name": "up.weight", "num_heads": 2, "lr_scale": 0.5, "ns_steps": 8},
                           {"name": "down.weight", "split": {"a": 4, "b": 4}, "momentum": 0.5},
                           {"name": "*.bias", "optimizer": "scalar", "weight_decay": 0.0}]}


@pytest.mark.parametrize("word", names(whole=False))
def test_a_scalar_rule_for_the_matrices_is_for_everything(word):
    params = {"lr": 1e-3, "muon_lr": 0.02, "weight_decay": 0.1, "matrix_optimizer": word}
    found, _ = outcome(params)
    expected, _ = outcome({**params, "matrix_optimizer": "muon", "scalar_optimizer": word}, {
        "overrides": [{"name": "*", "optimizer": "scalar"}]})
    assert found == expected and {recipe.rule for recipe, *_ in found.values()} == {word}
    assert {hyper["lr"] for *_, hyper, _ in found.values()} == {1e-3}


def test_the_file_of_another_serves_it_and_what_it_leaves_is_told():
    outcome(FILE, OVERRIDES)
    found, idle = outcome({**FILE, "matrix_optimizer": "adamw"}, OVERRIDES)
    assert idle == [f"optimizer.params.{key}" for key in (
        "muon_lr", "momentum", "ns_steps", "scale_mode", "per_head_muon")]
    assert "optimizer.params.scalar_optimizer" in outcome({"matrix_optimizer": "adamw", "scalar_optimizer": "lion"})[1]
    assert all(recipe == AdamW() and shape is None for recipe, shape, *_ in found.values())
    assert found["up.weight"][3] == {"lr": 5e-4, "weight_decay": 0.05, "momentum": 0.9, "eps": 1e-6,
                                     "betas": (0.8, 0.99)}
    routes = route_parameters(model := Model(), [{"params": list(model.parameters())}],
                              recipes=parsed({"matrix_optimizer": "adamw"})[0].recipes,
                              overrides=parsed(None, OVERRIDES)[1].overrides)
    assert routes["up.weight"].reason.endswith("num_heads, ns_steps without effect")
    assert routes["down.weight"].reason.endswith("momentum, split without effect")


@pytest.mark.parametrize("params, said", [
    ({"ns_step": 5}, "did you mean 'ns_steps'"), ({"ns_steps": 0}, "ns_steps must be a whole number of at least 1"),
    ({"adam_w_mode": False}, "adam_w_mode is false, which means scalar_optimizer 'adam', got 'adamw'")])
def test_a_scalar_rule_for_everything_checks_the_keys_that_it_leaves(params, said):
    with pytest.raises(ConfigError, match=said):
        parsed({"matrix_optimizer": "adamw", **params})


@pytest.mark.parametrize("preset", ["kimi", "keller_jordan"])
def test_a_scalar_rule_for_everything_takes_its_own_keys_of_a_preset(preset):
    config, _ = parsed({"preset": preset, "matrix_optimizer": "adamw"})
    muon, _ = parsed({"preset": preset})
    assert (config.eps, config.weight_decay, config.matrix) == (muon.eps, muon.weight_decay, AdamW())


# --- every key --------------------------------------------------------------------------------------------------------

#: By key of optimizer.params that is no setting of a recipe (these: test_every_setting.py), a value, and what it needs.
OF_PARAMS = {
    "lr": (2e-3, {}), "muon_lr": (0.1, {}), "adam_lr": (0.1, {}), "momentum": (0.5, {}), "weight_decay": (0.5, {}),
    "betas": ([0.5, 0.5], {}), "eps": (0.5, {}), "per_head_muon": (True, {}),
    "decay_vectors": (True, {"weight_decay": 0.1}), "scalar_weight_decay": (0.5, {}), "preset": ("kimi", {}),
    "matrix_optimizer": ("soap", {}), "scalar_optimizer": ("lion", {})}


def test_every_key_of_the_parameters_changes_something():
    known = {*params_model(Muon, AdamW, True).keys()} - {*merged_keys((Muon, AdamW))} | {"weight_decay"}
    assert OF_PARAMS.keys() == known
    for key, (value, beside) in OF_PARAMS.items():
        after, idle = outcome({**beside, key: value})
        assert after != outcome(beside)[0] and idle == [], key


#: By key of a group, the same.
OF_GROUPS = {"lr": 2e-3, "muon_lr": 0.1, "adam_lr": 0.1, "momentum": 0.5, "weight_decay": 0.5, "betas": [0.5, 0.5],
             "eps": 0.5, "use_muon": True}


def test_every_key_of_a_group_changes_something():
    assert OF_GROUPS.keys() == {*GROUP_KEYS}
    for key, value in OF_GROUPS.items():
        model = Model(scalars=key != "use_muon")
        if key == "use_muon":
            model.gain = nn.Linear(1, 8, bias=False)  # no matrix by itself
        beside = {"muon_lr": 0.02} if key == "lr" else {}
        after, idle = outcome(groups={key: value, **beside}, model=model)
        assert after != outcome(model=model)[0] and idle == [], key


def test_keys_of_a_group_that_only_overrides_read_are_told():
    groups = {"lr_scale": 0.5, "min_lr": 1e-5}
    assert outcome(groups=groups)[1] == ["param_groups[0].lr_scale", "param_groups[0].min_lr"]
    # torch's OneCycleLR leaves both.
    assert outcome(groups={"min_lr": 1e-5, "max_lr": 1e-3})[1] == []
    for key in ("beta1", "beta2"):
        with pytest.raises(ConfigError, match=f"{key} is not an option; did you mean 'betas'"):
            outcome(groups={key: 0.9})


#: By key of the layerwise section, where what trains a parameter depends on it: a value, what it needs, and a model for
#: which it is without effect.
OF_LAYERWISE = {
    "auto_split": (False, {}, None), "overrides": ([{"name": "up.weight", "momentum": 0.5}], {}, None),
    "decoupled_lr": (0.1, {}, matrices()), "decoupled_min_lr": (1e-3, {}, matrices()),
    "apply_wd_to_qk_layernorm": (True, {"weight_decay": 0.1}, matrices()),
    "mup": ({"base_width": 4, "width": 8}, {"scalar_optimizer": "sgd"}, None)}

#: The others act in an engine: a test of each.
IN_ENGINES = {
    "layout": "unit/tools/test_dry_run.py", "alignment": "unit/plan/test_layout.py",
    "reduction": "distributed/step/test_wires.py",
    "max_skipped_steps": "distributed/step/test_skipped.py",
    "grad_norm_skip_threshold": "distributed/step/test_reports.py",
    "log_num_zeros_in_grad": "distributed/step/test_reports.py", "norm_groups": "distributed/step/test_reports.py",
    "monitor": "distributed/step/test_reports.py", "verify_first_step": "distributed/step/test_first_step.py",
    "cuda_graph": "distributed/step/test_cuda_graph.py",
    "check_writes": "distributed/step/test_weight_writes.py",
    "overlap_param_gather": "distributed/step/test_under_way.py", "master_dtype": "distributed/step/test_remainders.py",
    "param_wire": "distributed/step/test_param_wire.py",
    "rounding_seed": "distributed/step/test_kept_states.py", "batch_matrices": "distributed/step/test_batches.py",
    "save_universal": "distributed/checkpoint/test_save_options.py",
    "fsync": "distributed/checkpoint/test_save_options.py", "max_waiting_buckets": "distributed/step/test_backward.py",
    "on_missing_state": "distributed/checkpoint/test_changed_since_save.py",
    "on_optimizer_change": "distributed/checkpoint/test_changed_since_save.py",
    "on_hyper_change": "distributed/checkpoint/test_resumed_groups.py",
    "rename": "distributed/checkpoint/test_changed_since_save.py",
    "client_optimizer": "distributed/step/test_client_optimizer.py",
    "qk_clip": "distributed/step/test_qk_clip.py", "log_max_attention_logit": "distributed/step/test_qk_clip.py",
    "dump_param_map": "distributed/step/test_override_rules.py", "table": "distributed/ecosystem/test_plan.py"}


def test_every_key_of_the_layerwise_section_changes_something():
    assert OF_LAYERWISE.keys() | IN_ENGINES.keys() == {*LayerWiseConfig.keys()}
    for key, (value, beside, without) in OF_LAYERWISE.items():
        model = Model()
        model.attn, model.last = nn.MultiheadAttention(8, 2, bias=False), nn.LayerNorm(8)
        (after, idle), (before, _) = (outcome(beside, each, model=model) for each in ({key: value}, {}))
        assert after != before and idle == [], key
        if without is not None:
            (after, idle), (before, _) = (outcome(beside, each, model=without) for each in ({key: value}, {}))
            assert after == before and idle == [f"layerwise.{key}"], key


@pytest.mark.parametrize("key", IN_ENGINES)
def test_every_other_key_has_a_test_in_an_engine(key):
    assert f'"{key}"' in (text := (TESTS / IN_ENGINES[key]).read_text()) or f"{key}=" in text


@pytest.mark.parametrize("params, layerwise, told", [
    ({"scalar_weight_decay": 0.5}, {}, "optimizer.params.scalar_weight_decay"),
    ({}, {"monitor": {"every": 5}}, "layerwise.monitor.every"),
    ({}, {"client_optimizer": {"split": "element"}}, "layerwise.client_optimizer"),
    ({"decay_vectors": True}, {"apply_wd_to_qk_layernorm": True}, "layerwise.apply_wd_to_qk_layernorm"),
    ({"momentum": 0.9}, {"overrides": [{"name": "*", "optimizer": "scalar"}]}, "optimizer.params.momentum")])
def test_keys_that_change_nothing_are_told(params, layerwise, told):
    model = Model()
    del model.embed
    assert told in outcome(params, layerwise, model=model)[1]
    assert told not in outcome({}, {"monitor": {"update_rms": True, "every": 5}}, model=model)[1]


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [
    lambda optimizer: OneCycleLR(optimizer, max_lr=1e-3, total_steps=10, base_momentum=0.6, max_momentum=0.8),
    lambda optimizer: CyclicLR(optimizer, 1e-4, 1e-3, step_size_up=3, base_momentum=0.6, max_momentum=0.8)])
def test_a_schedule_that_moves_momentum_moves_that_of_matrices(made):
    model = Model()
    optimizer = LayerWiseOptimizer(model.parameters(), parsed()[0])
    routes = route_parameters(model, optimizer.param_groups)
    assert routes["up.weight"].hyper(optimizer.groups_now()[0])["momentum"] == 0.95
    schedule, seen = made(optimizer), []
    for _ in range(5):
        hyper = routes["up.weight"].hyper(optimizer.groups_now()[0])
        assert hyper["momentum"] == hyper["betas"][0] == optimizer.param_groups[0]["betas"][0]
        seen.append(hyper["momentum"])
        optimizer.mark_step()
        schedule.step()
    assert math.isclose(seen[0], 0.8) and min(seen) < 0.65
