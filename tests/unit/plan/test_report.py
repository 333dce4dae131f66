"""The start-up table: which rates train what, what is decayed, and what changes nothing."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from ds_layerwise.config.fetching import Whole
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.plan.forecast.cost import RankMemory, RankTraffic
from ds_layerwise.plan.forecast.forecast import Forecast, forecast, specs_of
from ds_layerwise.plan.forecast.prediction import predict
from ds_layerwise.plan.forecast.report import as_json, plan_table, start_up_table
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.network.links import TCP
from ds_layerwise.routing.routes import Route
from tests.support.model_specs import bare, routes_of, specs_in
from tests.support.rooms import rooms

pytestmark = rooms("report", "param_list", "forecast", "prediction")

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
    return start_up_table(routes, specs, forecast(specs, routes, run, 2), run.optimizer, groups=groups,
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


def test_bare_parameters_have_rows_of_their_own_with_all_names():
    run = RunConfig.from_ds_config({"zero_optimization": {"stage": 1}, "optimizer": {
        "type": "LayerWiseMuon", "params": {"lr": 3e-4, "muon_lr": 0.02}}})
    names = [*(f"layers.{i}.experts.{name}" for i in range(2) for name in ("up", "down")), "layers.0.w2.weight"]
    routes = {name: Route(name=name, recipe=run.optimizer.recipes.matrix, reason="matrix", group=0,
                          matrix_shape=(4, 4), bare="experts" in name) for name in names}
    specs = specs_of(((name, (4, 4), "float32") for name in names), routes)
    text = start_up_table(routes, specs, forecast(specs, routes, run, 2), run.optimizer)
    # A cell may go on in the next line.
    rows = text.replace(" ", "").split("│muon(whole)│")[1:]
    assert rows[0].startswith("matrix│1│16│") and "layers.0.w2.weight" in rows[0]
    assert rows[1].startswith("matrix,bare│4│64│") and "layers.*.experts.up," in rows[1]
    assert "layers.*.experts.down" in rows[1]


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
    assert f" {said} layout " in " ".join(text.split())


def test_a_class_may_be_both_optimizers():
    params = {"matrix_optimizer": "torch.optim:AdamW", "matrix_params": {"eps": 1e-6},
              "scalar_optimizer": "torch.optim:AdamW", "scalar_params": {"eps": 1e-7}}
    text = table(params, [group({})] * 2, kind="LayerWise")
    assert " torch.optim:AdamW: eps 1e-06; torch.optim:AdamW: eps 1e-07 layout " in " ".join(text.split())


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


def cells(text, columns):
    """The rows of the table in ``text`` that has so many columns."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()
            if line.count("│") == columns + 1]


@pytest.mark.parametrize("stage, bfloat16, float32", [
    (1, "16.0 MiB a step", "4.0 MiB a step"),
    (2, "0.0 MiB a backward pass and 16.0 MiB a step", "4.0 MiB a backward pass and 0.0 MiB a step"),
])
def test_the_busiest_rank_is_one_for_all_dtypes(stage, bfloat16, float32):
    # Each of three ranks sends what it does not own of gradients, and what it owns to both of the others. In MiB,
    # bfloat16 and float32: 16 + 4 of rank 0, 8 + 8 of rank 1, and 8 + 4 of rank 2; the mean rank 10.7 + 5.3.
    layout = Layout("balanced", 3, 1, (
        Bucket(0, "bfloat16", True, 0, (2**22, 0, 0), (Slot("a", 0, 2**22),)),
        Bucket(1, "float32", True, 0, (0, 2**20, 0), (Slot("b", 0, 2**20),))))
    specs = [ParamSpec("a", (2**11, 2**11), "bfloat16", True, 1, wire="bfloat16"),
             ParamSpec("b", (2**10, 2**10), "float32", True, 1)]
    routes = {spec.name: Route(name=spec.name, recipe=MUON, reason="matrix", group=0, matrix_shape=spec.shape)
              for spec in specs}
    run = RunConfig.from_ds_config({"optimizer": {"type": "LayerWiseMuon"}, "zero_optimization": {"stage": stage}})
    costs = Forecast.of(layout, specs, routes, run, tp_size=1, reduction="ordered", links=TCP)
    text = " ".join(start_up_table(routes, specs, costs, OptimizerConfig()).replace("│", " ").split())
    assert f"travel in bfloat16; the busiest rank sends {bfloat16}" in text
    assert f"travel in float32; the busiest rank sends {float32}" in text
    assert costs.sent_by_busiest() == {"bfloat16": (0, 2**24), "float32": (2**22, 0)}
    several = cells(plan_table(routes, specs, [costs, costs], OptimizerConfig()), 16)
    assert [row[-1] for row in several] == ["20.0 MiB"] * 2
    told = as_json(costs)
    assert told["sent_by_busiest_bytes"] == 20 * 2**20
    # Gradients of both buckets, or of the larger one.
    assert told["waiting_bytes"] == (0 if stage == 1 else 2**23 + 2**22)
    waits = "12.0 MiB more of gradients that wait for them, where reductions are slower than the backward pass (lay"
    for shown in (text, " ".join(plan_table(routes, specs, [costs, costs], OptimizerConfig()).split())):
        assert (waits in shown) is (stage == 2)
    assert told["dtypes"]["float32"]["sent_by_busiest_bytes"] == {"gradients": 2**22, "parameters": 0}
    assert told["dtypes"]["float32"]["sent_bytes"] == {"gradients": 2 * 2**22 / 3, "parameters": 2 * 2**22 / 3}


