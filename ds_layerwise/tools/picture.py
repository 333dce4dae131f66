"""A picture of plans: by number of ranks, what a step takes, and what the fullest rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ds_layerwise.checkpoint.files.atomic import write_whole
from ds_layerwise.errors import ConfigError, LayerWiseError
from ds_layerwise.plan.forecast.forecast import Forecast
from ds_layerwise.plan.forecast.prediction import Prediction

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_INCHES = (13.0, 5.0)


def check_picture(path: Path, *, overwrite: bool) -> None:
    """Refuse a picture that could not be drawn, or not be written to ``path``, before there is
    anything to draw.

    Raises:
        ConfigError: matplotlib is not installed.
        LayerWiseError: ``path`` is there and must stay, has no folder, or is called like a file of
            another kind.
    """
    try:
        import_module("matplotlib")
    except ImportError as e:
        raise ConfigError(f"--png takes matplotlib to draw ({e}): pip install matplotlib") from e
    if path.is_dir() or not path.parent.is_dir():
        raise LayerWiseError(
            f"{path} is a folder; name a file"
            if path.is_dir()
            else f"{path.parent} is no folder; make it, or name a file elsewhere with --png"
        )
    if path.suffix.lower() != ".png":
        raise LayerWiseError(
            f"--png writes PNG, and {path} is not called so; name it "
            f"{path.with_suffix('.png').name}"
        )
    if path.exists() and not overwrite:
        raise LayerWiseError(f"{path} exists; name another place, or replace it with --overwrite")


def figure_of(forecasts: Sequence[Forecast], predictions: Sequence[Prediction]) -> Any:
    """Draw two stacked bars for each plan: seconds of the busiest rank, and memory of the fullest
    one.

    Args:
        predictions: of each of ``forecasts``.

    Returns:
        A figure of matplotlib's, with two axes.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=_INCHES, layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    ranks = [str(forecast.layout.world_size) for forecast in forecasts]
    wires = [prediction.wire for prediction in predictions]
    links = dict.fromkeys(prediction.links.summary() for prediction in predictions)
    _stack(
        seconds,
        ranks,
        _TIMES,
        {
            "reduce": [wire.reduce + wire.sums for wire in wires],
            "update": [prediction.update for prediction in predictions],
            "gather": [wire.params + wire.gather for wire in wires],
        },
        "\n".join(["predicted a step, its update on the busiest rank;", ", or\n".join(links)]),
    )
    held = [forecast.memory[forecast.fullest] for forecast in forecasts]
    _stack(
        memory,
        ranks,
        _SIZES,
        {
            "parameters": [rank.params for rank in held],
            "gradients": [rank.grads for rank in held],
            "masters": [rank.masters for rank in held],
            "states": [rank.states for rank in held],
            "under way": [
                max(traffic.total for traffic in forecast.traffic) for forecast in forecasts
            ],
            "in an update": [max(forecast.workspace) for forecast in forecasts],
        },
        "memory of the fullest rank between two steps,\nand at most beside it; without activations",
    )
    return figure


def _stack(
    axes: Any,
    ranks: Sequence[str],
    units: Sequence[tuple[float, str]],
    parts: Mapping[str, Sequence[float]],
    title: str,
) -> None:
    totals = [sum(each) for each in zip(*parts.values(), strict=True)]
    factor, unit = next(
        ((factor, unit) for factor, unit in units if max(totals) >= factor), units[-1]
    )
    below = [0.0] * len(ranks)
    for label, values in parts.items():
        heights = [value / factor for value in values]
        bars = axes.bar(ranks, heights, bottom=below, label=label)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.bar_label(bars, [f"{total:.3g}" for total in below])
    axes.set(title=title, xlabel="ranks", ylabel=unit)
    axes.margins(y=0.1)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # where no bar can be


def draw(path: Path, forecasts: Sequence[Forecast], predictions: Sequence[Prediction]) -> None:
    """Write :func:`figure_of` them to ``path`` as PNG; it appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    figure = figure_of(forecasts, predictions)
    write_whole(path, lambda new: figure.savefig(new, format="png", dpi=150))
