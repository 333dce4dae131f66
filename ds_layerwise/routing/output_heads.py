"""Output heads, as declared by the model, by name, or by position; see :mod:`.routing_rules`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ds_layerwise.optimizers.recipe import Shape
from ds_layerwise.routing.fused_parts import QUERY_NAMES
from ds_layerwise.routing.module_of import (
    CONVOLUTIONS,
    is_table,
    kind_of,
    modules_of,
    shape_in,
    weights_of,
)
from ds_layerwise.routing.tensor_marks import is_cut

#: The names of output heads in common model families, or of modules that end in one.
HEAD_NAME = re.compile(
    r"heads?|(?!conv_)\w+_heads?|head_linear|(?!pre_)(\w+_)?classifier(_\w+)?|clf|score|"
    r"conv_score_b|summary|qa_outputs|embed_out|(output|residual)_layer|lm_loss|mlm_layer|"
    r"output_projection|logits_proj|vocab_projector|(class|bbox|box|mask)_predictor|predict_\w+|"
    r"seq_relationship|"
    r"(\w+_)?(class|bbox)_embed|(text|visual|audio|image|semantic|instance)_projection|"
    r"embedding_proj(ection|_layer)|proj_to_\w+|proj_out(_2)?|(base_)?conv_out|(feat|prob)_out|"
    r"(\w+_)?(final|out)_layer|final_convolution"
)

#: The names of modules at the input, between two models, in a block, or for conditions: none of
#: them contains a head.
_NO_HEAD = re.compile(
    r"(?!output_embed)(\w+_)?(embed(s|der|ding|dings)?|input|prompts?|prenet|pool(er|ing)?|"
    r"projector|connector|aligner|adapter|merger|attn|attention|adaln|modulation)"
    r"(_(?!\w*(decoder|model|net|lm)$)\w+)?|\w+_in",
    re.IGNORECASE,
)

#: The parts that wrappers add to names of modules, for compiling, checkpointing, adapters or extra
#: trained copies.
_WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|base_layer|original_module|"
    r"modules_to_save\.[^.]+)(?=\.|$)"
)


#: Weights of output heads, each with the reason.
Heads = Iterator[tuple[Tensor, str]]


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Facts about the other stages of a pipeline, so that decisions are those for the whole
    model.
    """

    tables: frozenset[Shape]
    """The shapes of all embeddings."""
    head_names: Mapping[str, int]
    """The counts of head names of all stages, see :func:`head_names`."""
    head_shapes: frozenset[Shape]
    """The shapes of all heads that are known by name, or declared by their layers."""
    linear_after: bool = False
    """True if a later stage has a linear layer, so that the model's last one is not here."""
    followed: bool = False
    """True if a module with parameters, also tied ones, follows the last linear layer of this
    stage.
    """
    has_matrices: bool = False
    """True if another stage has matrices."""
    tied: frozenset[Tensor] = frozenset()
    """The weights here that another layer on any stage also uses."""
    matched: frozenset[int] = frozenset()
    """The indices of the overrides that match a trainable parameter of some stage."""


def tables_and_linears(
    model: nn.Module, *, leave_out: Collection[Tensor] = ()
) -> tuple[set[Shape], list[tuple[str, Tensor]]]:
    """Return the shapes of the embeddings, and the weights of linear layers in order, without those
    in ``leave_out``.
    """
    tables = set()
    linears = []
    for path, module, _ in modules_of(model):
        for weight in weights_of(module):
            if weight.dim() != 2:
                continue
            if is_table(module):
                tables.add(tuple(weight.shape))
            linear = isinstance(module, nn.Linear) or is_cut(weight) and not is_table(module)
            if linear and weight not in leave_out:
                linears.append((path, weight))
    return tables, linears


def has_matrices(model: nn.Module, *, leave_out: Collection[Tensor]) -> bool:
    """Tell whether some parameter is a matrix, or a stack of matrices, and not a table."""
    for _, module, own in modules_of(model):
        if not is_table(module) and _has_matrix(module, own, leave_out):
            return True
    return False


