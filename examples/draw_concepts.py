"""Draw the pictures of docs/: the owners of parameters under ZeRO and here, and the paths of a step
and of a checkpoint.

    python examples/draw_concepts.py [--out docs/images]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RANKS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
EDGE = "#333333"
#: Names and sizes of the parameters in the first picture, and their owners here.
PARAMETERS = (
    ("embedding", 4.0, None),
    ("A", 3.0, 0),
    ("B", 2.2, 1),
    ("C", 3.4, 2),
    ("D", 2.4, 3),
    ("E", 1.0, 1),
)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty picture of ``width`` by ``height`` units, without axes."""
    figure, axes = pyplot.subplots(figsize=(width / 2, height / 2))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str) -> None:
    """Draw a box of height 1 with a text in its middle."""
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=color, edgecolor=EDGE, alpha=0.75))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=8)


def ownership() -> Figure:
    """Draw byte ranges that cut matrices, above owners of whole ones."""
    total = sum(size for _, size, _ in PARAMETERS)
    figure, axes = canvas(total + 0.4, 5.6)
    axes.text(0.2, 5.1, "ZeRO: equal byte ranges, which cut matrices", fontsize=9)
    axes.text(0.2, 2.3, "here: matrices have owners, the embedding is cut evenly", fontsize=9)
    start = 0.2
    for name, size, owner in PARAMETERS:
        box(axes, start, 3.6, size, name, "white")
        if owner is not None:
            box(axes, start, 0.8, size, name, RANKS[owner])
        else:
            for rank, color in enumerate(RANKS):
                box(axes, start + rank * size / 4, 0.8, size / 4, "", color)
            axes.text(start + size / 2, 1.3, name, ha="center", va="center", fontsize=8)
        start += size
    for rank, color in enumerate(RANKS):
        left = 0.2 + rank * total / 4
        axes.add_patch(Rectangle((left, 3.6), total / 4, 1, facecolor=color, alpha=0.5))
        axes.plot([left, left], [3.4, 4.8], color=EDGE, linestyle="--", linewidth=1)
        axes.text(left + total / 8, 3.15, f"rank {rank}", ha="center", fontsize=8)
        axes.text(
            left + total / 8, 0.3, f"rank {rank}", ha="center", fontsize=8, backgroundcolor=color
        )
    return figure


def path(rows: Sequence[tuple[str, Sequence[str]]], width: float) -> Figure:
    """Draw rows of boxes with arrows from each to the next; each row has a title."""
    figure, axes = canvas(width, 2.2 * len(rows) + 0.2)
    for number, (title, stations) in enumerate(rows):
        y = 2.2 * (len(rows) - 1 - number) + 0.2
        axes.text(0.2, y + 1.25, title, fontsize=9)
        box_width = (width - 0.4) / len(stations)
        for place, station in enumerate(stations):
            x = 0.2 + place * box_width
            box(axes, x, y, box_width - 0.5, station, RANKS[0] if place % 2 else "white")
            if place + 1 < len(stations):
                axes.annotate(
                    "",
                    (x + box_width, y + 0.5),
                    (x + box_width - 0.5, y + 0.5),
                    arrowprops={"arrowstyle": "->", "color": EDGE},
                )
    return figure


STEP = (
    (
        "stage 1: once a step",
        (
            "backward passes\nadd gradients up",
            "buckets go\nto their owners",
            "owners clip\nand update",
            "weights go\nto all ranks",
        ),
    ),
    (
        "stage 2: after every backward pass",
        (
            "a backward pass",
            "buckets go\nto their owners",
            "owners add up,\nclip, update",
            "weights go\nto all ranks",
        ),
    ),
    (
        "stage 3: no rank holds the model",
        (
            "weights are fetched\nfor each pass",
            "gradients: to cuts,\nthen to owners",
            "owners clip\nand update",
            "weights: from\nowners to cuts",
        ),
    ),
)
CHECKPOINT = (
    (
        "a save",
        (
            "each rank writes\nwhat it owns",
            "checksums of\nevery file",
            "the folder\nis renamed",
            "latest\nnames it",
        ),
    ),
    (
        "a load, on any number of ranks",
        (
            "latest\nnames a folder",
            "every file\nis checked",
            "each rank reads\nwhat it owns now",
            "masters, states,\nweights",
        ),
    ),
)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    pyplot.rcParams.update({"svg.hashsalt": "concepts", "svg.fonttype": "none"})
    pictures = {
        "ownership": ownership(),
        "step": path(STEP, 16),
        "checkpoint": path(CHECKPOINT, 16),
    }
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
        print(out / f"{name}.svg")


if __name__ == "__main__":
    main()
