"""The first answer of a plan: whether a run fits on devices of a given size; and the changes to its
config with which it does, cheapest first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from torch import nn

from ds_layerwise.config.ds_config import at
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.forecast.report import summary, to_look_at
from ds_layerwise.plan.forecast.text_tables import rendered, size_text, table_of, time_text
from ds_layerwise.tools.dry_run import DryRun

_REMAINDERS = {"layerwise.master_dtype": "bfloat16+remainder"}
_SHORT_STATES = {
    "optimizer.params.momentum_dtype": "bfloat16",
    "optimizer.params.exp_avg_dtype": "bfloat16",
    "optimizer.params.exp_avg_sq_dtype": "bfloat16",
    "optimizer.params.stochastic_rounding": True,
}

#: What can be changed beside the stage, the cheapest first, each with its price.
_MEASURES: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({}, ""),
    (_REMAINDERS, "master_dtype: the same bits; each step puts masters together"),
    ({**_REMAINDERS, **_SHORT_STATES}, "momentum_dtype and the like: states are rounded"),
    (
        {"zero_optimization.offload_optimizer": {"device": "cpu"}},
        "offload_optimizer: moves masters and states in each step, which the time leaves out",
    ),
)
#: A bound of the gradients that wait at stages 2 and 3, by its price; without one first.
_BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "max_waiting_buckets: a backward pass may wait, and every rank has to use every parameter": {
        "zero_optimization.overlap_comm": True,
        "layerwise.max_waiting_buckets": 2,
    },
}
_STAGES = (1, 2, 3)
#: The bucket sizes, in elements, that are tried where the config's own is too large.
_SMALLER = (500_000_000, 250_000_000, 100_000_000)
#: The most lines of an answer, and how it says that it has not all.
_LINES = 12
_MORE = "{} things more have no room here; "


@dataclass(frozen=True)
class Change:
    """New values for a config, by path."""

    values: Mapping[str, Any]
    prices: tuple[str, ...] = ()
    """Remarks on what it costs; none if that is only time of a step."""

    def applied_to(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``given`` with the new values."""
        changed: dict[str, Any] = json.loads(json.dumps(given))
        for path, value in self.values.items():
            *sections, key = path.split(".")
            holder = changed
            for section in sections:
                holder = holder.setdefault(section, {})
            holder[key] = value
        return changed

    def __str__(self) -> str:
        """Return the new values by the last key of their paths."""
        words = []
        for path, value in self.values.items():
            shown = value["device"] if isinstance(value, dict) else value
            words.append(f"{path.rpartition('.')[2]} {shown}")
        return ", ".join(words) or "as it is"


@dataclass(frozen=True)
class Fit:
    """A change with which every rank has enough memory."""

    change: Change
    left: int
    """The bytes of a device that are left on the rank that needs most."""
    sent: int
    """The bytes that the busiest rank sends in a step."""


def find_fits(
    model: nn.Module,
    given: Mapping[str, Any],
    devices: Sequence[int],
    *,
    memory_bytes: int,
    activations: int = 0,
    mesh: Mapping[str, int | None] | None = None,
) -> list[list[Fit]]:
    """Return, for each number of ``devices``, the changes of the config ``given`` with which
    ``model`` fits.

    What changes more, or costs more than time, is only tried where nothing cheaper leaves enough
    for ``activations``. Those that do come first, and among them the one that sends least.

    Args:
        memory_bytes: the memory of one device.
        activations: bytes of it; see :meth:`.DryRun.activations`.
        model, mesh: as in :meth:`.DryRun.of`.
    """
    plan_of = partial(DryRun.of, model, mesh=mesh)
    found = []
    for num_devices in devices:
        fits: list[Fit] = []
        for kind in _changes():
            for change in kind:
                fit = _tried(plan_of, given, num_devices, change, memory_bytes)
                if fit is not None:
                    fits.append(fit)
            if any(fit.left >= activations for fit in fits):
                break
        found.append(sorted(fits, key=lambda fit: (fit.left < activations, fit.sent)))
    return found


def _changes() -> Iterator[list[Change]]:
    """Yield the changes to try, by kind, the cheapest kind first."""
    for (values, price), bound in product(_MEASURES, _BOUNDS):
        prices = tuple(filter(None, (price, bound)))
        values = {**_BOUNDS[bound], **values}
        yield [Change({"zero_optimization.stage": stage, **values}, prices) for stage in _STAGES]


