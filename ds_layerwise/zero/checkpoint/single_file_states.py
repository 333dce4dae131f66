"""From the ranks that own them, masters and states of all parameters on rank 0, and into one
file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.formats.single_file import name_in_file, write
from ds_layerwise.checkpoint.record import Header, PieceRecord
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.parallel import pipeline
from ds_layerwise.ranks.comm import comm


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of one tensor of the file."""

    rank: int
    start: int
    numel: int
    shape: tuple[int, ...] | None
    """The shape of the whole, which this is; None for a part of what has one element for each of
    the parameter.
    """
    dtype: str


def check_uncut(module: nn.Module, tensor_group: comm.Group) -> None:
    """Refuse a model of which no rank trains whole parameters.

    Raises:
        LayerWiseError: tensor or pipeline parallelism has cut it.
    """
    if tensor_group is not None or pipeline.is_pipeline(module):
        raise LayerWiseError(
            "a file of whole parameters needs them on the ranks that train them, and tensor or "
            "pipeline parallelism has cut this model; save a checkpoint with "
            "engine.save_checkpoint()"
        )


def save(
    path: Path,
    pieces: Iterable[PieceRecord],
    header: Header,
    scaler: tuple[str, Any],
    device: torch.device,
) -> None:
    """Write all of ``pieces`` of all ranks into one file. Every rank must call it; rank 0 writes.

    Memory: one tensor on the device and one on the host; beside the file, while it is written, as
    much disk again.

    Raises:
        LayerWiseError: on every rank, if rank 0 cannot write.
    """
    mine = {
        name_in_file(piece.name, key): (piece, key)
        for piece in pieces
        for key in (None, *piece.state)
    }
    everyone = comm.gather_objects({name: _part(*of) for name, of in mine.items()}, group=None)
    parts: dict[str, dict[int, _Part]] = {}
    for of_rank in everyone:
        for name, part in of_rank.items():
            # Ranks that hold the same hold it alike.
            parts.setdefault(name, {}).setdefault(part.start, part)
    shapes = {
        name_in_file(name, key): shape
        for name, shape in header.shapes.items()
        for key in (None, *header.rules[name].state_keys)
    }
    rank, error = comm.rank_of(None), None
    scratch = path.with_name(f"{path.name}.parts")
    whole: dict[str, Tensor] = {}
    made = False
    try:
        for index, (name, of) in enumerate(sorted(parts.items())):
            place = None
            if rank == 0 and error is None:
                try:
                    made = made or _make_scratch(scratch)
                    place = _place(scratch, index, of, shapes[name])
                    whole[name] = place
                except (OSError, RuntimeError) as e:
                    # The others go on sending.
                    error = LayerWiseError(f"{scratch} cannot be written: {e}")
            for part in of.values():
                value = _bring(part, mine.get(name), rank, device)
                if place is not None and value is not None:
                    place.view(-1)[part.start : part.start + part.numel].copy_(value)
        with comm.Alike(None):
            if error is not None:
                raise error
            if rank == 0:
                write(path, whole, header, scaler)
    finally:
        whole.clear()
        if made:
            shutil.rmtree(scratch, ignore_errors=True)


def _make_scratch(scratch: Path) -> bool:
    """Make the folder of whole tensors; what a save that was killed has left in it may be
    overwritten.

    Raises:
        OSError: it cannot be made, or holds what no save has written.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    if foreign := next((each.name for each in scratch.iterdir() if not each.name.isdigit()), None):
        raise OSError(f"it holds {foreign}, and is removed after a save; move that away")
    return True


def _part(piece: PieceRecord, key: str | None) -> _Part:
    value, dtype = (
        (piece.master, piece.master.dtype)
        if key is None
        else (piece.state[key], piece.state[key].dtype)
    )
    own = key is not None and not piece.is_elementwise(key)
    return _Part(
        comm.rank_of(None),
        0 if own else piece.param_start,
        value.numel(),
        tuple(value.shape) if own else None,
        str(dtype).removeprefix("torch."),
    )


def _place(scratch: Path, index: int, of: Mapping[int, _Part], shape: tuple[int, ...]) -> Tensor:
    """Memory for a whole tensor, which is a file of its own so that not all of them have to fit."""
    first = next(iter(of.values()))
    own = shape if first.shape is None else first.shape
    numel, dtype = torch.Size(own).numel(), getattr(torch, first.dtype)
    if not numel:
        return torch.empty(own, dtype=dtype, device="cpu")
    # Memory of a file for which the disk has no room ends the process at the first write to it.
    with (scratch / str(index)).open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
    return torch.from_file(str(scratch / str(index)), shared=True, size=numel, dtype=dtype).view(
        own
    )


def _bring(
    part: _Part, mine: tuple[PieceRecord, str | None] | None, rank: int, device: torch.device
) -> Tensor | None:
    """What ``part`` is of, 1-D, on rank 0; None on all others."""
    if rank == part.rank and mine is not None:
        piece, key = mine
        value = (piece.master if key is None else piece.state[key]).reshape(-1)
        if rank:
            comm.send(value.to(device).contiguous(), to=0)
        return value if rank == 0 else None
    if rank:
        return None
    received = torch.empty(part.numel, dtype=getattr(torch, part.dtype), device=device)
    comm.receive(received, out_of=part.rank)
    return received
