"""The tables of docs/config_keys.md, as data."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "docs" / "config_keys.md"


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

    @property
    def path(self) -> str:
        """The key with its section."""
        return f"{self.section}.{self.key}" if self.section else self.key


def read_table(text: str) -> list[Row]:
    """Every row of every table in ``text``."""
    rows, section = [], None
    for line in text.splitlines():
        if line.startswith("## "):
            section = "" if line == "## Top level" else line[3:].strip("`")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if section is None or not line.startswith("| `"):
            continue
        keys, _, releases, value, verdict, _, test = cells
        for key in re.findall(r"`(\w+)`", keys):
            rows.append(Row(section, key, releases, json.loads(value.strip("`")), verdict, test.strip("`")))
    return rows


def config_with(path: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``base`` that says ``value`` at ``path``; sections on the way are made."""
    config: dict[str, Any] = json.loads(json.dumps(base))
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return config
