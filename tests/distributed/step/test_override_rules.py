"""Every kind of condition, in a config and in Python: what is set by it is what trains a parameter on several ranks."""

import json
from dataclasses import replace

import deepspeed.comm as dist
import pytest

import ds_layerwise
from ds_layerwise import ParamKey, ParamPredicate, ParamWithNamePredicate
from ds_layerwise.errors import ConfigError, LayerWiseError, RoutingError
from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.tools.dry_run import DryRun
from tests.support.checkpoints import assert_equal_states, loaded, masters, on_rank_0, whole_states
from tests.support.expected import assert_close, each_alone
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine

pytestmark = rooms("conditions", "overrides", "param_keys", "override_matching",
                   "routes", "start_report", "register")

RANKS, STEPS = 2, 4

#: The first is wrong in one of its conditions for every parameter.
RULES = [
    {"name": "tall.*", "ndim": 3, "min_elements": 1, "lr": 9.0, "optional": True},
    {"module": "Conv2d", "ndim": 4, "lr": 0.0625},
    {"module": "torch.nn.modules.normalization.*", "weight_decay": 0.5},
    {"shape": [None, 40], "momentum": 0.5},
    {"shape": [[17, None], [5, 5]], "name": ["head.*", "nothing"], "betas": [0.5, 0.75]},
    {"min_elements": 400, "max_elements": 480, "regex": "(tall|none).*", "lr": 0.03125, "min_lr": 0.01},
    {"attr": "is_router", "nesterov": False},
    {"ndim": 3, "weight_decay": 0.0},
]
IN_PYTHON = {
    ParamKey(with_name_predicate=ParamWithNamePredicate("wide biases", lambda param, name: (
        name.endswith(".bias") and len(param) > 30))): {"betas": (0.25, 0.5)},
    ParamKey(predicate=ParamPredicate("one axis", lambda param: param.dim() == 1), shape=(5,)): {"lr": 0.5},
}
REGISTERED = {ParamKey(name="square.weight", attr="is_square"): {"momentum": 0.75}}
BY_KIND = {"decoupled_lr": 0.015625, "decoupled_min_lr": 0.0078125}

#: Settings of the oracle that differ from the run's, by parameter; its rate does not go below ``floor``.
OWN = {
    "conv.weight": {"muon_lr": 0.0625},
    "norm.weight": {"weight_decay": 0.5}, "norm.bias": {"weight_decay": 0.5},
    "flat.weight": {"momentum": 0.5},
    "tall.weight": {"muon_lr": 0.03125, "floor": 0.01},
    "tall.bias": {"weight_decay": 0.0, "betas": (0.25, 0.5)},
    "twin.weight": {"nesterov": False},
    "experts": {"weight_decay": 0.0},
    "conv.bias": {"adam_lr": 0.5, "weight_decay": 0.0},
    "square.weight": {"momentum": 0.75},
    "square.bias": {"weight_decay": 0.0}, "flat.bias": {"weight_decay": 0.0},
    "embed.weight": {"adam_lr": 0.015625, "weight_decay": 0.25, "floor": 0.0078125},
    "head.weight": {"adam_lr": 0.015625, "weight_decay": 0.25, "betas": (0.5, 0.75), "floor": 0.0078125},
}


def schedule(step):
    """The factor by which a script multiplies every group's rate."""
    return 0.5**step


def model():
    module = Net()
    module.twin.weight.is_router = True
    return module


def config(**changes):
    return ds_config(layerwise={"overrides": RULES, **BY_KIND}, params={
        "decay_vectors": False, "scalar_weight_decay": 0.25, **changes})


def by_the_oracle(module):
    """Masters after all steps, each parameter trained on its own."""
    def recipe_of(name, recipe):
        own = dict(OWN.get(name, {}))
        floor = own.pop("floor", 0.0)
        recipe = replace(recipe, **own)
        rate = recipe.lr_of(name, 0)
        return replace(recipe, schedule=lambda step: max(schedule(step), floor / rate))

    return each_alone(module, recipe_of, STEPS, RANKS)


