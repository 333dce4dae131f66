"""The named parts of fused matrices, from an override or from known models.

Note: which parts are found without configuration
    The fused projections of transformers, by the names of layers and the sizes in their modules or
    configs. The names are in :mod:`.routing.fused_parts`:

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

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ds_layerwise.config.overrides import Part, Split
from ds_layerwise.errors import RoutingError
from ds_layerwise.orthogonalize.tensor_shards import Axis
from ds_layerwise.routing.module_of import config_value, kind_of, weights_of
from ds_layerwise.routing.part_views import Parts
from ds_layerwise.routing.routes import NOT_SPLIT, Route, with_parts
from ds_layerwise.routing.tensor_marks import heads_here, runs_of

#: The layers of queries, and of keys and values, whose heads can become separate matrices.
QUERY_NAMES = ("q_proj", "query", "wq", "q_b_proj", "kv_b_proj", "q_attn")
KEY_VALUE_NAMES = ("k_proj", "v_proj", "key", "value", "wk", "wv")

#: The layers of queries, keys and values together, with heads of one width.
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

#: The layers of queries, keys and values, in all families of transformers or in one.
QKV = (
    "qkv",
    "bark.att_proj",
    "bloom.query_key_value",
    "dbrx.Wqkv",
    "deberta.in_proj",
    "decision_transformer.c_attn",
    "falcon.query_key_value",
    "gpt2.c_attn",
    "gpt_bigcode.c_attn",
    "gpt_neox.query_key_value",
    "gpt_neox_japanese.query_key_value",
    "imagegpt.c_attn",
    "modernbert.Wqkv",
    "mpt.Wqkv",
    "openai.c_attn",
    "persimmon.query_key_value",
    "phi3.qkv_proj",
    "phi4_multimodal.qkv_proj",
)

#: The families in which :data:`QKV` is grouped by key head, each with its queries. In others, all
#: queries come first.
QKV_BY_HEAD = (
    "bloom",
    "deberta",
    "falcon",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "persimmon",
)

#: The layers of gate and up, or keys and values: two parts of one size, one after the other.
HALVES = (
    "gate_up_proj",
    "Wi",
    "to_kv",
    "granitemoe_swa.input_linear",
    "granitemoehybrid.input_linear",
    "granitemoeshared.input_linear",
    "jetmoe.input_linear",
    "jetmoe.kv_proj",
)

#: The families of experts with such a layout whose module does not declare it.
GATE_UP_EXPERTS = ("llama4", "longcat_flash", "step3p7")

#: The families in which a gate follows each head of queries.
GATED_QUERIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")

#: The names of fused projections, known or not.
LOOKS_FUSED = re.compile(
    r"(\w+_)?w?qkvz?(_proj)?|Wqkv|query_key_value|c_attn|att_proj|(to_|linear_)?kv|"
    r"in_proj_(weight|ba)|gate_up(_proj)?|Wi|w1[23]"
)

#: The names of the number of query heads, of the number of key heads, of the width of a head, and
#: of the width of a hidden state.
HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
HEAD_WIDTHS = ("head_dim", "attention_head_size")
HIDDEN_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")

#: The names of the sizes of latent attention.
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

#: The names, in linear attention, of the numbers of key heads and value heads, and of the total
#: width of each.
LINEAR_SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")


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
    rows, cols = shape
    heads = replace(route, tp_axis=tp_axis, matrix_shape=(num_heads, rows // num_heads, cols))
    if route.transposed:
        part = Part(size=cols, heads=num_heads)
        heads = replace(heads, matrix_shape=shape, parts=Parts(-1, (("", part),)))
    return heads.because(f"{num_heads} heads")


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
    outputs = route.whole_shape(shape, tp_size)[int(route.transposed)]
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
        RoutingError: ``route`` has no matrix, its size differs from that of the parts together, or
            tensor parallelism has cut the parameter through them.
    """
    if split is None or not split.parts:
        return route
    axis = outputs_of(module, route)
    if split.axis == "in":
        axis = -1 if axis == -2 else -2
    parts = Parts(axis, split.parts, split.groups)
    shape = route.matrices
    if shape is None:
        raise RoutingError(
            f"{route.name}: layerwise.overrides splits it into {split!r}, but it goes to "
            f"{route.recipe.rule} ({route.reason}), which does not see it as a matrix; narrow the "
            "pattern"
        )
    length = route.whole_shape(shape, tp_size)[axis]
    if parts.length != length:
        raise RoutingError(
            f"{route.name} {shape}: layerwise.overrides splits it into {split!r}, "
            f"which is {parts.length} in all, and it has {length} "
            f"{'rows' if axis == -2 else 'columns'}"
            f"{' over all tensor-parallel ranks' * (length != shape[axis])}; correct "
            "the sizes, or split_axis, or split_groups, or leave split out"
        )
    return _with_parts_here(route, parts, param, tp_size)


