"""The tables of docs/config_keys.md, and the trial of each key, as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "config_keys.md"

#: Trials by path of a key: the ``releases`` that have it ("ours": stock has no such key), a value to ``try`` that is
#: not the default, and the ``test`` that checks the document's words about it.
TRIED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "config_keys.json").read_text())

#: Names that tests give to the words in the document's column "here".
VERDICTS = {"works": "honoured", "error": "refused", "same result": "same", "no effect": "not ours"}


@dataclass(frozen=True)
class Row:
    """A key in one spelling."""

    section: str
    """The section where the key stands, with dots; empty for the top level."""
    key: str
    releases: str
    value: Any
    """A value that is not the default."""
    verdict: str
    test: str
    says: str
    """The document's own words."""

    @property
    def path(self) -> str:
        """The key with its section."""
        return f"{self.section}.{self.key}" if self.section else self.key


def documented(text: str) -> dict[str, tuple[str, str]]:
    """Return the verdict on each key in the tables of ``text``, and what the key means, by its path."""
    rows: dict[str, tuple[str, str]] = {}
    section = None
    for line in text.splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else line[3:].strip("`")
        if section is None or not line.startswith("| `"):
            continue
        keys, verdict, means = (cell.strip() for cell in line.strip("|").split("|"))
        for key in re.findall(r"`(\w+)`", keys):
            path = f"{section}.{key}" if section else key
            if path in rows:
                raise ValueError(f"{DOCUMENT.name} has {path} twice")
            rows[path] = (VERDICTS[verdict], means)
    return rows


def read_table(text: str) -> list[Row]:
    """Return every key of every table in ``text``, with its trial. A key that lacks one of both is an error."""
    tables = documented(text)
    if tables.keys() != TRIED.keys():
        raise ValueError(f"in {DOCUMENT.name} or in config_keys.json alone: {sorted(tables.keys() ^ TRIED.keys())}")
    return [Row(path.rpartition(".")[0], path.rpartition(".")[2], TRIED[path]["releases"], TRIED[path]["try"], verdict,
                TRIED[path]["test"], means) for path, (verdict, means) in tables.items()]


def config_with(path: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``base`` that says ``value`` at ``path``. It makes the sections on the way."""
    config: dict[str, Any] = json.loads(json.dumps(base))
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return config
