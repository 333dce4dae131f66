"""Checks that a scheduler does not set learning rates that nobody chose."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.fields import NonNegative, check
from ds_layerwise.optimizers.foreign.any_torch_recipe import AnyTorch
from ds_layerwise.plan.routes.routes import ParamGroups, Routes

#: The key with the rate that a scheduler reaches, or starts from, instead of the groups' ``lr``,
#: and its default; None if the default is the groups' ``lr``. Schedulers that are not listed
#: multiply ``lr``.
PEAKS: dict[str, tuple[str, float | None]] = {
    "WarmupLR": ("warmup_max_lr", None),
    "WarmupDecayLR": ("warmup_max_lr", 0.001),
    "OneCycle": ("cycle_max_lr", None),
    "LRRangeTest": ("lr_range_test_min_lr", 0.001),
    "OneCycleLR": ("max_lr", None),
    "CyclicLR": ("max_lr", None),
}


def check_taken(
    config: OptimizerConfig, routes: Routes, groups: Sequence[Collection[str]] = ()
) -> None:
    """Refuse hyper-parameters that no optimizer of the run uses, or that a class would need as
    arguments.

    A single optimizer for everything may ignore some, because it stands in for another one.

    Args:
        groups: the keys that each parameter group sets itself.

    Raises:
        ConfigError: names the key, the optimizers, and the way out.
    """
    recipes = {*config.recipes, *(route.recipe for route in routes.values())}
    given = {
        "optimizer.params": config.given,
        **{f"param_groups[{i}]": keys for i, keys in enumerate(groups)},
    }
    for where, key in product(given, ("momentum", "betas", "eps")):
        if key not in given[where]:
            continue
        for recipe in config.recipes:
            # A key that the matrix optimizer uses may be meant only for it.
            is_matrixs = not recipe.whole and key in config.matrix.hyper
            if isinstance(recipe, AnyTorch) and recipe.wants(key) and not is_matrixs:
                raise ConfigError(
                    f"{recipe.rule} does not read {where}.{key}, but has an argument {key}; set it "
                    f"in optimizer.params.{'matrix' if recipe.whole else 'scalar'}_params, and "
                    "here only for another optimizer of the run"
                )
        if config.matrix.whole and not any(key in recipe.hyper for recipe in recipes):
            raise ConfigError(
                "no optimizer of this run "
                f"({', '.join(sorted({recipe.rule for recipe in recipes}))}) uses {where}.{key}; "
                "remove it"
            )


def check_floors(routes: Routes, groups: ParamGroups) -> None:
    """Refuse a ``min_lr`` above the rate that it belongs to: no scheduler could change that rate.

    Args:
        groups: the parameter groups, each with ``configured_lr`` and the two ratios.

    Raises:
        ConfigError: names the parameter and both rates.
    """
    for name, route in routes.items():
        lr = route.configured_lr(groups[route.group])
        if route.min_lr is not None and route.min_lr > lr:
            raise ConfigError(
                f"{name}: min_lr is {route.min_lr:g}, above its learning rate, which is {lr:g}; "
                "lower min_lr, or give lr beside it"
            )


def check_peaks(
    scheduler: object,
    groups: ParamGroups,
    config: OptimizerConfig,
    *,
    used: Mapping[int, Collection[str]],
) -> None:
    """Refuse a ``scheduler`` section whose peak is not ``lr``: it would multiply Muon's rate by
    their quotient.

    If a group has only one rate, because it has parameters of one optimizer only or because
    ``scale_mode`` is "match_rms_adamw", the peak is simply that rate.

    Args:
        groups: the parameter groups, each with ``lr`` and the two ratios.
        used: by index of a group, the ratios that its parameters use.

    Raises:
        ConfigError: names the key, the resulting values of both rates, and the way out.
    """
    if not isinstance(scheduler, Mapping) or scheduler.get("type") not in PEAKS:
        return
    kind = str(scheduler["type"])
    params = scheduler.get("params") or {}
    key, omitted = PEAKS[kind]
    given = params.get(key, omitted)
    where = f"scheduler.params.{key}"
    if given is None:
        return
    if given == "auto":
        raise ConfigError(
            f"{where} is 'auto', which only Hugging Face's Trainer and Accelerate replace; give it "
            "a value"
        )
    peaks = given if isinstance(given, (list, tuple)) else [given] * len(groups)
    omission = "" if key in params else f" (the default of {kind})"
    lrs = [group["lr"] for group in groups]
    _refuse_others(peaks, lrs, groups, config, used=used, key=key, where=where, omission=omission)


def check_schedule(
    schedule: object,
    lrs: Sequence[float],
    groups: ParamGroups,
    config: OptimizerConfig,
    *,
    used: Mapping[int, Collection[str]],
) -> None:
    """Refuse a script's scheduler whose peak is not ``lr``, as :func:`check_peaks` does for a
    config.

    The peak is the attribute in which a scheduler of DeepSpeed, torch or another library keeps it.
    Without such an attribute it is ``base_lrs``, which torch's classes multiply. For composed
    schedulers, each part is checked.

    Args:
        lrs: the rate of each group before any scheduler.
        groups: the parameter groups as the scheduler has left them.

    Raises:
        ConfigError: names the class and its argument, the resulting values of both rates, and the
            way out.
    """
    parts = _parts(schedule)
    found = [(part, *peak) for part in parts if (peak := _peak_of(part, groups))]
    if not found:
        found = [
            (part, "base_lrs", base)
            for part in parts
            if (base := _numbers(getattr(part, "base_lrs", None), groups))
        ]
    for part, key, peaks in found:
        where = f"{type(part).__name__}'s {key}"
        _refuse_others(peaks, lrs, groups, config, used=used, key=key, where=where)


def _parts(schedule: Any) -> list[Any]:
    """Return ``schedule``, or the parts of torch's SequentialLR and ChainedScheduler."""
    made_of = getattr(schedule, "_schedulers", None)
    if not isinstance(made_of, (list, tuple)):
        return [schedule]
    parts = []
    for part in made_of:
        parts += _parts(part)
    return parts


