"""Named parts of fused matrices: which parameters have them, by an override or by what the model
is.

Note: what is found without being told
    The fused projections of transformers, by the names of layers and the numbers of the modules
    that have them, or of their configs:

    * queries, keys and values, see :data:`QKV`: one after the other, or by head; and those of
      linear attention;
    * layers of two equal parts, see :data:`_HALVES`; ``gate_up_proj`` of experts in one tensor, as
      their module lays it out;
    * multi-head latent attention: of the queries, and of what all heads share, the dimensions
      without and with rotation; of what comes out of the latent, keys and values.

    And the queries, keys and values of torch's own attention. A parameter of another size than the
    numbers make, and one that has the name of a fused one and is not known, stays whole, which its
    reason says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.routes.routes import Axis, Route, parts_of, with_parts
from ds_layerwise.recipes.targets.fused_parts import Part, Parts, Split
from ds_layerwise.routing.heads import (
    FUSED_NAMES,
    attention_of,
    family_of,
    heads_of,
    number_of,
    sources_of,
)
from ds_layerwise.routing.tensor_marks import runs_of

#: Layers of queries, keys and values, in all families of transformers or in one.
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

#: The families of these in which they lie by head of keys, each with its queries; in others all
#: queries come first.
_BY_HEAD = (
    "bloom",
    "deberta",
    "falcon",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "persimmon",
)

#: Layers of gate and up, or keys and values: two parts of one size, one after the other.
_HALVES = (
    "gate_up_proj",
    "Wi",
    "to_kv",
    "granitemoe_swa.input_linear",
    "granitemoehybrid.input_linear",
    "granitemoeshared.input_linear",
    "jetmoe.input_linear",
    "jetmoe.kv_proj",
)

#: Families of experts whose module does not say that gate and up lie so.
_EXPERTS = ("llama4", "longcat_flash", "step3p7")

#: Families of which each head of queries has a gate after it.
_GATED = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp")

#: What fused projections are called.
_FUSED = re.compile(
    r"(\w+_)?w?qkvz?(_proj)?|Wqkv|query_key_value|c_attn|att_proj|(to_|linear_)?kv|"
    r"in_proj_(weight|ba)|gate_up(_proj)?|Wi|w1[23]"
)

#: What says that attention goes through latents.
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

#: How many heads of keys and of values linear attention has, and how wide all of each are.
_LINEAR = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")


class TensorRank(NamedTuple):
    """How many ranks tensor parallelism has cut parameters for, and which of them this is."""

    size: int = 1
    rank: int = 0


def outputs_of(module: nn.Module, route: Route) -> Axis:
    """Which axis of the matrices of ``route`` the outputs of their layer are: rows, as in
    nn.Linear, or columns.
    """
    stack = route.matrix_shape is not None and len(route.matrix_shape) == 3
    by_inputs = getattr(module, "is_transposed", family_of(module) == "llama4") is True
    return -1 if route.transposed or stack and by_inputs else -2


def split_as_told(
    route: Route, split: Split | None, module: nn.Module, param: Tensor, tensor: TensorRank
) -> Route:
    """``route`` with the parts that an override names; as it is where that names none.

    Raises:
        RoutingError: they do not fit, or tensor parallelism has cut the parameter through them.
    """
    if split is None:
        return route
    parts = parts_of(route, split, outputs=outputs_of(module, route), tp_size=tensor.size)
    return route if parts is None else _with_parts_here(route, parts, param, tensor)


def split_known(
    model: nn.Module,
    routes: dict[str, Route],
    params: Mapping[str, Tensor],
    tensor: TensorRank,
    *,
    named: Collection[str],
    per_head: bool,
) -> dict[str, Route]:
    """``routes`` with the parts that models are known to have; see the note on what is found.

    Args:
        named: the parameters of which the user has said how they are split.
        per_head: whether heads are matrices of their own, into which :mod:`.routing.heads` cuts
            queries, keys and values that have heads of equal width.
    """
    found, cut = dict(routes), 1 if per_head else None
    for name, route in routes.items():
        module, leaf = attention_of(model, name)
        if (
            name in named
            or route.matrix_shape is None
            or not route.whole
            or per_head
            and leaf in FUSED_NAMES
        ):
            continue
        axis = outputs_of(module, route)
        length = route.matrix_shape[axis] * (tensor.size if route.tp_axis == axis else 1)
        split = _known(module, leaf, length, sources_of(module, model, tensor.size), cut)
        try:
            parts = parts_of(route, split or Split(()), outputs=axis, tp_size=tensor.size)
        except RoutingError:
            parts = None
        if parts and len(parts.each) > 1:
            try:
                found[name] = _with_parts_here(route, parts, params[name], tensor)
            except RoutingError:
                found[name] = route.because(
                    f"whole, for its parts {', '.join(parts.names)} do not lie whole on a "
                    "tensor-parallel rank"
                )
        elif (
            _FUSED.fullmatch(leaf)
            or leaf == "in_proj"
            and (hasattr(module, "conv1d") or hasattr(module, "conv"))
        ):
            found[name] = route.because("fused, not split")
    return found


def _known(
    module: nn.Module, leaf: str, length: int, sources: list[Any], cut: int | None
) -> Split | None:
    """What is known of the parts of a parameter.

    Args:
        module: the one that has it, or the layer whose weight it is.
        leaf: how that calls it.
        length: of the axis.
        sources: see :func:`.routing.heads.sources_of`.
        cut: into how many matrices parts of a head are cut; None for one of all heads.
    """
    family, (heads, keys, width) = family_of(module), heads_of(sources)
    if leaf == "gate_up_proj" and leaf in module._parameters:
        if getattr(module, "has_gate", False) is not True and family not in _EXPERTS:
            return None
        in_turns = not getattr(module, "is_concatenated", True)
        return _split(length // 2, gate=1, up=1) if in_turns else _equal(length, "gate", "up")
    if is_one(_HALVES, module, leaf):
        return _equal(length, *("k", "v") if "kv" in leaf else ("gate", "up"))
    if (
        is_one(QKV, module, leaf)
        or leaf == "in_proj_weight"
        and isinstance(module, nn.MultiheadAttention)
    ):
        by_head = lies_by_head(module)
        if not by_head and heads == keys:
            # Vision models may not say how many heads they have, or count them a stage; an encoder
            # gives no queries.
            return _equal(length, *"qkv"[getattr(module, "is_cross_attention", False) is True :])
        groups = (keys or 1) if by_head else 1
        q, kv = ((number or 0) * width // groups for number in (heads, keys))
        return _split(groups, q=q, k=kv, v=kv)
    if hasattr(module, "kv_b_proj"):
        latent, nope, rope, v = (number_of(sources, (key,)) or 0 for key in _LATENT)
        queries = _split(heads, cut, nope=nope, rope=rope)
        return {
            "q_proj": queries,
            "q_b_proj": queries,
            "kv_b_proj": _split(heads, cut, k=nope, v=v),
            "kv_a_proj_with_mqa": _split(latent=latent, rope=rope),
        }.get(leaf)
    if leaf == "q_proj" and family in _GATED:
        return _split(heads, cut, q=width, gate=width)
    groups, v_heads, keys, values = (number_of([module], (key,)) or 1 for key in _LINEAR)
    k, v = keys // groups, values // groups
    return {
        "in_proj_qkv": _split(q=keys, k=keys, v=values),
        "in_proj_qkvz": _split(groups, q=k, k=k, v=v, z=v),
        "in_proj_ba": _split(groups, b=v_heads // groups, a=v_heads // groups),
    }.get(leaf)


def is_one(names: Collection[str], module: nn.Module, leaf: str) -> bool:
    """Whether what ``module`` calls ``leaf`` is one of ``names``, which are for all families or
    begin with one.
    """
    family = family_of(module)
    return bool(family) and (leaf in names or f"{family}.{leaf}" in names)


def lies_by_head(module: nn.Module) -> bool:
    """Whether queries, keys and values that are in one layer of ``module`` lie by head of keys."""
    return family_of(module) in _BY_HEAD


def _split(groups: int | None = 1, heads: int | None = None, **sizes: int) -> Split:
    return Split(
        tuple((name, Part(size=size, heads=heads)) for name, size in sizes.items() if size),
        groups=groups or 1,
    )


def _equal(length: int, *names: str) -> Split:
    return _split(**dict.fromkeys(names, length // len(names)))


def _with_parts_here(route: Route, parts: Parts, param: Tensor, tensor: TensorRank) -> Route:
    """``route`` with what this rank has of ``parts``, which are those of all tensor shards
    together.

    A shard has whole groups, whole parts, or an equal piece of each part. Matrices that lie whole
    on a rank are nobody else's business; the others are shards of what they are together.

    Raises:
        RoutingError: none of these.
    """
    if tensor.size == 1 or route.tp_axis != parts.axis:
        return with_parts(route, parts)
    runs = runs_of(param, parts.length)
    sizes = tuple(part.size for _, part in parts.each)
    per_head = [part.heads is not None for _, part in parts.each]
    here: Parts | None = None
    whole = all(per_head)
    if runs == (parts.length,) and parts.groups % tensor.size == 0:
        here = Parts(parts.axis, parts.each, parts.groups // tensor.size)
    elif runs == (parts.length,) and parts.groups == 1:
        here, whole = _whole_parts_here(parts, tensor), True
    elif runs == sizes and parts.groups == 1:
        here = _pieces_here(parts, tensor)
    if here is None or any(per_head) and not whole:
        raise RoutingError(
            f"{route.name}: parts {Split(parts.each, groups=parts.groups)!r} do not lie whole on "
            f"{tensor.size} tensor-"
            "parallel ranks, which need whole groups, whole parts, or an equal piece of each part, "
            "and heads for all "
            'parts or for none; leave it whole with "split": {} in layerwise.overrides'
        )
    return with_parts(replace(route, tp_axis=None) if whole else route, here)


def _pieces_here(parts: Parts, tensor: TensorRank) -> Parts | None:
    """What each rank has of every part; None where those are no equal pieces, or cut heads."""
    if any(
        part.size % tensor.size or part.heads and part.heads % tensor.size for _, part in parts.each
    ):
        return None
    return Parts(
        parts.axis,
        tuple(
            (
                name,
                Part(size=part.size // tensor.size, heads=part.heads and part.heads // tensor.size),
            )
            for name, part in parts.each
        ),
    )


def _whole_parts_here(parts: Parts, tensor: TensorRank) -> Parts | None:
    """The parts that lie on this rank, if ranks have as many, of the same sizes in the same order,
    and none is cut.
    """
    count, rest = divmod(len(parts.each), tensor.size)
    of_ranks = [parts.each[count * rank : count * (rank + 1)] for rank in range(tensor.size)]
    if rest or any(
        [part for _, part in each] != [part for _, part in of_ranks[0]] for each in of_ranks
    ):
        return None
    # Ranks must agree on what they hold, and so on what that is called.
    return Parts(
        parts.axis,
        tuple(
            ("_or_".join(each[i][0] for each in of_ranks), part)
            for i, (_, part) in enumerate(of_ranks[0])
        ),
    )
