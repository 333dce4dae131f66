"""Tables and lines as plain text, which folds at the width of a terminal, and numbers with their
units.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator
from copy import copy

from rich.console import Console
from rich.table import Table

from ds_layerwise.output import columns_of_terminal

#: The space before a unit. It is in a word, so that no line ends between a number and its unit, and
#: becomes a plain space where a text is complete.
GLUE = "\ue000"

#: The width of a text that goes to no terminal.
WIDTH = 90

#: The width down to which a column of names shrinks before a table is cut.
_LEAST = 10


def table_of(title: str, headers: Iterable[str], texts: Container[str]) -> Table:
    """Return a table without rows. Only columns of ``texts`` may be folded, others never are."""
    table = Table(title=title, title_justify="left")
    for header in headers:
        if header in texts:
            table.add_column(header, overflow="fold")
        else:
            table.add_column(header, justify="right", no_wrap=True)
    return table


def rendered(parts: Iterable[Table | str], most: int = WIDTH) -> str:
    """Return ``parts`` as text that is as wide as the terminal, at most ``most``.

    Only columns with ``overflow="fold"`` may be folded inside a word.
    """
    width = columns_of_terminal(most)
    file = io.StringIO()
    console = Console(file=file, width=width, no_color=True, emoji=False, markup=False)
    for part in parts:
        if isinstance(part, str):
            text = textwrap.fill(
                part, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
            )
            file.write(f"{text}\n")
        else:
            wanted = console.measure(part, options=console.options.update(max_width=sys.maxsize))
            console.print(*([part] if wanted.maximum <= width else _cut(part, width)))
    text = "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())
    return text.replace(GLUE, " ")


def _cut(table: Table, width: int) -> Iterator[Table]:
    """Yield ``table`` in pieces of at most ``width``, each with its first column. It changes the
    columns.
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
            pieces.append(table.columns[:1])
        pieces[-1].append(column)
    for piece in pieces:
        part = copy(table)
        part.columns = piece
        yield part


def size_text(num_bytes: float) -> str:
    """Return bytes in MiB, from 10 GiB on in GiB."""
    if num_bytes >= 10 * 2**30:
        return f"{num_bytes / 2**30:,.1f}{GLUE}GiB"
    return f"{num_bytes / 2**20:,.1f}{GLUE}MiB"


def count_text(numel: int) -> str:
    """Return a number of elements in millions; written out if there are less than 100,000."""
    if numel >= 100_000:
        # A bucket size of a config may be too large for a float.
        millions, tenths = divmod((numel + 50_000) // 100_000, 10)
        return f"{millions:,}.{tenths}{GLUE}M"
    return f"{numel:,}"


def time_text(nanoseconds: float) -> str:
    """Return a time in the largest unit of which it is at least one, of s, ms and us."""
    if nanoseconds >= 1e9:
        return f"{nanoseconds / 1e9:,.2f}{GLUE}s"
    if nanoseconds >= 1e6:
        return f"{nanoseconds / 1e6:.1f}{GLUE}ms"
    return f"{nanoseconds / 1e3:.1f}{GLUE}us"


def work_text(flops: float) -> str:
    """Return floating-point operations in GFLOP, from a thousand on in TFLOP."""
    if flops >= 1e12:
        return f"{flops / 1e12:,.1f}{GLUE}TFLOP"
    return f"{flops / 1e9:,.3g}{GLUE}GFLOP"
