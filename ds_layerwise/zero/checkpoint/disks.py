"""Disks of a save: the ranks that share one, and the files that arrived there.

Note: who makes and moves folders
    One rank on each disk. Usually there is one disk, which all nodes see, and rank 0 does it; a
    rank that does not see what rank 0 has begun would write into another folder, and a checkpoint
    without its part would count as whole. With ``checkpoint.use_node_local_storage`` there may be
    more disks than one. Which ranks share one is found out by looking, not from local ranks:
    whoever is first to make a file is the one, and making a file only if there is none is decided
    by the disk alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.files.manifest import FILE_NAME, Manifest
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.ranks.comm import comm

#: For how many seconds a rank looks for what another one has written. Network file systems show
#: files late, those on object stores by up to a minute.
PATIENCE = 60.0

_WAY_OUT = (
    "save to one folder on a disk that all nodes share, or, where every node has a disk of its "
    "own, set checkpoint.use_node_local_storage to true"
)

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks that the ranks of a save write to."""

    rank: int
    owners: tuple[int, ...]
    """The ranks that make and move folders on the disk of each rank."""
    save_id: str
    """The name of this save, the same on all ranks."""

    @property
    def is_owner(self) -> bool:
        """True if this rank makes and moves folders."""
        return self.owners[self.rank] == self.rank

    @property
    def are_many(self) -> bool:
        """True if a part of the save is on another disk."""
        return len(set(self.owners)) > 1

    @property
    def here(self) -> list[int]:
        """The ranks that write to the disk of this rank."""
        return [rank for rank, owner in enumerate(self.owners) if owner == self.owners[self.rank]]


def begin(folder: Path, *, own_disks: bool) -> Disks:
    """Make an empty place to write ``folder`` into, on each disk one. Every rank must call this.

    Args:
        own_disks: whether there may be more disks than one.

    Raises:
        LayerWiseError: on all ranks, if one does not see what was made for it; names that rank.
    """
    rank = comm.rank_of(None)
    save_id: str = comm.gather_objects(secrets.token_hex(8), group=None)[0]
    is_owner = rank == 0
    if own_disks:
        with comm.errors_on_all_ranks(None):
            is_owner = atomic.claim(folder, save_id)
        # Else what is whole here, and in place elsewhere, would have to make room.
        finish_save(folder, may_move=is_owner)
    with ExitStack() as undo:
        with comm.errors_on_all_ranks(None):
            if is_owner:
                undo.callback(atomic.abandon, folder)
                atomic.begin(folder)
                atomic.sign(folder, save_id, rank)
        with comm.errors_on_all_ranks(None):
            owner = patiently(lambda: atomic.signed_by(folder, save_id), folder.parent)
            if owner is None:
                raise LayerWiseError(
                    f"rank {rank} finds nothing of this save in {folder.parent} after {PATIENCE:g} "
                    f"s, where rank 0 has begun it; {_WAY_OUT}"
                )
        undo.pop_all()
    return Disks(rank, tuple(comm.gather_objects(owner, group=None)), save_id)


def check_arrived(
    folder: Path, save_id: str, parts: Mapping[int, Manifest], needed: Mapping[int, Sequence[str]]
) -> None:
    """Compare what ranks have written of ``folder`` with what lies there, as this rank sees it.

    Args:
        parts: by rank, what it wrote.
        needed: by rank, the files without which it cannot resume.

    Raises:
        LayerWiseError: a file is not there, or another one; names it.
    """
    incomplete = atomic.incomplete_folder(folder)
    if atomic.signed_by(folder, save_id) is None:
        raise LayerWiseError(
            f"{incomplete} was made anew while this save was under way: another job saves to the "
            "same place; give each job a save_dir of its own"
        )
    written: set[str] = set()
    for part in parts.values():
        written.update(part.files)
    for rank, names in needed.items():
        for name in names:
            if name not in written:
                raise LayerWiseError(
                    f"no rank has written {incomplete / name}, which rank {rank} resumes from; use "
                    "another checkpoint.writer, or none"
                )
    check_seen(incomplete, parts)


def check_seen(folder: Path, parts: Mapping[int, Manifest]) -> None:
    """Compare what ranks have written into ``folder`` with what this rank sees there.

    Raises:
        LayerWiseError: a file is not there, or another one; names it.
    """
    for rank, part in parts.items():
        lines: list[str] = []

        def is_whole(part: Manifest = part, lines: list[str] = lines) -> bool | None:
            lines[:] = part.differing(folder)
            return None if lines else True

        if patiently(is_whole, folder) is None:
            raise LayerWiseError(
                f"rank {comm.rank_of(None)}, which puts the checkpoint in place, does not see in "
                f"{folder} what rank {rank} has written there: {lines[0]}; what was saved before "
                f"is still there; {_WAY_OUT}"
            )


def patiently(look: Callable[[], Found | None], folder: Path) -> Found | None:
    """Return what ``look`` finds; None if it finds nothing for :data:`PATIENCE` seconds. ``folder``
    is listed in between, which lets a network file system forget what it remembers of it.
    """
    until = time.monotonic() + PATIENCE
    pause = 0.01
    while (found := look()) is None and time.monotonic() < until:
        time.sleep(min(pause, max(0.0, until - time.monotonic())))
        pause = min(2 * pause, 2.0)
        if folder.is_dir():
            next(folder.iterdir(), None)
    return found


def finish_save(folder: Path, *, may_move: bool) -> None:
    """Put a save in place on the disks where it is whole, if it is in place on another.

    Args:
        may_move: whether this rank does it on its disk; one on each does.
    """
    with comm.errors_on_all_ranks(None):
        mine = atomic.save_ids(folder)
    everyone = comm.gather_objects(mine, group=None)
    in_place = set()
    for here, _ in everyone:
        in_place.add(here)
    if len(in_place) == 1:
        return
    for save_id in sorted(filter(None, in_place)):
        if all(save_id in ids for ids in everyone):
            with comm.errors_on_all_ranks(None):
                if may_move and mine[0] != save_id:
                    atomic.publish(folder)
            return


def newest(save_dir: Path, tags: Sequence[str]) -> str | None:
    """The newest of those saves that is in place on every rank's disk; None if there is none."""
    with comm.errors_on_all_ranks(None):
        mine = {
            tag: (save_id, (save_dir / tag / FILE_NAME).stat().st_mtime)
            for tag in tags
            if (save_id := atomic.save_ids(save_dir / tag)[0])
        }
    first, *others = comm.gather_objects(mine, group=None)
    common = {*first}
    for found in others:
        common = {tag for tag in common if tag in found and found[tag][0] == first[tag][0]}
    return max(sorted(common), key=lambda tag: first[tag][1], default=None)


def check_one_save(folder: Path, *, own_disks: bool) -> None:
    """Refuse to go on where ranks see different saves under the name ``folder``.

    Raises:
        LayerWiseError: on all ranks; names two of them.
    """
    with comm.errors_on_all_ranks(None):
        found = atomic.save_ids(folder)[0]
        if not found and not own_disks and (folder / FILE_NAME).exists():
            # Version 0.1 of this package gave saves no name; on one disk they all have the same
            # list.
            found = comm.digest_of([(folder / FILE_NAME).read_text()])
    everyone = comm.gather_objects((found, str(folder.absolute())), group=None)
    for rank, (other, place) in enumerate(everyone):
        if other != everyone[0][0]:
            raise LayerWiseError(
                f"ranks see different saves: rank 0 in {everyone[0][1]} another one than rank "
                f"{rank} in {place}; load a tag that all nodes have of one save"
            )
