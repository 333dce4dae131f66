"""A save in progress: its target, and the files that this rank has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds_layerwise.zero.checkpoint.disks import Disks


@dataclass(frozen=True)
class Save:
    """The state that a save of an engine passes to its commit.

    :class:`.checkpointing.Checkpointing` holds it during a background save, until the engine
    commits.
    """

    save_dir: Path
    tag: str
    latest: bool
    disks: Disks
    written: tuple[Path, ...] = ()
    """The files of this rank."""

    @property
    def folder(self) -> Path:
        """The final folder of the save. The incomplete folder is beside it."""
        return self.save_dir / self.tag

    @property
    def universal_tag(self) -> str:
        """The tag under which ``layerwise.save_universal`` writes the same state."""
        return f"{self.tag}_universal"
