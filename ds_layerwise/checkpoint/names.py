"""Other names for the parameters of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ds_layerwise.checkpoint.record import Header, PieceRecord, Saved
from ds_layerwise.errors import LayerwiseError


def new_names(names: Iterable[str], rename: Mapping[str, str], *, use_all: bool = False) -> dict[str, str]:
    """For each of ``names`` its new one, or itself. A ``*`` stands for the same text in both; the first glob wins.

    Raises:
        LayerwiseError: two names become one, or, with ``use_all``, a glob matches nothing.
    """
    patterns = [(glob, re.compile("(.*)".join(re.escape(part) for part in glob.split("*"))), new)
                for glob, new in rename.items()]
    used: set[str] = set()
    renamed: dict[str, str] = {}
    for name in names:
        renamed[name] = name
        for glob, pattern, new in patterns:
            if match := pattern.fullmatch(name):
                texts = iter(match.groups())
                renamed[name] = "".join(next(texts) if part == "*" else part for part in re.split(r"(\*)", new))
                used.add(glob)
                break
    if use_all and (unused := rename.keys() - used):
        raise LayerwiseError(f"layerwise.rename[{min(unused)!r}] matches no name in the checkpoint, such as "
                             f"{', '.join(sorted(renamed)[:3])}; correct or remove it")
    old_of: dict[str, str] = {}
    for old, new in renamed.items():
        if new in old_of:
            raise LayerwiseError(f"layerwise.rename gives {old_of[new]} and {old} of the checkpoint one name, {new}")
        old_of[new] = old
    return renamed


class Renamed:
    """``saved`` under new names; see :class:`.record.Saved`. ``use_all`` as in :func:`new_names`."""

    def __init__(self, saved: Saved, rename: Mapping[str, str], *, use_all: bool = False) -> None:
        header = saved.header
        renamed = new_names(header.shapes, rename, use_all=use_all)
        self._saved, self._old = saved, {new: old for old, new in renamed.items()}
        self.header: Header = replace(
            header, shapes={renamed[name]: shape for name, shape in header.shapes.items()},
            rules={renamed[name]: rule for name, rule in header.rules.items()})

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """See :meth:`.record.Saved.pieces`."""
        return self._saved.pieces(self._old[name], start, stop)
