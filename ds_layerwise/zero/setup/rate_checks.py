"""Checks of rates and other hyper-parameters: each counts, and none is one that nobody chose.
Storage in fewer bits must not silently cost accuracy, or make results depend on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.any_torch import AnyTorch
from ds_layerwise.optimizers.dtypes import BLOCK, MOST_KEPT, SCALED
from ds_layerwise.optimizers.fields import NonNegative, check
from ds_layerwise.optimizers.mxfp8 import BLOCK as BLOCK_OF_MXFP8
from ds_layerwise.optimizers.mxfp8 import GROUP
from ds_layerwise.plan.layout.layout import ParamSpec
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


def check_taken(config: OptimizerConfig, routes: Routes, groups: Sequence[Collection[str]]) -> None:
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
        its = used.get(index, ())
        ratios = {float(group[ratio]) for ratio in its}
        is_one_rate = len(its) < 2 or config.matrix.takes_rate_of_adamw
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


def check_kept(
    routes: Routes,
    specs: Sequence[ParamSpec],
    groups: ParamGroups,
    config: LayerWiseConfig,
    *,
    host_ratio: float,
) -> None:
    """Refuse masters and states in fewer bits if that is not possible, or if averages would stop
    moving.

    Args:
        groups: the parameter groups, as they are at the start.
        host_ratio: the share of masters and states in host memory.

    Raises:
        ConfigError: names the key, its value and the way out.
    """
    _check_masters(specs, config, host_ratio)
    _check_param_wire(specs, config)
    kept = {}
    for name, route in routes.items():
        states = route.states(1).items()
        kept[name] = {key: state.kept_as for key, state in states if state.kept_as}
    by_chance = [name for name in kept if routes[name].recipe.rounds_by_chance]
    if by_chance and not any("bfloat16" in kept[name].values() for name in by_chance):
        raise ConfigError(
            f"stochastic_rounding is true for {by_chance[0]}, but no state is stored in "
            "'bfloat16'; set momentum_dtype, exp_avg_dtype or exp_avg_sq_dtype to it, or remove "
            "stochastic_rounding"
        )
    if config.rounding_seed and not by_chance:
        raise ConfigError(
            f"layerwise.rounding_seed is {config.rounding_seed}, and nothing is rounded by chance; "
            "set stochastic_rounding of optimizer.params to true, or remove it"
        )
    for name, dtypes in kept.items():
        if "8bit" not in dtypes.values():
            continue
        if host_ratio:
            raise ConfigError(
                f"{name} has states in '8bit', and zero_optimization.offload_optimizer keeps "
                "states on the host, where '8bit' is not supported; store them in 'bfloat16', or "
                "remove it"
            )
        if not routes[name].whole and config.alignment % SCALED:
            raise ConfigError(
                f"{name} has states in '8bit', and layerwise.alignment is {config.alignment}: "
                f"{SCALED} consecutive elements share a scale, which would change with the number "
                f"of ranks; set it to a multiple of {SCALED}"
            )
    check_accuracy(routes, groups)


def check_accuracy(routes: Routes, groups: ParamGroups, *, told: str = "") -> None:
    """Refuse averages that would stop moving because of their few bits.

    Args:
        told: the source of ``groups``, for the error.

    Raises:
        ConfigError: names the parameter, its state, and the way out.
    """
    for route in routes.values():
        recipe = route.recipe
        for key, spec in route.states(1).items():
            dtype = spec.kept_as
            if dtype is None:
                continue
            share = recipe.share_kept(key, route.hyper(groups[route.group]))
            if share <= MOST_KEPT or (dtype == "bfloat16" and recipe.rounds_by_chance):
                continue
            way_out = "store it in 'bfloat16' with stochastic_rounding"
            if dtype == "bfloat16":
                way_out = "set stochastic_rounding to true, with which small changes add up"
            raise ConfigError(
                f"{told}{route.name}: {key} of {recipe.rule} keeps {share:g} of itself in a step "
                f"and would be stored in {dtype!r}, whose steps are so coarse that above "
                f"{MOST_KEPT:g} most of what is added to it is rounded away; {way_out}, or in "
                "'float32'"
            )


def _check_masters(specs: Sequence[ParamSpec], config: LayerWiseConfig, host_ratio: float) -> None:
    if config.master_dtype == "float32":
        return
    where = f"layerwise.master_dtype is {config.master_dtype!r}"
    dtypes = {spec.dtype for spec in specs}
    if "bfloat16" not in dtypes or "float16" in dtypes:
        why = "float32: a float32 weight is its own master, so that there is nothing to save"
        if "float16" in dtypes:
            why = (
                "float16: a float16 weight is not a part of its float32 master, it has fewer bits "
                "of exponent"
            )
        raise ConfigError(
            f"{where}, and parameters are {why}; train in bf16 (bf16.enabled), or remove it"
        )
    if config.alignment % BLOCK:
        raise ConfigError(
            f"{where}, and layerwise.alignment is {config.alignment}: {BLOCK} consecutive masters "
            f"belong together; set it to a multiple of {BLOCK}"
        )
    if host_ratio:
        raise ConfigError(
            f"{where}, and zero_optimization.offload_optimizer keeps masters on the host, where "
            "they take no memory of the device; remove one of the two"
        )


def check_captured(
    routes: Routes, config: LayerWiseConfig, *, tp_size: int, host_ratio: float
) -> None:
    """Refuse ``layerwise.cuda_graph`` for updates that no graph can replay.

    Raises:
        ConfigError: names the setting, or the parameter and its optimizer.
    """
    why = {
        "layerwise.qk_clip": config.qk_clip is not None and "its factors come from logits",
        "zero_optimization.offload_optimizer": host_ratio > 0 and "states come from the host",
        "layerwise.monitor": config.monitor.asks
        and config.monitor.every == 1
        and "every update is watched",
        "tensor parallelism": tp_size > 1 and "updates exchange parts of matrices",
    }
    for key, reason in why.items():
        if reason:
            raise ConfigError(
                f"layerwise.cuda_graph is true, and with {key} {reason}, which a graph cannot "
                "replay; set cuda_graph to false, or leave the other out"
            )
    for name, route in routes.items():
        recipe = route.recipe
        if recipe.can_be_captured and not recipe.rounds_by_chance:
            continue
        has = "stochastic_rounding" if recipe.can_be_captured else f"optimizer {recipe.rule}"
        raise ConfigError(
            f"layerwise.cuda_graph is true, and {name} has {has}, which asks the host in an "
            "update; set cuda_graph to false, or choose muon, normuon, adamuon, namo, scion, "
            "polargrad, rmnp, adamw, adam, lion or sgd, without stochastic_rounding"
        )


def _check_param_wire(specs: Sequence[ParamSpec], config: LayerWiseConfig) -> None:
    if config.param_wire is None:
        return
    where = f"layerwise.param_wire is {config.param_wire!r}"
    dtypes = {spec.dtype for spec in specs}
    if "bfloat16" not in dtypes or "float16" in dtypes:
        raise ConfigError(
            f"{where}, and parameters are {' and '.join(sorted(dtypes))}: it is for bfloat16 "
            "matrices; train in bf16 (bf16.enabled), or remove it"
        )
    if config.master_dtype != "float32":
        raise ConfigError(
            f"{where}, and layerwise.master_dtype is {config.master_dtype!r}: such masters are "
            "what bfloat16 weights lack of them, and these weights have fewer bits; remove one of "
            "the two"
        )
    if config.alignment % GROUP:
        raise ConfigError(
            f"{where}, and layerwise.alignment is {config.alignment}: {GROUP} consecutive elements "
            f"are sent together with their scales; set it to a multiple of {GROUP}"
        )
    for spec in specs:
        if not spec.whole or spec.dtype != "bfloat16":
            continue
        if len(spec.shape) < 2:
            raise ConfigError(
                f"{where}, and {spec.name}, which is no matrix, has one owner: vectors lose too "
                'much in so few bits; give its optimizer "split": "element" (scalar_params, or '
                "layerwise.client_optimizer) if it is element-wise, or remove it"
            )
        *stack, rows, cols = spec.shape
        if stack and spec.ep_size > 1 and rows * cols % BLOCK_OF_MXFP8:
            raise ConfigError(
                f"{where}, and the matrices of {spec.name} are {rows} x {cols}: blocks of "
                f"{BLOCK_OF_MXFP8} elements would hold parts of two experts, so that a resume on "
                "other ranks would round them otherwise; remove it"
            )
