"""The table at start, and its numbers for programs: the parameters by recipe, the costs of each
rank, and a list of every parameter's route.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.table import Table

from ds_layerwise.config.sections import PRESETS, OptimizerConfig
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.plan.forecast.forecast import Forecast, max_over_mean
from ds_layerwise.plan.forecast.sent import Sent
from ds_layerwise.plan.forecast.text_tables import (
    GLUE,
    count_text,
    rendered,
    size_text,
    table_of,
    time_text,
    work_text,
)
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.layout.transport import MAX_PENDING
from ds_layerwise.routing.routes import NOT_SPLIT, ParamGroups, Route, Routes

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
    clip_grad: float = 1.0,
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
        clip_grad: the bound of the gradients' norm, 0 for none.
    """
    parts = _recipe_parts(routes, specs, optimizer, groups or [optimizer.group()], products or {})
    parts.append(f"gradient_clipping: {clip_grad:g}")
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
    parts += filter(None, map(idle_told, forecasts))
    parts += to_look_at(routes, specs)
    return rendered(parts)


def summary(routes: Routes, specs: Sequence[ParamSpec], chosen: OptimizerConfig) -> str:
    """Return the elements and tensors of each recipe, of the model that a rank has, in one line."""
    trained = []
    for recipe in _recipes(routes[spec.name] for spec in specs):
        numels = [spec.numel for spec in specs if routes[spec.name].recipe == recipe]
        trained.append(
            f"{_called(recipe, chosen)} trains {count_text(sum(numels))} in {len(numels)} tensors"
        )
    total = sum(spec.numel for spec in specs)
    return f"{count_text(total)} elements in each rank's model: {', '.join(trained)}"


def to_look_at(routes: Routes, specs: Iterable[ParamSpec]) -> Iterator[str]:
    """Yield lines about what may be wrong, each with the entries of ``layerwise.overrides`` that
    say otherwise: the parameters that go by their name and shape alone, and the fused projections
    of unknown parts.
    """
    entries: dict[str, dict[str, Any]] = {}
    for spec in specs:
        route = routes[spec.name]
        # Layers have the same few names with different numbers.
        name = re.sub(r"\b\d+\b", "*", spec.name)
        entry: dict[str, Any] = {"name": name}
        # Stacks are experts, all but always.
        if route.bare and len(route.matrices or ()) < 3:
            about = f"of no known layer: {route.recipe.rule} trains"
            other = "scalar" if route.recipe.for_matrices else "matrix"
            entry["optimizer"] = other
        elif route.reason.endswith(NOT_SPLIT) and route.matrices is not None:
            about = "that look fused (sizes are a guess): one matrix each of"
            length = route.matrices[-1 if route.transposed else -2]
            parts = "qkv" if re.search("qkv|att", name, re.I) else "ab"
            entry["split"] = dict.fromkeys(parts, length // len(parts))
        else:
            continue
        entries.setdefault(about, {})[name] = entry
    for about, by_name in entries.items():
        others = f" and {len(by_name) - 1} more" if len(by_name) > 1 else ""
        overrides = ", ".join(map(json.dumps, by_name.values()))
        yield (
            f"look at parameters {about} {next(iter(by_name))}{others}; to change it, in "
            f"layerwise.overrides: {overrides}"
        )


def idle_told(forecast: Forecast) -> str:
    """Return a line about the ranks that own no matrix where others do; else an empty one."""
    ranks = forecast.layout.world_size
    idle = forecast.report.whole_numel.count(0)
    if idle in (0, ranks):
        return ""
    return (
        f"{idle} of {ranks} ranks own no matrix: there are fewer matrices than ranks, or one is "
        "larger than a rank's share. Splitting fused projections into their parts "
        "(layerwise.overrides, split or num_heads) makes more of them."
    )


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
        "padding": f"{count_text(report.padding)}, "
        f"{100 * report.padding / max(report.numel, 1):.3f}{GLUE}%",
    }
    for dtype in layout.buffers:
        rows[f"of {dtype}"] = f"{forecast.stored_as[dtype]}, {forecast.wire_as(dtype)}"
    rows["sent, gradients"] = size_text(gradients)
    rows["sent, parameters"] = size_text(parameters)
    if any(bucket.in_mxfp8 for bucket in layout.buckets):
        rows["sent, parameters"] += ", mxfp8"
    for axis, nbytes in forecast.sent_by_axis.items():
        # The two rows before say it of a plan that has no other axis.
        is_all = axis == "data" and nbytes == sum(forecast.sent_by_axis.values())
        if nbytes and not is_all:
            rows[f"sent over {axis}"] = size_text(nbytes)
    if gb_s is not None:
        rows[f"sent at {gb_s:g} GB/s"] = time_text(forecast.sent_in_step / gb_s)
    if memory_bytes is not None:
        rows["needed"] = size_text(forecast.needed)
        left = memory_bytes - forecast.needed
        told = size_text(abs(left))
        rows["fits"] = f"yes,{GLUE}{told} left" if left >= 0 else f"no,{GLUE}{told} too much"
    return rows


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
        f"in the memory of the host; works in: {works_in}, the sums of gradients, and the "
        f"transfers of {MAX_PENDING} buckets; padding: elements for alignment alone; of a dtype: "
        "gradients of such parameters "
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


