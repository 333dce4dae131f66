"""Attention modules: the parameters that make queries and keys, and the outputs of each head."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ds_layerwise.config.qk_clip_settings import AttentionEntry, QkClip
from ds_layerwise.errors import RoutingError
from ds_layerwise.routing.fused_parts import is_transposed
from ds_layerwise.routing.module_of import QK_NORM, config_value
from ds_layerwise.routing.tensor_marks import axis_of, heads_here, is_cut


class _Unfit(RoutingError):
    """A module does not match its entry."""


class Outputs(NamedTuple):
    """The outputs of a layer, as consecutive blocks."""

    widths: tuple[int, ...]
    """The number of outputs of each block."""
    units: tuple[int, ...]
    """The group of heads that each block belongs to."""
    powers: tuple[float, ...]
    """The power of eta by which each block is multiplied."""


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
    entry: str = ""
    """The name of its entry; empty if it needs none."""


def attentions_of(
    model: nn.Module,
    clip: QkClip | None,
    *,
    trained: Collection[str],
    tp_size: int = 1,
) -> list[Attention]:
    """Return the attention modules of ``model`` in model order; to only measure logits, all modules
    of transformers, which tell no more.

    Args:
        clip: the settings of QK-clip; None to only measure logits.
        trained: the parameters that are trained.
        tp_size: the number of ranks that tensor parallelism has cut parameters for.

    Raises:
        RoutingError: an entry does not fit a module, or scaling its queries and keys would not
            scale its logits.
    """
    attentions = []
    if clip is None:
        for path, module in model.named_modules():
            if implementation_of(module) is not None:
                attentions.append(Attention(path, module))
        return attentions
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    owners: dict[str, str] = {}
    # The model itself has no path.
    for path, module in list(model.named_modules())[1:]:
        entries = [entry for entry in clip.attention if fnmatchcase(path, entry.name)]
        if len(entries) > 1:
            raise RoutingError(
                f"layerwise.qk_clip.attention has {len(entries)} entries for {path}: "
                f"{', '.join(repr(entry.name) for entry in entries)}; narrow a pattern"
            )
        if not entries:
            continue
        entry = entries[0]
        try:
            attention = _attention(path, module, entry, names, trained, tp_size, clip.alpha)
        except _Unfit as error:
            raise RoutingError(
                f"{error}; it matches the entry {entry.name!r} of layerwise.qk_clip.attention; "
                "correct the entry, or make its name match only attention modules, like "
                "'blocks.*.attn'"
            ) from None
        for scaled in attention.scaled:
            if (owner := owners.setdefault(scaled.name, path)) != path:
                raise RoutingError(
                    f"layerwise.qk_clip: {scaled.name} makes queries or keys for both {owner} and "
                    f"{path}, whose logits cannot be scaled separately; leave qk_clip out"
                )
        attentions.append(attention)
    return attentions


def implementation_of(module: nn.Module) -> Any:
    """Return the attention implementation of a module of transformers; None for other modules."""
    return config_value(getattr(module, "config", None), "_attn_implementation")


def _attention(
    path: str,
    module: nn.Module,
    entry: AttentionEntry,
    names: Mapping[Tensor, str],
    trained: Collection[str],
    tp_size: int,
    alpha: float,
) -> Attention:
    """Return ``module`` as ``entry`` describes it, with parameter names and sizes on this rank.

    Raises:
        RoutingError: scaling would not scale its logits, or the entry does not fit.
    """
    _refuse_norms(path, module)
    layers = [_layer(path, module, where) for where in entry.paths]
    kv_heads = entry.kv_heads or entry.heads
    if tp_size > 1:
        counts = [kv_heads] if entry.qkv else [entry.heads, kv_heads]
        for (_, weight), count in zip(layers, counts, strict=True):
            _check_cut(names[weight], weight, count, entry, tp_size)
    heads = entry.heads // tp_size
    kv_heads //= tp_size
    lengths = [weight.shape[int(is_transposed(layer, weight))] for layer, weight in layers]
    each = _outputs(entry, lengths, heads, kv_heads, alpha)
    if [sum(outputs.widths) for outputs in each] != lengths or each[0].widths[0] <= 0:
        raise _Unfit(
            f"layerwise.qk_clip does not understand {path}: {heads} heads of queries and "
            f"{kv_heads} of keys do not fit {' and '.join(map(str, lengths))} outputs of "
            f"{', '.join(entry.paths)}"
        )
    scaled: list[Scaled] = []
    for (layer, weight), outputs in zip(layers, each, strict=True):
        scaled += _scaled(path, layer, weight, outputs, names)
    frozen = [each.name for each in scaled if each.name not in trained]
    if frozen and len(frozen) < len(scaled):
        raise RoutingError(
            f"layerwise.qk_clip: {frozen[0]} is not trained, and others that give queries and keys "
            f"of {path} are; train all of them or none, or leave qk_clip out"
        )
    if frozen:
        scaled = []
    return Attention(path, module, heads, kv_heads, tuple(scaled), entry.name)


def _refuse_norms(path: str, module: nn.Module) -> None:
    for child, normed in module.named_children():
        if QK_NORM.fullmatch(child) and next(normed.parameters(), None) is not None:
            raise RoutingError(
                f"layerwise.qk_clip: {path}.{child} normalises queries or keys, so scaling the "
                "weights before it does not change logits, which are bounded anyway; leave "
                "qk_clip out, or name other modules in layerwise.qk_clip.attention"
            )


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
    entry: AttentionEntry, lengths: list[int], heads: int, kv_heads: int, alpha: float
) -> list[Outputs]:
    """Return the outputs of each layer, which fit if their numbers are ``lengths``."""
    if entry.qkv is not None:
        width = lengths[0] // (heads + 2 * kv_heads)
        groups = 1
        if entry.by_head:
            groups = kv_heads
        keys = kv_heads // groups
        of_query = (heads // groups, width, alpha)
        return [_blocks(kv_heads, groups, of_query, (keys, width, 1 - alpha), (keys, width, 0.0))]
    rotated = entry.rotated or 0
    values = entry.values or 0
    # Keys are as wide as queries; if not, they do not fit.
    width = lengths[0] // heads - rotated
    return [
        _blocks(kv_heads, heads, (1, width, alpha), (1, rotated, 1.0)),
        _blocks(kv_heads, kv_heads, (1, width, 1 - alpha), (1, values, 0.0)),
    ]


def _blocks(kv_heads: int, groups: int, *runs: tuple[int, int, float]) -> Outputs:
    """Return ``groups`` times ``runs``; a run is a number of heads, their width and power."""
    blocks = []
    for group in range(groups):
        for heads, width, power in runs:
            for head in range(group * heads, (group + 1) * heads):
                blocks.append((width, head * kv_heads // (groups * heads), power))
    return Outputs(*zip(*blocks, strict=True))


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
        if bias.numel() != sum(outputs.widths):
            raise _Unfit(
                f"layerwise.qk_clip does not understand {path}: {names[bias]} has {bias.numel()} "
                f"elements, and {names[weight]} {sum(outputs.widths)} outputs"
            )
        yield Scaled(names[bias], outputs)
    if getattr(weight, "allreduce", True) is False:
        raise RoutingError(
            f"layerwise.qk_clip: {names[weight]} is an expert's, of which ranks have different "
            "ones; leave qk_clip out"
        )
