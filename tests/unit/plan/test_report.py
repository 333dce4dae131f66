"""The start-up table: which rates train what, what is decayed, and what changes nothing."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from torch import nn

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.plan.forecast.forecast import Forecast, specs_of
from ds_layerwise.plan.forecast.memory import RankMemory, Working
from ds_layerwise.plan.forecast.report import as_json, plan_table, to_look_at
from ds_layerwise.plan.forecast.text_tables import GLUE, time_text
from ds_layerwise.plan.layout.layout import Layout, ParamSpec, Slot
from ds_layerwise.routing.routes import Route
from tests.support.model_specs import bare, forecast, routes_of, specs_in
from tests.support.rooms import rooms
from tests.support.transports import bucket_of

pytestmark = [*rooms("report", "forecast"), pytest.mark.usefixtures("wide_tables")]

MUON, ADAMW = Muon(), AdamW()
ROUTES = {
    "up": Route(name="up", recipe=MUON, reason="matrix", group=0, matrix_shape=(16, 8)),
    "down": Route(name="down", recipe=MUON, reason="matrix", group=1, matrix_shape=(8, 16), lr_scale=0.5),
    "table": Route(name="table", recipe=ADAMW, reason="embedding", group=0),
    "bias": Route(name="bias", recipe=ADAMW, reason="fewer than two axes", group=0, weight_decay=0.0),
    "norm": Route(name="norm", recipe=ADAMW, reason="fewer than two axes", group=0),
}
SHAPES = {"up": (16, 8), "down": (8, 16), "table": (4, 8), "bias": (8, ), "norm": (8, )}


def table(params, groups=(), kind="LayerWiseMuon", **changes):
    run = RunConfig.from_ds_config({"zero_optimization": {"stage": 1}, **changes, "optimizer": {
        "type": kind, "params": params}})
    matrix, scalar = run.optimizer.recipes
    routes = {name: replace(route, recipe=matrix if route.whole else scalar) for name, route in ROUTES.items()}
    specs = specs_of(((name, shape, "float32") for name, shape in SHAPES.items()), routes)
    return plan_table(routes, specs, [forecast(specs, routes, run, 2)], run.optimizer, groups=groups,
                          without_effect=run.without_effect)


def rows(text):
    found = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    return {row[-1]: row[4:6] for row in found if len(row) == 7}


def group(params, **changes):
    config = OptimizerConfig.from_section({"type": "LayerWiseMuon", "params": params})
    return {**{key: getattr(config, key) for key in (
        "lr", "momentum", "weight_decay", "betas", "eps", "matrix_lr_ratio", "scalar_lr_ratio")}, **changes}


def test_both_rates_and_what_is_decayed():
    params = {"lr": 3e-4, "muon_lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    text = table(params, [group(params), group(params, weight_decay=0.3, momentum=0.8)])
    assert rows(text) == {"up": ["0.01 to 0.02", "0.1 to 0.3"], "table": ["0.0003", "0.1"],
                          "bias": ["0.0003", "0 to 0.1"]}
    assert "muon: momentum 0.8 to 0.9, nesterov, scale_mode original; adamw: betas [0.9, 0.95], eps 1e-10" in text
    assert "without effect" not in text


def told(routes, specs):
    """The things to look at, each with its override as a value."""
    lines = (line.split("; to change it, in layerwise.overrides: ") for line in to_look_at(routes, specs))
    return {about.removeprefix("look at "): json.loads(f"[{change}]") for about, change in lines}


def test_bare_parameters_have_rows_of_their_own_and_an_override():
    names = [*(f"layers.{i}.experts.{name}" for i in range(2) for name in ("up", "down")), "layers.0.w2.weight",
             "table"]
    routes = {name: Route(name=name, recipe=MUON, reason="matrix", group=0, matrix_shape=(4, 4),
                          bare="experts" in name) for name in names[:-1]}
    names.append("stack")
    routes["stack"] = Route(name="stack", recipe=MUON, reason="stack of matrices", group=0, matrix_shape=(2, 2, 4),
                            bare=True)
    routes["table"] = Route(name="table", recipe=ADAMW, reason="embedding (by name)", group=0, bare=True)
    specs = specs_of(((name, (4, 4), "float32") for name in names), routes)
    text = plan_table(routes, specs, [forecast(specs, routes, RUN, 2)], OptimizerConfig())
    rows = text.replace(" ", "").split("│muon(whole)│")[1:]
    assert rows[0].startswith("matrix│1│16│") and "layers.0.w2.weight" in rows[0]
    assert rows[1].startswith("matrix,bare│4│64│")
    assert told(routes, specs) == {
        "parameters of no known layer: muon trains layers.*.experts.up and 1 more": [
            {"name": "layers.*.experts.up", "optimizer": "scalar"},
            {"name": "layers.*.experts.down", "optimizer": "scalar"}],
        "parameters of no known layer: adamw trains table": [{"name": "table", "optimizer": "matrix"}]}
    assert all(f"look at {about}; to change it, in layerwise.overrides: " in text for about in told(routes, specs))


class Mixer(nn.Module):
    """Fused projections that nobody knows the parts of."""

    def __init__(self):
        super().__init__()
        self.my_qkv, self.w13 = nn.Linear(8, 24, bias=False), nn.Linear(8, 32, bias=False)


def test_a_fused_projection_that_stays_whole_has_an_override_that_splits_it():
    model = nn.Sequential(Mixer(), Mixer(), nn.Linear(8, 3))
    routes = routes_of(model)
    said = told(routes, specs_in(model, routes))
    expected = {"*.my_qkv.weight": {"q": 8, "k": 8, "v": 8}, "*.w13.weight": {"a": 16, "b": 16}}
    assert said == {"parameters that look fused (sizes are a guess): one matrix each of *.my_qkv.weight and 1 more": [
        {"name": name, "split": parts} for name, parts in expected.items()]}
    # What it says to paste is taken, and asks no more.
    [overrides] = said.values()
    split = routes_of(model, LayerWiseConfig.from_section({"overrides": overrides}).overrides)
    assert {name: split[name].parts.names for name in split if split[name].parts} == {
        f"{i}.{name}.weight": tuple(parts) for i in range(2) for name, parts in (("my_qkv", "qkv"), ("w13", "ab"))}
    assert not told(split, specs_in(model, split))


@pytest.mark.parametrize("params, said", [
    ({"nesterov": False, "scale_mode": "match_rms_adamw", "extra_scale_factor": 2, "scalar_optimizer": "lion"},
     "muon: momentum 0.95, scale_mode match_rms_adamw x 2; lion: betas [0.9, 0.95]"),
    ({"scalar_optimizer": "sgd"}, "muon: momentum 0.95, nesterov, scale_mode original; sgd: momentum 0.95"),
    ({"scalar_optimizer": "sgd", "weight_decay_method": "l2"},
     "muon with weight decay l2: momentum 0.95, nesterov, scale_mode original; sgd: momentum 0.95"),
    ({"scalar_optimizer": "sgd", "weight_decay_method": "palm", "cautious_weight_decay": True},
     "muon with weight decay palm, cautious: momentum 0.95, nesterov, scale_mode original; sgd with weight decay "
     "palm, cautious: momentum 0.95"),
])
def test_recipes_are_told_with_their_settings(params, said):
    text = table(params, [group(params)] * 2)
    assert f" {said} gradient_clipping: 1 layout " in " ".join(text.split())


def test_a_class_may_be_both_optimizers():
    params = {"matrix_optimizer": "torch.optim:AdamW", "matrix_params": {"eps": 1e-6},
              "scalar_optimizer": "torch.optim:AdamW", "scalar_params": {"eps": 1e-7}}
    text = table(params, [group({})] * 2, kind="LayerWise")
    said = "torch.optim:AdamW: eps 1e-06; torch.optim:AdamW: eps 1e-07 gradient_clipping: 1"
    assert f" {said} layout " in " ".join(text.split())


def test_keys_without_effect_are_named():
    text = table({}, [group({})] * 2, prescale_gradients=True, zero_optimization={
        "stage": 2, "round_robin_gradients": True, "reduce_scatter": False, "contiguous_gradients": True,
        "allgather_partitions": True, "overlap_comm": True, "allgather_bucket_size": 5e8})
    assert ("without effect here: reduce_scatter, round_robin_gradients, allgather_bucket_size, prescale_gradients" in
            text)


def test_a_plan_says_the_same():
    run = RunConfig.from_ds_config({"zero_optimization": {"stage": 1, "round_robin_gradients": True}, "optimizer": {
        "type": "LayerWiseMuon", "params": {"lr": 1e-3, "muon_lr": 0.05, "weight_decay": 0.1}}})
    routes = {name: Route(name=name, recipe=route.recipe, reason=route.reason, group=0,
                          matrix_shape=route.matrix_shape) for name, route in ROUTES.items()}
    specs = specs_of(((name, shape, "float32") for name, shape in SHAPES.items()), routes)
    one, other = (plan_table(routes, specs, [forecast(specs, routes, run, n) for n in ranks], run.optimizer,
                             without_effect=run.without_effect) for ranks in ([2], [2, 4]))
    assert rows(one) == rows(other) == {"up": ["0.05", "0.1"], "table": ["0.001", "0.1"], "bias": ["0.001", "0.1"]}
    assert "without effect here: round_robin_gradients" in one and "without effect here: round_robin" in other


def column(text, number=0):
    """The cells of one plan, by the names of their rows."""
    found = {}
    for line in text[text.index("\nlayout "):].splitlines():
        if line.startswith("│"):
            name, *cells = [cell.strip() for cell in line.strip("│").split("│")]
            found[name] = cells[number]
    return found


MIB = 2**20


@pytest.mark.parametrize("stage, sent", [
    (1, {"bfloat16": (4 * MIB, 8 * MIB), "float32": (3 * MIB, 2 * MIB)}),
    (2, {"bfloat16": (8 * MIB, 4 * MIB), "float32": (2 * MIB, 4 * MIB)}),
])
def test_the_busiest_rank_is_one_for_all_dtypes(stage, sent):
    # Each of three ranks sends two thirds of both buckets both ways, and cuts and shards that belong elsewhere. In MiB,
    # bfloat16 and float32, at stage 1: (4 + 8) + (3 + 2) of rank 0, (6 + 4) + (2 + 4) of rank 1, (6 + 4) + (3 + 2) of
    # rank 2. At stage 2 sums of bfloat16 gradients travel in float32, 2 MiB more of ranks 1 and 2.
    layout = Layout("balanced", 3, 1, (
        bucket_of(0, "bfloat16", True, 0, (3 * 2**20, 0, 0), (Slot("a", 0, 3 * 2**20),), transport="cuts"),
        bucket_of(1, "float32", True, 0, (0, 3 * 2**18, 0), (Slot("b", 0, 3 * 2**18),), transport="cuts")))
    specs = [ParamSpec("a", (3 * 2**10, 2**10), "bfloat16", True, 1, wire="bfloat16"),
             ParamSpec("b", (3 * 2**9, 2**9), "float32", True, 1)]
    routes = {spec.name: Route(name=spec.name, recipe=MUON, reason="matrix", group=0, matrix_shape=spec.shape)
              for spec in specs}
    run = RunConfig.from_ds_config({"optimizer": {"type": "LayerWiseMuon"}, "zero_optimization": {"stage": stage}})
    costs = Forecast.of(layout, specs, routes, run, tp_size=1, reduction="native")
    assert costs.sent_by_busiest() == sent
    gradients, parameters = map(sum, zip(*sent.values(), strict=True))
    text = plan_table(routes, specs, [costs, costs], OptimizerConfig())
    for number in (0, 1):
        shown = column(text, number)
        assert (shown["sent, gradients"], shown["sent, parameters"]) == (
            f"{gradients / MIB} MiB", f"{parameters / MIB} MiB")
        stored = "bfloat16" if stage == 1 else "float32"
        assert (shown["of bfloat16"], shown["of float32"]) == (f"{stored}, bfloat16", "float32, float32")
        assert shown["buckets"] == "2, 2 in cuts"
    told = as_json(costs)
    assert told["sent_by_busiest_bytes"] == gradients + parameters
    # Gradients of both buckets wait, and sums are in cuts of 2 and 1 MiB, as they arrive.
    assert told["working_bytes"]["in_pass"] == (0 if stage == 1 else (9 + 2 + 1) * MIB)
    assert ("gradients that wait in a pass (layerwise.max_waiting" in " ".join(text.split())) is (stage == 2)
    assert told["dtypes"]["float32"]["sent_by_busiest_bytes"] == dict(
        zip(("gradients", "parameters"), sent["float32"], strict=True))
    assert told["dtypes"]["float32"]["sent_bytes"] == {"gradients": 8 * MIB / 3, "parameters": 8 * MIB / 3}


GIB = 2**30
RUN = RunConfig.from_ds_config({"zero_optimization": {"stage": 1}, "optimizer": {
    "type": "LayerWiseMuon", "params": {}}})
ALIKE = {name: replace(route, group=0) for name, route in ROUTES.items()}
SPECS = specs_of(((name, shape, "float32") for name, shape in SHAPES.items()), ALIKE)


def on_two_ranks(**changes):
    """Rank 0 holds 10 GiB between two steps, and rank 1 holds 9; either works in 3 more."""
    return replace(forecast(SPECS, ALIKE, RUN, 2), **{
        "memory": (RankMemory(GIB, 2 * GIB, 3 * GIB, 4 * GIB),
                   RankMemory(GIB, 2 * GIB, 3 * GIB, 3 * GIB, host=5 * GIB, staging=GIB)),
        "working": Working(update=2 * GIB, in_pass=GIB, exchange=GIB, transfers=GIB), **changes})


def fitting(memory_bytes, *plans):
    return plan_table(ALIKE, SPECS, plans, RUN.optimizer, memory_bytes=memory_bytes)


def test_the_table_says_what_the_fullest_rank_holds_by_kind_and_works_in():
    shown = column(plan_table(ALIKE, SPECS, [on_two_ranks()], RUN.optimizer))
    assert {key: shown[key] for key in ("held", "parameters", "gradients", "masters", "states", "on the host",
                                        "works in, at most")} == {
        "held": "10.0 GiB, 1.053 x", "parameters": "1,024.0 MiB", "gradients": "2,048.0 MiB", "masters": "3,072.0 MiB",
        "states": "4,096.0 MiB", "on the host": "5,120.0 MiB", "works in, at most": "3,072.0 MiB"}
    told = as_json(on_two_ranks())
    assert told["working_bytes"] == {"update": 2 * GIB, "in_pass": GIB, "exchange": GIB, "transfers": GIB,
                                     "total": 3 * GIB}
    assert told["memory_bytes"][1] == {"params": GIB, "grads": 2 * GIB, "masters": 3 * GIB, "states": 3 * GIB,
                                       "host": 5 * GIB, "staging": GIB, "total": 9 * GIB}


def test_at_stage_3_what_passes_make_whole_is_foretold():
    zero = {"stage": 3, "stage3_max_live_parameters": 1000, "stage3_param_persistence_threshold": 100}
    run = RunConfig.from_ds_config({"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": {
        "type": "LayerWiseMuon", "params": {"muon_lr": 0.1}}})
    model = bare({**{f"w{number}": (40, 50) for number in range(8)}, "b": (30,)})
    specs = specs_in(model, routes := routes_of(model))
    plan = forecast(specs, routes, run, 4)
    waiting = sum(2 * bucket.numel for bucket in plan.layout.buckets)
    # The 30 elements of b stay whole, and are kept once more, to notice what is written. Sums are in equal parts, less
    # the padding behind the last matrix.
    assert plan.working.in_pass == waiting + waiting // 2 - 4 * (2048 - 2000) + 4000 - 60
    none = replace(run, fetching=replace(run.fetching, param_persistence_threshold=0))
    assert [rank.params for rank in plan.memory] == [
        rank.params + 120 for rank in forecast(specs, routes, none, 4).memory]
    assert "DeepSpeed makes whole (stage3_max_live" in " ".join(plan_table(
        routes, specs, [plan], run.optimizer).split())


def test_a_plan_fits_if_the_fullest_rank_has_room():
    plan = on_two_ranks()
    assert (plan.fullest, plan.needed) == (0, 13 * GIB)
    for memory, said in ((16 * GIB, "yes, 3,072.0 MiB left"), (13 * GIB, "yes, 0.0 MiB left"),
                         (12 * GIB + GIB // 2, "no, 512.0 MiB too much"), (10 * GIB, "no, 3,072.0 MiB too much")):
        for plans in ([plan], [plan, plan]):
            text = fitting(memory, *plans)
            for number in range(len(plans)):
                shown = column(text, number)
                assert (shown["needed"], shown["fits"]) == ("13.0 GiB", said)
        told = as_json(plan, memory_bytes=memory)
        assert (told["device_memory_bytes"], told["needed_bytes"], told["left_bytes"], told["fits"]) == (
            memory, 13 * GIB, memory - 13 * GIB, memory >= 13 * GIB)
    words = " ".join(text.split())
    assert "needed: held and works in; fits: on a device with 10.0 GiB" in words
    # The way out is there for a plan that does not fit, and only then.
    assert all(key in words for key in ("too much: more ranks", "stage 2", "reduce_bucket_size", "offload_optimizer"))
    assert "too much" not in fitting(16 * GIB, plan)
    assert "fits" not in plan_table(ALIKE, SPECS, [plan], RUN.optimizer) and "fits" not in as_json(plan)


@pytest.mark.parametrize("most", [1, 2])
def test_a_bucket_fills_while_others_wait(most):
    """A bound of waiting buckets leaves room for the one whose gradients still come."""
    runs = [RunConfig.from_ds_config({
        "zero_optimization": {"stage": 2, "overlap_comm": True}, "layerwise": {"max_waiting_buckets": bound},
        "optimizer": {"type": "LayerWiseMuon", "params": {}}}) for bound in (None, most)]
    free, bound = (forecast(SPECS, ALIKE, run, 2, bucket_numel=1) for run in runs)
    sizes = sorted(4 * bucket.numel for bucket in free.layout.buckets)
    # The sums of all of them are in parts of two ranks.
    assert len(sizes) > 3 and free.working.in_pass == sum(sizes) + sum(sizes) // 2
    assert bound.working.in_pass == sum(sizes[-most - 1:]) + sum(sizes) // 2


def test_bytes_take_as_long_as_a_bandwidth_says():
    plan, other = (forecast(SPECS, ALIKE, RUN, ranks) for ranks in (2, 4))
    sent = as_json(plan)["sent_by_busiest_bytes"]
    assert as_json(plan, gb_s=0.5)["sent_seconds"] == pytest.approx(sent / 5e8) and "gb_s" not in as_json(plan)
    shown = column(plan_table(ALIKE, SPECS, [plan, other], RUN.optimizer, gb_s=1e-6))
    assert shown["sent at 1e-06 GB/s"] == time_text(sent * 1e6).replace(GLUE, " ")
    assert "GB/s" not in plan_table(ALIKE, SPECS, [plan], RUN.optimizer)


def test_ranks_without_a_matrix_are_counted():
    plans = [forecast(SPECS, ALIKE, RUN, ranks) for ranks in (1, 2, 4)]
    text = " ".join(plan_table(ALIKE, SPECS, plans, RUN.optimizer).split())
    assert "2 of 4 ranks own no matrix" in text and text.count("own no matrix") == 1


def test_no_cell_of_a_plans_table_is_cut_off():
    most = RankMemory(*[1000 * 2**20] * 4, host=1000 * 2**20)
    wide = on_two_ranks(memory=(most,) * 2, working=Working(*[1000 * 2**20] * 4))
    text = fitting(2**20, *[wide] * 8)
    assert "…" not in text and column(text, 7)["fits"] == "no, 5,999.0 MiB too much"


class Square(Muon):
    """It has no use for other matrices."""

    def refusal(self, shape, *, cut_axis=None):
        return f"is no square (of {shape} in all, axis {cut_axis})" if shape[-1] != shape[-2] else None


@pytest.mark.parametrize("changes, said", [
    ({}, r"w \(8, 4\) is no square \(of \(8, 4\) in all, axis None\)"),
    ({"tp_axis": -2, "is_cut": True}, r"of \(16, 4\) in all, axis -2\)"),
    ({"tp_axis": -1, "is_cut": True}, None),
    ({"matrix_shape": (2, 4, 4)}, None),
])
def test_a_recipe_may_refuse_a_shape(changes, said):
    route = Route(name="w", recipe=Square(), reason="", group=0, matrix_shape=(8, 4))
    with pytest.raises(RoutingError, match=said) if said else nullcontext():
        assert specs_of([("w", (8, 4), "float32")], {"w": replace(route, **changes)}, tp_size=2)[0].work > 0
