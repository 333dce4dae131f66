"""Which optimizer, group and overrides each parameter gets. The only place that decides.

The answer is a table of :class:`Route`, one row a parameter, each with its reason. Nothing is written on tensors.

The rules, first match wins:

1. an override in ``layerwise.overrides`` that names an optimizer, then the user's own ``param.use_muon``;
2. fewer than two axes: scalar (norms, biases);
3. a table or an output head: scalar (weights that layers of a pipeline share; ``nn.Embedding`` by module type, others
   by a class name that ends in ``Embedding``; a head is a linear layer that shares an embedding's weight, that the
   model returns from ``get_output_embeddings()``, that ends in one of :data:`HEAD_NAMES`, or that is the model's last
   and maps an embedding's width to its number of rows; Megatron marks both with
   ``is_embedding_or_output_parameter``);
4. convolutions: a kernel over two or more axes is an (out, rest) matrix, a grouped one a batch of them; depthwise
   kernels and kernels over one axis are scalar;
5. two axes: a matrix, unless one axis has length 1; three axes: a batch of matrices, unless the first has length 1;
6. anything else: scalar.

Where tensor parallelism has cut a parameter, all of this holds for the part that a rank has of it; :mod:`.tensor_cuts`
says which axis of which matrix is cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.config import Override, Placement
from ds_layerwise.errors import RoutingError
from ds_layerwise.placement import Route, forced_matrix_shape, overrides_by_name, require_a_matrix, with_heads
from ds_layerwise.tensor_cuts import axis_of, heads_here, is_cut

#: Last component of the module name of an output head, as the common model families spell it.
HEAD_NAMES = ("lm_head", "embed_out", "output_layer")

_QUERY_NAMES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj")
_KEY_VALUE_NAMES = ("k_proj", "v_proj", "key", "value", "wk", "wv")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What a stage of a pipeline must know of the others to decide as for the whole model."""

    tables: frozenset[tuple[int, ...]]
    """The shapes of all embeddings."""
    linear_after: bool
    """Whether a later stage has a linear layer, so that the model's last one is not here."""
    tied: frozenset[Tensor]
    """The weights here that another layer uses, too, wherever that is."""
    names: frozenset[str]
    """The trainable parameters of all stages."""


@dataclass(frozen=True, slots=True)
class _Home:
    """What the model says about a parameter: the modules that hold it, and facts about the model."""

    modules: tuple[tuple[str, nn.Module], ...]
    is_head: str | None


def route_parameters(model: nn.Module, param_groups: Sequence[Mapping[str, Any]], *,
                     overrides: Sequence[Override] = (), per_head: bool = False, tp_size: int = 1,
                     elsewhere: Elsewhere | None = None) -> dict[str, Route]:
    """Route every trainable parameter of ``param_groups``, in the order of ``model.named_parameters()``.

    Frozen parameters, parameters without elements and parameters outside ``param_groups`` get no route. With
    ``elsewhere``, ``model`` is a part, and the caller calls :func:`.placement.require_a_matrix` with the routes of all.

    Args:
        tp_size: how many ranks tensor parallelism has cut parameters for; the marks it left count if there are two.

    Raises:
        RoutingError: a parameter of a group is not in the model, has a dtype that cannot be trained or gets sparse
            gradients, an override matches nothing or contradicts another, no parameter at all goes to the matrix
            optimizer, or it is not clear how a matrix is cut.
    """
    names = {param: name for name, param in model.named_parameters()}
    group_of: dict[str, int] = {}
    for index, group in enumerate(param_groups):
        for param in group["params"]:
            if param not in names:
                raise RoutingError(f"param_groups[{index}] holds a parameter of shape {tuple(param.shape)} that the "
                                   "model does not have; pass parameters of the model given to initialize()")
            group_of[names[param]] = index
    homes = _homes(model, elsewhere)
    trained = {name: param for param, name in names.items()
               if name in group_of and param.requires_grad and param.numel()}
    merged = overrides_by_name(trained, overrides, elsewhere=elsewhere.names if elsewhere else ())
    routes: dict[str, Route] = {}
    for name, param in trained.items():
        if param.dtype not in _FLOATS:
            raise RoutingError(f"{name} is {param.dtype}, which cannot be trained here (known: float32, bfloat16, "
                               "float16); freeze it or convert it")
        if any(getattr(module, "sparse", False) is True for _, module in homes[name].modules):
            raise RoutingError(f"{name} belongs to a module with sparse=True, and sparse gradients cannot be cut into "
                               "shards; build it with sparse=False")
        mine = merged[name]
        route = _decide(name, param, homes[name], mine.get("optimizer"))
        if tp_size > 1 and is_cut(param):
            route = _with_cut(route, param, tp_size)
        routes[name] = _with_heads(replace(route, group=group_of[name], weight_decay=mine.get("weight_decay"),
                                           lr_scale=mine.get("lr_scale", 1.0)),
                                   mine.get("num_heads"), param, tp_size, explicit=True)
    if per_head:
        routes = _split_heads(model, routes, tp_size)
    if elsewhere is None:
        require_a_matrix(routes.values())
    return routes