def _peak_of(schedule: Any, groups: ParamGroups) -> tuple[str, list[float]] | None:
    """Return the argument with the peak, and its value for each group; None if there is none."""
    kind = next((kind.__name__ for kind in type(schedule).__mro__ if kind.__name__ in PEAKS), None)
    key = "max_lr" if kind is None else PEAKS[kind][0]
    kept = getattr(schedule, "min_lr" if kind == "LRRangeTest" else "max_lrs", None)
    if kept is None:
        # OneCycleLR keeps it in the groups; classes outside of torch keep the argument as they got
        # it.
        if kind == "OneCycleLR":
            kept = [group.get(key) for group in groups]
        else:
            kept = getattr(schedule, key, None)
    peaks = _numbers(kept, groups)
    return None if peaks is None else (key, peaks)


def _numbers(kept: Any, groups: Sequence[object]) -> list[float] | None:
    """Return the rates that a scheduler keeps, one per group; None if they are not rates."""
    if not isinstance(kept, (list, tuple)):
        kept = [kept] * len(groups)
    try:
        return list(map(float, kept))
    except (TypeError, ValueError):
        return None


def _refuse_others(
    peaks: Sequence[Any],
    lrs: Sequence[float],
    groups: ParamGroups,
    config: OptimizerConfig,
    *,
    used: Mapping[int, Collection[str]],
    key: str,
    where: str,
    omission: str = "",
) -> None:
    # If a list has another length, DeepSpeed itself reports the right one.
    for index, (each, lr, group) in enumerate(zip(peaks, lrs, groups)):
        peak = check(NonNegative, where, each)
        lr = float(lr)
        matrix = float(group["matrix_lr_ratio"])
        scalar = float(group["scalar_lr_ratio"])
        kinds = used.get(index, ())
        one_rate = all(group[kind] == 1 for kind in kinds) and (
            len(kinds) < 2 or config.matrix.takes_rate_of_adamw
        )
        if one_rate or math.isclose(peak, lr, rel_tol=1e-6):
            continue
        own = not math.isclose(lr, config.lr, rel_tol=1e-6)
        name = f"param_groups[{index}].lr" if own else "optimizer.params.lr"
        shown = [f"{float(each):g}" for each in lrs]
        value = f"[{', '.join(shown)}]" if own and len({*map(float, lrs)}) > 1 else shown[0]
        instead = f"set {key} to {value}, or lr"
        if key == "base_lrs":
            instead = "do not change lr of the groups, or set lr"
        raise ConfigError(
            f"{where} is {peak:g}{omission}, and {name} is {lr:g}: both rates follow lr in a fixed "
            f"ratio, so that muon_lr would become {peak * matrix:.4g} instead of "
            f"{lr * matrix:.4g}, and adam_lr {peak * scalar:.4g} instead of {lr * scalar:.4g}; "
            f"{instead} to {peak:g}"
        )
