"""A checkpoint becomes visible whole or not at all: written aside, moved into place by one rename."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from ds_layerwise.checkpoint.manifest import Manifest

#: What the folder of a save is called, after its tag, until it is whole, and what the one before it is called while
#: the new one takes its place, where the file system cannot exchange two folders.
INCOMPLETE, REPLACED = ".incomplete", ".replaced"

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def begin(folder: Path) -> None:
    """Make an empty place to write ``folder`` into, and put right what an earlier save left of it."""
    recover(folder)
    shutil.rmtree(staged(folder), ignore_errors=True)
    staged(folder).mkdir(parents=True)


def staged(folder: Path) -> Path:
    """Where to write what becomes ``folder``."""
    return folder.with_name(folder.name + INCOMPLETE)


def commit(folder: Path, manifest: Manifest) -> None:
    """Add the list of what was written, and move it to ``folder``. What was there before is removed at the end."""
    manifest.write(staged(folder))
    flush(staged(folder))
    if not folder.exists():
        staged(folder).rename(folder)
    elif _exchange(staged(folder), folder):
        shutil.rmtree(staged(folder), ignore_errors=True)
    else:
        before = folder.with_name(folder.name + REPLACED)
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
        staged(folder).rename(folder)
        shutil.rmtree(before, ignore_errors=True)
    flush(folder.parent)


def abandon(folder: Path) -> None:
    """Clear away what was written of ``folder``."""
    shutil.rmtree(staged(folder), ignore_errors=True)


def recover(folder: Path) -> None:
    """Where a commit died between its two renames, take the checkpoint before it back."""
    before = folder.with_name(folder.name + REPLACED)
    if not folder.exists() and before.is_dir():
        before.rename(folder)


def point(pointer: Path, tag: str) -> None:
    """Write ``tag`` into the file ``pointer``, such as ``latest``; it holds the old text or the new one, never none."""
    new = pointer.with_name(pointer.name + INCOMPLETE)
    with new.open("w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    new.replace(pointer)
    flush(pointer.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once, where the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return renameat2 is not None and renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other),
                                               _RENAME_EXCHANGE) == 0


def flush(path: Path) -> None:
    """Make what ``path`` holds last through a loss of power: a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