def _decide(name: str, param: Tensor, home: _Home, override: Placement | None) -> Route:
    wanted: Placement | None = override
    reason = "layerwise.overrides"
    if wanted is None and hasattr(param, "use_muon"):
        wanted, reason = "matrix" if param.use_muon else "scalar", f"param.use_muon = {param.use_muon}"
    if wanted == "matrix":
        asked = _matrix_shape(param, home)[0] or forced_matrix_shape(name, tuple(param.shape), reason)
        return Route(name=name, optimizer="matrix", reason=reason, group=0, matrix_shape=asked)
    if wanted == "scalar":
        return Route(name=name, optimizer="scalar", reason=reason, group=0)
    table = _table_or_head(param, home)
    shape, reason = (None, table) if table else _matrix_shape(param, home)
    return Route(name=name, optimizer="scalar" if shape is None else "matrix", reason=reason, group=0,
                 matrix_shape=shape)


def _with_cut(route: Route, param: Tensor, tp_size: int) -> Route:
    if route.matrix_shape is None:
        return replace(route, is_cut=True)
    axis = axis_of(route.name, param, route.matrix_shape, tp_size)
    cut = {-2: f", rows over {tp_size} ranks", -1: f", columns over {tp_size} ranks", None: ""}[axis]
    return replace(route, is_cut=True, tp_axis=axis, reason=route.reason + cut)


def _table_or_head(param: Tensor, home: _Home) -> str | None:
    if param.dim() < 2:
        return None
    if any(_is_table(module) for _, module in home.modules):
        return "embedding" if len(home.modules) == 1 else "embedding, tied"
    if getattr(param, "is_embedding_or_output_parameter", False):
        return "embedding or output head (as Megatron marks it)"
    return home.is_head


def _is_table(module: nn.Module) -> bool:
    # Tables of tensor-parallel models are no nn.Embedding, and each library has classes of its own.
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or type(module).__name__.endswith("Embedding")


def _matrix_shape(param: Tensor, home: _Home) -> tuple[tuple[int, ...] | None, str]:
    """How the matrix optimizer sees ``param``, or None, and why."""
    shape = tuple(param.shape)
    if len(shape) < 2:
        return None, "fewer than two axes"
    module = home.modules[0][1]
    if isinstance(module, _CONVOLUTIONS):
        return _kernel_shape(shape, module)
    if len(shape) == 2:
        return (None, "a vector") if 1 in shape else (shape, "matrix")
    if len(shape) == 3:
        if shape[0] == 1 or 1 in shape[1:]:
            return None, "three axes, but no stack of matrices"
        return shape, "stack of matrices"
    return None, f"{len(shape)} axes, and not a convolution"