GIB = 2**30
RUN = RunConfig.from_ds_config({"zero_optimization": {"stage": 1}, "optimizer": {
    "type": "LayerWiseMuon", "params": {}}})
ALIKE = {name: replace(route, group=0) for name, route in ROUTES.items()}
SPECS = specs_of(((name, shape, "float32") for name, shape in SHAPES.items()), ALIKE)


def on_two_ranks(**changes):
    """Rank 0 holds 10 GiB between two steps; rank 1 holds 9, and needs 2 + 3 + 1 beside them, where rank 0 needs 3."""
    return replace(forecast(SPECS, ALIKE, RUN, 2), **{
        "memory": (RankMemory(GIB, 2 * GIB, 3 * GIB, 4 * GIB),
                   RankMemory(GIB, 2 * GIB, 3 * GIB, 3 * GIB, host=5 * GIB, staging=GIB)),
        "traffic": (RankTraffic(0, GIB), RankTraffic(GIB, GIB)), "workspace": (2 * GIB, 3 * GIB), "opened": (0, 0),
        **changes})


def fitting(memory_bytes, *plans):
    predictions = [predict(plan, SPECS, ALIKE, RUN, memory_bytes=memory_bytes) for plan in plans]
    return plan_table(ALIKE, SPECS, plans, RUN.optimizer, predictions=predictions)


def test_at_stage_3_times_and_what_passes_make_whole_are_foretold():
    zero = {"stage": 3, "stage3_max_live_parameters": 1000, "stage3_param_persistence_threshold": 100}
    run = RunConfig.from_ds_config({"zero_optimization": zero, "bf16": {"enabled": True}, "optimizer": {
        "type": "LayerWiseMuon", "params": {"muon_lr": 0.1}}})
    model = bare({**{f"w{number}": (40, 50) for number in range(8)}, "b": (30,)})
    specs = specs_in(model, routes := routes_of(model))
    found = forecast(specs, routes, run, 4)
    assert found.whole == (60, 4000)
    assert "whole, at most" in start_up_table(routes, specs, found, run.optimizer)
    times = predict(found, specs, routes, run, bucket_numels=()).wire
    at_2 = predict(forecast(specs, routes, replace(run, stage=2), 4), specs, routes, replace(run, stage=2),
                   bucket_numels=()).wire
    assert times.params > 0 and times.gather > 1.5 * at_2.gather > 0


