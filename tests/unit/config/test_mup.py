"""Learning rates of another width: the published table by kind of parameter, and what would count the width twice."""

import json

import pytest
import torch
from torch import nn

from ds_layerwise.config.mup import is_hidden
from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.rules.muon_family import scale_factor
from ds_layerwise.plan.forecast.report import plan_table
from ds_layerwise.tools.dry_run import DryRun
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("mup", "routes")

WIDTH, BASE, LR, EPS = 24, 8, 0.5, 0.25


class Model(nn.Module):
    """A model of all kinds of parameters, some of them for the scalar optimizer by override."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, 6, bias=False)
        self.mix, self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3), nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False)
        self.positions = nn.Parameter(torch.zeros(1, 7, WIDTH))
        self.lm_head = nn.Linear(WIDTH, 10, bias=False)


VECTORS = {"norm.weight", "norm.bias", "up.bias", "mix.bias"}
TABLES = {"embed.weight", "lm_head.weight"}
ONE_AXIS = {"depthwise.weight", "positions"}
HIDDEN = {"router.weight", "mix.weight"}
MATRICES = {"up.weight", "down.weight"}

MUP = {"mup": {"base_width": BASE, "width": WIDTH}}
ROUTER = {"name": "router.weight", "optimizer": "scalar"}


def hyper(scalar="adamw", overrides=(ROUTER,), layerwise=None, **params):
    """Rate and eps of the next step by parameter, as multiples of those without a width."""
    config = OptimizerConfig.from_section({"type": "LayerWise", "params": {
        "lr": LR, "muon_lr": LR, "eps": EPS, "scalar_optimizer": scalar, **params}})
    sections = LayerWiseConfig.from_section({**(MUP if layerwise is None else layerwise),
                                             "overrides": list(overrides)})
    model = Model()
    optimizer = LayerWiseOptimizer(model.parameters(), config)
    routes = route_parameters(model, optimizer.param_groups, optimizer=config, layerwise=sections)
    group, = optimizer.groups_now()
    found = {name: route.hyper(group) for name, route in routes.items()}
    for name, route in routes.items():
        assert route.configured_lr(group) == pytest.approx(found[name]["lr"])
        assert route.lr_ratio(group) * LR == pytest.approx(found[name]["lr"])
    return {name: (values["lr"] / LR, values["eps"] / EPS) for name, values in found.items()}


def assert_table(found, hidden, others, matrices=(1.0, 1.0)):
    expected = {**dict.fromkeys(HIDDEN, hidden), **dict.fromkeys(VECTORS | TABLES | ONE_AXIS, others),
                **dict.fromkeys(MATRICES, matrices)}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name


@pytest.mark.parametrize("scalar, hidden, others", [
    ("adamw", (1 / 3, 1 / 3), (1, 1)), ("adam", (1 / 3, 1 / 3), (1, 1)), ("lion", (1 / 3, 1), (1, 1)),
    ("sgd", (1, 1), (3, 1))])
def test_rates_are_those_of_the_published_table(scalar, hidden, others):
    assert_table(hyper(scalar), hidden, others)
    assert_table(hyper(scalar, layerwise={}), (1, 1), (1, 1))
    assert_table(hyper(scalar, layerwise={"mup": {"base_width": 7, "width": 7}}), (1, 1), (1, 1))


def test_a_narrower_model_has_larger_rates():
    assert hyper(layerwise={"mup": {"base_width": 48, "width": 24}})["router.weight"] == pytest.approx((2.0, 2.0))


def test_a_rate_of_an_override_stays_and_a_scale_multiplies():
    found = hyper(overrides=[{**ROUTER, "lr": 0.125, "eps": 0.0625}, {"name": "mix.weight", "lr_scale": 6}])
    assert found["router.weight"] == (0.25, 0.25) and found["mix.weight"] == pytest.approx((2.0, 1 / 3))
    half = hyper(overrides=[{**ROUTER, "lr": 0.125}])
    assert half["router.weight"] == pytest.approx((0.25, 1 / 3))
    assert hyper(layerwise={**MUP, "decoupled_lr": 0.125})["lm_head.weight"] == (0.25, 1.0)


@pytest.mark.parametrize("shape, hidden", [
    ((), False), ((5,), False), ((5, 7), True), ((1, 7), False), ((7, 1), False), ((8, 1, 3), False), ((8, 8, 3), True),
    ((1, 7, 8), False), ((4, 8, 8), True), ((8, 1, 3, 3), False), ((8, 3, 3, 3), True)])
def test_a_matrix_that_grows_in_two_axes_is_hidden(shape, hidden):
    assert is_hidden(shape) is hidden


@pytest.mark.parametrize("params", [{}, {"scale_mode": "unit_rms_norm"}, {"matrix_optimizer": "normuon"},
                                    {"matrix_optimizer": "scion"}, {"matrix_optimizer": "namo"},
                                    {"matrix_optimizer": "adamuon", "scale_mode": "unit_rms_norm"}])
def test_matrices_keep_their_rate(params):
    assert_table(hyper(**params), (1 / 3, 1 / 3), (1, 1))


@pytest.mark.parametrize("params, message", [
    ({"scale_mode": "spectral"}, "layerwise.mup: up.weight: scale_mode of muon is 'spectral', with which updates grow "
                                 "with the width by themselves, so that widths would count twice; set it to "
                                 "'unit_rms_norm' or 'original', or leave layerwise.mup out"),
    ({"scale_mode": "match_rms_adamw"}, "scale_mode of muon is 'match_rms_adamw'"),
    ({"matrix_optimizer": "adamuon"}, "scale_mode of adamuon is 'match_rms_adamw'"),
    ({"matrix_optimizer": "adamuon", "scale_mode": "original", "moment2_rescale": False},
     "how the rate of adamuon depends"),
    ({"matrix_optimizer": "rmnp"}, "how the rate of rmnp depends on the width is not known"),
    ({"matrix_optimizer": "polargrad"}, "how the rate of polargrad depends on the width is not known"),
    ({"matrix_optimizer": "soap"}, "how the rate of soap depends on the width is not known"),
    ({"hyperball": 2.0}, "how the rate of muon with hyperball depends on the width"),
    ({"scalar": "torch.optim:NAdam"}, "how the rate of torch.optim:NAdam depends on the width"),
])
def test_optimizers_without_a_rule_or_with_their_own_are_refused(params, message):
    with pytest.raises(RoutingError, match=message):
        hyper(**params)


@pytest.mark.parametrize("mode, grows", [("unit_rms_norm", 0.0), ("original", 0.0), ("spectral", 0.5),
                                         ("match_rms_adamw", 0.5)])
def test_spectral_norms_of_updates_grow_with_this_power_of_the_width(mode, grows):
    """The spectral norm of an update, over the root of rows over columns, grows with this power of the width."""
    sizes = [scale_factor(mode, rows * m, cols * m) / (rows / cols) ** 0.5
             for rows, cols in ((8, 8), (32, 8), (8, 32)) for m in (1, 16)]
    for narrow, wide in zip(sizes[::2], sizes[1::2]):
        assert wide / narrow == pytest.approx(16 ** grows)


@pytest.mark.parametrize("section, message", [
    ({"base_width": 8}, "layerwise.mup.width is missing; it needs base_width, width"),
    (3, r"layerwise.mup must be an object like \{\"base_width\": 256, \"width\": 4096\}, got 3"),
    ({"base_width": 0, "width": 8}, "layerwise.mup.base_width must be a whole number of at least 1, got 0"),
    ({"base_width": 8, "width": 8, "depth": 3}, "layerwise.mup.depth is not an option"),
])
def test_a_bad_section_is_refused(section, message):
    with pytest.raises(ConfigError, match=message):
        LayerWiseConfig.from_section({"mup": section})


def planned(tmp_path, model, **layerwise):
    (tmp_path / "ds.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "layerwise": {
            "mup": {"base_width": 8, "width": 32}, **layerwise},
        "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 1e-3, "muon_lr": 0.02, "eps": EPS}}}))
    return DryRun.of(model, tmp_path / "ds.json", [2])


@pytest.mark.usefixtures("wide_tables")
def test_plans_and_tables_show_rates_where_they_know_embeddings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 16,
        "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 40}))
    plan = planned(tmp_path, str(tmp_path / "config.json"),
                   overrides=[{"name": "*.up_proj.weight", "optimizer": "scalar"}])
    rows = {row["name"]: row for row in plan.listed(plan.forecasts[0])}
    up = rows["model.layers.0.mlp.up_proj.weight"]
    assert up["lr_ratio"] == 0.25 and up["reason"] == "layerwise.overrides, rate x 0.25 by width"
    assert rows["lm_head.weight"]["lr_ratio"] == 1.0
    assert rows["model.layers.0.self_attn.q_proj.weight"]["lr_ratio"] == pytest.approx(20.0)
    lines = plan_table(plan.routes, plan.specs, plan.forecasts, plan.run.optimizer)
    assert "eps 0.0625 to 0.25" in " ".join(lines.split())
    row = next(line for line in lines.splitlines() if "rate x 0.25 by" in line or "layerwise.overrides" in line)
    assert "0.00025" in row
