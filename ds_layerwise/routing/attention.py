"""Attention modules: which parameters give their queries and keys, and which outputs belong to
which head.

Note: what is found without being told
    Modules of transformers, those with a ``config`` and "Attention" in the name of their class that
    have no other such module inside, by the names of their layers: separate queries and keys, see
    :data:`_SEPARATE`; the fused projections that :mod:`.routing.find_fused_parts` knows; multi-head
    latent attention, which has ``kv_b_proj``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.routes.group_defaults import QK_NORM
from ds_layerwise.recipes.targets.qk_clip_settings import AttentionEntry, Outputs, QkClip, Run
from ds_layerwise.routing.find_fused_parts import QKV, is_one, lies_by_head
from ds_layerwise.routing.heads import heads_of, is_transposed, number_of, sources_of
from ds_layerwise.routing.tensor_marks import axis_of, heads_here, is_cut

#: What model families call the layers of queries and of keys.
_SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q", "k"),
    ("wq", "wk"),
    ("q_lin", "k_lin"),
    ("linear_q", "linear_k"),
)

_WAY_OUT = (
    "say where queries and keys are in layerwise.qk_clip.attention, which then names every module "
    "to be clipped"
)


class _Unfit(RoutingError):
    """A module of which somebody, or the list of what is known, says what it is not."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A parameter that gives queries or keys."""

    name: str
    outputs: Outputs
    axis: Literal[0, 1] = 0
    """Which axis of its shape the outputs are."""


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module."""

    name: str
    module: nn.Module
    heads: int | None = None
    """Of queries, on this rank; None if nobody has to know."""
    units: int = 1
    """Into how many groups of heads these fall that are scaled alike, in their order."""
    scaled: tuple[Scaled, ...] = ()
    """What is scaled; nothing where all of it is frozen."""


def attentions_of(
    model: nn.Module,
    clip: QkClip | None,
    *,
    trained: Collection[str],
    tp_size: int = 1,
) -> list[Attention]:
    """The attention modules of ``model`` in its order.

    Args:
        clip: what is to be clipped; None to look at logits alone.
        trained: the parameters that are trained.
        tp_size: how many ranks tensor parallelism has cut parameters for.

    Raises:
        RoutingError: an attention module is not understood, or scaling its queries and keys would
            not scale its logits.
    """
    if clip is None:
        return [Attention(path, module) for path, module in _of_transformers(model)]
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    found, owner = [], dict[str, str]()
    for path, module, entry in _entries(model, clip, tp_size):
        try:
            attention = _attention(path, module, entry, names, trained, tp_size)
        except _Unfit as error:
            way_out = (
                f"the entry {entry.name!r} of layerwise.qk_clip.attention means it; correct that, "
                "or let its name fit attention modules alone, as 'blocks.*.attn' does"
                if clip.attention
                else _WAY_OUT
            )
            raise RoutingError(f"{error}; {way_out}") from None
        for each in attention.scaled:
            if (other := owner.setdefault(each.name, path)) != path:
                raise RoutingError(
                    f"layerwise.qk_clip: {each.name} gives queries or keys of {other} and of "
                    f"{path}, whose logits cannot be scaled each for itself; leave qk_clip out"
                )
        found.append(attention)
    return found


def matched(model: nn.Module, clip: QkClip | None) -> set[int]:
    """The entries of ``clip``, by index, that are for a module of ``model``."""
    return {
        i
        for i, entry in enumerate(clip.attention if clip else ())
        if any(fnmatchcase(path, entry.name) for path, _ in _inside(model))
    }


def _inside(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but the model itself, which has no path."""
    return ((path, module) for path, module in model.named_modules() if path)


def _of_transformers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    found = {
        path: module
        for path, module in model.named_modules()
        if "Attention" in type(module).__name__
        and getattr(getattr(module, "config", None), "model_type", None) is not None
    }
    for path, module in found.items():
        inside = f"{path}." if path else ""
        if not any(other != path and other.startswith(inside) for other in found):
            yield path, module


def _entries(
    model: nn.Module, clip: QkClip, tp_size: int
) -> Iterator[tuple[str, nn.Module, AttentionEntry]]:
    """The modules that are to be clipped, and where each has its queries and keys."""
    if not clip.attention:
        for path, module in _of_transformers(model):
            yield path, module, _known(path, module, tp_size)
        return
    for path, module in _inside(model):
        entries = [entry for entry in clip.attention if fnmatchcase(path, entry.name)]
        if len(entries) > 1:
            raise RoutingError(
                f"layerwise.qk_clip.attention has {len(entries)} entries for {path}: "
                f"{', '.join(repr(entry.name) for entry in entries)}; narrow a pattern"
            )
        if entries:
            yield path, module, entries[0]


