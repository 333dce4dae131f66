"""The parameters of a plan: a table by recipe, and a list of every parameter's route."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from ds_layerwise.config.sections import PRESETS, OptimizerConfig
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.plan.forecast.text_tables import count_text, rendered, table_of
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.routing.routes import ParamGroups, Route, Routes


def recipe_parts(
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
    owner = {}
    for bucket in layout.buckets:
        for slot in bucket.slots if bucket.whole else ():
            owner[slot.name] = bucket.owner(slot)
    rows = []
    for spec in specs:
        route = routes[spec.name]
        group = groups[route.group]
        parts = {}
        if route.parts is not None:
            parts = route.seen(spec.numel)
        rows.append(
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "optimizer": route.recipe.rule,
                "reason": route.reason,
                "matrices": None if route.matrix_shape is None else list(route.matrix_shape),
                "parts": {name: list(seen) for name, seen in parts.items()},
                "weight_decay": route.hyper(group)["weight_decay"],
                "weight_decay_summary": route.recipe.decay_summary(),
                "lr_ratio": route.lr_ratio(group),
                "min_lr": route.min_lr,
                "owner": owner.get(spec.name),
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
    return rendered(layout.format(*line).rstrip() for line in lines)
