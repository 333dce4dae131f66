"""Tables and lines as plain text, which folds at the width of a terminal."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Iterator
from copy import copy

from rich.console import Console
from rich.table import Table

from ds_layerwise.output import columns_of_terminal
from ds_layerwise.plan.forecast.quantities import GLUE

#: The width down to which a column of names shrinks before a table is cut.
_LEAST = 10


def rendered(parts: Iterable[Table | str], most: int = sys.maxsize) -> str:
    """Return ``parts`` as text that is as wide as the terminal, at most ``most``.

    Only columns with ``overflow="fold"`` may be folded inside a word.
    """
    width = columns_of_terminal(most)
    file = io.StringIO()
    console = Console(file=file, width=width, no_color=True, emoji=False, markup=False)
    for part in parts:
        if isinstance(part, str):
            text = textwrap.fill(
                part, width, subsequent_indent="  " * (width < most), break_on_hyphens=False
            )
            file.write(f"{text}\n")
        else:
            console.print(*(_cut(part, width) if width < most else [part]))
    text = "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())
    return text.replace(GLUE, " ")


def _cut(table: Table, width: int) -> Iterator[Table]:
    """Yield ``table`` in pieces of at most ``width``, each with its first two columns. It changes
    the columns.
    """
    pieces = [table.columns[:0]]
    for column in table.columns:
        words = " ".join([str(column.header), *map(str, column.cells)]).split()
        column.min_width = max(map(len, words), default=1)
        if column.overflow == "fold":
            column.min_width = min(column.min_width, _LEAST)
        else:
            column.width = column.min_width
            column.no_wrap = False
        if sum((each.min_width or 0) + 3 for each in [*pieces[-1], column]) >= width:
            pieces.append(table.columns[:2])
        pieces[-1].append(column)
    for piece in pieces:
        part = copy(table)
        part.columns = piece
        yield part
