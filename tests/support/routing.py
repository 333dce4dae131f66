"""Routes of models by single settings, for tests that need no whole config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, Recipes
from ds_layerwise.routing import routing_rules
from ds_layerwise.routing.routes import ParamGroups, Route


def route_parameters(
    model: nn.Module, param_groups: ParamGroups, *, overrides: Sequence[Any] = (), recipes: Recipes | None = None,
    per_head: bool = False, auto_split: bool = True, optimizer: OptimizerConfig = OptimizerConfig(),
    layerwise: LayerWiseConfig = LayerWiseConfig(), **settings: Any,
) -> dict[str, Route]:
    """Return the routes of ``model``, of ``optimizer`` and ``layerwise`` with the single settings beside them."""
    of_optimizer: dict[str, Any] = {"per_head_muon": True} if per_head else {}
    of_layerwise: dict[str, Any] = {} if auto_split else {"auto_split": False}
    if recipes is not None:
        of_optimizer.update(recipes._asdict())
    if overrides:
        of_layerwise["overrides"] = tuple(overrides)
    return routing_rules.route_parameters(model, param_groups, routing_rules.RouteSettings(
        optimizer=optimizer.model_copy(update=of_optimizer), layerwise=layerwise.model_copy(update=of_layerwise),
        **settings))
