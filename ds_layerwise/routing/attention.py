"""Attention modules: the parameters that make queries and keys, and the outputs of each head.

Note: which modules are found without configuration
    Modules of transformers with a ``config`` and "Attention" in the name of their class, and no
    other such module inside, by the names of their layers: separate queries and keys, see
    :data:`.model_names.QUERY_KEY_PAIRS`; the fused projections that
    :mod:`.routing.find_fused_parts` knows; multi-head latent attention, which has ``kv_b_proj``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from ds_layerwise.errors import RoutingError
from ds_layerwise.plan.routes.group_defaults import QK_NORM
from ds_layerwise.recipes.targets.model_names import QKV, QUERY_KEY_PAIRS
from ds_layerwise.recipes.targets.qk_clip_settings import AttentionEntry, Outputs, QkClip, Run
from ds_layerwise.routing.find_fused_parts import is_one, lies_by_head
from ds_layerwise.routing.heads import heads_of, is_transposed, number_of, sources_of
from ds_layerwise.routing.tensor_marks import axis_of, heads_here, is_cut

_WAY_OUT = (
    "say where queries and keys are in layerwise.qk_clip.attention, which then names every module "
    "to be clipped"
)


class _Unfit(RoutingError):
    """A module does not match its entry, or any known kind."""


@dataclass(frozen=True)
class Scaled:
    """A parameter that makes queries or keys."""

    name: str
    outputs: Outputs
    axis: Literal[0, 1] = 0
    """The axis of its shape with the outputs."""


@dataclass(frozen=True)
class Attention:
    """An attention module."""

    name: str
    module: nn.Module
    heads: int | None = None
    """The number of query heads on this rank; None if it is not needed."""
    units: int = 1
    """The number of groups of consecutive heads. The heads of a group are scaled by one factor."""
    scaled: tuple[Scaled, ...] = ()
    """The parameters to scale; empty if all of them are frozen."""


def attentions_of(
    model: nn.Module,
    clip: QkClip | None,
    *,
    trained: Collection[str],
    tp_size: int = 1,
) -> list[Attention]:
    """Return the attention modules of ``model`` in model order.

    Args:
        clip: the settings of QK-clip; None to only measure logits.
        trained: the parameters that are trained.
        tp_size: the number of ranks that tensor parallelism has cut parameters for.

    Raises:
        RoutingError: an attention module is of an unknown kind, or scaling its queries and keys
            would not scale its logits.
    """
    if clip is None:
        return [Attention(path, module) for path, module in _of_transformers(model)]
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    attentions = []
    owners: dict[str, str] = {}
    for path, module, entry in _entries(model, clip, tp_size):
        try:
            attention = _attention(path, module, entry, names, trained, tp_size)
        except _Unfit as error:
            way_out = _WAY_OUT
            if clip.attention:
                way_out = (
                    f"it matches the entry {entry.name!r} of layerwise.qk_clip.attention; correct "
                    "the entry, or make its name match only attention modules, like "
                    "'blocks.*.attn'"
                )
            raise RoutingError(f"{error}; {way_out}") from None
        for scaled in attention.scaled:
            if (owner := owners.setdefault(scaled.name, path)) != path:
                raise RoutingError(
                    f"layerwise.qk_clip: {scaled.name} makes queries or keys for both {owner} and "
                    f"{path}, whose logits cannot be scaled separately; leave qk_clip out"
                )
        attentions.append(attention)
    return attentions


def matched(model: nn.Module, clip: QkClip | None) -> set[int]:
    """Return the indices of the entries of ``clip`` that match a module of ``model``."""
    found = set()
    for path, _ in _inside(model):
        for i, entry in enumerate(clip.attention if clip else ()):
            if fnmatchcase(path, entry.name):
                found.add(i)
    return found


def _inside(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules except the model itself, which has no path."""
    return list(model.named_modules())[1:]


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
    """Yield the modules to clip, each with its entry, which locates its queries and keys."""
    if not clip.attention:
        for path, module in _of_transformers(model):
            yield path, module, _known(path, module, tp_size)
        return
    for path, module in _inside(model):
        entries = []
        for entry in clip.attention:
            if fnmatchcase(path, entry.name):
                entries.append(entry)
        if len(entries) > 1:
            raise RoutingError(
                f"layerwise.qk_clip.attention has {len(entries)} entries for {path}: "
                f"{', '.join(repr(entry.name) for entry in entries)}; narrow a pattern"
            )
        if entries:
            yield path, module, entries[0]


