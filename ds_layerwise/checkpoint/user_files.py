"""The user's files in the folder of a checkpoint. They stay when another save replaces it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from ds_layerwise.checkpoint.manifest import FILE_NAME, MARKS, SIGNATURE, Manifest
from ds_layerwise.errors import LayerWiseError

#: The beginnings of the names of DeepSpeed's files, which end in ``_states.pt``.
_OF_DEEPSPEED = ("mp_rank_", "zero_pp_rank_", "bf16_zero_pp_rank_", "layer_", "expert_")


def others_in(folder: Path, *, replaces: Sequence[str] = ()) -> list[str]:
    """Return the paths within ``folder`` of everything that no save wrote: files, links, and empty
    folders.

    A save writes the files in its list, and those with DeepSpeed's names for files of a checkpoint.

    Args:
        replaces: globs over the names of further files that do not belong to the user.
    """
    try:
        listed = {*Manifest.read(folder).files}
    except (LayerWiseError, OSError):
        listed = set()
    found = []
    for name in _entries(folder):
        top, _, rest = name.partition("/")
        if rest:
            is_known = top == "zero" and (rest.endswith(".pt") or (folder / name).is_dir())
        else:
            is_known = top.startswith(_OF_DEEPSPEED) and top.endswith("_states.pt") or top == "zero"
        if is_known or name in listed or name in MARKS:
            continue
        if not any(fnmatchcase(name, glob) for glob in replaces):
            found.append(name)
    return found


def is_a_saves(folder: Path) -> bool:
    """Tell whether ``folder`` is left over from a save, or was being replaced. Other folders must
    not be removed.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    return any((folder / mark).exists() for mark in MARKS) or not others_in(folder)


def carry_over(old: Path, new: Path, *, replaces: Sequence[str]) -> None:
    """Add to ``new`` everything in ``old`` that no save wrote, as links if the disk
    supports them.
    """
    for name in others_in(old, replaces=replaces):
        here = old / name
        there = new / name
        if os.path.lexists(there):
            continue
        # Its owner may remove it at any time.
        with suppress(FileNotFoundError):
            if here.is_dir() and not here.is_symlink():
                there.mkdir(parents=True)
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(here, there, follow_symlinks=False)
            except (OSError, NotImplementedError):
                shutil.copy2(here, there, follow_symlinks=False)


def remove(folder: Path) -> None:
    """Remove the rest of a save. If this is interrupted, the remaining part still identifies its
    save.
    """
    if folder.is_symlink():
        folder.unlink()
    if not folder.is_dir():
        return
    with suppress(OSError):
        (folder / SIGNATURE).touch()
        (folder / FILE_NAME).unlink(missing_ok=True)
        for path in list(folder.iterdir()):
            if path.name == SIGNATURE:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _entries(folder: Path) -> Iterator[str]:
    """Yield files, links and empty folders, by path within ``folder``."""
    for place, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        here = Path(place).relative_to(folder)
        for name in (*files, *links):
            yield (here / name).as_posix()
        if not folders and not files and Path(place) != folder:
            yield here.as_posix()
