"""The named parts of fused matrices, from an override or from known models.

Note: which parts are found without configuration
    The fused projections of transformers, by the names of layers and the sizes in their modules or
    configs. The names are in :mod:`.config.model_names`:

    * queries, keys and values, see ``QKV``: one after the other, or by head; also those of linear
      attention;
    * layers of two equal parts, see ``HALVES``; ``gate_up_proj`` of experts in one tensor, in the
      layout of their module;
    * multi-head latent attention: the dimensions with and without rotation, of the queries and of
      the part that all heads share; keys and values of the projection out of the latent.

    Also the queries, keys and values of torch's own attention. A parameter whose size does not
    match, or that has the name of a fused one but is unknown, stays whole, and its reason says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_layerwise.config.fused_parts import Part, Parts, Split
from ds_layerwise.config.model_names import (
    FUSED_NAMES,
    GATE_UP_EXPERTS,
    GATED_QUERIES,
    HALVES,
    LATENT_SIZES,
    LINEAR_SIZES,
    LOOKS_FUSED,
    QKV,
    QKV_BY_HEAD,
)
from ds_layerwise.errors import RoutingError
from ds_layerwise.orthogonalize.tensor_shards import Axis
from ds_layerwise.routing.heads import attention_of, family_of, heads_of, number_of, sources_of
from ds_layerwise.routing.routes import Route, parts_of, with_parts
from ds_layerwise.routing.tensor_marks import runs_of


def outputs_of(module: nn.Module, route: Route) -> Axis:
    """Return the axis of the matrices of ``route`` with the outputs of their layer: rows, as in
    nn.Linear, or columns.
    """
    stack = route.matrix_shape is not None and len(route.matrix_shape) == 3
    by_inputs = getattr(module, "is_transposed", family_of(module) == "llama4") is True
    if route.transposed or stack and by_inputs:
        return -1
    return -2


def split_as_told(
    route: Route, split: Split | None, module: nn.Module, param: Tensor, tp_size: int
) -> Route:
    """Return ``route`` with the parts that an override names; unchanged if it names none.

    Args:
        tp_size: the number of ranks that tensor parallelism has cut parameters for.

    Raises:
        RoutingError: the parts do not fit, or tensor parallelism has cut the parameter through
            them.
    """
    if split is None:
        return route
    parts = parts_of(route, split, outputs=outputs_of(module, route), tp_size=tp_size)
    if parts is None:
        return route
    return _with_parts_here(route, parts, param, tp_size)


def split_known(
    model: nn.Module,
    routes: dict[str, Route],
    params: Mapping[str, Tensor],
    tp_size: int,
    *,
    named: Collection[str],
    per_head: bool,
) -> dict[str, Route]:
    """Return ``routes`` with the parts of known models; see the note.

    Args:
        named: the parameters for which the user has chosen a split.
        per_head: True if heads become matrices of their own. :mod:`.routing.heads` then cuts
            queries, keys and values that have heads of equal width.
    """
    split = dict(routes)
    for name, route in routes.items():
        module, leaf = attention_of(model, name)
        shape = route.matrices
        if name in named or shape is None or per_head and leaf in FUSED_NAMES:
            continue
        axis = outputs_of(module, route)
        length = shape[axis]
        if route.tp_axis == axis:
            length *= tp_size
        known = _known(module, leaf, length, sources_of(module, model, tp_size), per_head)
        parts = None
        if known is not None and known.length == length:
            parts = parts_of(route, known, outputs=axis, tp_size=tp_size)
        if parts and len(parts.each) > 1:
            try:
                split[name] = _with_parts_here(route, parts, params[name], tp_size)
            except RoutingError:
                split[name] = route.because(
                    f"whole, for its parts {', '.join(parts.names)} do not lie whole on a "
                    "tensor-parallel rank"
                )
        elif LOOKS_FUSED.fullmatch(leaf) or (
            leaf == "in_proj" and (hasattr(module, "conv1d") or hasattr(module, "conv"))
        ):
            split[name] = route.because("fused, not split")
    return split


def _known(
    module: nn.Module, leaf: str, length: int, sources: list[Any], per_head: bool
) -> Split | None:
    """Return the known split of the ``length`` outputs of the layer ``leaf`` of ``module``."""
    # One matrix in a part for each head, or one for all heads.
    cut = 1 if per_head else None
    heads, keys, width = heads_of(sources)
    if leaf == "gate_up_proj" and leaf in module._parameters:
        return _of_experts(module, length)
    if is_one(HALVES, module, leaf):
        if "kv" in leaf:
            return _equal(length, "k", "v")
        return _equal(length, "gate", "up")
    of_torch = leaf == "in_proj_weight" and isinstance(module, nn.MultiheadAttention)
    if is_one(QKV, module, leaf) or of_torch:
        return _of_attention(module, length, heads or 0, keys or 0, width)
    if hasattr(module, "kv_b_proj"):
        return _of_latents(leaf, sources, heads, cut)
    if leaf == "q_proj" and family_of(module) in GATED_QUERIES:
        return _split(heads, cut, q=width, gate=width)
    return _of_linear_attention(module, leaf)


def _of_experts(module: nn.Module, length: int) -> Split | None:
    known = family_of(module) in GATE_UP_EXPERTS
    if getattr(module, "has_gate", False) is not True and not known:
        return None
    if getattr(module, "is_concatenated", True):
        return _equal(length, "gate", "up")
    return _split(length // 2, gate=1, up=1)


def _of_attention(module: nn.Module, length: int, heads: int, keys: int, width: int) -> Split:
    by_head = lies_by_head(module)
    if not by_head and heads == keys:
        # Vision models may have no number of heads, or one per stage. In cross-attention, the layer
        # on the encoder's output has no queries.
        of_encoder = getattr(module, "is_cross_attention", False) is True
        return _equal(length, *("kv" if of_encoder else "qkv"))
    groups = 1
    if by_head:
        groups = keys or 1
    kv = keys * width // groups
    return _split(groups, q=heads * width // groups, k=kv, v=kv)


def _of_latents(leaf: str, sources: list[Any], heads: int | None, cut: int | None) -> Split | None:
    latent, nope, rope, v = (number_of(sources, (key,)) or 0 for key in LATENT_SIZES)
    if leaf in ("q_proj", "q_b_proj"):
        return _split(heads, cut, nope=nope, rope=rope)
    if leaf == "kv_b_proj":
        return _split(heads, cut, k=nope, v=v)
    if leaf == "kv_a_proj_with_mqa":
        return _split(latent=latent, rope=rope)
    return None


def _of_linear_attention(module: nn.Module, leaf: str) -> Split | None:
    groups, v_heads, keys, values = (number_of([module], (key,)) or 1 for key in LINEAR_SIZES)
    k = keys // groups
    v = values // groups
    heads = v_heads // groups
    return {
        "in_proj_qkv": _split(q=keys, k=keys, v=values),
        "in_proj_qkvz": _split(groups, q=k, k=k, v=v, z=v),
        "in_proj_ba": _split(groups, b=heads, a=heads),
    }.get(leaf)


def is_one(names: Collection[str], module: nn.Module, leaf: str) -> bool:
    """Tell whether ``leaf`` of ``module`` is in ``names``. A name is for all families, or begins
    with one.
    """
    family = family_of(module)
    return bool(family) and (leaf in names or f"{family}.{leaf}" in names)


def lies_by_head(module: nn.Module) -> bool:
    """Tell whether queries, keys and values in one layer of ``module`` are grouped by key head."""
    return family_of(module) in QKV_BY_HEAD


def _split(groups: int | None = 1, heads: int | None = None, **sizes: int) -> Split:
    parts = tuple((name, Part(size=size, heads=heads)) for name, size in sizes.items() if size)
    return Split(parts, groups=groups or 1)


def _equal(length: int, *names: str) -> Split:
    return _split(**dict.fromkeys(names, length // len(names)))


def _with_parts_here(route: Route, parts: Parts, param: Tensor, tp_size: int) -> Route:
    """Return ``route`` with this rank's share of ``parts``, which are those of all tensor shards
    together.

    A shard has whole groups, whole parts, or an equal piece of each part. Matrices that are whole
    on a rank do not involve other ranks; the others are shards of their union.

    Raises:
        RoutingError: none of these.
    """
    if tp_size == 1 or route.tp_axis != parts.axis:
        return with_parts(route, parts)
    runs = runs_of(param, parts.length)
    sizes = tuple(part.size for _, part in parts.each)
    with_heads = [part.heads is not None for _, part in parts.each]
    here = None
    whole = all(with_heads)
    if runs == (parts.length,) and parts.groups % tp_size == 0:
        here = Parts(parts.axis, parts.each, parts.groups // tp_size)
    elif runs == (parts.length,) and parts.groups == 1:
        here = _whole_parts_here(parts, tp_size)
        whole = True
    elif runs == sizes and parts.groups == 1:
        here = _pieces_here(parts, tp_size)
    if here is None or any(with_heads) and not whole:
        raise RoutingError(
            f"{route.name}: parts {Split(parts.each, groups=parts.groups)!r} do not fit "
            f"{tp_size} tensor-parallel ranks: each must have whole groups, whole parts, or an "
            "equal piece of each part, and heads for all parts or for none; leave it whole with "
            '"split": {} in layerwise.overrides'
        )
    return with_parts(replace(route, tp_axis=None) if whole else route, here)


def _pieces_here(parts: Parts, tp_size: int) -> Parts | None:
    """Return each rank's piece of every part; None if pieces differ, or cut heads."""
    pieces = []
    for name, part in parts.each:
        heads = part.heads
        if part.size % tp_size or heads and heads % tp_size:
            return None
        heads = heads and heads // tp_size
        pieces.append((name, Part(size=part.size // tp_size, heads=heads)))
    return Parts(parts.axis, tuple(pieces))


def _whole_parts_here(parts: Parts, tp_size: int) -> Parts | None:
    """Return the parts on this rank, if every rank has the same number of parts with the same sizes
    in the same order, and none is cut; else None.
    """
    count, rest = divmod(len(parts.each), tp_size)
    if rest:
        return None
    here = []
    for i in range(count):
        names, same = zip(*parts.each[i::count], strict=True)
        if len(set(same)) > 1:
            return None
        # Ranks must agree on their parts, so also on the names of these.
        here.append(("_or_".join(names), same[0]))
    return Parts(parts.axis, tuple(here))
