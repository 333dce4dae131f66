"""The files of all pipeline stages as one checkpoint, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_layerwise.checkpoint.formats.regular import KEY, RegularCheckpoint, describe
from ds_layerwise.checkpoint.record import PieceRecord
from ds_layerwise.errors import LayerWiseError


class PipelineCheckpoint:
    """A checkpoint of any number of pipeline stages; see :class:`.record.Saved`.

    A parameter is in the files of one stage; a tied one, in those of the first stage that holds it.

    Args:
        rank: the rank whose file of each stage is opened first.
        pipeline_stage: the stage whose parameter groups and loss scale are used, if the checkpoint
            has that many stages.

    Raises:
        LayerWiseError: a file is missing, unreadable, of another save, not ours, or in a newer
            format; names it.
    """

    def __init__(self, folder: Path, *, rank: int = 0, pipeline_stage: int = 0) -> None:
        count = max(1, len(list(folder.glob("*zero_pp_rank_0_mp_rank_*_optim_states.pt"))))
        self._stages = [
            RegularCheckpoint(folder, rank=rank, mp_rank=mp_rank) for mp_rank in range(count)
        ]
        first = self._stages[0]
        for other in self._stages[1:]:
            if other.header.step != first.header.step:
                raise LayerWiseError(
                    f"{other.path(0)} says step {other.header.step}, expected {first.header.step}; "
                    "the files are not of one save"
                )
        self._stage_of: dict[str, RegularCheckpoint] = {}
        for saved in self._stages:
            self._stage_of.update(dict.fromkeys(saved.header.shapes, saved))
        self.header = replace(
            self._stages[pipeline_stage if pipeline_stage < count else 0].header,
            shapes={name: saved.header.shapes[name] for name, saved in self._stage_of.items()},
            rules={name: saved.header.rules[name] for name, saved in self._stage_of.items()},
        )

    def identity(self) -> list[str]:
        """See :meth:`.regular.RegularCheckpoint.identity`."""
        return sum((saved.identity() for saved in self._stages), [])

    def state_dict(self, rank: int) -> Mapping[str, Any]:
        """Return the ``optimizer_state_dict`` of ``rank`` in the first stage, with the header of
        all stages.
        """
        held = self._stages[0].state_dict(rank)
        return {**held, KEY: {**held[KEY], **describe(self.header)}}

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """See :meth:`.record.Saved.pieces`."""
        return self._stage_of[name].pieces(name, start, stop)
