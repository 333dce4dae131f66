"""README.md and docs/, as data: code blocks, tables, links."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

#: Files that a page tells its reader to make, or that a command on a page writes, and a test's stand-in for each.
USERS_FILES = {"ds.json", "train.py", "hostfile", "config.json", "my_models:build", "checkpoints",
               "checkpoints/best", "checkpoints/best_universal", "checkpoints/zero_to_fp32.py", "out", "out/model",
               "out/model.safetensors", "llama_sft.yaml", "axolotl.yaml"}


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    """Return the blocks of all pages that are marked as ``language``."""
    return [block for path in PAGES for block in blocks_of(path) if block.language == language]


def blocks_of(path: Path) -> list[Block]:
    """Return every fenced block of a page, also those without a language."""
    blocks: list[Block] = []
    inside: list[str] = []
    start, language = 0, ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```") and not start:
            start, language, inside = number, line[3:].strip(), []
        elif line.startswith("```"):
            blocks.append(Block(str(path.relative_to(ROOT)), start, language, "\n".join(inside) + "\n"))
            start = 0
        elif start:
            inside.append(line)
    if start:
        raise ValueError(f"{path.name}:{start} opens a block that nothing closes")
    return blocks


def prose_of(path: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def tables_of(path: Path) -> list[list[list[str]]]:
    """Return every table of a page: its rows of cells, the header first and without the line below it."""
    tables: list[list[list[str]]] = []
    previous = ""
    for line in prose_of(path).splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                tables.append([])
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                tables[-1].append(cells)
        previous = line
    return tables


def names_in(cell: str) -> list[str]:
    """Return the names in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def as_config(block: Block) -> tuple[dict[str, Any], bool]:
    """Return the DeepSpeed config of a JSON block, and whether the block is a whole one. A small config completes the
    others."""
    given = json.loads(block.text)
    base = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02}}}
    return {**base, **given}, "optimizer" in given


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose_of(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def sentences_of(path: Path) -> list[str]:
    """Return the sentences of a page without its code: a blank line, a heading, a list item and a cell end one, too."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    pieces = [""]
    for line in text.splitlines():
        opens = re.match(r" *(?:[*-]|\d+\.|#+) +", line)
        if line.startswith("|"):
            pieces += [*line.strip("|").split("|"), ""]
        elif opens or not line.strip():
            pieces += [line[opens.end():] if opens else "", *[""] * bool(opens and "#" in opens[0])]
        else:
            pieces[-1] += f" {line}"
    whole = [" ".join(piece.split()) for piece in pieces]
    return [found for piece in whole for found in re.split(r"(?:(?<=[.!?])|(?<=[.!?]\))) +(?=[^a-z])", piece) if found]
