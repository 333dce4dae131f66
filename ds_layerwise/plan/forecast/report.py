"""The start-up table as text, and its numbers for programs: which recipe trains which parameters,
and the costs of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.table import Table

from ds_layerwise.config.presets import PRESETS
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.optimizers.base.recipe import Recipe
from ds_layerwise.plan.forecast.cost import max_over_mean
from ds_layerwise.plan.forecast.forecast import Forecast, Sent
from ds_layerwise.plan.forecast.prediction import BucketSize, Prediction
from ds_layerwise.plan.forecast.quantities import GLUE, count_text, size_text, time_text, work_text
from ds_layerwise.plan.forecast.text_tables import rendered
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.network.transport import MAX_PENDING, WireTime
from ds_layerwise.routing.routes import ParamGroups, Route, Routes

#: The second width has room for the widest cells of every column, so that none is cut off.
_WIDTH = 110
_PLAN_WIDTH = 222


def start_up_table(
    routes: Routes,
    specs: Sequence[ParamSpec],
    forecast: Forecast,
    optimizer: OptimizerConfig,
    *,
    groups: ParamGroups = (),
    without_effect: Sequence[str] = (),
    products: Mapping[Recipe, str] | None = None,
) -> str:
    """Return plain text for a log, without colours.

    Args:
        forecast: for exactly these ``specs``.
        groups: the parameter groups, with the values of the next step and ``configured_lr``; if
            empty, one group with the values of ``optimizer``.
        without_effect: the keys of the config that are accepted but change nothing.
        products: the dtypes in which recipes multiply matrices, if there is a device.
    """
    head = _head(routes, specs, optimizer, groups, without_effect, products or {})
    return rendered([*head, *_costs(forecast)], _WIDTH)


def plan_table(
    routes: Routes,
    specs: Sequence[ParamSpec],
    forecasts: Sequence[Forecast],
    optimizer: OptimizerConfig,
    *,
    without_effect: Sequence[str] = (),
    predictions: Sequence[Prediction] = (),
) -> str:
    """Return the start-up table for several numbers of ranks, one row each.

    For one number of ranks it begins with :func:`start_up_table` itself.

    Args:
        predictions: one for each of ``forecasts``, printed below; may be empty.
    """
    head = _head(routes, specs, optimizer, (), without_effect, {})
    below = []
    if predictions:
        if predictions[0].memory_bytes is not None:
            below += _fitting(forecasts, predictions, predictions[0].memory_bytes)
        below += _predicted(forecasts, predictions)
    if len(forecasts) == 1:
        above = rendered([*head, *_costs(forecasts[0])], _WIDTH)
        return f"{above}\n{rendered(below, _PLAN_WIDTH)}".rstrip()
    in_passes = "gradients in one backward pass and parameters in a step"
    what = {
        1: "gradients and parameters in a step",
        2: in_passes,
        3: f"parameters in one forward and backward pass, {in_passes}",
    }[forecasts[0].stage]
    rows = list(map(_row, forecasts))
    if not any(any(forecast.saved) for forecast in forecasts):
        for row in rows:
            del row["saved"]
    return rendered(
        [
            *head,
            _numbers("memory of the fullest rank, and what the busiest rank sends", rows),
            "ranks: data-parallel ones; layout: a digest, which all ranks of a run compare; "
            "buckets: reduced one after another; NS max/mean: matrix updates (Newton-Schulz) of "
            "the busiest rank over the mean; total, params, grads, masters, states: between two "
            f"steps; {'saved: by fewer bits; ' if 'saved' in rows[0] else ''}host: more in the "
            "memory of the host; under way: messages, at most; in a step: an update works in it, "
            "at most; at start: the peak before the first step; checkpoint: on disk, of all ranks, "
            "without what is not trained; padding: for alignment alone",
            f"sent: {what}{_waiting(forecasts[0])}",
            *below,
        ],
        _PLAN_WIDTH,
    )


def _row(forecast: Forecast) -> dict[str, str]:
    report = forecast.report
    fullest = forecast.memory[forecast.fullest]
    return {
        "ranks": str(forecast.layout.world_size),
        "layout": forecast.layout.digest(),
        "buckets": str(report.num_buckets),
        "NS max/mean": f"{report.work_max_over_mean:.3f}",
        "total": size_text(fullest.total),
        "params": size_text(fullest.params),
        "grads": size_text(fullest.grads),
        "masters": size_text(fullest.masters),
        "states": size_text(fullest.states),
        "saved": size_text(forecast.saved[forecast.fullest]),
        "host": size_text(fullest.host),
        "under way": size_text(max(traffic.total for traffic in forecast.traffic)),
        "in a step": size_text(max(forecast.workspace)),
        "at start": size_text(max(forecast.start_up)),
        "checkpoint": size_text(forecast.checkpoint),
        "padding": f"{100 * report.padding_fraction:.3f}{GLUE}%",
        "sent": size_text(sum(map(sum, forecast.sent_by_busiest().values()))),
    }


def as_json(forecast: Forecast, prediction: Prediction | None = None) -> dict[str, Any]:
    """Return a plan's numbers for programs: bytes, elements, FLOPs, and predicted seconds."""
    report = forecast.report
    layout = forecast.layout
    most = forecast.sent_by_busiest()
    dtypes = {}
    for dtype, (gradients, parameters) in forecast.sent().items():
        dtypes[dtype] = {
            "gradients_accumulate_in": forecast.stored_as[dtype],
            "gradients_travel_in": forecast.wire_as(dtype),
            "sent_bytes": {
                "gradients": sum(gradients) / layout.world_size,
                "parameters": sum(parameters) / layout.world_size,
            },
            "sent_by_busiest_bytes": dict(zip(Sent._fields, most[dtype], strict=True)),
        }
    found = {
        "ranks": layout.world_size,
        "layout": layout.policy,
        "digest": layout.digest(),
        "stage": forecast.stage,
        "buckets": report.num_buckets,
        "elements": report.numel,
        "padding_elements": report.padding,
        "newton_schulz_flops": list(report.work),
        "newton_schulz_max_over_mean": report.work_max_over_mean,
        "owned_matrix_elements": list(report.whole_numel),
        "fullest_rank": forecast.fullest,
        "memory_bytes": _with_totals(forecast.memory),
        "saved_bytes": list(forecast.saved),
        "start_up_bytes": list(forecast.start_up),
        "step_bytes": list(forecast.workspace),
        "waiting_bytes": forecast.waiting,
        "whole_bytes": forecast.whole._asdict(),
        "under_way_bytes": _with_totals(forecast.traffic),
        "checkpoint_bytes": forecast.checkpoint,
        "dtypes": dtypes,
        "gradients_sent_every": "step" if forecast.stage == 1 else "backward pass",
        "sent_by_busiest_bytes": sum(map(sum, most.values())),
    }
    if prediction is None:
        return found
    if prediction.memory_bytes is not None:
        found["device_memory_bytes"] = prediction.memory_bytes
        found["needed_bytes"] = list(forecast.needed)
    return {**found, **_fit_json(prediction.own), "predicted": _prediction_json(prediction)}


