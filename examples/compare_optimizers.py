"""Stock AdamW, stock Muon with and without its clipping, and LayerWiseMuon: one table, one plot.

    python examples/compare_optimizers.py --ranks 2 --steps 100

Every configuration is one ``deepspeed`` run of train_gpt.py, one after the other, on the same windows from the same
weights. Options that this script does not know (--width, --data, --seed, ...) go to train_gpt.py.
Into --out go results.csv, loss.png, and a folder with log.txt for each run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
CONFIGS = EXAMPLES.parent / "ds_configs"
DEFAULT_CONFIGS = ("stock_adamw", "stock_muon", "stock_muon_noclip", "quickstart")
COLUMNS = ("config", "optimizer", "clipping", "train_loss", "validation_bits_per_byte", "ms_per_step",
           "checkpoint_bytes")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Compare optimizers on the small GPT of train_gpt.py.")
    parser.add_argument("configs", nargs="*", type=Path, help="DeepSpeed configurations (default: "
                        f"{', '.join(DEFAULT_CONFIGS)} of ds_configs)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (default: 100)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of each run (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/compare"), help="folder (default: out/compare)")
    args, rest = parser.parse_known_args()
    args.configs = args.configs or [CONFIGS / f"{name}.json" for name in DEFAULT_CONFIGS]
    for config in args.configs:
        if not config.is_file():
            parser.error(f"{config}: no such configuration")
    if len({config.stem for config in args.configs}) < len(args.configs):
        parser.error("two configurations have the same name, and a run is named after its configuration")
    return args, rest


def run(config: Path, args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Train with ``config``; returns its row of the table.

    Raises:
        SystemExit: the run failed; says so with the end of its log.
    """
    out = args.out / config.stem
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    command = [
        sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(args.ranks),
        "--master_port", str(_free_port()), str(EXAMPLES / "train_gpt.py"),
        "--deepspeed_config", str(config), "--steps", str(args.steps), "--out", str(out), *rest,
    ]
    # Stock Muon compiles its kernels once a shape, which on a CPU takes longer than such a run trains.
    environment = {"TORCHDYNAMO_DISABLE": "1", **os.environ}
    with open(log, "w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{tail}\ncompare_optimizers.py: the run of {config} failed, see {log}")
    settings = json.loads(config.read_text())
    summary = json.loads((out / "summary.json").read_text())
    return {"config": config.stem, "optimizer": settings["optimizer"]["type"],
            "clipping": settings.get("gradient_clipping"), **{key: summary[key] for key in COLUMNS[3:]}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = ["| config | optimizer | clipping | train loss | validation bits/byte | ms/step (median) | checkpoint MB |",
             "|---|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        clipping = "default" if row["clipping"] is None else row["clipping"]
        lines.append(f"| {row['config']} | {row['optimizer']} | {clipping} | {row['train_loss']:.3f} "
                     f"| {row['validation_bits_per_byte']:.3f} | {row['ms_per_step']:.0f} "
                     f"| {row['checkpoint_bytes'] / 1e6:.1f} |")
    return "\n".join(lines)


def write_plot(rows: list[dict[str, Any]], out: Path) -> None:
    """The training loss of every run as loss.png."""
    try:
        import matplotlib
    except ImportError:
        print("no loss.png: pip install matplotlib draws one")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for row in rows:
        with open(out / row["config"] / "metrics.csv", newline="") as file:
            points = [(int(line["step"]), float(line["train_loss"])) for line in csv.DictReader(file)]
        axes.plot(*zip(*points), label=row["config"])
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    args, rest = parse_arguments()
    rows = []
    for config in args.configs:
        print(f"{config.stem}: {args.steps} steps on {args.ranks} ranks, log in {args.out / config.stem / 'log.txt'}")
        rows.append(run(config, args, rest))
    with open(args.out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    write_plot(rows, args.out)
    print(f"\n{table(rows)}\n\nresults in {args.out}")


if __name__ == "__main__":
    main()
