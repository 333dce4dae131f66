"""Output heads: by what a model says of itself, by name, or by place; see
:mod:`.routing.routing_rules`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ds_layerwise.routing.heads import QUERY_NAMES
from ds_layerwise.routing.matrix_view import CONVOLUTIONS, shape_in
from ds_layerwise.routing.module_of import is_table, kind_of, modules_of, weights_of
from ds_layerwise.routing.tensor_marks import is_cut

#: What the common model families call an output head, or the module that ends in one.
HEAD_NAME = re.compile(
    r"heads?|(?!conv_)\w+_heads?|head_linear|(?!pre_)(\w+_)?classifier(_\w+)?|clf|score|"
    r"conv_score_b|summary|qa_outputs|embed_out|(output|residual)_layer|lm_loss|mlm_layer|"
    r"output_projection|logits_proj|vocab_projector|(class|bbox|box|mask)_predictor|predict_\w+|"
    r"seq_relationship|"
    r"(\w+_)?(class|bbox)_embed|(text|visual|audio|image|semantic|instance)_projection|"
    r"embedding_proj(ection|_layer)|proj_to_\w+|proj_out(_2)?|(base_)?conv_out|(feat|prob)_out|"
    r"(\w+_)?(final|out)_layer|final_convolution"
)

#: A name of what lies at the input, between two models, or in a block, or gives conditions: nothing
#: in it is a head.
_NO_HEAD = re.compile(
    r"(?!output_embed)(\w+_)?(embed(s|der|ding|dings)?|input|prompts?|prenet|pool(er|ing)?|"
    r"projector|connector|aligner|adapter|merger|attn|attention|adaln|modulation)"
    r"(_(?!\w*(decoder|model|net|lm)$)\w+)?|\w+_in",
    re.IGNORECASE,
)

#: What wrappers put into the names of modules that are compiled, checkpointed, adapted or trained
#: beside others.
_WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|base_layer|original_module|"
    r"modules_to_save\.[^.]+)(?=\.|$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What a stage of a pipeline must know of the others to decide as for the whole model."""

    tables: frozenset[tuple[int, ...]]
    """The shapes of all embeddings."""
    linear_after: bool
    """Whether a later stage has a linear layer, so that the model's last one is not here."""
    followed: bool
    """Whether something with parameters, tied ones included, comes after the last linear layer of
    this stage.
    """
    has_matrices: bool
    """Whether another stage has matrices."""
    head_names: Mapping[str, int]
    """Of all stages, see :func:`head_names`."""
    head_shapes: frozenset[tuple[int, ...]]
    """Of all heads that are known by their names, or because their layers say so."""
    tied: frozenset[Tensor]
    """The weights here that another layer uses, too, wherever that is."""
    matched: frozenset[int]
    """The overrides, by index, that are for a trainable parameter of some stage."""


def tables_and_linears(
    model: nn.Module, *, leave_out: Collection[Tensor] = ()
) -> tuple[set[tuple[int, ...]], list[tuple[str, Tensor]]]:
    """The shapes of the embeddings, and the weights of linear layers in their order, but for those
    in ``leave_out``.
    """
    weights = [
        (path, m, w) for path, m, _ in modules_of(model) for w in weights_of(m) if w.dim() == 2
    ]
    return (
        {tuple(w.shape) for _, module, w in weights if is_table(module)},
        [
            (path, w)
            for path, module, w in weights
            if w not in leave_out
            and (isinstance(module, nn.Linear) or is_cut(w) and not is_table(module))
        ],
    )


def has_matrices(model: nn.Module, *, leave_out: Collection[Tensor] = ()) -> bool:
    """Whether some parameter is a matrix, or a stack of them, that is no table."""
    return any(
        param not in leave_out and not is_table(module) and shape_in(module, param)[0] is not None
        for _, module, own in modules_of(model)
        for param in own
    )


def output_heads(model: nn.Module, elsewhere: Elsewhere | None = None) -> dict[Tensor, str]:
    """The weights of output heads, each with what makes it one."""
    heads = dict(known_heads(model, elsewhere.head_names if elsewhere else head_names(model)))
    tables = elsewhere.tables if elsewhere else tables_and_linears(model)[0]
    known = elsewhere.head_shapes if elsewhere else {tuple(weight.shape) for weight in heads}
    # A name alone may be that of a layer at the input, beside a head of the vocabulary.
    if known.isdisjoint(tables):
        heads.update(_last(model, elsewhere, tables, by_place=not known))
    if not (heads or elsewhere):
        heads.update(_last_kernel(model))
    tied = elsewhere.tied if elsewhere else ()
    return {**dict.fromkeys(tied, "tied to another layer of the pipeline"), **heads}


def _ends(model: nn.Module) -> dict[str, dict[str, str]]:
    """By each module with a head's name, and in a list of heads by each head, the last layer in
    it.
    """
    modules = {
        **{_plain(path): module for path, module in model.named_modules(remove_duplicate=False)},
        "": model,
    }
    repeated = {
        kind_of(inner)
        for module in modules.values()
        if isinstance(module, nn.ModuleList)
        for inner in module.modules()
    }
    ends: dict[str, dict[str, str]] = {}
    for path, _ in _layers(model):
        for head, member in _heads_around(_plain(path), modules):
            around = head.rpartition(".")[0]
            # A sequence in the middle of an image model has what its lists of blocks have, too.
            if not (
                re.search(r"[^\d.].*\.\d+$", around)
                and kind_of(modules[around]) in repeated - {nn.Sequential}
            ):
                ends.setdefault(head, {})[member] = _plain(path)
    return ends


def head_names(model: nn.Module) -> Counter[str]:
    """The modules with a head's name, with ``#`` for numbers: what repeats, as a router does, is no
    head.
    """
    return Counter(map(_numberless, _ends(model)))