def _with_totals(ranks: Iterable[Any]) -> list[dict[str, int]]:
    return [{**asdict(rank), "total": rank.total} for rank in ranks]


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    sizes = []
    for size in prediction.sizes:
        counts = {"elements": size.bucket_numel, "buckets": size.num_buckets}
        sizes.append({**counts, "seconds": _seconds(size.wire), **_fit_json(size)})
    return {
        "links": prediction.links.model_dump(),
        "reduction": prediction.reduction,
        "ways": dict(prediction.ways),
        "seconds": {
            **_seconds(prediction.wire),
            "update": prediction.update / 1e9,
            "all": prediction.total / 1e9,
        },
        "best_bucket_elements": prediction.best.bucket_numel if prediction.best else None,
        "bucket_sizes": sizes,
    }


def _seconds(wire: WireTime) -> dict[str, float]:
    return {
        "reduce": (wire.reduce + wire.sums) / 1e9,
        "after_last_gradient": wire.tail / 1e9,
        "gather": (wire.params + wire.gather) / 1e9,
    }


def _fit_json(size: BucketSize) -> dict[str, Any]:
    if size.left is None:
        return {}
    return {"fits": size.fits, "left_bytes": size.left}


def _fitting(
    forecasts: Sequence[Forecast], predictions: Sequence[Prediction], memory: int
) -> list[Table | str]:
    """Report for each number of ranks whether the rank that needs most memory fits on its
    device.
    """
    rows = []
    for forecast, prediction in zip(forecasts, predictions, strict=True):
        most = max(forecast.needed)
        rank = forecast.needed.index(most)
        rows.append(
            {
                "ranks": str(forecast.layout.world_size),
                "rank": str(rank),
                "between steps": size_text(forecast.memory[rank].total),
                "under way": size_text(forecast.traffic[rank].total),
                "in a step": size_text(forecast.in_step[rank]),
                "in a pass": size_text(forecast.in_pass),
                "at start": size_text(forecast.start_up[rank]),
                "needed": size_text(most),
                "fits": _fit(prediction.own),
            }
        )
    parts: list[Table | str] = [
        _numbers(f"the rank that needs most, on a device with {size_text(memory)}", rows),
        "rank: the one that needs most; between steps: its total; in a pass: at stages 2 and 3 "
        "gradients that wait, at stage 3 also parameters that are whole; needed: between steps, "
        "under way, and the more of in a step and in a pass together, or at start if that is more. "
        "Not counted: what else the forward and the backward pass keep, activations above all; and "
        "what drivers and libraries take for themselves. fits: with what is left for that.",
    ]
    fit = [prediction.own.fits for prediction in predictions]
    if not all(fit):
        parts.append(
            "too much: more ranks, zero_optimization.stage 2 or 3, a smaller reduce_bucket_size, "
            "offload_optimizer, fewer bits (layerwise.master_dtype, momentum_dtype) or tensor "
            "parallelism need less of a device; ds-layerwise plan --fit tries them"
        )
    if not any(fit):
        ranks = ", ".join(row["ranks"] for row in rows)
        mended = ""
        if any(prediction.best for prediction in predictions):
            mended = "; with another bucket size it does, see below"
        parts.append(f"none of the numbers of ranks asked for fits: {ranks}{mended}")
    return parts