def test_a_plan_fits_if_the_rank_that_needs_most_has_room():
    plan = on_two_ranks()
    assert (plan.fullest, plan.needed) == (0, (13 * GIB, 15 * GIB))
    row = ["2", "1", "9,216.0 MiB", "2,048.0 MiB", "4,096.0 MiB", "0.0 MiB", "10.0 GiB", "15.0 GiB"]
    for memory, said in ((16 * GIB, "yes, 1,024.0 MiB left"), (15 * GIB, "yes, 0.0 MiB left"),
                         (14 * GIB + GIB // 2, "no, 512.0 MiB too much"), (10 * GIB, "no, 5,120.0 MiB too much")):
        for plans in ([plan], [plan, plan]):
            text = fitting(memory, *plans)
            assert cells(text, 9) == [[*row, said]] * len(plans)
            # The plan's own bucket size has the same in the comparison, below.
            assert [each[9] for each in cells(text, 11) if "this plan" in each[10]] == [said] * len(plans)
    assert "the rank that needs most, on a device with 10.0 GiB" in text
    words = " ".join(text.split())
    assert ("rank: the one that needs most; between steps: its total; in a pass: at stages 2 and 3 gradients that "
            "wait, at stage 3 also parameters that are whole; needed: between steps, under way, and the more of in a "
            "step and in a pass together, or at start if that is more. Not counted: what else the forward and the "
            "backward pass keep, activations above all; and what drivers and libraries take for themselves. fits: with "
            "what is left for that." in words)
    # The way out is there for a plan that does not fit, and only then.
    assert all(key in words for key in ("too much: more ranks", "stage 2", "reduce_bucket_size", "offload_optimizer"))
    assert "too much" not in fitting(16 * GIB, plan)


@pytest.mark.parametrize("stage, whole", [(1, 0), (2, 0), (3, GIB)])
def test_gradients_that_wait_count_in_what_is_needed(stage, whole):
    plan = on_two_ranks(stage=stage, workspace=(0, 0), whole=Whole(0, whole))
    sizes = sorted(4 * bucket.numel * (stage > 1) for bucket in plan.layout.buckets)
    assert plan.needed[0] == 11 * GIB + sum(sizes) + whole
    assert predict(plan, SPECS, ALIKE, RUN, memory_bytes=20 * GIB).own.left == 20 * GIB - max(plan.needed)


@pytest.mark.parametrize("most", [1, 2])
def test_a_bucket_fills_while_others_wait(most):
    """A bound of waiting buckets leaves room for the one whose gradients still come."""
    plan = forecast(SPECS, ALIKE, replace(RUN, stage=2), 2, bucket_numel=1)
    sizes = sorted(4 * bucket.numel for bucket in plan.layout.buckets)
    assert len(sizes) > 3 and plan.waiting == sum(sizes)
    assert replace(plan, max_waiting=most).waiting == sum(sizes[-most - 1:])


def test_more_may_be_needed_at_start():
    # In float32 6 GiB more are there until they are kept in fewer bits.
    text = fitting(16 * GIB, on_two_ranks(opened=(0, 7 * GIB)))
    assert cells(text, 9) == [["2", "1", "9,216.0 MiB", "2,048.0 MiB", "4,096.0 MiB", "0.0 MiB", "17.0 GiB", "17.0 GiB",
                               "no, 1,024.0 MiB too much"]]


def test_if_no_number_of_ranks_fits_that_is_said():
    small = forecast(SPECS, ALIKE, RUN, 4)
    assert "none of the numbers of ranks" not in fitting(12 * GIB, on_two_ranks(), small)
    # Plans of other bucket sizes are made anew, for the few elements that there are.
    text = fitting(12 * GIB, on_two_ranks())
    assert "\nnone of the numbers of ranks asked for fits: 2; with another bucket size it does, see below\n" in text
    assert "none of the sizes" not in text and "\nbest: of the sizes that fit" in text
    told = [(row[9], row[10]) for row in cells(text, 11)]
    assert sorted(told) == [("no, 3,072.0 MiB too much", "this plan"), *[("yes, 12.0 GiB left", "")] * 2,
                            ("yes, 12.0 GiB left", "best")]
    text = fitting(1, on_two_ranks(), small)
    assert "\nnone of the numbers of ranks asked for fits: 2, 4\n" in text
    assert text.endswith("\n2 ranks: none of the sizes fits, so none is best\n"
                         "4 ranks: none of the sizes fits, so none is best")
    assert not any("best" in row[10] for row in cells(text, 11))
    assert "fits" not in plan_table(ALIKE, SPECS, [small], RUN.optimizer, predictions=[
        predict(small, SPECS, ALIKE, RUN)])


def test_no_cell_of_a_plans_tables_is_cut_off():
    most = RankMemory(*[1000 * 2**20] * 4, host=1000 * 2**20)
    wide = on_two_ranks(memory=(most,) * 2, in_float32=(replace(most, states=1999 * 2**20),) * 2,
                        workspace=(1000 * 2**20,) * 2, traffic=(RankTraffic(0, 1000 * 2**20),) * 2)
    text = fitting(GIB, wide, wide)
    assert "…" not in text and len(cells(text, 17)) == len(cells(text, 9)) == 2


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
