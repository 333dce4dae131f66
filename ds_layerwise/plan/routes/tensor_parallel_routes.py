"""The cuts that tensor parallelism would make in a whole model, by parameter names. Plans need this
because they see no marks on parameters.

Megatron cuts a linear layer that opens a block along its outputs, one that closes it along its
inputs, and embeddings and the output layer along the vocabulary (arXiv 1909.08053, section 3).
DeepSpeed's AutoTP cuts linear layers in the same way; it leaves an embedding whole unless the
output layer shares it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ds_layerwise.config.targets.model_names import (
    CLOSES_BLOCK,
    COPIED,
    OPENS_BLOCK,
    OUTPUT_LAYERS,
    TABLES,
)
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.recipe import Shape
from ds_layerwise.plan.routes.routes import Route, Routes, with_cut

#: The source of the cuts: a model that marks its parts as Megatron's do, or DeepSpeed at its start.
Cutter = Literal["megatron", "autotp"]


def cut(
    shapes: Sequence[tuple[str, Shape]],
    routes: Routes,
    tp_size: int,
    cutter: Cutter,
) -> tuple[list[tuple[str, Shape]], dict[str, Route]]:
    """Return the part of ``shapes`` on one of ``tp_size`` tensor-parallel ranks, and its routes.

    Args:
        shapes: the name and shape of each parameter of the whole model, in model order.
        routes: of the whole model, by name.

    Raises:
        ConfigError: it is unknown how a parameter is cut, or it cannot be cut into equal parts.
    """
    if tp_size == 1:
        return list(shapes), dict(routes)
    tied = not any(_module_of(name) in OUTPUT_LAYERS for name, _ in shapes)
    parts = []
    cut_routes = dict(routes)
    for name, shape in shapes:
        route = routes.get(name)
        transposed = route is not None and route.transposed
        dim = _dim_of(name, shape, transposed, tied, cutter)
        if dim is None:
            parts.append((name, shape))
            continue
        if shape[dim] % tp_size:
            raise ConfigError(
                f"tensor parallelism over {tp_size} ranks cuts axis {dim} of {name} {shape}, which "
                "they cannot share evenly; pad it in a model file of your own, or plan with "
                "another tp_size"
            )
        part = (*shape[:dim], shape[dim] // tp_size, *shape[dim + 1 :])
        parts.append((name, part))
        if route is None:
            continue
        if route.matrix_shape is None:
            cut_routes[name] = with_cut(route, None, tp_size)
            continue
        if route.matrix_shape != shape or route.parts is not None:
            seen = str(route.matrix_shape)
            if route.parts is not None:
                seen = f"parts {', '.join(route.parts.names)}"
            raise ConfigError(
                f"{name} {shape} is updated as matrices of {seen}, and a plan cannot tell how "
                "tensor parallelism would cut these; plan without num_heads, per_head_muon, split "
                "and auto_split"
            )
        along = with_cut(route, -2 if dim == 0 else -1, tp_size)
        cut_routes[name] = replace(along, matrix_shape=part)
    return parts, cut_routes


def _module_of(name: str) -> str:
    return (["", *name.split(".")])[-2]


def _dim_of(name: str, shape: Shape, transposed: bool, tied: bool, cutter: Cutter) -> int | None:
    """Return the axis that is cut; None if every rank has a copy of the parameter.

    Raises:
        ConfigError: the name does not tell.
    """
    module = _module_of(name)
    if module in COPIED:
        return None
    if module in TABLES:
        return 0 if cutter == "megatron" or tied else None
    if module in OUTPUT_LAYERS:
        return 0
    known = OPENS_BLOCK + CLOSES_BLOCK + TABLES + OUTPUT_LAYERS
    if module not in known or (transposed and cutter == "autotp"):
        raise ConfigError(
            f"{name} {shape}: shapes of a whole model do not say how tensor parallelism cuts it, "
            f"and plans know that only for {', '.join(known)}; give a file with the shapes that "
            "one rank has, and plan that without tensor parallelism"
        )
    closes = module in CLOSES_BLOCK
    if len(shape) == 1:
        return None if closes else 0
    return int(closes != transposed)