def _fit(size: BucketSize) -> str:
    left = size.left or 0
    if size.fits:
        return f"yes,{GLUE}{size_text(left)} left"
    return f"no,{GLUE}{size_text(-left)} too much"


def _predicted(
    forecasts: Sequence[Forecast], predictions: Sequence[Prediction]
) -> list[Table | str]:
    """Return the predicted times of a step, with the plan's bucket size and with others."""
    rows = []
    none_fits = []
    rates: dict[str, list[str]] = {}
    for forecast, prediction in zip(forecasts, predictions, strict=True):
        ranks = str(forecast.layout.world_size)
        rates.setdefault(prediction.links.summary(), []).append(ranks)
        if prediction.best is None:
            none_fits.append(f"{ranks} ranks: none of the sizes fits, so none is best")
        rows += [_size_row(ranks, prediction, size) for size in prediction.sizes]
    at = ", or ".join(
        f"{rate} ({', '.join(ranks)} ranks)" if len(rates) > 1 else rate
        for rate, ranks in rates.items()
    )
    first = predictions[0]
    every = ""
    if forecasts[0].stage > 1:
        every = " once in each backward pass at stages 2 and 3,"
    parts: list[Table | str] = [
        _numbers(f"predicted a step, {first.reduction} sums", rows),
        "elements a bucket: reduce_bucket_size, here and as it might be; ways: how many buckets "
        f"travel how; reduce: gradients to their owners,{every} hidden by the backward pass but "
        "for its end, if that is long enough; of it at the end: begins with the last gradient; "
        f"collectives one after another, at {at}; update: the matrices of the busiest rank at "
        f"{first.links.tflops:g}{GLUE}TFLOP/s; gather: updated parameters, to all "
        "ranks; all: one after another",
    ]
    if forecasts[0].stage == 3:
        parts.append(
            "stage 3 gathers parameters for one forward and one backward pass, which fetching "
            "ahead hides behind them, and once a step from owners to cuts"
        )
    if first.memory_bytes is not None:
        parts.append("best: of the sizes that fit")
    return [*parts, *none_fits]


