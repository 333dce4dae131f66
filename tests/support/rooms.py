"""Marks for the rooms of the package that a test file guards: ``pytest -m sync`` runs all tests of ``ranks/sync.py``.

A room is a module, by its name without folders, or a folder with all that is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ds_layerwise"

#: The mark of files that guard no room: tests of the tests, of examples and of installed packages.
OUTSIDE = "outside"


def folders_by_room() -> dict[str, tuple[str, ...]]:
    """Return by the name of every module and folder the folders of the modules with that name."""
    by_room: dict[str, set[str]] = {OUTSIDE: set()}
    for path in sorted(PACKAGE.rglob("*.py")):
        *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
        for folder in folders:
            by_room.setdefault(folder, set())
        if name != "__init__":
            by_room.setdefault(name, set()).update(folders)
    return {name: tuple(sorted(folders)) for name, folders in by_room.items()}


def rooms(*names: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test file that guards these rooms, and so their folders, too."""
    known = folders_by_room()
    if unknown := set(names) - known.keys():
        raise ValueError(f"{min(unknown)} is no module or folder of {PACKAGE.name}")
    every = {*names, *(folder for name in names for folder in known[name])}
    return [getattr(pytest.mark, name) for name in sorted(every)]


def marker_lines() -> Iterator[str]:
    """Yield the marks as lines of pytest's configuration."""
    for name, folders in folders_by_room().items():
        where = f"a module in {', '.join(folders)}" if folders else "a folder, or a module beside the folders"
        yield f"{name}: guards {name}, {where}"
