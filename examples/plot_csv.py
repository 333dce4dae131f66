"""Draw the values that DeepSpeed's ``csv_monitor`` has written, by the number of samples.

    python examples/plot_csv.py out/monitors/csv monitors.png

It needs matplotlib (``pip install matplotlib``).
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

#: Files whose names share one of these beginnings are lines of one picture. So are learning rates.
TOGETHER = ("grad_norm", "update_rms", "momentum_norm", "max_attention_logit")


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Return values by label and samples; a resumed run repeats the header and some samples."""
    values = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row[0] != "step"]
        values[path.stem.removeprefix("Train_Samples_")] = {int(x): float(y) for x, y in rows}
    if not values:
        raise SystemExit(f"plot_csv.py: {folder} has no *.csv; name output_path/job_name")
    return values


def title(label: str) -> str:
    """Return the title of the picture that has the line ``label``."""
    if label.endswith("lr"):
        return "learning rates"
    return next((start for start in TOGETHER if label.startswith(start)), label)


def draw(values: dict[str, dict[int, float]], out: Path) -> None:
    """Write one picture of all ``values`` to ``out``."""
    from matplotlib.figure import Figure

    titles = sorted({title(label) for label in values})
    rows = math.ceil(len(titles) / 3)
    figure = Figure(figsize=(12, 3 * rows), layout="constrained")
    for number, name in enumerate(titles, 1):
        axes = figure.add_subplot(rows, 3, number, title=name, xlabel="samples")
        for label, of_label in values.items():
            if title(label) == name:
                axes.plot(*zip(*sorted(of_label.items())), label=label)
        axes.legend()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw what csv_monitor has written.")
    parser.add_argument("folder", type=Path, help="the folder with the files")
    parser.add_argument("out", type=Path, help="the picture, such as monitors.png")
    arguments = parser.parse_args()
    draw(read(arguments.folder), arguments.out)
