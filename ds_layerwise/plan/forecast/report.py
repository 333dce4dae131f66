"""The start-up table, as text or for a program: who trains what and why, and what it costs each
rank.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_layerwise.config.sections import Hyper, OptimizerConfig
from ds_layerwise.plan.forecast.cost import max_over_mean
from ds_layerwise.plan.forecast.forecast import Forecast, Sent
from ds_layerwise.plan.forecast.prediction import BucketSize, Prediction
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.network.transport import MAX_UNDER_WAY, WireTime
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.recipes.base.recipe import Recipe
from ds_layerwise.recipes.presets import PRESETS

#: The second holds the widest cells of every column, so that none is cut off.
_WIDTH, _PLAN_WIDTH = 110, 210


def start_up_table(
    routes: Mapping[str, Route],
    specs: Sequence[ParamSpec],
    forecast: Forecast,
    optimizer: OptimizerConfig,
    *,
    groups: Sequence[Mapping[str, Any]] = (),
    without_effect: Sequence[str] = (),
    products: Mapping[Recipe, str] | None = None,
) -> str:
    """Plain text for a log, without colours.

    Args:
        forecast: for exactly these ``specs``.
        groups: the parameter groups, with what the next step uses and ``configured_lr``; without
            any, one as ``optimizer`` says.
        without_effect: keys of the config that are accepted, but change nothing.
        products: what recipes multiply matrices in, where a device is there to say.
    """
    return _rendered(
        *_head(routes, specs, optimizer, groups, without_effect, products or {}),
        _costs(forecast),
        *_hint(forecast),
    )


def plan_table(
    routes: Mapping[str, Route],
    specs: Sequence[ParamSpec],
    forecasts: Sequence[Forecast],
    optimizer: OptimizerConfig,
    *,
    without_effect: Sequence[str] = (),
    predictions: Sequence[Prediction] = (),
) -> str:
    """The start-up table for several numbers of ranks, one row each. For one it is
    :func:`start_up_table` itself.

    Args:
        predictions: what each of ``forecasts`` takes, told below; nothing if empty.
    """
    below = _below(forecasts, predictions)
    if len(forecasts) == 1:
        one = start_up_table(routes, specs, forecasts[0], optimizer, without_effect=without_effect)
        return "\n".join([one, *([_rendered(*below, width=_PLAN_WIDTH)] if below else [])])
    saves = any(any(forecast.saved) for forecast in forecasts)
    table = _table(
        "memory of the fullest rank, and what the busiest rank sends",
        "ranks",
        "layout",
        "buckets",
        "NS max/mean",
        "total",
        "params",
        "grads",
        "masters",
        "states",
        *["saved"] * saves,
        "host",
        "under way",
        "in a step",
        "at start",
        "padding",
        "sent",
    )
    for forecast in forecasts:
        held, sent = forecast.memory[forecast.fullest], forecast.sent_by_busiest().values()
        table.add_row(
            str(forecast.layout.world_size),
            forecast.layout.digest(),
            str(forecast.report.num_buckets),
            f"{forecast.report.work_max_over_mean:.3f}",
            *(
                _size(n)
                for n in (
                    held.total,
                    held.params,
                    held.grads,
                    held.masters,
                    held.states,
                    *[forecast.saved[forecast.fullest]] * saves,
                    held.host,
                )
            ),
            _size(max(traffic.total for traffic in forecast.traffic)),
            _size(max(forecast.workspace)),
            _size(max(forecast.start_up)),
            f"{100 * forecast.report.padding_fraction:.3f} %",
            _size(sum(map(sum, sent))),
        )
    what = (
        "gradients and parameters in a step"
        if forecasts[0].stage == 1
        else "gradients in one backward pass and parameters in a step"
    )
    return _rendered(
        *_head(routes, specs, optimizer, (), without_effect, {}),
        table,
        f"sent: {what}{_waiting(forecasts[0])}",
        *below,
        width=_PLAN_WIDTH,
    )


def as_json(forecast: Forecast, prediction: Prediction | None = None) -> dict[str, Any]:
    """A plan's numbers for a program: bytes, elements and FLOPs, memory of every rank; seconds
    where predicted.
    """
    report, layout, sent, most = (
        forecast.report,
        forecast.layout,
        forecast.sent(),
        forecast.sent_by_busiest(),
    )
    return {
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
        "memory_bytes": [{**asdict(held), "total": held.total} for held in forecast.memory],
        "saved_bytes": list(forecast.saved),
        "start_up_bytes": list(forecast.start_up),
        "step_bytes": list(forecast.workspace),
        "waiting_bytes": forecast.waiting,
        "under_way_bytes": [
            {**asdict(traffic), "total": traffic.total} for traffic in forecast.traffic
        ],
        "dtypes": {
            dtype: {
                "gradients_accumulate_in": forecast.stored_as[dtype],
                "gradients_travel_in": forecast.wire_as(dtype),
                "sent_bytes": {
                    key: sum(by_rank) / layout.world_size
                    for key, by_rank in sent[dtype]._asdict().items()
                },
                "sent_by_busiest_bytes": dict(zip(Sent._fields, most[dtype], strict=True)),
            }
            for dtype in layout.dtypes
        },
        "gradients_sent_every": "step" if forecast.stage == 1 else "backward pass",
        "sent_by_busiest_bytes": sum(map(sum, most.values())),
        **(
            {
                "device_memory_bytes": prediction.memory_bytes,
                "needed_bytes": list(forecast.needed),
                **_fit_json(prediction.own),
            }
            if prediction and prediction.memory_bytes is not None
            else {}
        ),
        **({"predicted": _prediction_json(prediction)} if prediction else {}),
    }


def _prediction_json(prediction: Prediction) -> dict[str, Any]:
    def seconds(wire: WireTime) -> dict[str, float]:
        return {
            "reduce": (wire.reduce + wire.sums) / 1e9,
            "after_last_gradient": wire.tail / 1e9,
            "gather": (wire.params + wire.gather) / 1e9,
        }

    return {
        "links": prediction.links.model_dump(),
        "reduction": prediction.reduction,
        "ways": dict(prediction.ways),
        "seconds": {
            **seconds(prediction.wire),
            "update": prediction.update / 1e9,
            "all": prediction.total / 1e9,
        },
        "best_bucket_elements": prediction.best.bucket_numel if prediction.best else None,
        "bucket_sizes": [
            {
                "elements": size.bucket_numel,
                "buckets": size.num_buckets,
                "seconds": seconds(size.wire),
                **_fit_json(size),
            }
            for size in prediction.sizes
        ],
    }


def _fit_json(size: BucketSize) -> dict[str, Any]:
    return {} if size.left is None else {"fits": size.fits, "left_bytes": size.left}


def _below(forecasts: Sequence[Forecast], predictions: Sequence[Prediction]) -> list[Table | str]:
    """What is told below the costs of plans: whether they fit, if somebody says into what, and what
    a step takes.
    """
    if not predictions:
        return []
    memory = predictions[0].memory_bytes
    fitting = [] if memory is None else _fitting(forecasts, predictions, memory)
    return [*fitting, *_predicted(forecasts, predictions)]


def _fitting(
    forecasts: Sequence[Forecast], predictions: Sequence[Prediction], memory: int
) -> list[Table | str]:
    """Whether the rank that needs most has it on a device with ``memory`` bytes, for each number of
    ranks.
    """
    table = _table(
        f"the rank that needs most, on a device with {_size(memory)}",
        "ranks",
        "rank",
        "between steps",
        "under way",
        "in a step",
        "at start",
        "needed",
        "fits",
    )
    for forecast, prediction in zip(forecasts, predictions, strict=True):
        most = max(forecast.needed)
        rank = forecast.needed.index(most)
        table.add_row(
            str(forecast.layout.world_size),
            str(rank),
            *(
                _size(each)
                for each in (
                    forecast.memory[rank].total,
                    forecast.traffic[rank].total,
                    forecast.in_step[rank],
                    forecast.start_up[rank],
                    most,
                )
            ),
            _fit(prediction.own),
        )
    told = [
        "needed: between steps, under way and in a step together, or at start if that is more. Not "
        "counted: what the forward and the backward pass keep, activations above all, and what "
        "drivers and libraries take for themselves."
    ]
    if not all(prediction.own.fits for prediction in predictions):
        told.append(
            "too much: more ranks, zero_optimization.stage 2, a smaller reduce_bucket_size, "
            "offload_optimizer, fewer bits (layerwise.master_dtype, momentum_dtype) or tensor "
            "parallelism need less of a device"
        )
    if not any(prediction.own.fits for prediction in predictions):
        ranks = ", ".join(str(forecast.layout.world_size) for forecast in forecasts)
        other = any(size.fits for prediction in predictions for size in prediction.sizes)
        told.append(
            "none of the numbers of ranks asked for fits: "
            f"{ranks}{'; with another bucket size it does, see below' * other}"
        )
    return [table, *told]


def _fit(size: BucketSize) -> str:
    left = size.left or 0
    return f"yes, {_size(left)} left" if size.fits else f"no, {_size(-left)} too much"


def _predicted(
    forecasts: Sequence[Forecast], predictions: Sequence[Prediction]
) -> list[Table | str]:
    """What a step takes, and with which bucket sizes it would take what."""
    links, reduction, asked = (
        predictions[0].links,
        predictions[0].reduction,
        predictions[0].memory_bytes is not None,
    )
    table = _table(
        f"predicted a step, {reduction} sums",
        "ranks",
        "elements a bucket",
        "buckets",
        "ways",
        "reduce",
        "of it at the end",
        "update",
        "gather",
        "all",
        *["fits"] * asked,
        "",
    )
    for forecast, prediction in zip(forecasts, predictions, strict=True):
        own, best = prediction.own, prediction.best
        for size in prediction.sizes:
            ways = (
                ", ".join(f"{count} {way}" for way, count in prediction.ways.items())
                if size is own
                else ""
            )
            wire = size.wire
            table.add_row(
                str(forecast.layout.world_size),
                f"{size.bucket_numel:,}",
                str(size.num_buckets),
                ways,
                _time(wire.reduce + wire.sums),
                _time(wire.tail),
                _time(prediction.update),
                _time(wire.params + wire.gather),
                _time(wire.total + prediction.update),
                *[_fit(size)] * asked,
                " and ".join(["this plan"] * (size is own) + ["best"] * (size is best)),
            )
    every = "" if forecasts[0].stage == 1 else " once in each backward pass at stage 2,"
    return [
        table,
        f"reduce:{every} hidden by the backward pass but for its end, if that is long enough; "
        f"collectives one after another, at {_rates(forecasts, predictions)}; update: the matrices "
        f"of the busiest rank at {links.tflops:g} TFLOP/s",
        *["best: of the sizes that fit"] * asked,
        *(
            f"{forecast.layout.world_size} ranks: none of the sizes fits, so none is best"
            for forecast, prediction in zip(forecasts, predictions, strict=True)
            if prediction.best is None
        ),
    ]


def _rates(forecasts: Sequence[Forecast], predictions: Sequence[Prediction]) -> str:
    ranks: dict[str, list[str]] = {}
    for forecast, prediction in zip(forecasts, predictions, strict=True):
        ranks.setdefault(prediction.links.summary(), []).append(str(forecast.layout.world_size))
    return ", or ".join(
        f"{rates} ({', '.join(numbers)} ranks)" if len(ranks) > 1 else rates
        for rates, numbers in ranks.items()
    )


def _time(nanoseconds: float) -> str:
    return (
        f"{nanoseconds / 1e9:,.2f} s"
        if nanoseconds >= 1e9
        else f"{nanoseconds / 1e6:.1f} ms"
        if nanoseconds >= 1e6
        else f"{nanoseconds / 1e3:.1f} us"
    )


def _table(title: str, *headers: str) -> Table:
    """A table without rows, of numbers, which are not cut off."""
    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _rendered(*parts: Table | str, width: int = _WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True, markup=False, emoji=False)
    for part in parts:
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _hint(forecast: Forecast) -> list[str]:
    idle = (
        sum(1 for numel in forecast.report.whole_numel if not numel)
        if any(forecast.report.whole_numel)
        else 0
    )
    return (
        [
            f"{idle} of {forecast.layout.world_size} ranks own no matrix: there are fewer matrices "
            "than ranks, or one is larger than a rank's share. Splitting fused projections into "
            "their parts (layerwise.overrides, split or num_heads) makes more of them."
        ]
        if idle
        else []
    )


def _head(
    routes: Mapping[str, Route],
    specs: Sequence[ParamSpec],
    chosen: OptimizerConfig,
    groups: Sequence[Mapping[str, Any]],
    without_effect: Sequence[str],
    products: Mapping[Recipe, str],
) -> list[Table | str]:
    """What trains which parameters, with which rates."""
    groups = groups or [chosen.group()]
    used = [groups[i] for i in sorted({route.group for route in routes.values()})]

    def text(recipe: Recipe, key: str) -> str:
        mine = [routes[spec.name] for spec in specs if routes[spec.name].recipe == recipe]
        if key == "eps":
            return _span(route.hyper(groups[route.group])["eps"] for route in mine)
        own = [getattr(route, key) for route in mine]
        values = [group[key] for group in used if None in own] + [
            value for value in own if value is not None
        ]
        if key == "betas":
            return " and ".join(sorted({f"[{first:g}, {second:g}]" for first, second in values}))
        return _span(values)

    lines = [
        f"{_called(recipe, chosen)}: {recipe.summary(partial(text, recipe))}"
        f"{f', matrix products in {products[recipe]}' if recipe in products else ''}"
        for recipe in _recipes(routes, specs)
    ]
    told = [f"preset {chosen.preset}: {_preset(chosen)}"] if chosen.preset else []
    told += [f"without effect here: {', '.join(without_effect)}"] if without_effect else []
    return [_parameters(routes, specs, chosen, groups), "; ".join(lines), *told]


def _preset(chosen: OptimizerConfig) -> str:
    """What a preset has given, and what the config says itself in its place."""
    given = {**chosen.for_the_run(), **{key: getattr(chosen, key) for key in Hyper.keys()}}
    own = [key for key in PRESETS[str(chosen.preset)] if key not in chosen.from_preset]
    told = ", ".join(
        f"{key} {list(given[key]) if isinstance(given[key], tuple) else given[key]}"
        for key in chosen.from_preset
        if key in given
    )
    left_out = f"; without its {', '.join(own)}, where the config has its own" if own else ""
    return f"{told or 'nothing'}{left_out}"


def _recipes(routes: Mapping[str, Route], specs: Sequence[ParamSpec]) -> list[Recipe]:
    """The recipes in use: first those of whole parameters, then by name."""
    found = dict.fromkeys(routes[spec.name].recipe for spec in specs)
    return sorted(found, key=lambda recipe: (not recipe.whole, recipe.rule, repr(recipe)))


def _called(recipe: Recipe, chosen: OptimizerConfig) -> str:
    """A name for ``recipe``, with what an override has changed of it, and how weights decay unless
    by default.
    """
    # One class may be both, with arguments of its own for each.
    run = next((each for each in chosen.recipes if type(each) is type(recipe)), type(recipe)())
    changed = [
        f"{key} {value}"
        for key, value in recipe.settings().items()
        if value != run.settings()[key] and key not in Recipe.keys()
    ]
    changed += [f"weight decay {recipe.decay_summary()}"] * bool(recipe.decay_summary())
    changed += [recipe.kept_summary()] * bool(recipe.kept_summary())
    return " ".join([recipe.rule, *(["with", ", ".join(changed)] if changed else [])])


def _span(values: Iterable[float]) -> str:
    found = sorted({f"{float(value):g}" for value in {*values}}, key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _parameters(
    routes: Mapping[str, Route],
    specs: Sequence[ParamSpec],
    chosen: OptimizerConfig,
    groups: Sequence[Mapping[str, Any]],
) -> Table:
    place = {recipe: i for i, recipe in enumerate(_recipes(routes, specs))}
    rows: dict[tuple[int, str, bool], list[ParamSpec]] = {}
    for spec in specs:
        route = routes[spec.name]
        rows.setdefault((place[route.recipe], route.reason, route.bare), []).append(spec)
    table = Table(title="parameters", title_justify="left")
    for header in (
        "optimizer",
        "because",
        "tensors",
        "elements",
        "lr",
        "weight decay",
        "for example",
    ):
        table.add_column(
            header,
            justify="left" if header in ("optimizer", "because", "for example") else "right",
            overflow="fold",
        )
    for (_, reason, bare), members in sorted(rows.items()):
        # Layers number the same few.
        names = (
            dict.fromkeys(re.sub(r"\b\d+\b", "*", spec.name) for spec in members)
            if bare
            else [members[0].name]
        )
        mine = [routes[spec.name] for spec in members]
        recipe, hypers = mine[0].recipe, [route.hyper(groups[route.group]) for route in mine]
        table.add_row(
            f"{_called(recipe, chosen)} ({'whole' if recipe.whole else 'split'})",
            f"{reason}{', bare' * bare}",
            str(len(members)),
            f"{sum(spec.numel for spec in members):,}",
            *(_span(each[key] for each in hypers) for key in ("lr", "weight_decay")),
            ", ".join(names),
        )
    return table


def _waiting(forecast: Forecast) -> str:
    if not forecast.waiting:
        return ""
    return (
        f"; {_size(forecast.waiting)} more of gradients that wait for them, where reductions are "
        "slower than the backward pass (layerwise.max_waiting_buckets bounds it if no parameter "
        "is unused)"
    )


def _costs(forecast: Forecast) -> Table:
    report, layout, held = forecast.report, forecast.layout, forecast.memory[forecast.fullest]
    rows = {
        "ranks, buckets": f"{layout.world_size}, {report.num_buckets}",
        "matrix updates a step": f"{max(report.work) / 1e9:,.3g} GFLOP on the busiest rank, "
        f"{report.work_max_over_mean:.3f} x the mean",
        "owned matrices": f"{max(report.whole_numel):,} elements on the fullest rank, "
        f"{report.whole_max_over_mean:.3f} x the mean",
        "memory of the fullest rank": f"{_size(held.total)}, "
        f"{max_over_mean([rank.total for rank in forecast.memory]):.3f} x the mean: "
        f"parameters {_size(held.params)}, gradients {_size(held.grads)}, masters "
        f"{_size(held.masters)}, states "
        f"{_size(held.states)}",
    }
    if any(forecast.saved):
        wide = forecast.in_float32[forecast.fullest]
        rows["fewer bits save"] = (
            f"{_size(forecast.saved[forecast.fullest])} of the fullest rank's: masters "
            f"{_size(wide.masters - held.masters)}, states {_size(wide.states - held.states)}; "
            f"{_size(min(forecast.saved))} at least of any rank's"
        )
    if any(rank.host for rank in forecast.memory):
        host, staging = (
            max(getattr(rank, key) for rank in forecast.memory) for key in ("host", "staging")
        )
        rows["on the host"] = (
            f"{_size(host)} more of masters and states on the fullest rank; a step takes "
            f"{_size(staging)} of its device to work on them (less with a smaller "
            "reduce_bucket_size)"
        )
    rows |= {
        "beside it, at "
        "most": f"{_size(max(traffic.total for traffic in forecast.traffic))} for buckets under "
        "way, and "
        f"their exchange, {MAX_UNDER_WAY} at a time{_waiting(forecast)}",
        "in a step, at most": f"{_size(max(forecast.workspace))} that an update works in",
        "at start, at "
        "most": f"{_size(max(forecast.start_up))}, while parameters move into their buffer",
        "padding": f"{report.padding:,} elements, {100 * report.padding_fraction:.3f} %",
    }
    for dtype, (reduced, gathered) in forecast.sent_by_busiest().items():
        sent = (
            f"{_size(reduced + gathered)} a step"
            if forecast.stage == 1
            else f"{_size(reduced)} a backward pass and {_size(gathered)} a step"
        )
        rows[f"{dtype} parameters"] = (
            f"gradients accumulate in {forecast.stored_as[dtype]}, travel in "
            f"{forecast.wire_as(dtype)}; the busiest rank sends {sent}"
        )
    table = Table(
        title=f"layout {layout.policy}, {layout.digest()}", title_justify="left", show_header=False
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    return table