def known_heads(model: nn.Module, names: Mapping[str, int]) -> Iterator[tuple[Tensor, str]]:
    """The heads that have a head's name, or that ``model`` or one of its modules says it has.

    Args:
        names: those of the whole model, see :func:`head_names`.
    """
    ends, layers = _ends(model), dict(_layers(model))
    # A classifier that has one right inside does not end where its layers do.
    outer = {head.rpartition(".")[0] for head in ends}
    named = {
        end
        for head, members in ends.items()
        for end in members.values()
        if head not in outer and names[_numberless(head)] == 1
    }
    losses = tuple(
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)
    )
    first = next(iter(layers.values()), model)
    for path, module in layers.items():
        why = (
            "by name"
            if _plain(path) in named and not _widens_input(module, first)
            else "of a loss"
            if kind_of(module).__name__.endswith("Loss") or path.startswith(losses)
            else ""
        )
        yield from (
            (weight, f"output head ({why})")
            for weight in weights_of(module)
            if why and weight.dim() > 1
        )
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        told = get() if callable(get) else None
        for returned in weights_of(told) if isinstance(told, nn.Module) else ():
            yield returned, "output head (get_output_embeddings)"


def _widens_input(module: nn.Module, first: nn.Module) -> bool:
    """Whether ``module`` is a convolution of the image that the ``first`` layer takes, as EDSR's
    head.
    """
    return isinstance(module, CONVOLUTIONS) and (
        getattr(first, "in_channels", None) == module.in_channels < min(5, module.out_channels)
    )


def _last(
    model: nn.Module,
    elsewhere: Elsewhere | None,
    tables: Collection[tuple[int, ...]],
    *,
    by_place: bool,
) -> Iterator[tuple[Tensor, str]]:
    """The last linear layer, where it is a head by its shape, one of ``tables``, or by its
    place.
    """
    layers = dict(_layers(model))
    _, linears = tables_and_linears(model, leave_out=elsewhere.tied if elsewhere else ())
    linears = [(path, weight) for path, weight in linears if path in layers]
    end = linears[-1][0] if linears else ""
    if (
        not linears
        or elsewhere
        and elsewhere.linear_after
        or any(map(_NO_HEAD.fullmatch, _plain(end).split(".")))
    ):
        return
    last = {weight for path, weight in linears if _plain(path) == _plain(end)}
    around = [
        (module, own)
        for path, module, own in modules_of(model)
        if end.startswith(f"{path}." if path else "")
    ]
    # Blocks and experts that lie in a list are alike, and so is the last of them.
    in_list = any(isinstance(module, nn.ModuleList) for module, _ in around)
    # A bare matrix beside a layer has no place in the order of modules.
    followed = (
        bool(elsewhere and elsewhere.followed)
        or [*layers][-1] != end
        or any(shape_in(module, p)[0] is not None for module, own in around for p in own)
    )
    alone = not (has_matrices(model, leave_out=last) or elsewhere and elsewhere.has_matrices)
    for weight in last:
        if tuple(weight.shape) in tables and (by_place or not in_list):
            yield weight, "output head (last linear layer, shaped like an embedding)"
        elif by_place and not (followed or in_list or alone):
            yield weight, "output head (last linear layer)"


def _last_kernel(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """The last convolution of a model of images, which gives as many channels as the first one
    takes.
    """
    layers = dict(_layers(model)) or {"": model}
    first, (path, last) = [*layers.values()][0], [*layers.items()][-1]
    in_list = any(
        isinstance(m, nn.ModuleList) and path.startswith(f"{outer}.")
        for outer, m in model.named_modules()
    )
    if (
        isinstance(first, CONVOLUTIONS)
        and isinstance(last, CONVOLUTIONS)
        and not (first.transposed or in_list)
        and (
            first.in_channels == last.out_channels
            and has_matrices(model, leave_out=set(weights_of(last)))
        )
    ):
        yield from ((weight, "output head (last convolution)") for weight in weights_of(last))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters in their order, but for what adapters such as LoRA have put
    beside a layer.
    """
    beside = tuple(
        f"{path}.{name}." if path else f"{name}."
        for path, module in model.named_modules()
        for name, _ in module.named_children()
        if name.startswith("lora_")
        or name != "base_layer"
        and "base_layer" in module._modules
        and hasattr(module, "active_adapter")
    )
    return (
        (path, module)
        for path, module, own in modules_of(model)
        if any(p.numel() for p in own) and not f"{path}.".startswith(beside)
    )


def _plain(path: str) -> str:
    """The path that a module would have without wrappers."""
    return _WRAPPERS.sub("", path).lstrip(".")


def _numberless(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _heads_around(path: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Of the modules around ``path``, those with a head's name; of a list of heads the one of them,
    too.
    """
    parts = path.split(".")
    for depth, name in enumerate(parts, 1):
        head = ".".join(parts[:depth])
        module, several, linear = modules[head], False, isinstance(modules[head], nn.Linear)
        # A linear conv_out flattens what convolutions at the input make; a convolution called fc is
        # DLA's classifier.
        named = (
            head == "fc"
            if name == "fc" and not linear
            else HEAD_NAME.fullmatch(name) and not (linear and name.endswith("conv_out"))
        )
        if named and "modulation" not in path.lower() and "Pool" not in kind_of(module).__name__:
            several = (
                isinstance(module, nn.ModuleList)
                or isinstance(module, nn.ModuleDict)
                and name.endswith("s")
            )
            one = ".".join(parts[: depth + several])
            # Attention may be built of a list of heads.
            if modules[one]._modules.keys().isdisjoint(QUERY_NAMES):
                yield head, one
        if isinstance(module, nn.ModuleList) and not several or _NO_HEAD.fullmatch(name):
            return
