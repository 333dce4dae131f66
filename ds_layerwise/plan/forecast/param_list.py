"""Every parameter's route, one line each: what the start-up table counts, name by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.routes.routes import Route


def listed(
    routes: Mapping[str, Route],
    specs: Sequence[ParamSpec],
    layout: Layout,
    groups: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """For each of ``specs`` in their order, what becomes of it.

    Args:
        groups: the parameter groups, with ``weight_decay``, ``configured_lr``, ``matrix_lr_ratio``
            and ``scalar_lr_ratio``.
    """
    owner = {
        slot.name: bucket.owner(slot)
        for bucket in layout.buckets
        if bucket.whole
        for slot in bucket.slots
    }
    rows = []
    for spec in specs:
        route = routes[spec.name]
        group, decay = groups[route.group], route.recipe.own_weight_decay
        if decay is None:
            decay = group["weight_decay"] if route.weight_decay is None else route.weight_decay
        rows.append(
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "optimizer": route.recipe.rule,
                "reason": route.reason,
                "matrices": None if route.matrix_shape is None else list(route.matrix_shape),
                "parts": {}
                if route.parts is None
                else {name: list(seen) for name, seen in route.seen(spec.numel).items()},
                "weight_decay": decay,
                "weight_decay_summary": route.recipe.decay_summary(),
                "lr_ratio": route.lr_ratio(group),
                "min_lr": route.min_lr,
                "owner": owner.get(spec.name),
            }
        )
    return rows


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Routes in columns under a head line; parameters that are cut evenly belong to "all" ranks."""
    cells = [("name", "shape", "optimizer", "weight decay", "lr ratio", "owner", "because")]
    cells += [
        (
            row["name"],
            "x".join(map(str, row["shape"])) or "()",
            row["optimizer"],
            f"{row['weight_decay']:g} {row['weight_decay_summary']}".strip(),
            f"{row['lr_ratio']:g}",
            "all" if row["owner"] is None else str(row["owner"]),
            row["reason"],
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
