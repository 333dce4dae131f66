"""A plan as one HTML page: its tables, and pictures of what each rank holds, computes and sends.

The page needs no network and no scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

import numpy as np
from rich.table import Table

from ds_layerwise.plan.forecast.forecast import Forecast
from ds_layerwise.plan.forecast.quantities import GLUE, size_text, work_text

#: Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
#: Of more ranks, a picture has the fullest of each group of neighbours.
_MOST_BARS = 256
_WIDTH = 960
_HEIGHT = 200

_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem }
div { overflow-x: auto }
table { border-collapse: collapse; margin-top: 1.5rem }
caption, figcaption { text-align: left; font-weight: 600 }
th, td { text-align: left; vertical-align: top; padding: .2rem .6rem; border: 1px solid #8886 }
th:empty { padding: 0; border: 0 }
.right { text-align: right; white-space: nowrap }
figure { margin: 1.5rem 0 }
svg { width: 100%; max-width: 60rem; display: block }
text { fill: currentColor; font-size: 12px }
b { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
</style>
"""


def page(
    model: str,
    assumed: Iterable[str],
    table: Callable[..., str],
    forecasts: Iterable[Forecast],
) -> str:
    """Return the page of a plan of ``model``.

    Args:
        assumed: lines with the assumptions.
        table: :func:`.plan.forecast.report.plan_table` with all arguments but ``write``.
        forecasts: those of the table.
    """
    title = escape(f"ds-layerwise plan of {model}")
    pictures = "".join(map(_pictures, forecasts))
    return (
        f"{_HEAD}<title>{title}</title></head><body>\n<h1>{title}</h1>\n{_tables(assumed)}"
        f"{table(write=_tables)}\n{pictures}<p>Of more than {_MOST_BARS} ranks, a bar is the one "
        "with most of several neighbours.</p>\n</body></html>\n"
    ).replace(GLUE, " ")


def _tables(parts: Iterable[Table | str], _: int = 0) -> str:
    text = ""
    for part in parts:
        if isinstance(part, str):
            text += f"<p>{escape(part)}</p>\n"
            continue
        text += f"<div><table><caption>{escape(str(part.title))}</caption>\n"
        columns = [[column.header, *column.cells] for column in part.columns]
        for number, row in enumerate(zip(*columns, strict=True)):
            tag = "td" if number else "th"
            text += "<tr>"
            for column, cell in zip(part.columns, row, strict=True):
                text += f'<{tag} class="{column.justify}">{escape(str(cell))}</{tag}>'
            text += "</tr>\n"
        text += "</table></div>\n"
    return text


def _pictures(plan: Forecast) -> str:
    kinds = ("params", "grads", "masters", "states", "under way, at most", "in a step, at most")
    held = [
        (rank.params, rank.grads, rank.masters, rank.states, traffic.total, in_step)
        for rank, traffic, in_step in zip(plan.memory, plan.traffic, plan.in_step, strict=True)
    ]
    sent_kinds = ("gradients, at stage 3 also parameters of passes", "parameters")
    sent = np.sum([*plan.sent().values()], axis=0).T.tolist()
    return (
        f"<h2>{plan.layout.world_size:,} ranks</h2>\n"
        + _bars("memory of each rank", kinds, held, size_text)
        + _bars("load of each rank", ["matrix updates"], [[n] for n in plan.report.work], work_text)
        + _bars("bytes that each rank sends", sent_kinds, sent, size_text)
    )


def _bars(
    what: str,
    kinds: Sequence[str],
    ranks: Sequence[Sequence[int]],
    text: Callable[[float], str],
) -> str:
    """Return a picture with a bar for each of ``ranks``, in which ``kinds`` are stacked."""
    totals = [*map(sum, ranks)]
    scale = _HEIGHT / max(1, *totals)
    group = -(-len(ranks) // _MOST_BARS)
    width = _WIDTH / len(ranks)
    bars = ""
    for first in range(0, len(ranks), group):
        rank = max(range(len(ranks))[first : first + group], key=totals.__getitem__)
        top = 0
        for i, value in enumerate(ranks[rank]):
            top += value
            bars += (
                f'<rect x="{width * first:.2f}" y="{_HEIGHT - scale * top:.2f}" '
                f'width="{0.9 * width * group:.2f}" height="{scale * value:.2f}" '
                f'fill="{_COLOURS[i]}"><title>rank {rank}, {kinds[i]}: {text(value)}</title>'
                "</rect>\n"
            )
    legend = ""
    for i, kind in enumerate(kinds):
        legend += f'<b style="background: {_COLOURS[i]}"></b>{kind}'
    return (
        f"<figure><figcaption>{what}</figcaption>\n"
        f'<svg viewBox="0 -20 {_WIDTH} {_HEIGHT + 40}" role="img" aria-label="{what}">\n'
        f'<text y="-6">most: {text(max(totals))}, rank {totals.index(max(totals))}</text>\n{bars}'
        f'<text y="{_HEIGHT + 16}">rank 0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">rank {len(ranks) - 1}</text>\n'
        f"</svg>{legend}</figure>\n"
    )
