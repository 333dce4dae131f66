"""Folders and files that become visible as a whole or not at all. They are written under another
name, listed, and moved into place by one rename.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path

from deepspeed.utils import logger

from ds_layerwise.checkpoint.manifest import FILE_NAME, SIGNATURE, Manifest
from ds_layerwise.checkpoint.user_files import carry_over, is_a_saves, others_in, remove
from ds_layerwise.errors import LayerWiseError

#: The suffix of the folder that a save writes, until it is complete.
INCOMPLETE = ".incomplete"

#: The suffix of the old folder during a replacement, if the file system cannot exchange two
#: folders.
REPLACED = ".replaced"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

#: The errors of a file system without fsync, for folders or at all.
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)

#: The disks that a warning has already named.
_without_fsync: set[int] = set()


def claim(folder: Path, save_id: str) -> bool:
    """Tell whether this process is the first on this disk to claim ``folder`` for ``save_id``.

    Raises:
        LayerWiseError: ``folder`` cannot be a folder.
    """
    _check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.with_name(f"{folder.name}.{save_id}{INCOMPLETE}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _check_free(folder: Path) -> None:
    """Refuse a file that would block the save, or be moved by it.

    Raises:
        LayerWiseError: ``folder``, or a parent of it, is a file, or a link that leads to no folder.
    """
    for place in (folder, *folder.parents):
        if os.path.lexists(place) and not place.is_dir():
            raise LayerWiseError(
                f"{place} is not a folder, but a save of {folder.name} needs one of that name; "
                "move it away, or choose another tag or place"
            )


def begin(folder: Path) -> None:
    """Make an empty incomplete folder for ``folder``, and clean up after an earlier save.

    Raises:
        LayerWiseError: a file, or a folder that no save made, has a name that the save needs; or
            the disk cannot rename folders.
    """
    _check_free(folder)
    new = incomplete_folder(folder)
    places = (new, folder.with_name(folder.name + REPLACED))
    for place in places:
        if os.path.lexists(place) and not is_a_saves(place):
            what = "is a file"
            if place.is_symlink():
                what = "is a link"
            elif place.is_dir():
                what = f"holds {others_in(place)[0]}, which no save wrote"
            raise LayerWiseError(
                f"{place} {what}, and a save of {folder.name} needs that name; move it away, or "
                "choose another tag"
            )
    recover(folder)
    for place in places:
        remove(place)
    new.mkdir(parents=True)
    (new / SIGNATURE).touch()
    _check_renames(new)


def _check_renames(place: Path) -> None:
    """Rename a folder in ``place`` as a test, before anything is written that needs a rename at the
    end.

    Raises:
        LayerWiseError: the disk cannot do it.
    """
    old = place / "old"
    new = place / "new"
    old.mkdir()
    (old / SIGNATURE).touch()
    try:
        os.rename(old, new)
    except OSError as e:
        raise LayerWiseError(
            f"the disk of {place.parent} cannot rename a folder ({e.strerror}), as mounts of "
            "object stores cannot, so that a save there could appear in part; save to a local or "
            "shared disk, and copy the folder"
        ) from e
    shutil.rmtree(new)


def sign(folder: Path, save_id: str, rank: int) -> None:
    """Write the identifier of the save, and the rank that has made it, into the incomplete folder
    for ``folder``.
    """
    (incomplete_folder(folder) / SIGNATURE).write_text(f"{save_id} {rank}")
    # The claims of this save, and of interrupted saves.
    for path in folder.parent.glob(f"{escape(folder.name)}.{'[0-9a-f]' * 16}{INCOMPLETE}"):
        if path.is_file():
            path.unlink(missing_ok=True)


def signed_by(folder: Path, save_id: str) -> int | None:
    """Return the rank that made the incomplete folder for ``folder`` for the save ``save_id``; None
    if it does not exist, or belongs to another save.
    """
    try:
        signer, _, rank = (incomplete_folder(folder) / SIGNATURE).read_text().partition(" ")
    except OSError:
        return None
    if signer == save_id and rank:
        return int(rank)
    return None


def incomplete_folder(folder: Path) -> Path:
    """Return the incomplete folder for ``folder``."""
    return folder.with_name(folder.name + INCOMPLETE)


def commit(folder: Path, manifest: Manifest, *, replaces: Sequence[str] = ()) -> None:
    """Add the list of written files, and move the save to ``folder``. See :func:`publish`."""
    seal(folder, manifest)
    publish(folder, replaces=replaces)


def seal(folder: Path, manifest: Manifest) -> None:
    """Add the list of files written for ``folder``. The save is then complete, and not
    visible yet.
    """
    new = incomplete_folder(folder)
    (new / SIGNATURE).unlink(missing_ok=True)
    manifest.write(new)
    flush(new / FILE_NAME)
    flush(new)


def publish(folder: Path, *, replaces: Sequence[str] = ()) -> None:
    """Move the sealed save to ``folder``. Files of an earlier save there are removed at the end,
    and nothing else.

    Args:
        replaces: globs over the names of further files that may be removed.
    """
    new = incomplete_folder(folder)
    before = folder.with_name(folder.name + REPLACED)
    if folder.is_dir():
        # Before the exchange, so that no file is missing at any moment.
        carry_over(folder, new, replaces=replaces)
    if folder.exists() and _exchange(new, folder):
        before = new
    else:
        try:
            if folder.exists():
                remove(before)
                os.rename(folder, before)
            os.rename(new, folder)
        except OSError:
            if before.is_dir() and not folder.exists():
                os.rename(before, folder)
            raise
    if before.is_dir():
        # Again, for files that were added in the meantime.
        carry_over(before, folder, replaces=replaces)
    remove(before)
    flush(folder.parent)


def abandon(folder: Path) -> None:
    """Remove the files written for ``folder``."""
    if is_a_saves(incomplete_folder(folder)):
        remove(incomplete_folder(folder))


def save_ids(folder: Path) -> tuple[str, str]:
    """Return the identifier of the save in ``folder``, and that of the complete save beside it;
    each is empty if there is none.
    """
    return _save_id(folder), _save_id(incomplete_folder(folder))


def _save_id(place: Path) -> str:
    try:
        return Manifest.read(place).save_id
    except LayerWiseError:
        return ""


def recover(folder: Path) -> None:
    """Restore a checkpoint if the commit that replaces it was interrupted between its two
    renames.
    """
    before = folder.with_name(folder.name + REPLACED)
    if not folder.exists() and is_a_saves(before):
        os.rename(before, folder)


def point(pointer: Path, tag: str) -> None:
    """Write ``tag`` into the file ``pointer``, such as ``latest``. The file always has the old text
    or the new one.
    """
    write_whole(pointer, lambda new: new.write_text(tag, encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file with ``write``, and then replace ``path`` by it atomically.

    Raises:
        LayerWiseError: the name that it needs is that of a folder or a link.
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
    """Return the tag in the file ``pointer``, which may come from anywhere: editors add byte order
    marks and line ends. Bytes that are not UTF-8 become characters that no tag has.
    """
    text = pointer.read_bytes().removeprefix(codecs.BOM_UTF8).strip()
    return text.decode(errors="surrogateescape")


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders atomically, if the system can. Return True if it did."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    return bool(renameat2(*paths, _RENAME_EXCHANGE) == 0)


def flush(path: Path) -> None:
    """Flush a file's bytes, or the names in a folder, to the disk, so that they survive a loss of
    power.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in _NO_FSYNC:
            raise
        if (device := os.fstat(descriptor).st_dev) not in _without_fsync:
            _without_fsync.add(device)
            logger.warning(
                f"ds_layerwise: the disk of {path.parent} does not support fsync ({e.strerror}): "
                "a power failure may lose what is saved there"
            )
    finally:
        os.close(descriptor)