def _known(path: str, module: nn.Module, tp_size: int) -> AttentionEntry:
    """Return the entry of an attention module of transformers, which locates its queries and keys.

    Raises:
        RoutingError: its kind is unknown.
    """
    layers = set()
    for name, child in module.named_children():
        if isinstance(getattr(child, "weight", None), Tensor):
            layers.add(name)
    heads, kv_heads, _ = heads_of(sources_of(module, module, tp_size))
    where = None
    why = "the number of its heads is not told"
    if heads is not None:
        where = _latents(module, layers) or _pair(module, layers, heads)
        where = where or _fused(module, layers, kv_heads)
        known = ", ".join(sorted(layers)) or "no layers"
        why = f"what gives its queries and keys is not known; it has {known}"
    if heads is None or where is None:
        raise RoutingError(
            f"layerwise.qk_clip does not understand {path}, {type(module).__name__}: {why}; "
            f"{_WAY_OUT}"
        )
    return AttentionEntry(name=path, heads=heads, **where)


def _latents(module: nn.Module, layers: Collection[str]) -> dict[str, Any] | None:
    if "kv_b_proj" not in layers:
        return None
    sources = (module, module.config)
    return {
        "q": "q_b_proj" if "q_b_proj" in layers else "q_proj",
        "k": "kv_b_proj",
        "rotated": number_of(sources, ("qk_rope_head_dim",)),
        "values": number_of(sources, ("v_head_dim",)),
    }