def _size_row(ranks: str, prediction: Prediction, size: BucketSize) -> dict[str, str]:
    wire = size.wire
    ways = ""
    marks = []
    if size is prediction.own:
        ways = ", ".join(f"{count}{GLUE}{way}" for way, count in prediction.ways.items())
        marks.append(f"this{GLUE}plan")
    if size is prediction.best:
        marks.append("best")
    row = {
        "ranks": ranks,
        "elements a bucket": count_text(size.bucket_numel),
        "buckets": str(size.num_buckets),
        "ways": ways,
        "reduce": time_text(wire.reduce + wire.sums),
        "of it at the end": time_text(wire.tail),
        "update": time_text(prediction.update),
        "gather": time_text(wire.params + wire.gather),
        "all": time_text(wire.total + prediction.update),
    }
    if size.left is not None:
        row["fits"] = _fit(size)
    row[""] = " and ".join(marks)
    return row


def table_of(title: str, headers: Iterable[str], texts: Container[str] = ()) -> Table:
    """Return a table without rows. Only columns of ``texts`` may be folded, others never are."""
    table = Table(title=title, title_justify="left")
    for header in headers:
        if header in texts:
            table.add_column(header, overflow="fold")
        else:
            table.add_column(header, justify="right", no_wrap=True)
    return table


