"""From the pieces of any layout to the pieces of any other, by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from ds_layerwise.checkpoint.record import PieceRecord, ShardRecord
from ds_layerwise.errors import LayerwiseError
from ds_layerwise.layout import Layout


def plan_copies(own: ShardRecord, saved: Sequence[ShardRecord], *, masters: bool,
                states: bool) -> list[tuple[Tensor, Tensor]]:
    """What to copy to where so that ``own`` holds what ``saved`` says, in pairs of (into, from).

    Args:
        own: views into live memory; nothing is written here.
        saved: the records of all ranks that saved, in any order. Their tensors may be mapped from files: only what
            this rank needs is read, and only when it is copied.
        masters, states: which of the two are wanted.

    Raises:
        LayerwiseError: a parameter is missing, has another size, or lacks a state or some of its elements.
    """
    sources: dict[str, list[PieceRecord]] = {}
    for record in saved:
        for piece in record.pieces:
            sources.setdefault(piece.name, []).append(piece)
    sizes = _sizes(saved[0].layout_json), _sizes(own.layout_json)
    copies: list[tuple[Tensor, Tensor]] = []
    for piece in own.pieces:
        if piece.name not in sizes[0]:
            raise LayerwiseError(f"{piece.name} is not in the checkpoint, which has {len(sizes[0])} parameters")
        if sizes[0][piece.name] != sizes[1][piece.name]:
            raise LayerwiseError(f"{piece.name} has {sizes[0][piece.name]} elements in the checkpoint, "
                                 f"{sizes[1][piece.name]} in the model")
        copies += _copies(piece, sources.get(piece.name, []), masters=masters, states=states)
    return copies


def _sizes(layout_json: str) -> dict[str, int]:
    return {slot.name: slot.numel for bucket in Layout.from_json(layout_json).buckets for slot in bucket.slots}


def _copies(piece: PieceRecord, sources: Sequence[PieceRecord], *, masters: bool,
            states: bool) -> Iterator[tuple[Tensor, Tensor]]:
    start, stop, covered = piece.param_start, piece.param_start + piece.master.numel(), 0
    for source in sources:
        first = max(start, source.param_start)
        last = min(stop, source.param_start + source.master.numel())
        if first >= last:
            continue
        covered += last - first
        into, out_of = slice(first - start, last - start), slice(first - source.param_start, last - source.param_start)
        if masters:
            yield piece.master[into], source.master[out_of]
        if states and source.state.keys() != piece.state.keys():
            raise LayerwiseError(f"the checkpoint holds {', '.join(sorted(source.state)) or 'no state'} of {piece.name}"
                                 f", this optimizer needs {', '.join(sorted(piece.state)) or 'none'}; resume with the "
                                 "optimizers of the checkpoint, or load the weights alone, load_checkpoint(..., "
                                 "load_optimizer_states=False)")
        for key, value in piece.state.items() if states else ():
            yield (value, source.state[key]) if value.dim() == 0 else (value[into], source.state[key][out_of])
    if covered != stop - start:
        raise LayerwiseError(f"the checkpoint's files hold {covered} of the {stop - start} elements of {piece.name} "
                             f"from {start} on; a file is missing or belongs to another save")
