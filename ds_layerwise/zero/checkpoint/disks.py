"""The disks of a save: which ranks share one, and which files have arrived there.

Note: which rank makes and moves folders
    One rank per disk. Usually all nodes see one disk, and rank 0 does it. A rank that does not see
    the folder of rank 0 would write into another folder, and a checkpoint without its part would
    count as complete. With ``checkpoint.use_node_local_storage`` there may be several disks. The
    ranks that share a disk are found by testing, not from local ranks: the first rank to make a
    certain file on the disk is its owner. The disk itself decides which is first, because the file
    is made only if it does not exist.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest
from ds_layerwise.errors import LayerWiseError, few
from ds_layerwise.ranks.comm import comm

#: The time, in seconds, for which a rank looks for the files of another. Network file systems show
#: files late; those on object stores, up to a minute late.
PATIENCE = 60.0

_WAY_OUT = (
    "save to one folder on a disk that all nodes share, or, where every node has a disk of its "
    "own, set checkpoint.use_node_local_storage to true"
)

Found = TypeVar("Found")


@dataclass(frozen=True)
class Save:
    """A save of an engine, and the disks that its ranks write to."""

    save_dir: Path
    tag: str
    latest: bool
    rank: int
    owners: tuple[int, ...]
    """The rank that makes and moves folders on the disk of each rank, by rank."""
    save_id: str
    """The identifier of this save, the same on all ranks."""
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

    @property
    def is_owner(self) -> bool:
        """True if this rank makes and moves folders."""
        return self.owners[self.rank] == self.rank

    @property
    def here(self) -> list[int]:
        """The ranks that write to the disk of this rank."""
        return [rank for rank, owner in enumerate(self.owners) if owner == self.owners[self.rank]]


def begin(save_dir: Path, tag: str, *, latest: bool, own_disks: bool) -> Save:
    """Begin a save: make an empty folder on each disk that it writes to. Every rank must call this.

    Args:
        latest: True to point to it once it is complete.
        own_disks: True if there may be more disks than one.

    Raises:
        LayerWiseError: on all ranks, if one does not see the folder made for it; names that rank.
    """
    folder = save_dir / tag
    rank = comm.rank_of(None)
    save_id: str = comm.gather_objects(secrets.token_hex(8), group=None)[0]
    is_owner = rank == 0
    if own_disks:
        with comm.errors_on_all_ranks():
            is_owner = atomic.claim(folder, save_id)
        # Otherwise the new save would delete a complete one here that is already in place on other
        # disks.
        finish_save(folder, may_move=is_owner)
    with ExitStack() as undo:
        with comm.errors_on_all_ranks():
            if is_owner:
                undo.callback(atomic.abandon, folder)
                atomic.begin(folder)
                atomic.sign(folder, save_id, rank)
        with comm.errors_on_all_ranks():
            owner = patiently(lambda: atomic.signed_by(folder, save_id), folder.parent)
            if owner is None:
                raise LayerWiseError(
                    f"rank {rank} finds nothing of this save in {folder.parent} after {PATIENCE:g} "
                    f"s, where rank 0 has begun it; {_WAY_OUT}"
                )
        undo.pop_all()
    owners = tuple(comm.gather_objects(owner, group=None))
    return Save(save_dir, tag, latest, rank, owners, save_id)


def check_arrived(
    folder: Path, save_id: str, parts: Mapping[int, Manifest], needed: Mapping[int, Sequence[str]]
) -> None:
    """Compare the files that ranks have written for ``folder`` with the files that this rank sees
    there.

    Args:
        parts: by rank, the files that it wrote.
        needed: by rank, the files without which it cannot resume.

    Raises:
        LayerWiseError: a file is missing or differs; names it.
    """
    incomplete = atomic.incomplete_folder(folder)
    if atomic.signed_by(folder, save_id) is None:
        raise LayerWiseError(
            f"{incomplete} was replaced during this save: another job saves to the same folder; "
            "give each job its own save_dir"
        )
    written = Manifest.merged(parts.values()).files
    for rank, names in needed.items():
        for name in names:
            if name not in written:
                raise LayerWiseError(
                    f"no rank has written {incomplete / name}, which rank {rank} needs to resume; "
                    "use another checkpoint.writer, or none"
                )
    check_seen(incomplete, parts)


def check_seen(folder: Path, parts: Mapping[int, Manifest]) -> None:
    """Compare the files that ranks have written into ``folder`` with the files that this rank sees
    there.

    Raises:
        LayerWiseError: a file is missing or differs; names it.
    """
    for rank, part in parts.items():

        def is_whole(part: Manifest = part) -> bool | None:
            return not part.differing(folder) or None

        if patiently(is_whole, folder) is None:
            raise LayerWiseError(
                f"rank {comm.rank_of(None)}, which puts the checkpoint in place, does not see in "
                f"{folder} what rank {rank} has written there: {few(part.differing(folder))}; "
                f"what was saved before is still there; {_WAY_OUT}"
            )


def patiently(look: Callable[[], Found | None], folder: Path) -> Found | None:
    """Call ``look`` until it finds something and return that; None if it finds nothing for
    :data:`PATIENCE` seconds.

    ``folder`` is listed between calls, which makes a network file system drop its cache.
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
    """Move a save into place on the disks where it is complete but not in place, if it is in place
    on another disk.

    Args:
        may_move: True on the one rank per disk that moves it.
    """
    everyone = _save_ids(folder)
    in_place = {here for here, _ in everyone}
    if len(in_place) == 1:
        return
    for save_id in sorted(filter(None, in_place)):
        if all(save_id in ids for ids in everyone):
            with comm.errors_on_all_ranks():
                if may_move and everyone[comm.rank_of(None)][0] != save_id:
                    atomic.publish(folder)
            return


def newest(save_dir: Path, tags: Sequence[str]) -> str | None:
    """Return the newest of the saves that are in place on every rank's disk; None if there
    is none.
    """
    times = {}
    for tag in tags:
        in_place = {here for here, _ in _save_ids(save_dir / tag)}
        if len(in_place) == 1 and "" not in in_place:
            with comm.errors_on_all_ranks():
                times[tag] = (save_dir / tag / FILE_NAME).stat().st_mtime
    times = comm.gather_objects(times, group=None)[0]
    return max(times, key=times.__getitem__, default=None)


def check_one_save(folder: Path) -> None:
    """Raise an error if ranks see different saves under the name ``folder``.

    Raises:
        LayerWiseError: on all ranks; names two of them.
    """
    in_place = [here for here, _ in _save_ids(folder)]
    places = comm.gather_objects(folder.absolute(), group=None)
    for rank, place in enumerate(places):
        if in_place[rank] != in_place[0]:
            raise LayerWiseError(
                f"ranks see different saves: rank 0 in {places[0]}, rank {rank} in {place}; "
                "load a tag for which all nodes have the same save"
            )


def _save_ids(folder: Path) -> list[tuple[str, str]]:
    """Return the result of :func:`.atomic.save_ids` on every rank."""
    with comm.errors_on_all_ranks():
        mine = atomic.save_ids(folder)
    return comm.gather_objects(mine, group=None)
