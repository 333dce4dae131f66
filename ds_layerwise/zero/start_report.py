"""What an engine says of itself when it starts."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.utils import logger

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import few
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.plan.forecast.forecast import Forecast
from ds_layerwise.plan.forecast.param_list import listed
from ds_layerwise.plan.forecast.report import start_up_table
from ds_layerwise.plan.routes.group_defaults import idle_keys
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import FlatBuffer, dtype_name
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.recipes.rules.update_hook_settings import keeps_zeros
from ds_layerwise.zero.qk_clip.attention_logits import AttentionLogits
from ds_layerwise.zero.setup.matmul_dtype import Products
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.setup.run_settings import Settings


def warn_of_zeros(planned: Planned, settings: Settings, owned: Owned) -> None:
    """Warn of matrices of zeros that a hook keeps at their own norm. Every rank of the group must
    call it.

    No error: a checkpoint may be loaded next.
    """
    kept = {name for name, route in planned.routes.items() if keeps_zeros(route.recipe)}
    if not kept:
        return
    mine = [
        piece.name
        for pieces in owned.pieces
        for piece in pieces
        if piece.name in kept and not owned.value(piece.name).any()
    ]
    found = sorted(
        {name for names in comm.gather_objects(mine, group=settings.group) for name in names}
    )
    if found and comm.rank_of(settings.group) == 0:
        logger.warning(
            f"ds_layerwise: {few(found)}: all weights are 0, and relative_update, or hyperball "
            "'own', keeps them so for ever; start them otherwise, give hyperball a norm, or leave "
            "the hook out for them with layerwise.overrides"
        )


def forecast(
    planned: Planned, settings: Settings, grads: FlatBuffer | None, config: LayerWiseConfig
) -> Forecast:
    """What the layout costs each rank.

    Args:
        grads: the gradient buffer; None where averaged gradients alone are kept.
    """
    stored_as = {
        dtype: torch.float32 if grads is None else grads.dtype(dtype)
        for dtype in planned.layout.dtypes
    }
    return Forecast.of(
        planned.layout,
        planned.specs,
        planned.routes,
        stage=settings.stage,
        tp_size=settings.tp_size,
        stored_as={key: dtype_name(each) for key, each in stored_as.items()},
        reduction=planned.reduction,
        links=planned.links,
        host_ratio=settings.host_ratio,
        master_dtype=config.master_dtype,
        max_waiting=config.max_waiting_buckets,
    )


def routes(planned: Planned, optimizer: LayerWiseOptimizer) -> list[dict[str, Any]]:
    """Every parameter's route; see :func:`.plan.forecast.param_list.listed`."""
    return listed(planned.routes, planned.specs, planned.layout, optimizer.groups_now())


def table(
    planned: Planned,
    settings: Settings,
    costs: Forecast,
    optimizer: LayerWiseOptimizer,
    products: Products,
    attention: AttentionLogits,
    config: LayerWiseConfig,
) -> str:
    """Who trains what and why, and what it ``costs`` each rank."""
    told = {
        recipe: products.told(recipe)
        for recipe in {route.recipe for route in planned.routes.values()}
    }
    routes = [*planned.routes.values(), *planned.routes_elsewhere.values()]
    idle = [
        *settings.without_effect,
        *idle_keys(optimizer.config, config, routes, optimizer.own_keys),
    ]
    found = start_up_table(
        planned.routes,
        planned.specs,
        costs,
        optimizer.config,
        groups=optimizer.groups_now(),
        without_effect=idle,
        products={recipe: text for recipe, text in told.items() if text is not None},
    )
    names = planned.left_out
    left_out = f"in no parameter group, so not trained here: {few(names)}" if names else ""
    return "\n".join(filter(None, [found, left_out, attention.told()]))
