"""Masters and states of all ranks on their way into one file, which rank 0 writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.formats.headers import sums_of, write_beside
from ds_layerwise.checkpoint.formats.single_file import HEADER, name_in_file, write
from ds_layerwise.checkpoint.record import Header, PieceRecord
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.parallel import pipeline
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements of a tensor of the file that one rank has."""

    rank: int
    start: int
    numel: int
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: torch.dtype
    sums: dict[int, tuple[int, int]]


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

    Memory: what a rank owns of one tensor, on the device and on the host.

    Raises:
        LayerWiseError: on every rank, if rank 0 cannot write.
    """
    rank = comm.rank_of(None)
    values: dict[str, Tensor] = {}
    mine: dict[str, _Part] = {}
    for piece in pieces:
        for key, value in (("", piece.master), *piece.state.items()):
            name = name_in_file(piece.name, key)
            start, shape = 0, tuple(value.shape)
            if not key or piece.is_elementwise(key):
                start, shape = piece.param_start, header.shapes[piece.name]
            values[name] = value.reshape(-1)
            mine[name] = _Part(
                rank, start, value.numel(), shape, value.dtype, sums_of(value, start)
            )
    parts: dict[str, dict[int, _Part]] = {}
    sums: dict[str, dict[int, tuple[int, int]]] = {}
    for of_rank in comm.gather_objects(mine, group=None):
        for name, part in of_rank.items():
            # Ranks that hold the same elements hold the same values.
            parts.setdefault(name, {}).setdefault(part.start, part)
            sums.setdefault(name, {}).update(part.sums)
    tensors = {name: (of[min(of)].dtype, of[min(of)].shape) for name, of in parts.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])))
    brought = _bring(tensors, parts, values, device)
    with comm.errors_on_all_ranks(None):
        with (attempt := Attempt()):
            if rank == 0:
                beside = write_beside(header, scaler, sums)
                layout = {**tensors, HEADER: (beside.dtype, tuple(beside.shape))}
                write(path, layout, chain(brought, [beside]))
        # The others go on sending where rank 0 cannot write.
        deque(brought, maxlen=0)
        if attempt.error is not None:
            raise attempt.error


def _bring(
    names: Iterable[str],
    parts: Mapping[str, Mapping[int, _Part]],
    mine: Mapping[str, Tensor],
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield all ``parts`` on rank 0, in the order of ``names`` and of elements; on the others send
    it what is theirs.
    """
    rank = comm.rank_of(None)
    for name in names:
        for _, part in sorted(parts[name].items()):
            if part.rank == rank == 0:
                yield mine[name]
            elif part.rank == rank:
                comm.send(mine[name].to(device).contiguous(), to=0)
            elif rank == 0:
                received = torch.empty(part.numel, dtype=part.dtype, device=device)
                comm.receive(received, out_of=part.rank)
                yield received