def split_known(
    model: nn.Module,
    routes: Mapping[str, Route],
    params: Mapping[str, Tensor],
    tp_size: int,
    *,
    named: Collection[str],
    auto_split: bool,
    per_head: bool,
) -> dict[str, Route]:
    """Return ``routes`` with the parts and the heads of known models; see the note.

    Args:
        model: has a config like transformers' or nanoGPT's, if its modules have no number of heads.
        named: the parameters for which the user has chosen heads or parts. They are already changed
            in ``routes``.
        auto_split: True for the parts.
        per_head: True for one matrix per head of the query, key and value projections, by the head
            counts of their modules.

    Raises:
        RoutingError: with ``per_head``, no projection has a known name and a number of heads, and
            none is in ``named``.
    """
    split = dict(routes)
    has_heads = bool(named)
    for name, route in routes.items():
        if name in named:
            continue
        if auto_split:
            route = _with_known_parts(model, route, params[name], tp_size, per_head)
        split[name] = route
        if route.parts is not None:
            has_heads |= any(part.heads for _, part in route.parts.each)
        elif per_head:
            heads = _count_of(model, route, tp_size)
            split[name] = cut_heads(route, heads, params[name], tp_size)
            has_heads |= split[name] is not route
    if per_head and not has_heads:
        raise RoutingError(
            "per_head_muon found no query, key or value projection (known: "
            f"{', '.join(QUERY_NAMES + KEY_VALUE_NAMES + FUSED_NAMES)}) of which its module or "
            "model.config.num_attention_heads says how many heads it has; name them in "
            "layerwise.overrides with num_heads"
        )
    return split


def _with_known_parts(
    model: nn.Module, route: Route, param: Tensor, tp_size: int, per_head: bool
) -> Route:
    """Return ``route`` with the parts of its fused matrix, or a reason why it has none.

    Args:
        per_head: True if queries, keys and values that have heads of equal width are cut by head.
    """
    module, leaf = attention_of(model, route.name)
    shape = route.matrices
    if shape is None or per_head and leaf in FUSED_NAMES:
        return route
    axis = outputs_of(module, route)
    length = route.whole_shape(shape, tp_size)[axis]
    known = _known(module, leaf, length, sources_of(module, model, tp_size), per_head)
    parts = known and Parts(axis, known.parts, known.groups)
    if parts is not None and parts.length == length and len(parts.each) > 1:
        try:
            return _with_parts_here(route, parts, param, tp_size)
        except RoutingError:
            return route.because(
                f"whole, for its parts {', '.join(parts.names)} do not lie whole on a "
                "tensor-parallel rank"
            )
    if LOOKS_FUSED.fullmatch(leaf) or (
        leaf == "in_proj" and (hasattr(module, "conv1d") or hasattr(module, "conv"))
    ):
        return route.because(NOT_SPLIT)
    return route


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
    by_head = family_of(module) in QKV_BY_HEAD
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
    runs = None if route.tp_lengths else runs_of(param, parts.length)
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
