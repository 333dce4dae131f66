"""The table at start, and its numbers for programs: the parameters by recipe, and the costs of each
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.plan.forecast.forecast import Forecast, max_over_mean
from ds_layerwise.plan.forecast.param_tables import recipe_parts
from ds_layerwise.plan.forecast.sent import Sent
from ds_layerwise.plan.forecast.text_tables import (
    GLUE,
    count_text,
    rendered,
    size_text,
    time_text,
    work_text,
)
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.transport import MAX_PENDING
from ds_layerwise.routing.routes import ParamGroups, Routes

#: The width of a text that goes to no terminal, with one column of costs, and of each further one.
_WIDTH = 110
_COLUMN = 28

#: The period in which the bytes of gradients are sent, by ZeRO stage.
_PERIODS = {1: "a step", 2: "a backward pass", 3: "a forward and backward pass, with parameters"}


def plan_table(
    routes: Routes,
    specs: Sequence[ParamSpec],
    forecasts: Sequence[Forecast],
    optimizer: OptimizerConfig,
    *,
    groups: ParamGroups = (),
    without_effect: Sequence[str] = (),
    products: Mapping[Recipe, str] | None = None,
    memory_bytes: int | None = None,
    gb_s: float | None = None,
) -> str:
    """Return plain text for a log, without colours.

    Args:
        forecasts: the forecasts of exactly these ``specs``, a column for each.
        groups: the parameter groups, with the values of the next step and ``configured_lr``; if
            empty, one group with the values of ``optimizer``.
        without_effect: the keys of the config that are accepted but change nothing.
        products: the dtypes in which recipes multiply matrices, if there is a device.
        memory_bytes: the memory of one device; None if it is not known.
        gb_s: the bandwidth of a rank, in 10^9 bytes per second, for which seconds are printed; None
            for none.
    """
    parts = recipe_parts(routes, specs, optimizer, groups or [optimizer.group()], products or {})
    if without_effect:
        parts.append(f"without effect here: {', '.join(without_effect)}")
    columns = [_costs(each, memory_bytes, gb_s) for each in forecasts]
    title = f"layout {forecasts[0].layout.policy}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    for _ in columns:
        table.add_column(justify="right", no_wrap=True)
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    parts.append(table)
    parts += _notes(forecasts, memory_bytes)
    return rendered(parts, max(_WIDTH, _COLUMN * (len(columns) + 1)))


def _costs(forecast: Forecast, memory_bytes: int | None, gb_s: float | None) -> dict[str, str]:
    """Return a column of the table of costs, by the names of its rows."""
    report = forecast.report
    layout = forecast.layout
    held = forecast.memory[forecast.fullest]
    totals = [rank.total for rank in forecast.memory]
    gradients, parameters = map(sum, zip(*forecast.sent_by_busiest().values(), strict=True))
    rows = {
        "ranks": str(layout.world_size),
        "digest": layout.digest(),
        "buckets": f"{report.num_buckets}, {forecast.transports['cuts']} in cuts",
        "matrix updates": _with_balance(work_text(max(report.work)), report.work),
        "owned matrices": _with_balance(count_text(max(report.whole_numel)), report.whole_numel),
        "held": _with_balance(size_text(held.total), totals),
        "parameters": size_text(held.params),
        "gradients": size_text(held.grads),
        "masters": size_text(held.masters),
        "states": size_text(held.states),
        "on the host": size_text(max(rank.host for rank in forecast.memory)),
        "works in, at most": size_text(forecast.working.total),
        "padding": f"{count_text(report.padding)}, {100 * report.padding_fraction:.3f}{GLUE}%",
    }
    for dtype in layout.dtypes:
        rows[f"of {dtype}"] = f"{forecast.stored_as[dtype]}, {forecast.wire_as(dtype)}"
    rows["sent, gradients"] = size_text(gradients)
    rows["sent, parameters"] = size_text(parameters)
    if gb_s is not None:
        rows[f"sent at {gb_s:g} GB/s"] = time_text((gradients + parameters) / gb_s)
    if memory_bytes is not None:
        rows["needed"] = size_text(forecast.needed)
        rows["fits"] = _fit(memory_bytes - forecast.needed)
    return rows


def _fit(left: int) -> str:
    if left >= 0:
        return f"yes,{GLUE}{size_text(left)} left"
    return f"no,{GLUE}{size_text(-left)} too much"


def _with_balance(most: str, loads: Sequence[int]) -> str:
    return f"{most}, {max_over_mean(loads):.3f}{GLUE}x"


def _notes(forecasts: Sequence[Forecast], memory_bytes: int | None) -> Iterator[str]:
    """Yield the lines below the table of costs."""
    stage = forecasts[0].stage
    works_in = "an update"
    if stage > 1:
        works_in += (
            ", or gradients that wait in a pass (layerwise.max_waiting_buckets bounds them if no "
            "parameter is unused)"
        )
    if stage == 3:
        works_in += " and parameters that DeepSpeed makes whole (stage3_max_live_parameters)"
    yield (
        "ranks: data-parallel ones; digest: of the layout, which all ranks of a run compare; "
        "buckets: reduced one after another; matrix updates, owned matrices: FLOPs and elements of "
        "those that one rank updates whole, on the busiest and the fullest rank, and how many "
        "times the mean; held: between two steps, on the fullest rank, by kind; on the host: more, "
        f"in the memory of the host; works in: {works_in}, and the transfers of {MAX_PENDING} "
        "buckets; padding: elements for alignment alone; of a dtype: gradients of such parameters "
        f"accumulate in, and travel in; sent: by the busiest rank, gradients in {_PERIODS[stage]}, "
        "parameters in a step. Memory is of one device, and counts no activations, drivers and "
        "libraries."
    )
    if memory_bytes is not None:
        yield (
            f"needed: held and works in; fits: on a device with {size_text(memory_bytes)}, and "
            "what is left for activations, drivers and libraries"
        )
        if max(forecast.needed for forecast in forecasts) > memory_bytes:
            yield (
                "too much: more ranks, zero_optimization.stage 2 or 3, a smaller "
                "reduce_bucket_size, offload_optimizer, fewer bits (layerwise.master_dtype, "
                "momentum_dtype) or tensor parallelism need less of a device; ds-layerwise plan "
                "--fit tries them"
            )
    for forecast in forecasts:
        ranks = forecast.layout.world_size
        idle = forecast.report.whole_numel.count(0)
        if idle not in (0, ranks):
            yield (
                f"{idle} of {ranks} ranks own no matrix: there are fewer matrices than ranks, or "
                "one is larger than a rank's share. Splitting fused projections into their parts "
                "(layerwise.overrides, split or num_heads) makes more of them."
            )


def as_json(
    forecast: Forecast, *, memory_bytes: int | None = None, gb_s: float | None = None
) -> dict[str, Any]:
    """Return a plan's numbers for programs: bytes, elements, FLOPs, and seconds at a bandwidth.

    Args:
        memory_bytes, gb_s: as in :func:`plan_table`.
    """
    report = forecast.report
    layout = forecast.layout
    most = forecast.sent_by_busiest()
    dtypes = {}
    for dtype, (gradients, parameters) in forecast.sent.items():
        dtypes[dtype] = {
            "gradients_accumulate_in": forecast.stored_as[dtype],
            "gradients_travel_in": forecast.wire_as(dtype),
            "sent_bytes": {
                "gradients": sum(gradients) / layout.world_size,
                "parameters": sum(parameters) / layout.world_size,
            },
            "sent_by_busiest_bytes": dict(zip(Sent._fields, most[dtype], strict=True)),
        }
    busiest = sum(map(sum, most.values()))
    numbers = {
        "ranks": layout.world_size,
        "layout": layout.policy,
        "digest": layout.digest(),
        "stage": forecast.stage,
        "buckets": report.num_buckets,
        "transports": forecast.transports,
        "reduction": forecast.reduction,
        "elements": report.numel,
        "padding_elements": report.padding,
        "newton_schulz_flops": list(report.work),
        "newton_schulz_max_over_mean": report.work_max_over_mean,
        "owned_matrix_elements": list(report.whole_numel),
        "fullest_rank": forecast.fullest,
        "memory_bytes": [{**asdict(rank), "total": rank.total} for rank in forecast.memory],
        "working_bytes": {**forecast.working._asdict(), "total": forecast.working.total},
        "dtypes": dtypes,
        "gradients_sent_every": "step" if forecast.stage == 1 else "backward pass",
        "sent_by_busiest_bytes": busiest,
    }
    if memory_bytes is not None:
        left = memory_bytes - forecast.needed
        numbers["device_memory_bytes"] = memory_bytes
        numbers["needed_bytes"] = forecast.needed
        numbers["left_bytes"] = left
        numbers["fits"] = left >= 0
    if gb_s is not None:
        numbers["gb_s"] = gb_s
        numbers["sent_seconds"] = busiest / gb_s / 1e9
    return numbers