def _pair(module: nn.Module, layers: Collection[str], heads: int) -> dict[str, Any] | None:
    for q, k in QUERY_KEY_PAIRS:
        if q in layers and k in layers:
            layers_of_both = (getattr(module, q), getattr(module, k))
            queries, keys = (_length(layer, layer.weight) for layer in layers_of_both)
            # Key heads are as wide as query heads. If the division leaves a rest, the sizes do not
            # fit, and a later check raises the error.
            return {"q": q, "k": k, "kv_heads": max(1, heads * keys // queries)}
    return None


def _fused(
    module: nn.Module, layers: Collection[str], kv_heads: int | None
) -> dict[str, Any] | None:
    for layer in layers:
        if is_one(QKV, module, layer) and not getattr(module, "is_cross_attention", False):
            return {"qkv": layer, "kv_heads": kv_heads, "by_head": lies_by_head(module)}
    return None


def _length(layer: nn.Module, weight: Tensor) -> int:
    return weight.shape[int(is_transposed(layer, weight))]


def _attention(
    path: str,
    module: nn.Module,
    entry: AttentionEntry,
    names: Mapping[Tensor, str],
    trained: Collection[str],
    tp_size: int,
) -> Attention:
    """Return ``module`` as ``entry`` describes it, with parameter names and sizes on this rank.

    Raises:
        RoutingError: scaling would not scale its logits, or the entry does not fit.
    """
    _refuse_norms(path, module)
    layers = [_layer(path, module, where) for where in _paths(entry)]
    kv_heads = entry.kv_heads or entry.heads
    if entry.heads % kv_heads:
        raise _Unfit(
            f"layerwise.qk_clip does not understand {path}: {kv_heads} heads of keys do not divide "
            f"{entry.heads} of queries"
        )
    if tp_size > 1:
        counts = [kv_heads] if entry.qkv else [entry.heads, kv_heads]
        for (_, weight), count in zip(layers, counts, strict=True):
            _check_cut(names[weight], weight, count, entry, tp_size)
    heads = entry.heads // tp_size
    kv_heads //= tp_size
    lengths = [_length(layer, weight) for layer, weight in layers]
    scaled: list[Scaled] = []
    for (layer, weight), outputs in zip(
        layers, _outputs(path, entry, lengths, heads, kv_heads), strict=True
    ):
        scaled += _scaled(path, layer, weight, outputs, names)
    frozen = [each.name for each in scaled if each.name not in trained]
    if frozen and len(frozen) < len(scaled):
        raise RoutingError(
            f"layerwise.qk_clip: {frozen[0]} is not trained, and others that give queries and keys "
            f"of {path} are; train all of them or none, or leave qk_clip out"
        )
    if frozen:
        scaled = []
    return Attention(path, module, heads, kv_heads, tuple(scaled))


def _refuse_norms(path: str, module: nn.Module) -> None:
    for child, normed in module.named_children():
        if QK_NORM.fullmatch(child) and next(normed.parameters(), None) is not None:
            raise RoutingError(
                f"layerwise.qk_clip: {path}.{child} normalises queries or keys, so scaling the "
                "weights before it does not change logits, which are bounded anyway; leave "
                "qk_clip out, or name other modules in layerwise.qk_clip.attention"
            )


def _paths(entry: AttentionEntry) -> list[str]:
    found = []
    for where in (entry.q, entry.k, entry.qkv):
        if where is not None:
            found.append(where)
    return found


def _layer(path: str, module: nn.Module, where: str) -> tuple[nn.Module, nn.Parameter]:
    """Return the layer at ``where``, and its weight; for a bare weight, the module that holds it.

    Raises:
        RoutingError: it does not exist.
    """
    inner, _, last = where.rpartition(".")
    try:
        holder = module.get_submodule(inner)
        layer = getattr(holder, last)
    except AttributeError:
        layer = None
    if isinstance(layer, nn.Parameter) and layer.dim() == 2:
        return holder, layer
    weight = getattr(layer, "weight", None)
    if not (
        isinstance(layer, nn.Module) and isinstance(weight, nn.Parameter) and weight.dim() == 2
    ):
        raise _Unfit(f"layerwise.qk_clip: {path} has no layer or matrix {where}")
    for name, param in layer.named_parameters():
        if param is not weight and param is not getattr(layer, "bias", None):
            raise RoutingError(
                f"layerwise.qk_clip: {path}.{where} has {name} in addition to weight and bias, so "
                "scaling these does not scale its output; leave qk_clip out"
            )
    return layer, weight


def _check_cut(name: str, weight: Tensor, heads: int, entry: AttentionEntry, tp_size: int) -> None:
    """Refuse a weight that tensor parallelism has not cut into whole heads.

    Raises:
        RoutingError: names the weight.
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
    """Return the outputs of each layer.

    Raises:
        RoutingError: their number differs from ``lengths``.
    """
    if entry.qkv is not None:
        width = lengths[0] // (heads + 2 * kv_heads)
        groups = 1
        if entry.by_head:
            groups = kv_heads
        keys = kv_heads // groups
        key_run = Run("key", keys, width)
        runs = (Run("query", heads // groups, width), key_run, replace(key_run, role="other"))
        outputs = [Outputs(runs, groups)]
        fit = width > 0
    else:
        rotated = entry.rotated or 0
        values = entry.values or 0
        query = lengths[0] // heads - rotated
        key = lengths[1] // kv_heads - values
        fit = query == key > 0
        outputs = [
            _by_head(heads, Run("query", 1, query), Run("rotated", 1, rotated)),
            _by_head(kv_heads, Run("key", 1, key), Run("other", 1, values)),
        ]
    if not fit or [each.length for each in outputs] != lengths:
        raise _Unfit(
            f"layerwise.qk_clip does not understand {path}: {heads} heads of queries and "
            f"{kv_heads} of keys do not fit {' and '.join(map(str, lengths))} outputs of "
            f"{', '.join(_paths(entry))}"
        )
    return outputs


def _by_head(heads: int, first: Run, second: Run) -> Outputs:
    if second.width:
        return Outputs((first, second), heads)
    return Outputs((replace(first, heads=heads),))


def _scaled(
    path: str, layer: nn.Module, weight: nn.Parameter, outputs: Outputs, names: Mapping[Tensor, str]
) -> Iterator[Scaled]:
    """Yield the weight of a layer, and its bias, if it has one."""
    own = next((name for name, param in layer._parameters.items() if param is weight), "weight")
    bias = None
    if "weight" in own:
        bias = getattr(layer, own.replace("weight", "bias"), None)
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