def _known(path: str, module: nn.Module, tp_size: int) -> AttentionEntry:
    """Where an attention module of transformers has its queries and keys.

    Raises:
        RoutingError: nobody knows.
    """
    config: Any = module.config
    layers = {
        name
        for name, child in module.named_children()
        if isinstance(getattr(child, "weight", None), Tensor)
    }
    heads, kv_heads, _ = heads_of(sources_of(module, module, tp_size))
    why = "the number of its heads is not told"
    if heads is not None:
        if "kv_b_proj" in layers:
            rope, values = (
                number_of((module, config), (key,)) for key in ("qk_rope_head_dim", "v_head_dim")
            )
            return AttentionEntry(
                name=path,
                heads=heads,
                q="q_b_proj" if "q_b_proj" in layers else "q_proj",
                k="kv_b_proj",
                rotated=rope,
                values=values,
            )
        for q, k in _SEPARATE:
            if q in layers and k in layers:
                return AttentionEntry(
                    name=path, heads=heads, kv_heads=_kv_heads(module, q, k, heads), q=q, k=k
                )
        for layer in layers:
            if is_one(QKV, module, layer) and not getattr(module, "is_cross_attention", False):
                by_head = lies_by_head(module)
                return AttentionEntry(
                    name=path, heads=heads, kv_heads=kv_heads, qkv=layer, by_head=by_head
                )
        known = ", ".join(sorted(layers)) or "no layers"
        why = f"what gives its queries and keys is not known; it has {known}"
    raise RoutingError(
        f"layerwise.qk_clip does not understand {path}, {type(module).__name__}: {why}; {_WAY_OUT}"
    )


