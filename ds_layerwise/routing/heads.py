"""Attention heads as matrices of their own: which parameters hold them, how many, and along which
axis.

A linear layer's rows are its outputs. The ``Conv1D`` of transformers, GPT-2's linear layer, holds
the transpose, so that its heads are blocks of columns. In a fused projection queries, keys and
values of all heads lie one after the other, in whatever order, and all have the same width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.routes.routes import Route, with_heads
from ds_layerwise.routing.module_of import kind_of, told, weights_of
from ds_layerwise.routing.tensor_marks import heads_here

QUERY_NAMES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj", "q_attn")
_KEY_VALUE_NAMES = ("k_proj", "v_proj", "key", "value", "wk", "wv")
FUSED_NAMES = (
    "c_attn",
    "qkv",
    "qkv_proj",
    "query_key_value",
    "Wqkv",
    "wqkv",
    "att_proj",
    "in_proj_weight",
)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_size")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")


def is_transposed(module: nn.Module, param: Tensor) -> bool:
    """Whether ``param`` is the weight of a linear layer that holds it as (inputs, outputs)."""
    return (
        kind_of(module).__name__ == "Conv1D"
        and param.dim() == 2
        and any(param is w for w in weights_of(module))
    )


def sources_of(module: nn.Module, model: nn.Module, tp_size: int) -> list[Any]:
    """What says which sizes an attention module has: itself and its config, or, of one that is
    mute, the model's.

    Args:
        tp_size: how many ranks tensor parallelism has cut parameters for; it may divide what a
            module says of itself.
    """
    own, config = [module] * (tp_size == 1), getattr(model, "config", None)
    of_text = None if number_of(own, _HEADS) else told(config, "text_config") or config
    return [*own, getattr(module, "config", of_text)]


def heads_of(sources: Collection[Any]) -> tuple[int | None, int | None, int]:
    """The heads of queries and of keys, and how wide they are, 0 if that is not known."""
    heads, width, hidden = (number_of(sources, keys) for keys in (_HEADS, _HEAD_WIDTHS, _WIDTHS))
    return heads, number_of(sources, _KV_HEADS) or heads, width or (hidden or 0) // (heads or 1)


def family_of(module: nn.Module) -> str:
    """The family of transformers' models that the class of ``module`` is of; empty if none."""
    paths = (kind.__module__.split(".") for kind in type(module).__mro__)
    return next((path[2] for path in paths if path[:2] == ["transformers", "models"]), "")


def attention_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter ``name``, or a layer with such a weight, and how it calls
    that.
    """
    path, _, own = name.removesuffix(".weight").rpartition(".")
    return model.get_submodule(path), own


def cut_heads(
    route: Route, num_heads: int | None, param: Tensor, tp_size: int, *, explicit: bool = False
) -> Route:
    """``route`` with one matrix a head, of those that this rank has; as it is where ``num_heads``
    is None.

    Raises:
        RoutingError: ``explicit``, and the outputs are not so many blocks; or tensor parallelism
            has cut heads.
    """
    if num_heads is not None and route.tp_axis is not None and route.transposed:
        raise RoutingError(
            f"{route.name}: {num_heads} heads of a Conv1D that tensor parallelism has cut are not "
            "supported; orthogonalise it as one matrix, without num_heads and per_head_muon"
        )
    if num_heads is None or route.tp_axis != -2:
        return with_heads(route, num_heads, explicit=explicit)
    here = heads_here(route.name, param, num_heads, tp_size)
    whole = with_heads(replace(route, tp_axis=None), here, explicit=explicit)
    return whole if whole.matrix_shape != route.matrix_shape else route


def split_heads(
    model: nn.Module,
    routes: dict[str, Route],
    params: Mapping[str, Tensor],
    tp_size: int,
    *,
    named: Collection[str],
) -> dict[str, Route]:
    """Cut the query, key and value projections into one matrix a head, by the counts of their
    modules.

    Args:
        model: with a config as transformers' or nanoGPT's have, if its modules do not say how many
            heads they have.
        named: the parameters whose heads or parts the user has named, in ``routes`` already, as are
            those that have parts.

    Raises:
        RoutingError: no projection is known by its name and has a number of heads, and none is
            ``named``.
    """
    split = {}
    for name, route in routes.items():
        module, leaf = attention_of(model, name)
        heads, kv_heads, width = heads_of(sources_of(module, model, tp_size))
        count = heads if leaf in QUERY_NAMES else kv_heads if leaf in _KEY_VALUE_NAMES else None
        if leaf in FUSED_NAMES and route.matrix_shape is not None and len(route.matrix_shape) == 2:
            outputs = route.matrix_shape[1 if route.transposed else 0] * (
                tp_size if route.tp_axis == -2 else 1
            )
            count = outputs // width if width and outputs % width == 0 else None
        done = name in named or route.parts is not None
        split[name] = route if done else cut_heads(route, count, params[name], tp_size)
    per_head = named or any(
        route.parts and any(part.heads for _, part in route.parts.each) for route in routes.values()
    )
    if split == routes and not per_head:
        raise RoutingError(
            "per_head_muon found no query, key or value projection (known: "
            f"{', '.join(QUERY_NAMES + _KEY_VALUE_NAMES + FUSED_NAMES)}) of which its module or "
            "model.config.num_attention_heads says how many heads it has; name them in "
            "layerwise.overrides with num_heads"
        )
    return split


def number_of(sources: Iterable[Any], spellings: Collection[str]) -> int | None:
    """The number, at least 1, that the first of ``sources`` has which has one, under the first of
    ``spellings``.

    Vision models count heads a stage, in a list, which says nothing of a layer.
    """
    return next(
        (
            n
            for each in sources
            for key in spellings
            if isinstance(n := told(each, key), int) and n > 0
        ),
        None,
    )
