"""The list of every parameter's route, one line each. The start-up table counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_layerwise.plan.forecast.text_tables import rendered
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.routing.routes import ParamGroups, Routes


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
