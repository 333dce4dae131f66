"""Changes to a config with which a run fits on devices of a given size, cheapest first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ds_layerwise.config.config_file import at
from ds_layerwise.engine.config_hook import read_file
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.forecast.quantities import size_text, time_text
from ds_layerwise.plan.forecast.report import table_of
from ds_layerwise.plan.forecast.text_tables import rendered
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
#: The config's own bucket size stays if messages take at most this many times as long as with the
#: best one.
_AS_FAST = 1.05
#: The width of a terminal.
_NARROW = 80
_PARALLEL_SIZES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Change:
    """New values for a config, by path, and how many ranks share matrices or experts."""

    values: Mapping[str, Any]
    price: str = ""
    """A remark on what it costs; empty if that is only time of a step."""
    tp_size: int = 1
    ep_size: int = 1

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
        for key in ("tp_size", "ep_size"):
            if getattr(self, key) > 1:
                words.append(f"{key} {getattr(self, key)}")
        return ", ".join(words) or "as it is"


@dataclass(frozen=True)
class Fit:
    """A change with which every rank has enough memory."""

    change: Change
    left: int
    """The bytes of a device that are left on the rank that needs most."""
    nanoseconds: float
    """The predicted time of the collectives and updates of a step."""


def find_fits(
    model: str,
    config: Path,
    devices: Sequence[int],
    *,
    memory_bytes: int,
    ep_size: int = 1,
    tp_size: int | None = None,
    **options: Any,
) -> tuple[list[list[Fit]], Sequence[str]]:
    """Return, for each number of ``devices``, the changes with which ``model`` fits, and lines with
    the assumptions about the config.

    What changes more, or costs more than time, is only tried where nothing cheaper fits. Among
    changes of one kind the one with the shortest predicted step is the first.

    Args:
        memory_bytes: the memory of one device.
        ep_size, tp_size: as in :meth:`.DryRun.of`; if they are given, no others are tried.
        options: further arguments of :meth:`.DryRun.of`.

    Raises:
        ConfigError: the config is refused as it is, or a file cannot be read.
        RoutingError: a parameter cannot be trained by its chosen optimizer.
    """
    given = read_file(config)
    as_it_is = DryRun.of(model, given, [devices[0]], ep_size=ep_size, tp_size=tp_size, **options)
    is_fixed = tp_size is not None or max(as_it_is.tp_size, ep_size) > 1
    found = []
    for num_devices in devices:
        fits = []
        for kind in _changes(ep_size, as_it_is.tp_size, fixed=is_fixed):
            for change in kind:
                fit = _tried(model, given, num_devices, change, memory_bytes, options)
                if fit is not None:
                    fits.append(fit)
            if fits:
                break
        found.append(sorted(fits, key=lambda fit: fit.nanoseconds))
    return found, as_it_is.assumed


def _changes(ep_size: int, tp_size: int, *, fixed: bool) -> Iterator[list[Change]]:
    """Yield the changes to try, by kind, the cheapest kind first; none of the two sizes if they are
    ``fixed``.
    """

    def at_each_stage(**sizes: int) -> Iterator[list[Change]]:
        for (values, price), bound in product(_MEASURES, _BOUNDS):
            prices = "; ".join(filter(None, (price, bound)))
            values = {**_BOUNDS[bound], **values}
            yield [
                Change({"zero_optimization.stage": stage, **values}, prices, **sizes)
                for stage in _STAGES
            ]

    yield from at_each_stage(tp_size=tp_size, ep_size=ep_size)
    if fixed:
        return
    for size in _PARALLEL_SIZES:
        both = zip(at_each_stage(ep_size=size), at_each_stage(tp_size=size), strict=True)
        for experts, slices in both:
            yield [*experts, *slices]


def _tried(
    model: str,
    given: Mapping[str, Any],
    num_devices: int,
    change: Change,
    memory_bytes: int,
    options: Mapping[str, Any],
) -> Fit | None:
    """Return the fit of ``change`` with its best bucket size; None if there is none, or a run would
    refuse the config.
    """
    if num_devices % (change.tp_size * change.ep_size):
        return None
    tried = change.applied_to(given)
    # Batches change no plan, and would have to be others on other numbers of ranks.
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        tried.pop(key, None)
    try:
        plan = DryRun.of(
            model,
            tried,
            [num_devices // change.tp_size],
            ep_size=change.ep_size,
            tp_size=change.tp_size if change.tp_size > 1 else None,
            memory_bytes=memory_bytes,
            **options,
        )
    except LayerWiseError:
        return None
    prediction = plan.predictions[0]
    size = prediction.best
    own = prediction.own
    if size is None:
        return None
    values = dict(change.values)
    if own.fits and own.wire.total <= _AS_FAST * size.wire.total:
        size = own
    else:
        values["zero_optimization.reduce_bucket_size"] = size.bucket_numel
    for path, value in change.values.items():
        if at(given, path) == value:
            del values[path]
    time = size.wire.total + prediction.update
    return Fit(replace(change, values=values), size.left or 0, time)


def as_text(found: Sequence[Sequence[Fit]], devices: Sequence[int], memory_bytes: int) -> str:
    """Return a table of ``found``, one list for each number of ``devices``, and below it the first
    change of each as a part of a config.
    """
    title = f"what fits on devices with {size_text(memory_bytes)}, cheapest first"
    table = table_of(title, ("devices", "change", "left", "a step"), ("change",))
    prices: dict[str, None] = {}
    below = []
    for num_devices, fits in zip(devices, found, strict=True):
        for fit in fits:
            costs = size_text(fit.left), time_text(fit.nanoseconds)
            table.add_row(str(num_devices), str(fit.change), *costs)
            prices[fit.change.price] = None
        if not fits:
            below.append(f"devices: {num_devices}; nothing that was tried fits")
        elif fits[0].change.values:
            part = json.dumps(fits[0].change.applied_to({}))
            if fits[0].change.tp_size > 1:
                part += f", with tensor parallelism over {fits[0].change.tp_size} ranks"
            if fits[0].change.ep_size > 1:
                part += f", with experts shared by {fits[0].change.ep_size} ranks"
            below.append(f"devices: {num_devices}; the first, to merge into the config: {part}")
    about = (
        "change: of the config; left: for what the forward and the backward pass keep, activations "
        "above all, and what drivers and libraries take; a step: predicted, one micro-batch, "
        "without the passes; devices: --ranks."
    )
    lines = rendered([*filter(None, prices), *below])
    return f"{rendered([table, about], _NARROW)}\n{lines}".rstrip()
