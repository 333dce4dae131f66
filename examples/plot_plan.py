"""Draw plans by number of ranks: the seconds of a step, and the memory of the fullest rank.

    ds-layerwise plan --model llama-3-8b --config ds.json --ranks 8,16,64 --json > plan.json
    python examples/plot_plan.py plan.json plan.png

It needs matplotlib (``pip install matplotlib``). No number includes activations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def seconds_of(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of one step by their purpose, from one plan of ``--json``."""
    seconds = plan["predicted"]["seconds"]
    return {key: seconds[key] for key in ("reduce", "update", "gather")}


def gib_of(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the memory of the fullest rank by purpose, and the most beside it, in GiB."""
    memory = plan["memory_bytes"][plan["fullest_rank"]]
    num_bytes = {key: memory[key] for key in ("params", "grads", "masters", "states")}
    num_bytes["under way"] = max(traffic["total"] for traffic in plan["under_way_bytes"])
    num_bytes["in an update"] = max(plan["step_bytes"])
    return {key: value / 2**30 for key, value in num_bytes.items()}


def draw(plans: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write the picture of ``plans`` to ``out``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    ranks = [str(plan["ranks"]) for plan in plans]
    for axes, unit, parts_of in ((seconds, "s", seconds_of), (memory, "GiB", gib_of)):
        parts = [parts_of(plan) for plan in plans]
        below = [0.0] * len(plans)
        for label in parts[0]:
            heights = [part[label] for part in parts]
            bars = axes.bar(ranks, heights, bottom=below, label=label)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        axes.bar_label(bars, [f"{total:.3g}" for total in below])
        axes.set(xlabel="ranks", ylabel=unit)
        axes.margins(y=0.1)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # where no bar can be
    seconds.set_title("predicted seconds of a step")
    memory.set_title("memory of the fullest rank between two steps,\nand the most beside it")
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw what `ds-layerwise plan --json` has written."
    )
    parser.add_argument("plan", type=Path, help="the file with the JSON")
    parser.add_argument("out", type=Path, help="the picture, such as plan.png")
    arguments = parser.parse_args()
    draw(json.loads(arguments.plan.read_text(encoding="utf-8")), arguments.out)


if __name__ == "__main__":
    main()
