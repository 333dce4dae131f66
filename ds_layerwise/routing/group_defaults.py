"""The kinds of parameters by their names, and the keys of a config that change nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.optimizers.any_torch import ClientTorch
from ds_layerwise.routing.routes import Route

#: The names that model families give a norm over queries or keys, and its content.
QK_NORM = re.compile(r"(.*\.)?((q|k|query|key)_?(layer_?norm|norm|ln)|(norm|ln)_(q|k))(\..+)?")

#: The names of parameters with one value per unit, whatever their shape: biases, tables of biases,
#: gains, and Mamba's decays.
_VECTOR = re.compile(
    r"(\w+_)?bias(es)?(_(?!proj)\w+)?|(\w+_)?table|A_(log|real|imag)s?|log_A_real|Ds?|"
    r"time_faaaa|r_k|"
    r"(\w+_)?(scale|gain|alpha|beta|gamma)s?(_?\d+)?"
)


def own_name(name: str) -> str:
    """Return the last part of ``name``; for a parameter in a list, that of the list."""
    *path, last = name.split(".")
    if path and last.isdecimal():
        return path[-1]
    return last


def is_vector(name: str) -> bool:
    """Tell whether the parameter ``name`` is a vector according to its own name, whatever its
    shape.
    """
    # Relative positions may be the weight of a layer that is named a bias.
    return bool(re.search(r"(\b|_)rel\w*bias\.weight$", name) or _VECTOR.fullmatch(own_name(name)))


def idle_keys(
    optimizer: OptimizerConfig,
    layerwise: LayerWiseConfig,
    routes: Collection[Route],
    groups: Sequence[Collection[str]] = (),
) -> list[str]:
    """Return the keys of both sections, and of parameter groups, that change nothing.

    Args:
        routes: those of the whole model.
        groups: the keys that the script has set in each parameter group.
    """
    acting = _acting_keys(optimizer, routes)
    idle = [f"optimizer.params.{key}" for key in optimizer.given if key not in acting]
    idle += [f"layerwise.{key}" for key in _idle_in_layerwise(optimizer, layerwise, routes)]
    for i, keys in enumerate(groups):
        if "max_lr" not in keys:
            idle += [f"param_groups[{i}].{key}" for key in OF_OTHER_SCHEDULES if key in keys]
    return idle


def _idle_in_layerwise(
    optimizer: OptimizerConfig, layerwise: LayerWiseConfig, routes: Collection[Route]
) -> list[str]:
    idle = []
    if layerwise.monitor.every > 1 and not layerwise.monitor.asks:
        idle.append("monitor.every")
    has_client = any(isinstance(route.recipe, ClientTorch) for route in routes)
    if layerwise.client_optimizer.split != "whole" and not has_client:
        idle.append("client_optimizer")
    if layerwise.apply_wd_to_qk_layernorm:
        has_qk_norm = any(
            QK_NORM.fullmatch(route.name) for route in routes if not route.recipe.for_matrices
        )
        if optimizer.decay_vectors or not has_qk_norm:
            idle.append("apply_wd_to_qk_layernorm")
    for key, sets in OF_TABLES.items():
        if getattr(layerwise, key) not in (None, *(getattr(route, sets) for route in routes)):
            idle.append(key)
    return idle


def _acting_keys(optimizer: OptimizerConfig, routes: Collection[Route]) -> set[str]:
    """Return the keys of the optimizer's section that have an effect on ``routes``."""
    acting = {"lr", "weight_decay", "decay_vectors", "preset", "matrix_optimizer"}
    for recipe in {route.recipe for route in routes}:
        acting.update(recipe.keys(), recipe.hyper)
        acting.add("muon_lr" if recipe.for_matrices else "adam_lr")
    if not optimizer.recipes.are_one:
        acting |= {"scalar_optimizer", "per_head_muon"}
    decay = optimizer.scalar_weight_decay
    if any(not route.recipe.for_matrices and route.weight_decay == decay for route in routes):
        acting.add("scalar_weight_decay")
    return acting


#: The keys of a group for a script's own scheduler, or for torch's in addition to "max_lr". Here
#: only overrides have them.
OF_OTHER_SCHEDULES = ("lr_scale", "min_lr")


#: The keys for embeddings and output heads, each with the value that it sets for them.
OF_TABLES = {"decoupled_lr": "lr", "decoupled_min_lr": "min_lr"}
