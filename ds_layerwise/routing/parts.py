"""Named parts of fused matrices: which parameters have them, by an override or by what the model is.

Note: what is found without being told
    The fused projections of transformers, by the names of their modules and the numbers in ``model.config``:

    * queries, keys and values, by ``model_type``, see :data:`QKV`: one after the other, or by head;
    * ``gate_up_proj``, a linear layer: gate and up; and of experts in one tensor, as their module says it is laid out;
    * multi-head latent attention: of the queries, and of what all heads share, the dimensions without and with
      rotation; of what comes out of the latent, keys and values.

    A parameter of another size than the numbers make stays whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.routes import Axis, Route, parts_of, with_parts
from ds_layerwise.recipes.parts import Part, Parts, Split
from ds_layerwise.routing.heads import HEADS, WIDTHS, number_of
from ds_layerwise.routing.tensor_marks import runs_of

#: By model type, the fused projection, and whether its queries, keys and values lie head by head.
QKV = {"gpt2": ("c_attn", False), "openai-gpt": ("c_attn", False), "phi3": ("qkv_proj", False), "mpt": ("Wqkv", False),
        "gpt_neox": ("query_key_value", True), "bloom": ("query_key_value", True),
        "persimmon": ("query_key_value", True)}

#: Of a config, what says that attention goes through latents.
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class TensorRank(NamedTuple):
    """How many ranks tensor parallelism has cut parameters for, and which of them this is."""

    size: int = 1
    rank: int = 0


def outputs_of(module: nn.Module, route: Route) -> Axis:
    """Which axis of the matrices of ``route`` the outputs of their layer are: rows, as in nn.Linear, or columns."""
    stack = route.matrix_shape is not None and len(route.matrix_shape) == 3
    return -1 if route.transposed or stack and getattr(module, "is_transposed", False) is True else -2


def split_as_told(route: Route, split: Split | None, module: nn.Module, param: Tensor, tensor: TensorRank) -> Route:
    """``route`` with the parts that an override names; as it is where that names none.

    Raises:
        RoutingError: they do not fit, or tensor parallelism has cut the parameter through them.
    """
    if split is None:
        return route
    parts = parts_of(route, split, outputs=outputs_of(module, route), tp_size=tensor.size)
    return route if parts is None else _with_parts_here(route, parts, param, tensor)


def split_known(config: Any, routes: dict[str, Route], params: Mapping[str, Tensor], modules: Mapping[str, nn.Module],
                tensor: TensorRank, *, named: Collection[str], per_head: bool) -> dict[str, Route]:
    """``routes`` with the parts that transformers' models are known to have; see the note on what is found.

    Args:
        config: the model's; None if it has none.
        modules: by parameter, the module that holds it.
        named: the parameters of which the user has said how they are split.
        per_head: whether heads are matrices of their own, into which :mod:`.routing.heads` cuts queries, keys and
            values that have heads of equal width.
    """
    config = getattr(config, "text_config", config)
    found = dict(routes)
    for name, route in routes.items():
        if name in named or route.matrix_shape is None or not route.whole:
            continue
        split = _known(config, name, route, modules[name], routes, per_head)
        if split is None:
            continue
        try:
            parts = parts_of(route, split, outputs=outputs_of(modules[name], route), tp_size=tensor.size)
        except RoutingError:
            continue
        try:
            found[name] = route if parts is None else _with_parts_here(route, parts, params[name], tensor)
        except RoutingError:
            found[name] = route.because(f"whole, for its parts {', '.join(dict(split.parts))} do not lie whole on a "
                                        "tensor-parallel rank")
    return found


def _known(config: Any, name: str, route: Route, module: nn.Module, routes: Mapping[str, Route],
           per_head: bool) -> Split | None:
    """What is known of the parts of the parameter ``name``."""
    *path, last = name.split(".")
    if last == "gate_up_proj" and getattr(module, "has_gate", False) is True:
        return _experts(route, module)
    if last != "weight" or not path or getattr(config, "model_type", None) is None:
        return None
    leaf, shape = path[-1], route.matrix_shape
    if leaf == "gate_up_proj" and shape is not None and len(shape) == 2 and isinstance(module, nn.Linear):
        return _split(gate=shape[0] // 2, up=shape[0] // 2)
    qkv, by_head = QKV.get(config.model_type, ("", False))
    if leaf == qkv and not per_head:
        return _qkv(config, route, by_head)
    beside = ".".join([*path[:-1], "kv_b_proj", "weight"])
    return next((split for its, split in _latent(config, per_head) if its == leaf), None) if beside in routes else None


def _split(groups: int = 1, **sizes: int | Part) -> Split:
    return Split(tuple((name, size if isinstance(size, Part) else Part(size=size)) for name, size in sizes.items()
                       if isinstance(size, Part) or size), groups=groups)


def _experts(route: Route, module: nn.Module) -> Split | None:
    """Gate and up of experts in one tensor, whose module says whether they lie one after the other, or in turns."""
    if route.matrix_shape is None or len(route.matrix_shape) != 3:
        return None
    half = route.matrix_shape[outputs_of(module, route)] // 2
    return _split(gate=half, up=half) if getattr(module, "is_concatenated", True) else _split(half, gate=1, up=1)


def _qkv(config: Any, route: Route, by_head: bool) -> Split | None:
    """Queries, keys and values; keys and values alone where an encoder gives these."""
    heads = number_of(config, HEADS)
    width = number_of(config, ("head_dim",)) or (number_of(config, WIDTHS) or 0) // (heads or 1)
    if not heads or not width or route.matrix_shape is None:
        return None
    if by_head:
        return _split(heads, q=width, k=width, v=width)
    q, kv = heads * width, (number_of(config, ("num_key_value_heads",)) or heads) * width
    outputs = route.matrix_shape[-1 if route.transposed else -2]
    return _split(k=kv, v=kv) if outputs == 2 * kv else _split(q=q, k=kv, v=kv)


def _latent(config: Any, per_head: bool) -> Iterator[tuple[str, Split]]:
    """By projection of multi-head latent attention, its parts."""
    heads, sizes = number_of(config, HEADS), [number_of(config, (key,)) for key in _LATENT]
    if heads is None or None in sizes:
        return
    latent, nope, rope, v = (size or 0 for size in sizes)

    def of_heads(**widths: int) -> Split:
        return _split(heads, **{name: Part(size=width, heads=1 if per_head else None)
                                for name, width in widths.items()})

    yield "q_proj", of_heads(nope=nope, rope=rope)
    yield "q_b_proj", of_heads(nope=nope, rope=rope)
    yield "kv_b_proj", of_heads(k=nope, v=v)
    yield "kv_a_proj_with_mqa", _split(latent=latent, rope=rope)


def _with_parts_here(route: Route, parts: Parts, param: Tensor, tensor: TensorRank) -> Route:
    """``route`` with what this rank has of ``parts``, which are those of all tensor shards together.

    A shard has whole groups, whole parts, or an equal piece of each part. Matrices that lie whole on a rank are nobody
    else's business; the others are shards of what they are together.

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
            f"{route.name}: parts {Split(parts.each, groups=parts.groups)!r} do not lie whole on {tensor.size} tensor-"
            "parallel ranks, which need whole groups, whole parts, or an equal piece of each part, and heads for all "
            "parts or for none; leave it whole with \"split\": {} in layerwise.overrides")
    return with_parts(route.with_axis(None) if whole else route, here)


def _pieces_here(parts: Parts, tensor: TensorRank) -> Parts | None:
    """What each rank has of every part; None where those are no equal pieces, or cut heads."""
    if any(part.size % tensor.size or part.heads and part.heads % tensor.size for _, part in parts.each):
        return None
    return Parts(parts.axis, tuple((name, Part(size=part.size // tensor.size,
                                               heads=part.heads and part.heads // tensor.size))
                                   for name, part in parts.each))


def _whole_parts_here(parts: Parts, tensor: TensorRank) -> Parts | None:
    """The parts that lie on this rank, if ranks have as many, of the same sizes in the same order, and none is cut."""
    count, rest = divmod(len(parts.each), tensor.size)
    of_ranks = [parts.each[count * rank:count * (rank + 1)] for rank in range(tensor.size)]
    if rest or any([part for _, part in each] != [part for _, part in of_ranks[0]] for each in of_ranks):
        return None
    # Ranks must agree on what they hold, and so on what that is called.
    return Parts(parts.axis, tuple(("_or_".join(each[i][0] for each in of_ranks), part)
                                   for i, (_, part) in enumerate(of_ranks[0])))