def _tried(
    plan_of: Callable[..., DryRun],
    given: Mapping[str, Any],
    num_devices: int,
    change: Change,
    memory_bytes: int,
) -> Fit | None:
    """Return the fit of ``change`` with the config's bucket size, or the largest smaller one; None
    if there is none, or a run would refuse the config.
    """
    tried = change.applied_to(given)
    # Other numbers of ranks would need another one.
    tried.pop("train_batch_size", None)
    try:
        plan = plan_of(tried, [num_devices])
    except LayerWiseError:
        return None
    values = {path: value for path, value in change.values.items() if at(given, path) != value}
    costs = plan.forecasts[0]
    for bucket_numel in _SMALLER:
        if costs.needed > memory_bytes and bucket_numel < plan.run.bucket_numel:
            values["zero_optimization.reduce_bucket_size"] = bucket_numel
            costs = plan.costs_of(costs.layout.world_size, bucket_numel=bucket_numel)
    if costs.needed > memory_bytes:
        return None
    return Fit(replace(change, values=values), memory_bytes - costs.needed, costs.sent_in_step)


def as_text(
    found: Sequence[Sequence[Fit]],
    devices: Sequence[int],
    memory_bytes: int,
    activations: int = 0,
) -> str:
    """Return a table of ``found``, one list for each number of ``devices``, and below it the first
    change of each as a part of a config.
    """
    title = f"what fits on devices with {size_text(memory_bytes)}, cheapest first"
    table = table_of(title, ("devices", "change", "left", "sent"), ("change",))
    prices: dict[str, None] = {}
    below = []
    for num_devices, fits in zip(devices, found, strict=True):
        for fit in fits:
            left = fit.left - activations
            told = size_text(left) if left >= 0 else f"{size_text(-left)} too much"
            table.add_row(str(num_devices), str(fit.change), told, size_text(fit.sent))
            prices |= dict.fromkeys(fit.change.prices)
        line = f"devices: {num_devices}; {_recommended(fits, activations)}"
        if fits and fits[0].left >= activations and fits[0].change.values:
            part = json.dumps(fits[0].change.applied_to({}))
            line += f"; the first, to merge into the config: {part}"
        below.append(line)
    about = (
        f"change: of the config; left: beside {size_text(activations)} of activations (--tokens), "
        "for drivers and libraries; sent: by the busiest rank in a step; devices: --ranks."
    )
    return rendered([table, about, *prices, *below])


def answer(
    plan: DryRun,
    found: Sequence[Sequence[Fit]],
    devices: Sequence[int],
    *,
    memory_bytes: int | None,
    activations: int,
    gb_s: float | None,
) -> str:
    """Return what a plan says first, in at most 12 lines: what the run needs, whether that fits,
    and with which stage.

    Args:
        found: the fits of each number of ``devices``; none without ``memory_bytes``.
        memory_bytes, gb_s: as in :func:`.plan_table`.
        activations: as in :func:`find_fits`.
    """
    lines = [summary(plan.routes, plan.specs, plan.run.optimizer)]
    for index, costs in enumerate(plan.forecasts):
        needed = costs.needed + activations
        if memory_bytes is None:
            verdict = f"{size_text(needed)} needed"
        elif needed <= memory_bytes:
            left = size_text(memory_bytes - needed)
            verdict = f"fits, {left} of {size_text(memory_bytes)} left"
        else:
            verdict = f"does not fit, {size_text(needed - memory_bytes)} too much"
        line = (
            f"{devices[index]} ranks: {verdict} at stage {costs.stage}, "
            f"{size_text(costs.sent_in_step)} sent in a step of {costs.micro_batches} "
            f"micro-batch{'es' * (costs.micro_batches > 1)}"
        )
        if gb_s is not None:
            line += f" ({time_text(costs.sent_in_step / gb_s)})"
        if found:
            line += f"; {_recommended(found[index], activations)}"
        lines.append(line)
    lines += to_look_at(plan.routes, plan.specs)
    lines += plan.assumed
    if plan.run.without_effect:
        lines.append(f"without effect here: {', '.join(plan.run.without_effect)}")
    counted = "activations are not counted: --tokens N"
    if activations:
        counted = f"{size_text(activations)} of activations are counted"
    more = f"{counted}; more: --verbose, the tables; --list, every parameter; --fit GIB, changes"
    shown: list[str] = []
    for line in lines:
        if rendered([*shown, line, f"{_MORE.format(len(lines))}{more}"]).count("\n") < _LINES:
            shown.append(line)
    if left_out := len(lines) - len(shown):
        more = _MORE.format(left_out) + more
    return rendered([*shown, more])


def _recommended(fits: Sequence[Fit], activations: int) -> str:
    if not fits or fits[0].left < activations:
        return "nothing that was tried fits"
    return f"recommended: {fits[0].change}, because it sends least of what fits"
