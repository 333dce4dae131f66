"""A checkpoint becomes visible whole or not at all: written aside, listed, and moved into place by
one rename.

Note: where folders cannot be renamed at once
    Mounts of object stores refuse to rename a folder, or do it file by file and may die halfway.
    There the files are moved one by one, the list last, and nobody believes a folder without its
    list. That this is under way, and which files of the checkpoint before have to go, is written
    down first, and everything that was not moved yet is still in the place where it was written, so
    that whoever comes next brings it to its end.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from deepspeed.utils import logger

from ds_layerwise.checkpoint.files.manifest import FILE_NAME, MOVING, SIGNATURE, Manifest
from ds_layerwise.checkpoint.files.user_files import (
    carry_over,
    is_a_saves,
    others_in,
    remove,
    written_in,
)
from ds_layerwise.errors import LayerWiseError

#: What the folder of a save is called, after its tag, until it is whole, and what the one before it
#: is called while the new one takes its place, where the file system cannot exchange two folders.
INCOMPLETE, REPLACED = ".incomplete", ".replaced"

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

#: What a file system says that knows no fsync, for folders or at all.
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


def claim(folder: Path, save_id: str) -> bool:
    """Whether this process is the first on this disk that asks to write ``folder``, of all that
    know ``save_id``.

    Raises:
        LayerWiseError: ``folder`` can be none.
    """
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(
            os.open(
                folder.with_name(f"{folder.name}.{save_id}{INCOMPLETE}"), os.O_CREAT | os.O_EXCL
            )
        )
    except FileExistsError:
        return False
    return True


def _check_free(folder: Path) -> None:
    """Refuse a file that would be in the way, or be moved out of it.

    Raises:
        LayerWiseError: ``folder``, or what it is in, is one, or a link that leads to no folder.
    """
    for place in (folder, *folder.parents):
        if os.path.lexists(place) and not place.is_dir():
            raise LayerWiseError(
                f"{place} is no folder, and a save of {folder.name} needs one of that name; move "
                "it away, or choose another tag or place"
            )


def begin(folder: Path) -> None:
    """Make an empty place to write ``folder`` into, and put right what an earlier save left of it.

    Raises:
        LayerWiseError: a file, or a folder that no save made, has a name that this one needs.
    """
    _check_free(folder)
    for place in (staged(folder), folder.with_name(folder.name + REPLACED)):
        if os.path.lexists(place) and not is_a_saves(place):
            what = (
                "is a link"
                if place.is_symlink()
                else "is a file"
                if place.is_file()
                else f"holds {others_in(place)[0]}, which no save wrote"
            )
            raise LayerWiseError(
                f"{place} {what}, and a save of {folder.name} needs that name; move it away, or "
                "choose another tag"
            )
    recover(folder)
    for place in (staged(folder), folder.with_name(folder.name + REPLACED)):
        remove(place)
    staged(folder).mkdir(parents=True)
    (staged(folder) / SIGNATURE).touch()


def sign(folder: Path, save_id: str, rank: int) -> None:
    """Write into the place for ``folder`` which save it is for, and which rank has made it."""
    (staged(folder) / SIGNATURE).write_text(f"{save_id} {rank}")
    claims = re.compile(re.escape(folder.name) + "[.][0-9a-f]{16}" + re.escape(INCOMPLETE))
    for path in folder.parent.iterdir():
        # Of this save, and of those that died here.
        if claims.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def signed_by(folder: Path, save_id: str) -> int | None:
    """The rank that made the place for ``folder`` for the save ``save_id``; None if it is not
    there, or another's.
    """
    try:
        found, _, rank = (staged(folder) / SIGNATURE).read_text().partition(" ")
    except OSError:
        return None
    return int(rank) if found == save_id and rank else None


def staged(folder: Path) -> Path:
    """Where to write what becomes ``folder``."""
    return folder.with_name(folder.name + INCOMPLETE)


def commit(folder: Path, manifest: Manifest, *, replaces: Sequence[str] = ()) -> None:
    """Add the list of what was written, and move it to ``folder``. See :func:`publish`."""
    seal(folder, manifest)
    publish(folder, replaces=replaces)


def seal(folder: Path, manifest: Manifest) -> None:
    """Add the list of what was written for ``folder``. It is whole now, and not visible yet."""
    (staged(folder) / SIGNATURE).unlink(missing_ok=True)
    manifest.write(staged(folder))
    flush(staged(folder) / FILE_NAME)
    flush(staged(folder))


def publish(folder: Path, *, replaces: Sequence[str] = ()) -> None:
    """Move to ``folder`` what was sealed. What a save wrote there before is removed at the end, and
    nothing else.

    Args:
        replaces: globs over the names of more files that may be removed.
    """
    if not _renames_folders(folder.parent):
        _move_files(folder, replaces)
        return
    new, before = staged(folder), folder.with_name(folder.name + REPLACED)
    if folder.is_dir():
        # Before the swap, so that at no moment anything is away.
        carry_over(folder, new, replaces=replaces)
    if folder.exists() and _exchange(new, folder):
        # What somebody has put there in between.
        carry_over(new, folder, replaces=replaces)
        remove(new)
    else:
        try:
            if folder.exists():
                remove(before)
                folder.rename(before)
            new.rename(folder)
        except OSError as e:
            logger.debug(
                f"ds_layerwise: {folder} cannot be renamed ({e}); its files are moved one by one"
            )
            if before.is_dir() and not folder.exists():
                before.rename(folder)
            _move_files(folder, replaces)
            return
        if before.is_dir():
            carry_over(before, folder, replaces=replaces)
        remove(before)
    flush(folder.parent)


def abandon(folder: Path) -> None:
    """Clear away what was written of ``folder``, unless ``folder`` has lost something to it
    already.
    """
    if _to_remove(staged(folder)) is None and is_a_saves(staged(folder)):
        remove(staged(folder))


def save_ids(folder: Path) -> tuple[str, str]:
    """Which save is in ``folder``, and which one is whole beside it; empty where there is none."""

    def of(place: Path) -> str:
        try:
            return Manifest.read(place).save_id
        except LayerWiseError as e:
            if isinstance(e.__cause__, OSError):
                # What a disk does not give may be there.
                raise
            return ""

    return of(folder), of(staged(folder))


def recover(folder: Path) -> None:
    """Where a commit died between its two renames, take the checkpoint before it back; where it
    died while files were moved one by one, bring it to its end.

    Raises:
        LayerWiseError: a file is gone that should have been moved.
    """
    before = folder.with_name(folder.name + REPLACED)
    if not folder.exists() and is_a_saves(before):
        before.rename(folder)
    if _to_remove(staged(folder)) is not None:
        _move_files(folder)


def _move_files(folder: Path, replaces: Sequence[str] = ()) -> None:
    """Do what :func:`publish` does without renaming a folder, or go on with it; see the note at the
    top.
    """
    new = staged(folder)
    manifest = Manifest.read(new)
    to_remove = _to_remove(new)
    is_new = to_remove is None and not folder.exists()
    if to_remove is None:
        gone = set(written_in(folder, replaces=replaces)) if folder.is_dir() else set()
        to_remove = sorted(gone - manifest.files.keys())
        (new / MOVING).write_text(json.dumps(to_remove))
        flush(new / MOVING)
        flush(new)
    try:
        folder.mkdir(exist_ok=True)
        (folder / FILE_NAME).unlink(missing_ok=True)
        flush(folder)
        for name in to_remove:
            (folder / name).unlink(missing_ok=True)
        for name in manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (new / name).exists():
                _move(new / name, folder / name)
    except OSError:
        if is_new:
            # Nothing was there that could be lost, and this may be what fills the disk.
            shutil.rmtree(folder, ignore_errors=True)
            (new / MOVING).unlink(missing_ok=True)
        raise
    if lines := manifest.differing(folder):
        raise LayerWiseError(
            f"{lines[0]}, after what was written was moved there file by file; load another "
            "checkpoint"
        )
    for path in {folder, *((folder / name).parent for name in manifest.files)}:
        flush(path)
    shutil.copyfile(new / FILE_NAME, folder / FILE_NAME)
    flush(folder / FILE_NAME)
    flush(folder)
    (new / SIGNATURE).touch()
    (new / MOVING).unlink()
    remove(new)


def _to_remove(new: Path) -> list[str] | None:
    """The files that have to go for those of ``new``, if moving them has begun."""
    try:
        found: list[str] = json.loads((new / MOVING).read_text())
    except (OSError, ValueError):
        # Half written: then nothing was moved.
        return None
    return found


def _move(one: Path, other: Path) -> None:
    try:
        one.replace(other)
    except OSError:
        shutil.copyfile(one, other)
        flush(other)


def _renames_folders(path: Path) -> bool:
    """Whether a folder in ``path`` is renamed at once. Mounts in user space do it file by file, as
    far as they can.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return True
    place, kinds = path.resolve(), dict[Path, str]()
    for line in mounts:
        where, _, what = line.partition(" - ")
        mounted = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), where.split()[4]))
        if place.is_relative_to(mounted):
            kinds[mounted] = what.split()[0]
    return not kinds or not kinds[max(kinds, key=lambda mounted: len(mounted.parts))].startswith(
        "fuse"
    )