def train_scheduled(engine, num_steps, *, first=0, base=0.003):
    for step in range(first, first + num_steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = base * schedule(step)
        train_engine(engine, 1, first=step)


class TestRules(DistributedTest):
    world_size = RANKS

    def test_each_parameter_trains_as_all_that_is_said_for_it(self, stage):
        given = config()
        given["zero_optimization"]["stage"] = stage
        expected, module = by_the_oracle(model()), model()
        ds_layerwise.register(overrides=REGISTERED)
        try:
            engine = start(module, given, overrides=IN_PYTHON)
            # Those of initialize are for one engine, those of register for every one.
            other = start(model(), ds_config())
        finally:
            ds_layerwise.unregister()
        train_scheduled(engine, STEPS)
        assert_close(masters(engine), expected)
        assert {route.name for route in other.optimizer.routes.values() if route.momentum} == {"square.weight"}
        assert not any(route.lr for route in other.optimizer.routes.values())
        assert not any(route.momentum for route in start(model(), ds_config()).optimizer.routes.values())

    def test_a_rate_of_its_own_stays_where_a_checkpoint_has_another_lr_than_the_config(self, tmp_path):
        given = config()
        engine = start(model(), given, overrides=IN_PYTHON)
        train_scheduled(engine, 2)
        engine.save_checkpoint(tmp_path)
        # The checkpoint's lr wins, and with it what rates are counted from.
        given = config(lr=0.012, muon_lr=0.08)
        other = loaded(start(model(), given, overrides=IN_PYTHON), tmp_path)
        for each in (engine, other):
            train_scheduled(each, 2, first=2)
        assert_equal_states(whole_states(other), whole_states(engine))

    def test_ranks_that_would_choose_otherwise_are_told(self):
        key = ParamKey(predicate=ParamPredicate("of this rank", lambda param: param.dim() == 1 + dist.get_rank()))
        with pytest.raises(LayerWiseError, match="the layout differs between ranks|differ"):
            start(model(), ds_config(), overrides={key: {"weight_decay": 0.5}})
        value = 0.5 * (1 + dist.get_rank())
        with pytest.raises(LayerWiseError, match=r"the configuration differs.*ParamKey\(name='\*.bias'\)"):
            start(model(), ds_config(), overrides={ParamKey(name="*.bias"): {"weight_decay": value}})
        # One rank's own error is everybody's.
        fails = ParamPredicate("fails", lambda param: dist.get_rank() == 0 or 1 / 0)
        with pytest.raises(LayerWiseError, match="predicate|ParamPredicate"):
            start(model(), ds_config(), overrides={ParamKey(predicate=fails): {"weight_decay": 0.5}})

    def test_a_rule_beside_one_of_the_config_must_not_contradict_it(self):
        with pytest.raises(RoutingError, match=r"conv.weight: layerwise.overrides\[1\] sets lr to 0.0625 and "
                           r"overrides\[ParamKey\(name='conv.\*', ndim=4\)\] to 0.5; narrow one of the two"):
            start(model(), config(), overrides={ParamKey(name="conv.*", ndim=4): {"lr": 0.5}})
        with pytest.raises(RoutingError, match=r"overrides\[ParamKey\(attr='is_head'\)\] matches no trainable param"):
            start(model(), config(), overrides={ParamKey(attr="is_head"): {"momentum": 0.5}})
        start(model(), config(), overrides={ParamKey(attr="is_head"): {"momentum": 0.5, "optional": True}})


class TestParamMap(DistributedTest):
    world_size = RANKS

    def test_rank_0_writes_what_a_plan_prints(self, tmp_path):
        path = tmp_path / "map.json"
        on_rank_0(lambda: path.write_text("of a run before"))
        given = config()
        given["layerwise"]["dump_param_map"] = str(path)
        engine = start(model(), given, overrides=IN_PYTHON)
        dist.barrier()
        written, = json.loads(path.read_text())
        assert [file.name for file in tmp_path.glob("*map*")] == ["map.json"]
        parameters = written.pop("parameters")
        assert parameters == json.loads(json.dumps(engine.optimizer.listed()))
        assert written == json.loads(json.dumps(as_json(engine.optimizer.forecast())))
        rows = {row["name"]: row for row in parameters}
        assert list(rows) == list(trainable(engine.module))
        assert (rows["conv.weight"]["lr_ratio"], rows["conv.weight"]["owner"] in (0, 1)) == (0.0625 / 0.003, True)
        assert (rows["embed.weight"]["min_lr"], rows["embed.weight"]["weight_decay"]) == (0.0078125, 0.25)
        assert rows["flat.bias"]["weight_decay"] == 0 and rows["flat.weight"]["weight_decay"] == 0.1

        # A plan has the same rows; what Python has overridden it does not know.
        plan = DryRun.of(model(), given, [RANKS])
        assert as_json(plan.forecasts[0]).keys() == written.keys()
        for row, expected in zip(plan.listed(plan.forecasts[0]), parameters, strict=True):
            assert row.keys() == expected.keys()
            assert (row["name"], list(row["shape"])) == (expected["name"], expected["shape"])
            assert row["weight_decay"] == expected["weight_decay"], row

    def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(self, tmp_path):
        with pytest.raises(ConfigError if dist.get_rank() == 0 else LayerWiseError,
                           match="layerwise.dump_param_map is .*, which cannot be written: No such file or directory"):
            start(model(), ds_config(layerwise={"dump_param_map": str(tmp_path / "nowhere" / "map.json")}))
