"""States of an engine for a checkpoint of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.formats.dcp import MODEL, STATE, Piece, unwrapped
from ds_layerwise.checkpoint.formats.headers import sums_of, write_beside
from ds_layerwise.checkpoint.new_names import first_expert
from ds_layerwise.checkpoint.record import Header, PieceRecord
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.foreign import probe
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.ranks.comm import comm
from ds_layerwise.recipes.rules.any_torch_recipe import AnyTorch

#: Recipes that torch has a class for, which reads their states.
_CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def state_dict(
    pieces: Iterable[PieceRecord],
    shapes: Mapping[str, tuple[int, ...]],
    module: nn.Module,
    groups: list[dict[str, Any]],
    header: Header,
    scaler: tuple[str, Any],
) -> dict[str, Any]:
    """Return what ``torch.distributed.checkpoint.save`` takes, as views into live memory.

    Args:
        pieces, shapes: what this rank owns, and the shapes of all parameters, by name in a
            checkpoint.
        groups: the parameter groups, as torch's ``get_state_dict`` has them.
        header, scaler: what only this package asks for, equal on all ranks; the second with
            DeepSpeed's name for it.
    """
    is_first = comm.rank_of(None) == 0
    model: dict[str, Any] = {}
    if is_first:
        for name, value in untrained(module, shapes).items():
            model[unwrapped(name)] = value
    state: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        name, shape = unwrapped(piece.name), shapes[piece.name]
        model[name] = Piece(piece.master, piece.param_start, shape)
        for key, value in piece.state.items():
            if piece.is_elementwise(key) and shape:
                value = Piece(value, piece.param_start, shape)
            elif piece.param_start:
                # Every piece has the same.
                continue
            state.setdefault(name, {})[key] = value
    for name, other in tied(module, shapes).items():
        if unwrapped(other) in model:
            model[unwrapped(name)] = model[unwrapped(other)]
    sums = _all_sums(model, state)
    content: dict[str, Any] = {
        "model": model,
        "optim": {"state": state, "param_groups": groups},
    }
    if is_first:
        content["ds_layerwise"] = {"header": write_beside(header, scaler, sums)}
    return content


def _all_sums(
    model: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[int, tuple[int, int]]]:
    """Return the checksums of all tensors of all ranks, by their names in the file."""
    named = {f"{MODEL}.{name}": value for name, value in model.items()}
    for name, of in state.items():
        named |= {f"{STATE}.{name}.{key}": value for key, value in of.items()}
    mine = {}
    for name, value in named.items():
        is_piece = isinstance(value, Piece)
        mine[name] = sums_of(value.held, value.start) if is_piece else sums_of(value)
    sums: dict[str, dict[int, tuple[int, int]]] = {}
    for of_rank in comm.gather_objects(mine, group=None):
        for name, blocks in of_rank.items():
            sums.setdefault(name, {}).update(blocks)
    return sums


def untrained(module: nn.Module, trained: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the frozen parameters and buffers that a checkpoint has, by name."""
    # A module that recomputes leaves its wrapper out of the names in its own state_dict.
    known = {unwrapped(name) for name in (*trained, *tied(module, trained))}
    return {
        name: value
        for name, value in module.state_dict().items()
        if unwrapped(name) not in known and isinstance(value, Tensor)
    }


def check_experts(module: nn.Module, trained: Mapping[str, object]) -> None:
    """Refuse experts that are not trained: ranks have others of them under the same names.

    Raises:
        LayerWiseError: names one.
    """
    for name in untrained(module, trained):
        if first_expert(name) is not None:
            raise LayerWiseError(
                f"{name} belongs to an expert, of which each rank has others, and is not trained, "
                "so that nothing tells it from those of other ranks in a sharded checkpoint; "
                "train it, or use engine.save_checkpoint() and engine.load_checkpoint()"
            )


def tied(module: nn.Module, trained: Container[str]) -> dict[str, str]:
    """Return by further names of parameters those that they are trained under."""
    names = {param: name for name, param in module.named_parameters()}
    return {
        name: names[param]
        for name, param in module.named_parameters(remove_duplicate=False)
        if names[param] != name and names[param] in trained
    }


def groups_of(
    routes: Mapping[str, Route],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """Parameter groups in the way of torch, one for all that are updated with the same values.

    What a class of torch runs says all that a group of that class does, so that torch finds what it
    asks for.

    Args:
        groups: those of the engine, with all that an update takes of them.
        names: by parameter, those that it has in a checkpoint.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, route in routes.items():
        hyper = route.hyper(groups[route.group])
        of_class = hyper.pop("of_client", None) or _group_of_class(route)
        own = {
            key: hyper[key]
            for key in ("lr", "weight_decay", *route.recipe.hyper)
            if of_class is None or key in of_class
        }
        values = {**(of_class or {}), **own}
        same = found.setdefault(repr(sorted(values.items(), key=str)), {**values, "params": []})
        same["params"].extend(map(unwrapped, names[name]))
    return list(found.values())


def _group_of_class(route: Route) -> dict[str, Any] | None:
    """Return the values of a group of the class of torch that updates a parameter; None if no
    class does.
    """
    recipe, shape = route.recipe, route.matrix_shape or (1,)
    if isinstance(recipe, AnyTorch):
        made = probe.make(recipe, torch.zeros([2] * len(shape), dtype=torch.float32, device="cpu"))
    elif recipe.rule in _CLASSES:
        made = _CLASSES[recipe.rule]([torch.zeros(1, dtype=torch.float32, device="cpu")])
    else:
        return None
    return {key: value for key, value in made.param_groups[0].items() if key != "params"}
