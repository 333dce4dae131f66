"""A save under way: where it goes, and what of it this rank has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_layerwise.zero.checkpoint.disks import Disks


@dataclass(frozen=True, slots=True)
class Save:
    """The state that a save of an engine hands to its commit.

    :class:`.checkpointing.Checkpointing` owns one that goes on beside the training, until the
    engine commits it.
    """

    save_dir: Path
    tag: str
    latest: bool
    disks: Disks
    written: tuple[Path, ...] = ()
    """The files of this rank."""

    @property
    def folder(self) -> Path:
        """The folder that the save becomes, and beside which it is written."""
        return self.save_dir / self.tag

    @property
    def universal_tag(self) -> str:
        """Under which ``layerwise.save_universal`` writes the same."""
        return f"{self.tag}_universal"