def _has_matrix(
    module: nn.Module, own: Iterable[Tensor], leave_out: Collection[Tensor] = ()
) -> bool:
    return any(param not in leave_out and shape_in(module, param)[0] is not None for param in own)


def output_heads(model: nn.Module, elsewhere: Elsewhere | None) -> dict[Tensor, str]:
    """Return the weights of output heads, each with the reason."""
    others = elsewhere
    if others is None:
        names = head_names(model)
        shapes = frozenset(tuple(weight.shape) for weight, _ in known_heads(model, names))
        tables, _ = tables_and_linears(model)
        others = Elsewhere(tables=frozenset(tables), head_names=names, head_shapes=shapes)
    heads = dict.fromkeys(others.tied, "tied to another layer of the pipeline")
    heads.update(known_heads(model, others.head_names))
    # A head found only by its name may be a layer at the input, while the vocabulary's head has
    # another name.
    if others.head_shapes.isdisjoint(others.tables):
        heads.update(_last(model, others))
    if not (heads or elsewhere):
        heads.update(_last_kernel(model))
    return heads


def _ends(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return, by module with a head's name, the last layer in it, or the last layer in each head of
    a list.
    """
    modules = {_plain(path): m for path, m in model.named_modules(remove_duplicate=False)}
    modules[""] = model
    repeated: set[type[nn.Module]] = set()
    for module in modules.values():
        if isinstance(module, nn.ModuleList):
            repeated.update(map(kind_of, module.modules()))
    # A Sequential in the middle of an image model contains the same names as its lists of blocks.
    repeated.discard(nn.Sequential)
    ends: dict[str, dict[str, str]] = {}
    for path, _ in _layers(model):
        for head, member in _heads_around(_plain(path), modules):
            around = head.rpartition(".")[0]
            in_block = re.search(r"[^\d.].*\.\d+$", around)
            if not (in_block and kind_of(modules[around]) in repeated):
                ends.setdefault(head, {})[member] = _plain(path)
    return ends


def head_names(model: nn.Module) -> Counter[str]:
    """Count the modules with a head's name, by path with ``#`` for numbers.

    A name that repeats, such as that of a router, is no head.
    """
    return Counter(map(_numberless, _ends(model)))


def known_heads(model: nn.Module, names: Mapping[str, int]) -> Heads:
    """Yield the heads that have a head's name, or that ``model`` or one of its modules declares.

    Args:
        names: the names in the whole model, see :func:`head_names`.
    """
    ends = _ends(model)
    layers = dict(_layers(model))
    # A classifier that directly contains another one does not end at its own last layer.
    outer = {head.rpartition(".")[0] for head in ends}
    named: set[str] = set()
    for head, members in ends.items():
        if head not in outer and names[_numberless(head)] == 1:
            named.update(members.values())
    losses = _losses(model)
    first = next(iter(layers.values()), model)
    for path, module in layers.items():
        if _plain(path) in named and not _widens_input(module, first):
            why = "by name"
        elif kind_of(module).__name__.endswith("Loss") or path.startswith(losses):
            why = "of a loss"
        else:
            continue
        for weight in weights_of(module):
            if weight.dim() > 1:
                yield weight, f"output head ({why})"
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        if callable(get) and isinstance(layer := get(), nn.Module):
            for weight in weights_of(layer):
                yield weight, "output head (get_output_embeddings)"


def _losses(model: nn.Module) -> tuple[str, ...]:
    return tuple(
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)
    )


def _widens_input(module: nn.Module, first: nn.Module) -> bool:
    """Tell whether ``module`` is a convolution of the image that the ``first`` layer takes, as in
    EDSR's head.
    """
    return isinstance(module, CONVOLUTIONS) and (
        getattr(first, "in_channels", None) == module.in_channels < min(5, module.out_channels)
    )


def _last(model: nn.Module, others: Elsewhere) -> Heads:
    """Yield the last linear layer, if it is a head by its shape, that of a table, or by its
    position.
    """
    layers = list(dict(_layers(model)))
    end, last = _last_linear(model, layers, others.tied)
    if not last or others.linear_after:
        return
    in_list, beside_matrix = _surroundings(model, end)
    followed = others.followed or layers[-1] != end or beside_matrix
    alone = not (others.has_matrices or has_matrices(model, leave_out=last))
    by_place = not others.head_shapes
    for weight in last:
        if tuple(weight.shape) in others.tables and (by_place or not in_list):
            yield weight, "output head (last linear layer, shaped like an embedding)"
        elif by_place and not (followed or in_list or alone):
            yield weight, "output head (last linear layer)"


def _last_linear(
    model: nn.Module, layers: Collection[str], tied: Collection[Tensor]
) -> tuple[str, set[Tensor]]:
    """Return the path of the last linear layer in ``layers``, and its weights, also those under a
    second name in a wrapper. The weights are empty if its name rules out a head.
    """
    _, linears = tables_and_linears(model, leave_out=tied)
    linears = [(path, weight) for path, weight in linears if path in layers]
    if not linears:
        return "", set()
    end = linears[-1][0]
    if any(map(_NO_HEAD.fullmatch, _plain(end).split("."))):
        return end, set()
    return end, {weight for path, weight in linears if _plain(path) == _plain(end)}


def _surroundings(model: nn.Module, end: str) -> tuple[bool, bool]:
    """Return whether the module at ``end`` is in a list, and whether it is beside a bare matrix."""
    in_list = beside_matrix = False
    for path, module, own in modules_of(model):
        if not path or end.startswith(f"{path}."):
            # The blocks or experts in a list are equal, so the last one is not special.
            in_list |= isinstance(module, nn.ModuleList)
            # A bare matrix beside a layer has no position in the order of modules.
            beside_matrix |= _has_matrix(module, own)
    return in_list, beside_matrix


def _last_kernel(model: nn.Module) -> Heads:
    """Yield the last convolution of an image model, if it has as many outputs as the first one has
    input channels.
    """
    layers = list(_layers(model)) or [("", model)]
    (_, first), (path, last) = layers[0], layers[-1]
    if not isinstance(first, CONVOLUTIONS) or not isinstance(last, CONVOLUTIONS):
        return
    if first.transposed or first.in_channels != last.out_channels:
        return
    for outer, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and path.startswith(f"{outer}."):
            return
    weights = weights_of(last)
    if has_matrices(model, leave_out=set(weights)):
        for weight in weights:
            yield weight, "output head (last convolution)"


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters in order, without those that adapters such as LoRA have
    added to a layer.
    """
    beside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        adapted = "base_layer" in module._modules and hasattr(module, "active_adapter")
        for name, _ in module.named_children():
            if name.startswith("lora_") or adapted and name != "base_layer":
                beside += (f"{path}.{name}.".lstrip("."),)
    for path, module, own in modules_of(model):
        if any(param.numel() for param in own) and not f"{path}.".startswith(beside):
            yield path, module


def _plain(path: str) -> str:
    """Return the path that a module would have without wrappers."""
    return _WRAPPERS.sub("", path).lstrip(".")


def _numberless(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _heads_around(path: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the modules around ``path`` with a head's name, each with itself or, for a list of
    heads, with the head that contains ``path``.
    """
    parts = path.split(".")
    for depth, name in enumerate(parts, 1):
        head = ".".join(parts[:depth])
        module = modules[head]
        in_list = isinstance(module, nn.ModuleList)
        if _is_named_head(head, name, module) and "modulation" not in path.lower():
            several = in_list or isinstance(module, nn.ModuleDict) and name.endswith("s")
            member = ".".join(parts[: depth + several])
            in_list = False
            # Attention may also have a list of heads.
            if modules[member]._modules.keys().isdisjoint(QUERY_NAMES):
                yield head, member
        if in_list or _NO_HEAD.fullmatch(name):
            return


def _is_named_head(path: str, name: str, module: nn.Module) -> bool:
    if "Pool" in kind_of(module).__name__:
        return False
    linear = isinstance(module, nn.Linear)
    # A linear conv_out flattens the outputs of convolutions at the input. A convolution named fc is
    # DLA's classifier.
    if name == "fc" and not linear:
        return path == "fc"
    return HEAD_NAME.fullmatch(name) is not None and not (linear and name.endswith("conv_out"))