def _numbers(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    table = table_of(title, rows[0])
    for row in rows:
        table.add_row(*row.values())
    return table


def _head(
    routes: Routes,
    specs: Sequence[ParamSpec],
    chosen: OptimizerConfig,
    groups: ParamGroups,
    without_effect: Sequence[str],
    products: Mapping[Recipe, str],
) -> list[Table | str]:
    """Describe which recipe trains which parameters, and at which rates."""
    groups = groups or [chosen.group()]
    used = {route.group for route in routes.values()}
    trained = [routes[spec.name] for spec in specs]
    lines = []
    for recipe in _recipes(trained):
        mine = [route for route in trained if route.recipe == recipe]
        text = recipe.summary(partial(_hyper, mine, groups, used))
        line = f"{_called(recipe, chosen)}: {text}"
        if recipe in products:
            line += f", matrix products in {products[recipe]}"
        lines.append(line)
    head: list[Table | str] = [
        _parameters(routes, specs, chosen, groups),
        "optimizer: whole, one rank owns each parameter, or split, all ranks share each evenly; "
        "because: the rule that decided; tensors, elements: how many; lr, weight decay: in the "
        "next step, from least to greatest; for example: the first of them",
        "; ".join(lines),
    ]
    if chosen.preset:
        head.append(f"preset {chosen.preset}: {_preset(chosen)}")
    if without_effect:
        head.append(f"without effect here: {', '.join(without_effect)}")
    return head


def _hyper(routes: Sequence[Route], groups: ParamGroups, used: Iterable[int], key: str) -> str:
    if key == "eps":
        return _span(route.hyper(groups[route.group])["eps"] for route in routes)
    own = {getattr(route, key) for route in routes}
    values = [*own - {None}]
    if None in own:
        values += [groups[i][key] for i in used]
    if key == "betas":
        return " and ".join(sorted({f"[{first:g}, {second:g}]" for first, second in values}))
    return _span(values)


def _preset(chosen: OptimizerConfig) -> str:
    """List the settings of a preset, and those that the config replaces."""
    given = {**chosen.for_the_run(), **dict(iter(chosen))}
    own = [key for key in PRESETS[str(chosen.preset)] if key not in chosen.from_preset]
    taken = []
    for key in chosen.from_preset:
        if key in given:
            value = given[key]
            taken.append(f"{key} {list(value) if isinstance(value, tuple) else value}")
    left_out = f"; the config replaces its {', '.join(own)}" if own else ""
    return f"{', '.join(taken) or 'nothing'}{left_out}"


def _recipes(trained: Iterable[Route]) -> list[Recipe]:
    """Return the recipes in use: those of whole parameters first, then by name."""
    used = {route.recipe for route in trained}
    return sorted(used, key=lambda recipe: (not recipe.whole, recipe.rule, repr(recipe)))


def _called(recipe: Recipe, chosen: OptimizerConfig) -> str:
    """Return the name of ``recipe``, with the settings that an override has changed and an unusual
    weight decay.
    """
    # One class may be used for both recipes, with different arguments.
    run = next((each for each in chosen.recipes if type(each) is type(recipe)), type(recipe)())
    changed = []
    for key, value in recipe.settings().items():
        if value != run.settings()[key] and key not in Recipe.keys():
            changed.append(f"{key} {value}")
    if decay := recipe.decay_summary():
        changed.append(f"weight decay {decay}")
    if kept := recipe.kept_summary():
        changed.append(kept)
    return f"{recipe.rule} with {', '.join(changed)}" if changed else recipe.rule


def _span(values: Iterable[float]) -> str:
    texts = sorted({f"{float(value):g}" for value in values}, key=float)
    if len(texts) == 1:
        return texts[0]
    return f"{texts[0]} to {texts[-1]}"


def _parameters(
    routes: Routes,
    specs: Sequence[ParamSpec],
    chosen: OptimizerConfig,
    groups: ParamGroups,
) -> Table:
    in_order = _recipes(routes[spec.name] for spec in specs)
    rows: dict[tuple[int, str, bool], list[ParamSpec]] = {}
    for spec in specs:
        route = routes[spec.name]
        key = (in_order.index(route.recipe), route.reason, route.bare)
        rows.setdefault(key, []).append(spec)
    table = table_of(
        "parameters",
        ("optimizer", "because", "tensors", "elements", "lr", "weight decay", "for example"),
        ("optimizer", "because", "for example"),
    )
    for (index, reason, bare), members in sorted(rows.items()):
        names = [members[0].name]
        if bare:
            # Layers have the same few names with different numbers.
            names = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", spec.name) for spec in members))
        mine = [routes[spec.name] for spec in members]
        hypers = [route.hyper(groups[route.group]) for route in mine]
        recipe = in_order[index]
        table.add_row(
            f"{_called(recipe, chosen)} ({'whole' if recipe.whole else 'split'})",
            f"{reason}, bare" if bare else reason,
            str(len(members)),
            count_text(sum(spec.numel for spec in members)),
            _span(hyper["lr"] for hyper in hypers),
            _span(hyper["weight_decay"] for hyper in hypers),
            ", ".join(names),
        )
    return table


def _waiting(forecast: Forecast) -> str:
    if not forecast.waiting:
        return ""
    return (
        f"; {size_text(forecast.waiting)} more of gradients that wait for them, where reductions "
        "are slower than the backward pass (layerwise.max_waiting_buckets bounds it if no "
        "parameter is unused), or wait for its end without overlap_comm"
    )


def _costs(forecast: Forecast) -> list[Table | str]:
    report = forecast.report
    layout = forecast.layout
    held = forecast.memory[forecast.fullest]
    totals = [rank.total for rank in forecast.memory]
    rows = {
        "ranks, buckets": f"{layout.world_size}, {report.num_buckets}",
        "matrix updates a step": f"{work_text(max(report.work))} on the busiest rank, "
        f"{report.work_max_over_mean:.3f} x the mean",
        "owned matrices": f"{count_text(max(report.whole_numel))} elements on the fullest rank, "
        f"{report.whole_max_over_mean:.3f} x the mean",
        "memory of the fullest rank": f"{size_text(held.total)}, {max_over_mean(totals):.3f} x the "
        f"mean: parameters {size_text(held.params)}, gradients {size_text(held.grads)}, masters "
        f"{size_text(held.masters)}, states {size_text(held.states)}",
    }
    if any(forecast.saved):
        wide = forecast.in_float32[forecast.fullest]
        rows["fewer bits save"] = (
            f"{size_text(forecast.saved[forecast.fullest])} of the fullest rank's: masters "
            f"{size_text(wide.masters - held.masters)}, states "
            f"{size_text(wide.states - held.states)}; "
            f"{size_text(min(forecast.saved))} at least of any rank's"
        )
    if host := max(rank.host for rank in forecast.memory):
        staging = max(rank.staging for rank in forecast.memory)
        kinds = "parameters, masters and states" if forecast.stage == 3 else "masters and states"
        rows["on the host"] = (
            f"{size_text(host)} more of {kinds} on the fullest rank; a step takes "
            f"{size_text(staging)} of its device to work on them (less with a smaller "
            "reduce_bucket_size)"
        )
    if forecast.stage == 3:
        rows["whole, at most"] = (
            f"{size_text(forecast.whole.most)} of parameters that DeepSpeed fetches for a pass "
            f"(stage3_max_live_parameters), {size_text(forecast.whole.always)} of them always "
            "(stage3_param_persistence_threshold)"
        )
    under_way = max(traffic.total for traffic in forecast.traffic)
    rows["beside it, at most"] = (
        f"{size_text(under_way)} for buckets under way, and their exchange, {MAX_PENDING} at a "
        f"time{_waiting(forecast)}"
    )
    rows["in a step, at most"] = f"{size_text(max(forecast.workspace))} that an update works in"
    if forecast.stage < 3:
        rows["at start, at most"] = (
            f"{size_text(max(forecast.start_up))}, while parameters move into their buffer"
        )
    rows["a checkpoint"] = f"{size_text(forecast.checkpoint)}, without what is not trained"
    rows["padding"] = (
        f"{count_text(report.padding)} elements, {100 * report.padding_fraction:.3f}{GLUE}%"
    )
    for dtype, (reduced, gathered) in forecast.sent_by_busiest().items():
        if forecast.stage == 1:
            sent = f"{size_text(reduced + gathered)} a step"
        else:
            passes = "backward pass" if forecast.stage == 2 else "forward and backward pass"
            sent = f"{size_text(reduced)} a {passes} and {size_text(gathered)} a step"
        rows[f"{dtype} parameters"] = (
            f"gradients accumulate in {forecast.stored_as[dtype]}, travel in "
            f"{forecast.wire_as(dtype)}; the busiest rank sends {sent}"
        )
    table = Table(
        title=f"layout {layout.policy}, {layout.digest()}", title_justify="left", show_header=False
    )
    table.add_column(no_wrap=True, overflow="fold")
    table.add_column(overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    costs: list[Table | str] = [
        table,
        "matrix updates, owned matrices: of those that one rank updates whole; x the mean: 1.000 "
        "is balanced; padding: for alignment alone. Memory is of one device, and counts no "
        "activations, drivers and libraries.",
    ]
    idle = report.whole_numel.count(0)
    if idle not in (0, layout.world_size):
        costs.append(
            f"{idle} of {layout.world_size} ranks own no matrix: there are fewer matrices than "
            "ranks, or one is larger than a rank's share. Splitting fused projections into their "
            "parts (layerwise.overrides, split or num_heads) makes more of them."
        )
    return costs
