"""Which optimizer, group and overrides each parameter gets. The only place that decides.

The answer is a table of :class:`Route`, one row a parameter, each with its reason. Nothing is written on tensors.

The rules, first match wins:

1. an override in ``layerwise.overrides`` that names an optimizer, then the user's own ``param.use_muon``;
2. fewer than two axes: scalar (norms, biases);
3. a table or an output head: scalar (weights that layers of a pipeline share; ``nn.Embedding`` by module type; a head
   is a linear layer that shares an embedding's weight, that the model returns from ``get_output_embeddings()``, that
   ends in one of
   :data:`HEAD_NAMES`, or that is the model's last and maps an embedding's width to its number of rows);
4. convolutions: a kernel over two or more axes is an (out, rest) matrix, a grouped one a batch of them; depthwise
   kernels and kernels over one axis are scalar;
5. two axes: a matrix, unless one axis has length 1; three axes: a batch of matrices, unless the first has length 1;
6. anything else: scalar.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.config import Override, Placement
from ds_layerwise.errors import RoutingError

#: Last component of the module name of an output head, as the common model families spell it.
HEAD_NAMES = ("lm_head", "embed_out", "output_layer")

_QUERY_NAMES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj")
_KEY_VALUE_NAMES = ("k_proj", "v_proj", "key", "value", "wk", "wv")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one parameter goes.

    ``matrix_shape`` is how the matrix optimizer sees the parameter: (rows, cols) or (batch, rows, cols), with as
    many elements as the parameter; None for the scalar optimizer.
    """

    name: str
    optimizer: Placement
    reason: str
    group: int
    """Index into the user's ``param_groups``."""
    matrix_shape: tuple[int, ...] | None = None
    weight_decay: float | None = None
    """Replaces the group's, if set."""
    lr_scale: float = 1.0


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
                     overrides: Sequence[Override] = (), per_head: bool = False,
                     elsewhere: Elsewhere | None = None) -> dict[str, Route]:
    """Route every trainable parameter of ``param_groups``, in the order of ``model.named_parameters()``.

    Frozen parameters, parameters without elements and parameters outside ``param_groups`` get no route. With
    ``elsewhere``, ``model`` is a part: :func:`check_routes` is for the caller, with the routes of all parts.

    Raises:
        RoutingError: a parameter of a group is not in the model, has a dtype that cannot be trained or gets sparse
            gradients, an override matches nothing or contradicts another, or no parameter at all goes to the matrix
            optimizer.
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
    routes: dict[str, Route] = {}
    matched: set[int] = set()
    for param, name in names.items():
        if name not in group_of or not param.requires_grad or param.numel() == 0:
            continue
        if param.dtype not in _FLOATS:
            raise RoutingError(f"{name} is {param.dtype}, which cannot be trained here (known: float32, bfloat16, "
                               "float16); freeze it or convert it")
        if any(getattr(module, "sparse", False) is True for _, module in homes[name].modules):
            raise RoutingError(f"{name} belongs to a module with sparse=True, and sparse gradients cannot be cut into "
                               "shards; build it with sparse=False")
        mine = [(i, o) for i, o in enumerate(overrides) if fnmatchcase(name, o.name)]
        matched.update(i for i, _ in mine)
        merged = _merge(name, mine)
        route = _decide(name, param, homes[name], merged.get("optimizer"))
        routes[name] = _with_heads(replace(route, group=group_of[name], weight_decay=merged.get("weight_decay"),
                                           lr_scale=merged.get("lr_scale", 1.0)),
                                   merged.get("num_heads"), explicit=True)
    for index, override in enumerate(overrides):
        if index not in matched and not any(fnmatchcase(name, override.name)
                                            for name in (elsewhere.names if elsewhere else ())):
            raise RoutingError(f"layerwise.overrides[{index}] ({override.name!r}) matches no trainable parameter; is "
                               "the pattern misspelled?")
    if per_head:
        routes = _split_heads(model, routes)
    if elsewhere is None:
        check_routes(routes.values())
    return routes


def check_routes(routes: Collection[Route]) -> None:
    """Refuse a model that has nothing for the matrix optimizer.

    Raises:
        RoutingError: says how many parameters there are, and why they are none.
    """
    if not any(route.optimizer == "matrix" for route in routes):
        raise RoutingError(f"no parameter goes to the matrix optimizer, of {len(routes)} trainable ones: "
                           f"{_reasons(routes)}; use a plain optimizer, or route some with layerwise.overrides or "
                           "param.use_muon = True")


def _reasons(routes: Iterable[Route]) -> str:
    counts: dict[str, int] = {}
    for route in routes:
        counts[route.reason] = counts.get(route.reason, 0) + 1
    return ", ".join(f"{n} x {reason}" for reason, n in counts.items()) or "none at all"


def _merge(name: str, overrides: Sequence[tuple[int, Override]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    origin: dict[str, int] = {}
    for index, override in overrides:
        for key in ("optimizer", "weight_decay", "lr_scale", "num_heads"):
            value = getattr(override, key)
            if value is None:
                continue
            if merged.get(key, value) != value:
                raise RoutingError(f"{name}: layerwise.overrides[{origin[key]}] sets {key} to {merged[key]!r} and "
                                   f"layerwise.overrides[{index}] to {value!r}; narrow one of the patterns")
            merged[key], origin[key] = value, index
    return merged


def _decide(name: str, param: Tensor, home: _Home, override: Placement | None) -> Route:
    wanted: Placement | None = override
    reason = "layerwise.overrides"
    if wanted is None and hasattr(param, "use_muon"):
        wanted, reason = "matrix" if param.use_muon else "scalar", f"param.use_muon = {param.use_muon}"
    if wanted == "matrix":
        shape = _matrix_shape(param, home)[0] or (tuple(param.shape) if param.dim() in (2, 3) else None)
        if shape is None and param.dim() > 3:
            shape = (param.shape[0], math.prod(param.shape[1:]))
        if shape is None:
            raise RoutingError(f"{name} {tuple(param.shape)} was sent to the matrix optimizer by {reason}, but has "
                               "fewer than two axes")
        return Route(name=name, optimizer="matrix", reason=reason, group=0, matrix_shape=shape)
    if wanted == "scalar":
        return Route(name=name, optimizer="scalar", reason=reason, group=0)
    table = _table_or_head(param, home)
    shape, reason = (None, table) if table else _matrix_shape(param, home)
    return Route(name=name, optimizer="scalar" if shape is None else "matrix", reason=reason, group=0,
                 matrix_shape=shape)


def _table_or_head(param: Tensor, home: _Home) -> str | None:
    if param.dim() < 2:
        return None
    if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for _, module in home.modules):
        return "embedding" if len(home.modules) == 1 else "embedding, tied"
    return home.is_head


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
        set[tuple[int, ...]], list[tuple[str, nn.Linear]]]:
    """The shapes of the embeddings, and the linear layers in their order but for those with a weight of ``leave_out``.
    """
    modules = list(model.named_modules())
    return ({tuple(m.weight.shape) for _, m in modules if isinstance(m, nn.Embedding)},
            [(path, m) for path, m in modules if isinstance(m, nn.Linear) and m.weight not in leave_out])


def _heads(model: nn.Module, elsewhere: Elsewhere | None) -> Iterator[tuple[Tensor, str]]:
    tied = elsewhere.tied if elsewhere else frozenset()
    tables, linears = tables_and_linears(model, leave_out=tied)
    if linears and not (elsewhere and elsewhere.linear_after):
        last = linears[-1][1]
        if tuple(last.weight.shape) in (elsewhere.tables if elsewhere else tables):
            yield last.weight, "output head (last linear layer, shaped like an embedding)"
    yield from ((weight, "tied to another layer of the pipeline") for weight in tied)
    for path, linear in linears:
        if path.rpartition(".")[2] in HEAD_NAMES:
            yield linear.weight, "output head (by name)"
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        weight = getattr(get(), "weight", None) if callable(get) else None
        if isinstance(weight, Tensor):
            yield weight, "output head (get_output_embeddings)"


def _with_heads(route: Route, num_heads: int | None, *, explicit: bool = False) -> Route:
    if num_heads is None:
        return route
    shape = route.matrix_shape
    if shape is None or len(shape) != 2 or shape[0] % num_heads:
        if explicit:
            raise RoutingError(f"{route.name}: num_heads {num_heads} needs a matrix whose rows it divides, got "
                               f"{shape or 'a parameter of the scalar optimizer'}")
        return route
    return replace(route, matrix_shape=(num_heads, shape[0] // num_heads, shape[1]),
                   reason=f"{route.reason}, {num_heads} heads")


def _split_heads(model: nn.Module, routes: dict[str, Route]) -> dict[str, Route]:
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
        split[name] = _with_heads(route, count)
    if split == routes:
        raise RoutingError("per_head_muon found no query, key or value projection (known: "
                           f"{', '.join(_QUERY_NAMES + _KEY_VALUE_NAMES)}); name them in layerwise.overrides with "
                           "num_heads")
    return split