def stages_told(stages: Iterable[Sequence[Forecast]]) -> Iterator[str]:
    """Yield a line for each stage of a pipeline.

    Args:
        stages: the forecasts of each stage, by numbers of ranks.
    """
    for index, forecasts in enumerate(stages):
        for plan in forecasts:
            yield (
                f"stage {index} on {plan.layout.world_size} ranks: "
                f"{count_text(plan.report.numel)} elements, needs {size_text(plan.needed)}, sends "
                f"{size_text(sum(plan.sent_by_axis.values()))}"
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
        "newton_schulz_max_over_mean": max_over_mean(report.work),
        "owned_matrix_elements": list(report.whole_numel),
        "fullest_rank": forecast.fullest,
        "memory_bytes": [{**asdict(rank), "total": rank.total} for rank in forecast.memory],
        "working_bytes": {**forecast.working._asdict(), "total": forecast.working.total},
        "dtypes": dtypes,
        "gradients_sent_every": "step" if forecast.stage == 1 else "backward pass",
        "sent_by_busiest_bytes": busiest,
        "sent_by_axis_bytes": dict(forecast.sent_by_axis),
    }
    if any(report.to_peers):
        numbers["sent_to_tensor_peers_bytes"] = list(report.to_peers)
    if memory_bytes is not None:
        left = memory_bytes - forecast.needed
        numbers["device_memory_bytes"] = memory_bytes
        numbers["needed_bytes"] = forecast.needed
        numbers["left_bytes"] = left
        numbers["fits"] = left >= 0
    if gb_s is not None:
        numbers["gb_s"] = gb_s
        numbers["sent_seconds"] = forecast.sent_in_step / gb_s / 1e9
    return numbers


# --- parameters


def _recipe_parts(
    routes: Routes,
    specs: Sequence[ParamSpec],
    chosen: OptimizerConfig,
    groups: ParamGroups,
    products: Mapping[Recipe, str],
) -> list[Table | str]:
    """Return the table of parameters by recipe, and the lines below it with the settings of each
    recipe.

    Args:
        chosen: the settings of the run's optimizer.
        groups: the parameter groups, with the values of the next step and ``configured_lr``.
        products: the dtypes in which recipes multiply matrices.
    """
    trained = [routes[spec.name] for spec in specs]
    lines = []
    for recipe in _recipes(trained):
        mine = [route for route in trained if route.recipe == recipe]
        text = recipe.summary(partial(_hyper, mine, groups))
        line = f"{_called(recipe, chosen)}: {text}"
        if recipe in products:
            line += f", matrix products in {products[recipe]}"
        lines.append(line)
    head: list[Table | str] = [
        _parameters(routes, specs, chosen, groups),
        "optimizer: whole, one rank owns each parameter, or split, all ranks share each evenly; "
        "because: the rule that decided; tensors, elements: how many; lr, weight decay: now, "
        "from least to greatest, until a scheduler or a load sets others; for example: the first "
        "of them",
        "; ".join(lines),
    ]
    if chosen.preset:
        head.append(f"preset {chosen.preset}: {_preset(chosen)}")
    return head


def _hyper(routes: Sequence[Route], groups: ParamGroups, key: str) -> str:
    values = [route.hyper(groups[route.group])[key] for route in routes]
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
    rows: dict[tuple[int, str], list[ParamSpec]] = {}
    for spec in specs:
        route = routes[spec.name]
        key = (in_order.index(route.recipe), route.told)
        rows.setdefault(key, []).append(spec)
    table = table_of(
        "parameters",
        ("optimizer", "because", "tensors", "elements", "lr", "weight decay", "for example"),
        ("optimizer", "because", "for example"),
    )
    for (index, reason), members in sorted(rows.items()):
        mine = [routes[spec.name] for spec in members]
        hypers = [route.hyper(groups[route.group]) for route in mine]
        recipe = in_order[index]
        table.add_row(
            f"{_called(recipe, chosen)} ({'whole' if recipe.whole else 'split'})",
            reason,
            str(len(members)),
            count_text(sum(spec.numel for spec in members)),
            _span(hyper["lr"] for hyper in hypers),
            _span(hyper["weight_decay"] for hyper in hypers),
            members[0].name,
        )
    return table


def listed(
    routes: Routes,
    specs: Sequence[ParamSpec],
    layout: Layout,
    groups: ParamGroups,
) -> list[dict[str, Any]]:
    """Return the route, owner and settings of each of ``specs``, in their order.

    Args:
        groups: the parameter groups, with ``weight_decay``, ``configured_lr``, ``matrix_lr_ratio``
            and ``scalar_lr_ratio``.
    """
    rows = []
    for spec in specs:
        route = routes[spec.name]
        group = groups[route.group]
        bucket = layout.bucket_of(spec.name)
        seen = route.seen(spec.numel)
        matrices = seen.pop("", route.matrix_shape or ())
        rows.append(
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "optimizer": route.recipe.rule,
                "reason": route.told,
                "matrices": None if route.matrix_shape is None else list(matrices),
                "parts": {name: list(shape) for name, shape in seen.items()},
                "weight_decay": route.hyper(group)["weight_decay"],
                "weight_decay_summary": route.recipe.decay_summary(),
                "lr_ratio": route.lr_ratio(group),
                "min_lr": route.min_lr,
                "owner": bucket.owner(layout.slot(spec.name)) if bucket.whole else None,
            }
        )
    return rows


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return routes in columns under a header line.

    Parameters that are cut evenly belong to "all" ranks.
    """
    lines = [("name", "shape", "optimizer", "weight decay", "lr ratio", "owner", "because")]
    for row in rows:
        cells = (
            row["name"],
            "x".join(map(str, row["shape"])) or "()",
            row["optimizer"],
            f"{row['weight_decay']:g} {row['weight_decay_summary']}".strip(),
            f"{row['lr_ratio']:g}",
            "all" if row["owner"] is None else str(row["owner"]),
            row["reason"],
        )
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    layout = "  ".join(f"{{:{width}}}" for width in widths)
    return rendered((layout.format(*line).rstrip() for line in lines), sys.maxsize)