def _kernel_shape(shape: tuple[int, ...], module: nn.Module) -> tuple[tuple[int, ...] | None, str]:
    groups, first, rest = int(getattr(module, "groups")), shape[0], math.prod(shape[1:])
    if len(shape) == 3:
        return None, "convolution over one axis"
    if shape[1] == 1 and groups > 1:
        return None, "depthwise convolution"
    if groups == 1:
        return (first, rest), "convolution"
    # Filters of different groups see different channels: each group is a matrix of its own.
    return (groups, first // groups, rest), "grouped convolution"


def _homes(model: nn.Module, elsewhere: Elsewhere | None) -> dict[str, _Home]:
    """For each parameter name, the modules that hold it and whether it is an output head."""
    holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(param, []).append((path, module))
    heads = dict(_heads(model, elsewhere))
    return {name: _Home(tuple(holders[param]), heads.get(param)) for name, param in model.named_parameters()}


def tables_and_linears(model: nn.Module, *, leave_out: Collection[Tensor] = ()) -> tuple[
        set[tuple[int, ...]], list[tuple[str, Tensor]]]:
    """The shapes of the embeddings, and the weights of linear layers in their order, but for those in ``leave_out``."""
    weights = [(path, m, w) for path, m in model.named_modules()
               if isinstance(w := getattr(m, "weight", None), Tensor) and w.dim() == 2]
    return ({tuple(w.shape) for _, module, w in weights if _is_table(module)},
            [(path, w) for path, module, w in weights if w not in leave_out and (
                isinstance(module, nn.Linear) or is_cut(w) and not _is_table(module))])


def _heads(model: nn.Module, elsewhere: Elsewhere | None) -> Iterator[tuple[Tensor, str]]:
    tied = elsewhere.tied if elsewhere else frozenset()
    tables, linears = tables_and_linears(model, leave_out=tied)
    if linears and not (elsewhere and elsewhere.linear_after):
        last = linears[-1][1]
        if tuple(last.shape) in (elsewhere.tables if elsewhere else tables):
            yield last, "output head (last linear layer, shaped like an embedding)"
    yield from ((weight, "tied to another layer of the pipeline") for weight in tied)
    for path, each in linears:
        if path.rpartition(".")[2] in HEAD_NAMES:
            yield each, "output head (by name)"
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        weight = getattr(get(), "weight", None) if callable(get) else None
        if isinstance(weight, Tensor):
            yield weight, "output head (get_output_embeddings)"


def _with_heads(route: Route, num_heads: int | None, param: Tensor, tp_size: int, *, explicit: bool = False) -> Route:
    if num_heads is None or route.tp_axis != -2:
        return with_heads(route, num_heads, explicit=explicit)
    here = heads_here(route.name, param, num_heads, tp_size)
    whole = with_heads(replace(route, tp_axis=None), here, explicit=explicit)
    return whole if whole.matrix_shape != route.matrix_shape else route


def _split_heads(model: nn.Module, routes: dict[str, Route], tp_size: int) -> dict[str, Route]:
    """Cut the query, key and value projections into one matrix a head, where the model's config gives the count."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    spellings = ("num_attention_heads", "n_head", "num_heads")
    heads = next((n for key in spellings if (n := getattr(config, key, None))), None)
    if heads is None:
        raise RoutingError("per_head_muon needs model.config.num_attention_heads, which this model does not have; name "
                           "the projections in layerwise.overrides with num_heads instead")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    split = {}
    for name, route in routes.items():
        leaf = name.split(".")[-2] if "." in name else name
        count = heads if leaf in _QUERY_NAMES else kv_heads if leaf in _KEY_VALUE_NAMES else None
        split[name] = _with_heads(route, count, model.get_parameter(name), tp_size)
    if split == routes:
        raise RoutingError("per_head_muon found no query, key or value projection (known: "
                           f"{', '.join(_QUERY_NAMES + _KEY_VALUE_NAMES)}); name them in layerwise.overrides with "
                           "num_heads")
    return split
