"""What a script calls for masters and states outside of the engine's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_layerwise.zero.checkpoint.checkpointing import Checkpointing
from ds_layerwise.zero.engine_protocol import EngineOptimizer


class StatesOutside(EngineOptimizer):
    """Saves and loads states in one file, and as ``torch.distributed.checkpoint`` has them."""

    checkpointing: Checkpointing

    def save_state_dict_to_file(self, path: str | os.PathLike[str]) -> None:
        """Write masters and states of all parameters, whole, to one file of safetensors; see
        :mod:`.single_file_states`.

        Every rank must call it; rank 0 writes. The model's frozen parameters, the scheduler, the
        engine's counts, and the gradients of a step that is not over are not in it.
        """
        self.checkpoint_event_prologue()
        self.checkpointing.save_file(Path(path))

    def load_state_dict_from_file(
        self, path: str | os.PathLike[str], *, states: bool = True, strict: bool = True
    ) -> None:
        """Take over what :meth:`save_state_dict_to_file` wrote, in a run of any size;
        ``states=False``: weights alone; ``strict=False``: what both have. All ranks raise
        LayerWiseError if one lacks the file, or it is damaged, or does not fit."""
        self.checkpoint_event_prologue()
        self.checkpointing.load_file(Path(path), states=states, strict=strict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """What ``torch.distributed.checkpoint.save`` takes: {"model", "optim"} as for FSDP2,
        masters for weights; see :mod:`.checkpoint.formats.dcp`. Every rank must call it, between
        two steps, and save before the next: it has views. The gradients of a step that is not over
        are not in it.
        """
        self.checkpoint_event_prologue()
        return self.checkpointing.sharded_state_dict()

    def load_sharded_state_dict(
        self, checkpoint: Any, *, states: bool = True, strict: bool = True
    ) -> None:
        """Take over such a checkpoint, or FSDP2's, from its folder or a torch ``StorageReader``, in
        a run of any size; ``states=False``: weights alone; ``strict=False``: what both have. All
        ranks raise LayerWiseError if it is damaged, or does not fit one."""
        self.checkpoint_event_prologue()
        self.checkpointing.load_sharded(checkpoint, states=states, strict=strict)
