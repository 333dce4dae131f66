"""The one truth between memory and any file: what one rank owns, by parameter name, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """What one rank holds of one parameter. Tensors may be views into live memory.

    ``master`` is 1-D float32, the elements ``[param_start, param_start + master.numel())`` of the flattened
    parameter. ``state`` maps torch's state keys to 1-D tensors of the same length, or to 0-d ones such as ``step``.
    """

    name: str
    bucket: int
    param_start: int
    master: Tensor
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Everything that ``rank`` of ``world_size`` owns, in memory order, with the layout that it was laid out by."""

    rank: int
    world_size: int
    layout_json: str
    layout_digest: str
    pieces: tuple[PieceRecord, ...]
