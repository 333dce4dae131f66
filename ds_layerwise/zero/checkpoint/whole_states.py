"""The masters and states of all ranks in the form of files with whole parameters: for
``torch.distributed.checkpoint``, and for one file that rank 0 writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.dcp import PieceTensor, held_of, path_of, unwrapped
from ds_layerwise.checkpoint.record import Header, PieceRecord
from ds_layerwise.checkpoint.reshard import untrained
from ds_layerwise.checkpoint.single_file import (
    HEADER,
    Blocks,
    Sums,
    name_in_file,
    sums_of,
    write,
    write_beside,
)
from ds_layerwise.optimizers.any_torch import AnyTorch
from ds_layerwise.optimizers.recipe import Shape
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.param_cuts import filled_cut
from ds_layerwise.routing.routes import ParamGroups, Route, Routes

#: The recipes with a torch class that can read their states.
_CLASSES: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def state_dict(
    pieces: Iterable[PieceRecord],
    shapes: Mapping[str, Shape],
    module: nn.Module,
    trained: Iterable[nn.Parameter],
    groups: list[dict[str, Any]],
    header: Header,
) -> dict[str, Any]:
    """Return a dict for ``torch.distributed.checkpoint.save``. Its tensors are views into live
    memory.

    Args:
        pieces, shapes: the pieces that this rank owns, and the shapes of all parameters, by name in
            a checkpoint.
        trained: the parameters of ``module`` with those pieces.
        groups: the parameter groups in the form of torch's ``get_state_dict``.
        header: values that only this package reads, equal on all ranks.
    """
    is_first = comm.rank_of(None) == 0
    model: dict[str, Any] = {}
    own: Any
    for name, own in untrained(module, trained).items():
        if hasattr(own, "ds_tensor"):
            cut, start = filled_cut(own)
            model[unwrapped(name)] = PieceTensor(cut, start, own.ds_shape)
        elif is_first:
            model[unwrapped(name)] = own.detach()
    state: dict[str, dict[str, Any]] = {}
    named = {}
    for name, key, value in tensors_of(pieces, shapes):
        of = state.setdefault(unwrapped(name), {})
        if not key:
            model[unwrapped(name)] = value
            continue
        if not shapes[name]:
            # In torch's format, a state of a 0-d parameter is not cut.
            value, _ = held_of(value)
        of[key] = named[path_of(unwrapped(name), key)] = value
    for name, other in tied(module, shapes).items():
        if unwrapped(other) in model:
            model[unwrapped(name)] = model[unwrapped(other)]
    for name, value in model.items():
        named[path_of(name, "")] = value
    _, sums = _parts_of(named)
    content: dict[str, Any] = {
        "model": model,
        "optim": {"state": state, "param_groups": groups},
    }
    if is_first:
        content["ds_layerwise"] = {"header": write_beside(header, sums)}
    return content


def tensors_of(
    pieces: Iterable[PieceRecord], shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the masters (with an empty key) and the states of ``pieces``, by parameter and key.

    A tensor with one element per element of the parameter is a :class:`.PieceTensor` of the shape
    of the parameter. Other tensors are the same in every piece, and the first piece yields them.
    """
    for piece in pieces:
        for key, value in piece.tensors.items():
            if piece.is_elementwise(key):
                yield piece.name, key, PieceTensor(value, piece.param_start, shapes[piece.name])
            elif not piece.param_start:
                yield piece.name, key, value


@dataclass(frozen=True)
class _Part:
    """The elements of a tensor of the file that one rank has."""

    rank: int
    start: int
    numel: int
    shape: Shape
    """The shape of the whole tensor."""
    dtype: torch.dtype
    sums: Blocks


def _parts_of(named: Mapping[str, Tensor]) -> tuple[dict[str, dict[int, _Part]], Sums]:
    """Return the parts that all ranks have of the tensors of a file, by name and first element, and
    their checksums.

    Args:
        named: the parts of this rank, by their names in the file.
    """
    rank = comm.rank_of(None)
    mine = {}
    for name, value in named.items():
        held, start = held_of(value)
        mine[name] = _Part(
            rank,
            start,
            held.numel(),
            tuple(value.shape),
            value.dtype,
            sums_of(held, start),
        )
    parts: dict[str, dict[int, _Part]] = {}
    sums: dict[str, Blocks] = {}
    for of_rank in comm.gather_objects(mine, group=None):
        for name, part in of_rank.items():
            # Ranks that hold the same elements hold the same values.
            parts.setdefault(name, {}).setdefault(part.start, part)
            sums.setdefault(name, {}).update(part.sums)
    return parts, sums


