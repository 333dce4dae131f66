"""The lookup of the rule that runs a recipe, by the names of both: there is no list to edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from ds_layerwise.optimizers.base.recipe import Recipe
from ds_layerwise.optimizers.low_bit import torchao_maps
from ds_layerwise.optimizers.recipe_registry import entry_of
from ds_layerwise.optimizers.rule import UpdateRule
from ds_layerwise.orthogonalize.tensor_shards import Peers

#: An example shape of a matrix, or of a stack of elements. The number of bits of a state does not
#: depend on it.
_ANY_SHAPE = (2, 2)


@lru_cache(maxsize=None)
def rule_of(recipe: Recipe) -> UpdateRule:
    """Return the rule that runs ``recipe``, the same object for equal recipes.

    Raises:
        ConfigError: a setting that can only be checked with torch is invalid.
    """
    module, _, name = entry_of(recipe.rule, for_matrices=recipe.for_matrices).rule.partition(":")
    rule: UpdateRule = getattr(import_module(module), name).of(recipe)
    return rule


def check_recipes(recipes: Iterable[Recipe], device: torch.device | None = None) -> None:
    """Refuse settings that no rule, or ``device``, can run.

    Raises:
        ConfigError: names the setting.
    """
    for recipe in recipes:
        rule = rule_of(recipe)
        if any(spec.kept_as == "8bit" for spec in recipe.states(_ANY_SHAPE).values()):
            torchao_maps()
        if device is not None:
            rule.check(device)


def rules_of(
    routes: Mapping[str, Any],
    peers: Peers | None,
    *,
    fast_dtypes: frozenset[torch.dtype] = frozenset(),
) -> dict[str, UpdateRule]:
    """Return the rule of each parameter by name. For parts of matrices it uses ``peers``, which
    have the other parts.

    Args:
        fast_dtypes: see :func:`.devices.fast_dtypes`.
    """
    rules = {}
    on_device = {}
    for name, route in routes.items():
        if route.recipe not in on_device:
            on_device[route.recipe] = rule_of(route.recipe).on_device(fast_dtypes)
        rule = on_device[route.recipe]
        if peers is not None and route.tp_axis is not None:
            rule = rule.of_shards(route.tp_axis, peers)
        rules[name] = rule
    return rules
