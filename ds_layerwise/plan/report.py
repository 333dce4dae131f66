"""The start-up table, as text or for a program: who trains what and why, and what it costs each rank."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_layerwise.config import OptimizerConfig
from ds_layerwise.plan.cost import max_over_mean
from ds_layerwise.plan.forecast import Forecast
from ds_layerwise.plan.layout import ParamSpec
from ds_layerwise.plan.routes import Route
from ds_layerwise.plan.wire import MAX_UNDER_WAY
from ds_layerwise.recipes.recipe import Recipe

_WIDTH, _PLAN_WIDTH = 110, 160


def start_up_table(routes: Mapping[str, Route], specs: Sequence[ParamSpec], forecast: Forecast,
                   optimizer: OptimizerConfig, *, groups: Sequence[Mapping[str, Any]] = (),
                   without_effect: Sequence[str] = (), products: Mapping[Recipe, str] | None = None) -> str:
    """Plain text for a log, without colours.

    Args:
        forecast: for exactly these ``specs``.
        groups: the parameter groups, with what the next step uses; without any, one as ``optimizer`` says.
        without_effect: keys of the config that are accepted, but change nothing.
        products: what recipes multiply matrices in, where a device is there to say.
    """
    return _rendered(*_head(routes, specs, optimizer, groups, without_effect, products or {}), _costs(forecast),
                     *_hint(forecast))


def plan_table(routes: Mapping[str, Route], specs: Sequence[ParamSpec], forecasts: Sequence[Forecast],
               optimizer: OptimizerConfig, *, without_effect: Sequence[str] = ()) -> str:
    """The start-up table for several numbers of ranks, one row each. For one it is :func:`start_up_table` itself."""
    if len(forecasts) == 1:
        return start_up_table(routes, specs, forecasts[0], optimizer, without_effect=without_effect)
    table = Table(title="memory of the fullest rank in MiB; sent by the mean rank in MiB", title_justify="left")
    for header in ("ranks", "layout", "buckets", "NS max/mean", "total", "params", "grads", "masters", "states",
                   "host", "under way", "in a step", "at start", "padding", "sent"):
        table.add_column(header, justify="right", no_wrap=True)
    for forecast in forecasts:
        held = forecast.memory[forecast.fullest]
        table.add_row(str(forecast.layout.world_size), forecast.layout.digest(), str(forecast.report.num_buckets),
                      f"{forecast.report.work_max_over_mean:.3f}",
                      *(_mib(n) for n in (held.total, held.params, held.grads, held.masters, held.states, held.host)),
                      _mib(max(traffic.total for traffic in forecast.traffic)), _mib(max(forecast.workspace)),
                      _mib(max(forecast.start_up)),
                      f"{100 * forecast.report.padding_fraction:.3f} %",
                      _mib(sum(forecast.reduce_bytes(d) + forecast.gather_bytes(d) for d in forecast.layout.dtypes)))
    what = ("gradients and parameters in a step" if forecasts[0].stage == 1 else
            "gradients in one backward pass and parameters in a step")
    return _rendered(*_head(routes, specs, optimizer, (), without_effect, {}), table, f"sent: {what}",
                     width=_PLAN_WIDTH)


def as_json(forecast: Forecast) -> dict[str, Any]:
    """The same numbers for a program: bytes, elements and FLOPs, memory of every rank."""
    report, layout = forecast.report, forecast.layout
    return {
        "ranks": layout.world_size, "layout": layout.policy, "digest": layout.digest(), "stage": forecast.stage,
        "buckets": report.num_buckets, "elements": report.numel, "padding_elements": report.padding,
        "newton_schulz_flops": list(report.work), "newton_schulz_max_over_mean": report.work_max_over_mean,
        "owned_matrix_elements": list(report.whole_numel), "fullest_rank": forecast.fullest,
        "memory_bytes": [{**asdict(held), "total": held.total} for held in forecast.memory],
        "start_up_bytes": list(forecast.start_up), "step_bytes": list(forecast.workspace),
        "under_way_bytes": [{**asdict(traffic), "total": traffic.total} for traffic in forecast.traffic],
        "dtypes": {dtype: {
            "gradients_accumulate_in": forecast.stored_as[dtype], "gradients_travel_in": forecast.wire_as(dtype),
            "sent_bytes": {"gradients": forecast.reduce_bytes(dtype), "parameters": forecast.gather_bytes(dtype)},
        } for dtype in layout.dtypes},
        "gradients_sent_every": "step" if forecast.stage == 1 else "backward pass",
    }


def _rendered(*parts: Table | str, width: int = _WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    for part in parts:
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _hint(forecast: Forecast) -> list[str]:
    idle = sum(1 for numel in forecast.report.whole_numel if not numel) if any(forecast.report.whole_numel) else 0
    return [f"{idle} of {forecast.layout.world_size} ranks own no matrix: there are fewer matrices than ranks, or one "
            "is larger than a rank's share. Splitting fused projections into their parts "
            "(layerwise.overrides, num_heads) makes more of them."] if idle else []


def _head(routes: Mapping[str, Route], specs: Sequence[ParamSpec], chosen: OptimizerConfig,
          groups: Sequence[Mapping[str, Any]], without_effect: Sequence[str],
          products: Mapping[Recipe, str]) -> list[Table | str]:
    """What trains which parameters, with which rates."""
    groups = groups or [{key: getattr(chosen, key) for key in (
        "lr", "momentum", "weight_decay", "betas", "eps", "matrix_lr_ratio", "scalar_lr_ratio")}]
    used = [groups[i] for i in sorted({route.group for route in routes.values()})]

    def text(recipe: Recipe, key: str) -> str:
        own = [getattr(routes[spec.name], key) for spec in specs if routes[spec.name].recipe == recipe]
        values = [group[key] for group in used if None in own] + [value for value in own if value is not None]
        if key == "betas":
            return " and ".join(sorted({f"[{first:g}, {second:g}]" for first, second in values}))
        return _span(values)

    lines = [f"{_called(recipe, chosen)}: {recipe.summary(partial(text, recipe))}"
             f"{f', matrix products in {products[recipe]}' if recipe in products else ''}"
             for recipe in _recipes(routes, specs)]
    told = [f"without effect here: {', '.join(without_effect)}"] if without_effect else []
    return [_parameters(routes, specs, chosen, groups), "; ".join(lines), *told]


def _recipes(routes: Mapping[str, Route], specs: Sequence[ParamSpec]) -> list[Recipe]:
    """Those in use: first of whole parameters, then by name."""
    found = dict.fromkeys(routes[spec.name].recipe for spec in specs)
    return sorted(found, key=lambda recipe: (not recipe.whole, recipe.rule, repr(recipe)))


def _called(recipe: Recipe, chosen: OptimizerConfig) -> str:
    """A name for ``recipe``, with what an override has changed of it."""
    run = next((each for each in chosen.recipes if each.rule == recipe.rule), type(recipe)())
    changed = [f"{key} {value}" for key, value in recipe.settings().items() if value != run.settings()[key]]
    return " ".join([recipe.rule, *(["with", ", ".join(changed)] if changed else [])])


def _span(values: Iterable[float]) -> str:
    found = sorted({f"{float(value):g}" for value in values}, key=float)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _parameters(routes: Mapping[str, Route], specs: Sequence[ParamSpec], chosen: OptimizerConfig,
                groups: Sequence[Mapping[str, Any]]) -> Table:
    def hyper(spec: ParamSpec, key: str) -> float:
        route = routes[spec.name]
        return float(route.hyper(groups[route.group])[key])

    place = {recipe: i for i, recipe in enumerate(_recipes(routes, specs))}
    rows: dict[tuple[int, str], list[ParamSpec]] = {}
    for spec in specs:
        route = routes[spec.name]
        rows.setdefault((place[route.recipe], route.reason), []).append(spec)
    table = Table(title="parameters", title_justify="left")
    for header in ("optimizer", "because", "tensors", "elements", "lr", "weight decay", "for example"):
        table.add_column(header, justify="left" if header in ("optimizer", "because", "for example") else "right",
                         overflow="fold")
    for (_, reason), members in sorted(rows.items()):
        recipe = routes[members[0].name].recipe
        table.add_row(f"{_called(recipe, chosen)} ({'whole' if recipe.whole else 'split'})", reason,
                      str(len(members)), f"{sum(spec.numel for spec in members):,}",
                      _span(hyper(spec, "lr") for spec in members),
                      _span(hyper(spec, "weight_decay") for spec in members), members[0].name)
    return table


def _costs(forecast: Forecast) -> Table:
    report, layout, held = forecast.report, forecast.layout, forecast.memory[forecast.fullest]
    table = Table(title=f"layout {layout.policy}, {layout.digest()}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("ranks, buckets", f"{layout.world_size}, {report.num_buckets}")
    table.add_row("Newton-Schulz a step", f"{max(report.work) / 1e9:,.3g} GFLOP on the busiest rank, "
                  f"{report.work_max_over_mean:.3f} x the mean")
    table.add_row("owned matrices", f"{max(report.whole_numel):,} elements on the fullest rank, "
                  f"{report.whole_max_over_mean:.3f} x the mean")
    table.add_row("memory of the fullest rank", f"{_mib(held.total)} MiB, "
                  f"{max_over_mean([rank.total for rank in forecast.memory]):.3f} x the mean: parameters "
                  f"{_mib(held.params)}, gradients {_mib(held.grads)}, masters {_mib(held.masters)}, states "
                  f"{_mib(held.states)}")
    if any(rank.host for rank in forecast.memory):
        table.add_row("on the host", f"{_mib(max(rank.host for rank in forecast.memory))} MiB more of masters and "
                      f"states on the fullest rank; a step takes {_mib(max(rank.staging for rank in forecast.memory))} "
                      "MiB of its device to work on them (less with a smaller reduce_bucket_size)")
    table.add_row("beside it, at most", f"{_mib(max(traffic.total for traffic in forecast.traffic))} MiB for buckets "
                  f"under way, {MAX_UNDER_WAY} at a time")
    table.add_row("in a step, at most", f"{_mib(max(forecast.workspace))} MiB that the update of a bucket works in")
    table.add_row("at start, at most", f"{_mib(max(forecast.start_up))} MiB, while parameters move into their buffer")
    table.add_row("padding", f"{report.padding:,} elements, {100 * report.padding_fraction:.3f} %")
    for dtype in layout.dtypes:
        reduced, gathered = forecast.reduce_bytes(dtype), forecast.gather_bytes(dtype)
        sent = f"{_mib(reduced + gathered)} MiB a step" if forecast.stage == 1 else \
            f"{_mib(reduced)} MiB a backward pass and {_mib(gathered)} MiB a step"
        table.add_row(f"{dtype} parameters", f"gradients accumulate in {forecast.stored_as[dtype]}, travel in "
                      f"{forecast.wire_as(dtype)}; a rank sends {sent}")
    return table