def tied(module: nn.Module, trained: Container[str]) -> dict[str, str]:
    """Return the other names of tied parameters, each with the name that the parameter is trained
    under.
    """
    names = {}
    for name, param in module.named_parameters():
        names[param] = name
    return {
        name: names[param]
        for name, param in module.named_parameters(remove_duplicate=False)
        if names[param] != name and names[param] in trained
    }


def groups_of(
    routes: Routes,
    groups: ParamGroups,
    names: Mapping[str, Sequence[str]],
) -> list[dict[str, Any]]:
    """Return parameter groups in torch's form, one for all parameters that are updated with the
    same values.

    The groups of a torch class contain all keys of that class, so that torch finds what it needs.

    Args:
        groups: the engine's groups, with all values that an update uses.
        names: by parameter, its names in a checkpoint.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, route in routes.items():
        hyper = route.hyper(groups[route.group])
        of_class = hyper.pop("of_client", None) or _group_of_class(route)
        values = dict(of_class or {})
        for key in ("lr", "weight_decay", *route.recipe.hyper):
            if of_class is None or key in of_class:
                values[key] = hyper[key]
        same = found.setdefault(repr(sorted(values.items(), key=str)), {**values, "params": []})
        same["params"].extend(map(unwrapped, names[name]))
    return list(found.values())


def _group_of_class(route: Route) -> dict[str, Any] | None:
    """Return the values of a group of the torch class that updates a parameter; None if no
    class does.
    """
    recipe = route.recipe
    axes = len(route.matrix_shape or (1,))
    if isinstance(recipe, AnyTorch):
        made = recipe.make(torch.zeros([2] * axes, dtype=torch.float32, device="cpu"))
    elif recipe.rule in _CLASSES:
        made = _CLASSES[recipe.rule]([torch.zeros(1, dtype=torch.float32, device="cpu")])
    else:
        return None
    return {key: value for key, value in made.param_groups[0].items() if key != "params"}


def save_one_file(
    path: Path, pieces: Iterable[PieceRecord], header: Header, device: torch.device
) -> None:
    """Write all ``pieces`` of all ranks into one file. Every rank must call this; rank 0 writes.

    It needs memory, on the device and on the host, for one rank's part of one tensor.

    Raises:
        LayerWiseError: on every rank, if rank 0 cannot write.
    """
    named = {}
    for name, key, value in tensors_of(pieces, header.shapes):
        named[name_in_file(name, key)] = value
    parts, sums = _parts_of(named)
    first = {name: of[min(of)] for name, of in parts.items()}
    tensors = {}
    for name in sorted(first, key=lambda name: (-first[name].dtype.itemsize, name)):
        tensors[name] = (first[name].dtype, first[name].shape)
    brought = _bring(tensors, parts, named, device)
    with comm.errors_on_all_ranks():
        with (attempt := Attempt()):
            if comm.rank_of(None) == 0:
                beside = write_beside(header, sums)
                layout = {**tensors, HEADER: (beside.dtype, tuple(beside.shape))}
                write(path, layout, chain(brought, [beside]))
        # If rank 0 cannot write, it still receives what the other ranks send.
        deque(brought, maxlen=0)
        attempt.raise_original()


def _bring(
    names: Iterable[str],
    parts: Mapping[str, Mapping[int, _Part]],
    mine: Mapping[str, Tensor],
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield all ``parts`` on rank 0, in the order of ``names`` and elements. The other ranks send
    their parts to it.
    """
    rank = comm.rank_of(None)
    for name in names:
        for _, part in sorted(parts[name].items()):
            if part.rank == rank:
                held, _ = held_of(mine[name])
                if rank == 0:
                    yield held.reshape(-1)
                else:
                    comm.send(held.reshape(-1).to(device).contiguous(), dst=0)
            elif rank == 0:
                received = torch.empty(part.numel, dtype=part.dtype, device=device)
                comm.receive(received, src=part.rank)
                yield received