def point(pointer: Path, tag: str) -> None:
    """Write ``tag`` into the file ``pointer``, such as ``latest``; it holds the old text or the new
    one, never none.
    """
    try:
        write_whole(pointer, lambda new: new.write_text(tag, encoding="utf-8"))
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV, errno.EINVAL):
            raise
        # A mount that renames nothing takes a file as a whole when it is closed.
        pointer.write_text(tag, encoding="utf-8")
        flush(pointer)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file, which then takes the place of ``path`` in one go.

    Raises:
        LayerWiseError: a folder or a link has the name that is needed for it.
    """
    new = path.with_name(path.name + INCOMPLETE)
    if new.is_dir() or new.is_symlink():
        raise LayerWiseError(
            f"{new} is a folder or a link, and {path.name} is written under that name; move it away"
        )
    try:
        write(new)
        flush(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    flush(path.parent)


def pointed(pointer: Path) -> str:
    """What the file ``pointer`` holds, whoever wrote it: editors put marks and line ends around a
    tag. What is no UTF-8 becomes characters that no tag has."""
    return (
        pointer.read_bytes().removeprefix(codecs.BOM_UTF8).strip().decode(errors="surrogateescape")
    )


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once, where the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return (
        renameat2 is not None
        and renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
        == 0
    )


def flush(path: Path) -> None:
    """Make what ``path`` holds last through a loss of power: a file's bytes, or the names in a
    folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _NO_FSYNC:
            raise
        if (device := os.fstat(descriptor).st_dev) not in _told:
            _told.add(device)
            logger.warning(
                f"ds_layerwise: the disk of {path.parent} knows no fsync ({e.strerror}): what is "
                "saved there may be lost with the power"
            )
    finally:
        os.close(descriptor)


#: The disks of which this has been said.
_told: set[int] = set()
