"""Checks of storage in fewer bits: it must not silently cost accuracy, or make results depend on
the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.dtypes import BLOCK, MOST_KEPT, SCALED
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.routing.routes import ParamGroups, Routes


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
    kept = {}
    for spec in specs:
        own = routes[spec.name].states(1)
        kept[spec.name] = {key: state.kept_as for key, state in own.items() if state.kept_as}
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
    for name, states in kept.items():
        if "8bit" not in states.values():
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
    check_accuracy(routes, specs, groups)


def check_accuracy(
    routes: Routes,
    specs: Sequence[ParamSpec],
    groups: ParamGroups,
    *,
    told: str = "",
) -> None:
    """Refuse averages that would stop moving because of their few bits.

    Args:
        told: the source of ``groups``, for the error.

    Raises:
        ConfigError: names the parameter, its state, and the way out.
    """
    for route in (routes[spec.name] for spec in specs):
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