def _kv_heads(module: nn.Module, q: str, k: str, heads: int) -> int:
    """The heads of keys, which are as wide as those of queries."""
    outputs = [_length(getattr(module, layer), getattr(module, layer).weight) for layer in (q, k)]
    # Where these do not divide, the sizes do not fit, which is said later.
    return max(1, heads * outputs[1] // outputs[0])


def _length(layer: nn.Module, weight: Tensor) -> int:
    return weight.shape[1 if is_transposed(layer, weight) else 0]


def _attention(
    path: str,
    module: nn.Module,
    entry: AttentionEntry,
    names: Mapping[Tensor, str],
    trained: Collection[str],
    tp_size: int,
) -> Attention:
    """What ``entry`` says of ``module``, with names of parameters and sizes on this rank."""
    for child, _ in module.named_children():
        normed = getattr(module, child)
        if QK_NORM.fullmatch(child) and next(normed.parameters(), None) is not None:
            raise RoutingError(
                f"layerwise.qk_clip: {path}.{child} norms queries or keys, so that scaling the "
                "weights before it leaves logits as they are, and they are bounded without; leave "
                "qk_clip out, or name other modules in layerwise.qk_clip.attention"
            )
    layers = [
        _layer(path, module, where) for where in (entry.q, entry.k, entry.qkv) if where is not None
    ]
    if entry.kv_heads is not None and entry.heads % entry.kv_heads:
        raise _Unfit(
            f"layerwise.qk_clip does not understand {path}: {entry.kv_heads} heads of keys do not "
            f"divide {entry.heads} of queries"
        )
    ways, kv_heads = 1, entry.kv_heads or entry.heads
    if tp_size > 1:
        for (_, weight), heads in zip(layers, (entry.heads, kv_heads)):
            _check_cut(names[weight], weight, kv_heads if entry.qkv else heads, entry, tp_size)
        ways = tp_size
    heads, kv_heads = entry.heads // ways, kv_heads // ways
    outputs = _outputs(
        path, entry, [_length(layer, weight) for layer, weight in layers], heads, kv_heads
    )
    scaled = tuple(
        each
        for (layer, weight), its in zip(layers, outputs, strict=True)
        for each in _scaled(path, layer, weight, its, names)
    )
    frozen = [each.name for each in scaled if each.name not in trained]
    if frozen and len(frozen) < len(scaled):
        raise RoutingError(
            f"layerwise.qk_clip: {frozen[0]} is not trained, and others that give queries and keys "
            f"of {path} are; train all of them or none, or leave qk_clip out"
        )
    return Attention(path, module, heads, kv_heads, () if frozen else scaled)


def _layer(path: str, module: nn.Module, where: str) -> tuple[nn.Module, nn.Parameter]:
    """The layer at ``where``, and its weight; of a bare weight, the module that holds it.

    Raises:
        RoutingError: there is nothing like that.
    """
    *inner, last = where.split(".")
    try:
        holder = module.get_submodule(".".join(inner))
        found = getattr(holder, last)
    except AttributeError:
        found = None
    if isinstance(found, nn.Parameter) and found.dim() == 2:
        return holder, found
    weight = getattr(found, "weight", None)
    if isinstance(found, nn.Module) and isinstance(weight, nn.Parameter) and weight.dim() == 2:
        extra = [
            name
            for name, param in found.named_parameters()
            if param is not weight and param is not getattr(found, "bias", None)
        ]
        if extra:
            raise RoutingError(
                f"layerwise.qk_clip: {path}.{where} has {extra[0]} beside a weight and a bias, so "
                "that scaling those does not scale what it gives; leave qk_clip out"
            )
        return found, weight
    raise _Unfit(f"layerwise.qk_clip: {path} has no layer or matrix {where}")


def _check_cut(name: str, weight: Tensor, heads: int, entry: AttentionEntry, tp_size: int) -> None:
    """Refuse what tensor parallelism has not cut into whole heads.

    Raises:
        RoutingError: names it.
    """
    fused = entry.qkv is not None and not entry.by_head
    if not is_cut(weight) or fused or axis_of(name, weight, tuple(weight.shape), tp_size) != -2:
        raise RoutingError(
            f"layerwise.qk_clip: {name} has to lie on {tp_size} tensor-parallel ranks as whole "
            "heads, rows of a matrix that has queries and keys head by head, or one of the two; "
            "leave qk_clip out"
        )
    heads_here(name, weight, heads, tp_size)


def _outputs(
    path: str, entry: AttentionEntry, lengths: list[int], heads: int, kv_heads: int
) -> list[Outputs]:
    """What the outputs of each layer are.

    Raises:
        RoutingError: they are not so many.
    """
    if entry.qkv is not None:
        width = lengths[0] // (heads + 2 * kv_heads)
        groups = kv_heads if entry.by_head else 1
        of_keys = kv_heads // groups
        outputs = [
            Outputs(
                (
                    Run("query", heads // groups, width),
                    Run("key", of_keys, width),
                    Run("other", of_keys, width),
                ),
                groups,
            )
        ]
        alike = True
    else:
        rotated, values = entry.rotated or 0, entry.values or 0
        query, key = lengths[0] // heads - rotated, lengths[1] // kv_heads - values
        alike = query == key and query > 0
        outputs = [
            _by_head(heads, Run("query", 1, query), Run("rotated", 1, rotated)),
            _by_head(kv_heads, Run("key", 1, key), Run("other", 1, values)),
        ]
    if not alike or [each.length for each in outputs] != lengths or not all(lengths):
        layers = ", ".join(where for where in (entry.q, entry.k, entry.qkv) if where is not None)
        raise _Unfit(
            f"layerwise.qk_clip does not understand {path}: {heads} heads of queries and "
            f"{kv_heads} of keys do not fit {' and '.join(map(str, lengths))} outputs of {layers}"
        )
    return outputs


def _by_head(heads: int, *runs: Run) -> Outputs:
    some = tuple(run for run in runs if run.width)
    return (
        Outputs(some, heads)
        if len(some) > 1
        else Outputs((replace(some[0], heads=heads),))
        if some
        else Outputs(())
    )


def _scaled(
    path: str, layer: nn.Module, weight: nn.Parameter, outputs: Outputs, names: Mapping[Tensor, str]
) -> Iterator[Scaled]:
    """A weight with its bias, if it has one."""
    own = (
        next(name for name, param in layer._parameters.items() if param is weight)
        if any(param is weight for param in layer._parameters.values())
        else "weight"
    )
    bias = getattr(layer, own.replace("weight", "bias"), None) if "weight" in own else None
    yield Scaled(names[weight], outputs, 1 if is_transposed(layer, weight) else 0)
    if isinstance(bias, nn.Parameter):
        if bias.numel() != outputs.length:
            raise _Unfit(
                f"layerwise.qk_clip does not understand {path}: {names[bias]} has {bias.numel()} "
                f"elements, and {names[weight]} {outputs.length} outputs"
            )
        yield Scaled(names[bias], outputs)
    if getattr(weight, "allreduce", True) is False:
        raise RoutingError(
            f"layerwise.qk_clip: {names[weight]} is an expert's, of which ranks have different "
            "ones; leave qk_clip out"
        )
