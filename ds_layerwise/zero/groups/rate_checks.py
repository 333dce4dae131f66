"""Checks of rates and other hyper-parameters: each counts, and none is one that nobody chose."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.any_torch import AnyTorch
from ds_layerwise.optimizers.fields import NonNegative, check
from ds_layerwise.routing.routes import ParamGroups, Routes

#: The key with the rate that a scheduler reaches, or starts from, instead of the groups' ``lr``,
#: and its default; None if the default is the groups' ``lr``.
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
            is_matrixs = not recipe.for_matrices and key in config.matrix.hyper
            if isinstance(recipe, AnyTorch) and recipe.wants(key) and not is_matrixs:
                raise ConfigError(
                    f"{recipe.rule} does not read {where}.{key}, but has an argument {key}; set it "
                    f"in optimizer.params.{recipe.params_key}, and "
                    "here only for another optimizer of the run"
                )
        if not config.recipes.are_one and not any(key in recipe.hyper for recipe in recipes):
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
    key, omitted = PEAKS[scheduler["type"]]
    params = scheduler.get("params") or {}
    given = params.get(key, omitted)
    where = f"scheduler.params.{key}"
    if given == "auto":
        raise ConfigError(
            f"{where} is 'auto', which only Hugging Face's Trainer and Accelerate replace; give it "
            "a value"
        )
    if not isinstance(given, (list, tuple)):
        given = [given] * len(groups)
    omission = "" if key in params else f" (the default of {scheduler['type']})"
    # If a list has another length, DeepSpeed itself reports the right one.
    for index, (value, group) in enumerate(zip(given, groups)):
        ratios = {float(group[ratio]) for ratio in used.get(index, ())}
        is_one_rate = len(used.get(index, ())) < 2 or config.matrix.takes_rate_of_adamw
        if value is None or ratios <= {1.0} and is_one_rate:
            continue
        peak = check(NonNegative, where, value)
        lr = float(group["lr"])
        if math.isclose(peak, lr, rel_tol=1e-6):
            continue
        name = "optimizer.params.lr"
        wanted = f"{lr:g}"
        if not math.isclose(lr, config.lr, rel_tol=1e-6):
            name = f"param_groups[{index}].lr"
            wanted = str([float(each["lr"]) for each in groups])
        matrix = float(group["matrix_lr_ratio"])
        scalar = float(group["scalar_lr_ratio"])
        raise ConfigError(
            f"{where} is {peak:g}{omission}, and {name} is {lr:g}: both rates follow lr in a fixed "
            f"ratio, so that muon_lr would become {peak * matrix:.4g} instead of "
            f"{lr * matrix:.4g}, and adam_lr {peak * scalar:.4g} instead of {lr * scalar:.4g}; "
            f"set {key} to {wanted}, or lr to {peak:g}"
        )
