"""Attention heads as matrices of their own: which parameters hold them, how many, and along which axis.

A linear layer's rows are its outputs. The ``Conv1D`` of transformers, GPT-2's linear layer, holds the transpose, so
that its heads are blocks of columns. In a fused projection queries, keys and values of all heads lie one after the
other, in whatever order, and all have the same width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.routes import Route, with_heads
from ds_layerwise.routing.held import kind_of, told, weights_of
from ds_layerwise.routing.tensor_marks import heads_here

_QUERY_NAMES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj", "q_attn")
_KEY_VALUE_NAMES = ("k_proj", "v_proj", "key", "value", "wk", "wv")
_FUSED_NAMES = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "att_proj", "in_proj_weight")
HEADS = ("num_attention_heads", "n_head", "num_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")


def is_transposed(module: nn.Module, param: Tensor) -> bool:
    """Whether ``param`` is the weight of a linear layer that holds it as (inputs, outputs)."""
    return kind_of(module).__name__ == "Conv1D" and param.dim() == 2 and any(param is w for w in weights_of(module))


def cut_heads(route: Route, num_heads: int | None, param: Tensor, tp_size: int, *, explicit: bool = False) -> Route:
    """``route`` with one matrix a head, of those that this rank has; as it is where ``num_heads`` is None.

    Raises:
        RoutingError: ``explicit``, and the outputs are not so many blocks; or tensor parallelism has cut heads.
    """
    if num_heads is not None and route.tp_axis is not None and route.transposed:
        raise RoutingError(f"{route.name}: {num_heads} heads of a Conv1D that tensor parallelism has cut are not "
                           "supported; orthogonalise it as one matrix, without num_heads and per_head_muon")
    if num_heads is None or route.tp_axis != -2:
        return with_heads(route, num_heads, explicit=explicit)
    here = heads_here(route.name, param, num_heads, tp_size)
    whole = with_heads(replace(route, tp_axis=None), here, explicit=explicit)
    return whole if whole.matrix_shape != route.matrix_shape else route


def split_heads(config: Any, routes: dict[str, Route], params: Mapping[str, Tensor], tp_size: int, *,
                named: Collection[str]) -> dict[str, Route]:
    """Cut the query, key and value projections into one matrix a head, by the counts in the model's config.

    Args:
        config: as transformers' or nanoGPT's models have it; None if the model has none.
        named: the parameters whose heads or parts the user has named, in ``routes`` already, as are those that have
            parts.

    Raises:
        RoutingError: ``config`` has no counts, or no projection is known by its name, and none is ``named``.
    """
    config = getattr(config, "text_config", config)
    heads = number_of(config, HEADS)
    if heads is None:
        if named:
            return routes
        raise RoutingError("per_head_muon needs model.config.num_attention_heads, which this model does not have; name "
                           "the projections in layerwise.overrides with num_heads")
    kv_heads = number_of(config, ("num_key_value_heads",)) or heads
    width = number_of(config, ("head_dim",)) or (number_of(config, WIDTHS) or 0) // heads
    split = {}
    for name, route in routes.items():
        *path, last = name.split(".")
        leaf = path[-1] if path and last == "weight" else last
        count = heads if leaf in _QUERY_NAMES else kv_heads if leaf in _KEY_VALUE_NAMES else None
        if leaf in _FUSED_NAMES and route.matrix_shape is not None and len(route.matrix_shape) == 2:
            outputs = route.matrix_shape[1 if route.transposed else 0] * (tp_size if route.tp_axis == -2 else 1)
            count = outputs // width if width and outputs % width == 0 else None
        done = name in named or route.parts is not None
        split[name] = route if done else cut_heads(route, count, params[name], tp_size)
    per_head = named or any(route.parts and any(part.heads for _, part in route.parts.each)
                            for route in routes.values())
    if split == routes and not per_head:
        raise RoutingError("per_head_muon found no query, key or value projection (known: "
                           f"{', '.join(_QUERY_NAMES + _KEY_VALUE_NAMES + _FUSED_NAMES)}); name them in "
                           "layerwise.overrides with num_heads")
    return split


def number_of(config: Any, spellings: Collection[str]) -> int | None:
    """The number, at least 1, that ``config`` has under the first of ``spellings`` that it knows.

    Vision models count heads a stage, in a list, which says nothing of a layer.
    """
    return next((n for key in spellings if isinstance(n := told(config, key), int) and n > 0), None)
