"""The tables of docs/config_keys.md, and what is tried with each key and where, as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "config_keys.md"

#: By the path of each key: the ``releases`` that have it ("ours": no key of stock), a value to ``try`` that is not the
#: default, and the ``test`` of what the document says of it.
TRIED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "config_keys.json").read_text())

#: What the document's column "here" says, and what it is called in tests.
VERDICTS = {"works": "honoured", "error": "refused", "same result": "same", "no effect": "not ours"}


@dataclass(frozen=True)
class Row:
    """One key in one spelling."""

    section: str
    """Where the key stands, with dots; empty for the top level."""
    key: str
    releases: str
    value: Any
    """One that is not the default."""
    verdict: str
    test: str
    says: str
    """The document's own words."""

    @property
    def path(self) -> str:
        """The key with its section."""
        return f"{self.section}.{self.key}" if self.section else self.key


def documented(text: str) -> dict[str, tuple[str, str]]:
    """By the path of each key in the tables of ``text``: its verdict, and what it means."""
    found: dict[str, tuple[str, str]] = {}
    section = None
    for line in text.splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else line[3:].strip("`")
        if section is None or not line.startswith("| `"):
            continue
        keys, verdict, means = (cell.strip() for cell in line.strip("|").split("|"))
        for key in re.findall(r"`(\w+)`", keys):
            path = f"{section}.{key}" if section else key
            if path in found:
                raise ValueError(f"{DOCUMENT.name} has {path} twice")
            found[path] = (VERDICTS[verdict], means)
    return found


def read_table(text: str) -> list[Row]:
    """Every key of every table in ``text``, with what is tried; each has to be in both."""
    tables = documented(text)
    if tables.keys() != TRIED.keys():
        raise ValueError(f"in {DOCUMENT.name} or in config_keys.json alone: {sorted(tables.keys() ^ TRIED.keys())}")
    return [Row(path.rpartition(".")[0], path.rpartition(".")[2], TRIED[path]["releases"], TRIED[path]["try"], verdict,
                TRIED[path]["test"], means) for path, (verdict, means) in tables.items()]


def config_with(path: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``base`` that says ``value`` at ``path``; sections on the way are made."""
    config: dict[str, Any] = json.loads(json.dumps(base))
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return config
