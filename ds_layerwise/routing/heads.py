"""Attention heads as separate matrices: the parameters that hold them, and their number.

The rows of a linear layer are its outputs. ``Conv1D`` of transformers, GPT-2's linear layer, stores
the transpose, so that its heads are blocks of columns. In a fused projection, queries, keys and
values of all heads follow one another in any order, and all have the same width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_layerwise.config.model_names import (
    FUSED_NAMES,
    HEAD_COUNTS,
    HEAD_WIDTHS,
    HIDDEN_WIDTHS,
    KEY_HEAD_COUNTS,
    KEY_VALUE_NAMES,
    QUERY_NAMES,
)
from ds_layerwise.errors import RoutingError
from ds_layerwise.routing.module_of import config_value, kind_of, weights_of
from ds_layerwise.routing.routes import Route
from ds_layerwise.routing.tensor_marks import heads_here


def is_transposed(module: nn.Module, param: Tensor) -> bool:
    """Tell whether ``param`` is the weight of a linear layer that stores it as (inputs,
    outputs).
    """
    return (
        kind_of(module).__name__ == "Conv1D"
        and param.dim() == 2
        and any(param is weight for weight in weights_of(module))
    )


def sources_of(module: nn.Module, model: nn.Module, tp_size: int) -> list[Any]:
    """Return the objects with the sizes of an attention module: itself and its config, or the
    model's config if it has neither.

    Args:
        tp_size: the number of ranks that tensor parallelism has cut parameters for. A module's own
            numbers may be divided by it.
    """
    own = [module] * (tp_size == 1)
    fallback = None
    if not number_of(own, HEAD_COUNTS):
        config = getattr(model, "config", None)
        fallback = config_value(config, "text_config") or config
    return [*own, getattr(module, "config", fallback)]


def heads_of(sources: Collection[Any]) -> tuple[int | None, int | None, int]:
    """Return the number of query heads and of key heads, and their width, 0 if it is unknown."""
    heads = number_of(sources, HEAD_COUNTS)
    width = number_of(sources, HEAD_WIDTHS)
    if width is None:
        width = (number_of(sources, HIDDEN_WIDTHS) or 0) // (heads or 1)
    return heads, number_of(sources, KEY_HEAD_COUNTS) or heads, width


def family_of(module: nn.Module) -> str:
    """Return the transformers model family of ``module``; empty if it is not of transformers."""
    for kind in type(module).__mro__:
        path = kind.__module__.split(".")
        if path[:2] == ["transformers", "models"]:
            return path[2]
    return ""


def attention_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has the parameter ``name``, or a layer with such a weight, and the
    name that it uses for that.
    """
    path, _, own = name.removesuffix(".weight").rpartition(".")
    return model.get_submodule(path), own


def cut_heads(
    route: Route, num_heads: int | None, param: Tensor, tp_size: int, *, explicit: bool = False
) -> Route:
    """Return ``route`` with one matrix per head on this rank; unchanged if ``num_heads`` is None.

    Raises:
        RoutingError: with ``explicit``, if the outputs cannot be divided into so many blocks; or
            tensor parallelism has cut heads.
    """
    if num_heads is None:
        return route
    if route.tp_axis is not None and route.transposed:
        raise RoutingError(
            f"{route.name}: {num_heads} heads of a Conv1D that tensor parallelism has cut are not "
            "supported; orthogonalise it as one matrix, without num_heads and per_head_muon"
        )
    tp_axis = route.tp_axis
    if tp_axis == -2:
        num_heads = heads_here(route.name, param, num_heads, tp_size)
        tp_axis = None
    shape = route.matrices
    axis = int(route.transposed)
    if shape is None or len(shape) != 2 or shape[axis] % num_heads:
        if explicit:
            raise RoutingError(
                f"{route.name}: num_heads {num_heads} needs a matrix whose "
                f"{'columns' if route.transposed else 'rows'} it divides, got "
                f"{shape or 'a parameter of the scalar optimizer'}"
            )
        return route
    cut = list(shape)
    cut[axis] //= num_heads
    heads = replace(route, matrix_shape=(num_heads, *cut), tp_axis=tp_axis)
    return heads.because(f"{num_heads} heads")


def split_heads(
    model: nn.Module,
    routes: dict[str, Route],
    params: Mapping[str, Tensor],
    tp_size: int,
    *,
    named: Collection[str],
) -> dict[str, Route]:
    """Cut the query, key and value projections into one matrix per head, by the head counts of
    their modules.

    Args:
        model: has a config like transformers' or nanoGPT's, if its modules have no number of heads.
        named: the parameters whose heads or parts the user has chosen. They are already changed in
            ``routes``, and so are those with parts.

    Raises:
        RoutingError: no projection has a known name and a number of heads, and none is in
            ``named``.
    """
    split = dict(routes)
    parts_per_head = False
    for name, route in routes.items():
        if route.parts is not None:
            parts_per_head |= any(part.heads for _, part in route.parts.each)
        elif name not in named:
            count = _count_of(model, route, tp_size)
            split[name] = cut_heads(route, count, params[name], tp_size)
    if split == routes and not (named or parts_per_head):
        raise RoutingError(
            "per_head_muon found no query, key or value projection (known: "
            f"{', '.join(QUERY_NAMES + KEY_VALUE_NAMES + FUSED_NAMES)}) of which its module or "
            "model.config.num_attention_heads says how many heads it has; name them in "
            "layerwise.overrides with num_heads"
        )
    return split


def _count_of(model: nn.Module, route: Route, tp_size: int) -> int | None:
    """Return the number of heads in a projection, over all tensor shards; None if it is unknown."""
    module, leaf = attention_of(model, route.name)
    heads, key_heads, width = heads_of(sources_of(module, model, tp_size))
    if leaf in QUERY_NAMES:
        return heads
    if leaf in KEY_VALUE_NAMES:
        return key_heads
    shape = route.matrices
    if leaf not in FUSED_NAMES or shape is None or len(shape) != 2:
        return None
    outputs = shape[int(route.transposed)] * (tp_size if route.tp_axis == -2 else 1)
    if width and outputs % width == 0:
        return outputs // width
    return None


def number_of(sources: Iterable[Any], spellings: Collection[str]) -> int | None:
    """Return the first number of at least 1 that ``sources`` have under one of ``spellings``.

    Vision models have a list of head counts per stage, which does not apply to a single layer.
    """
    for source in sources:
        for key in spellings:
            number = config_value(source, key)
            if isinstance(number, int) and number > 0:
                return number
    return None
