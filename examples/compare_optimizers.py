"""Several optimizers on the small GPT of train_gpt.py: one table, one plot.

    python examples/compare_optimizers.py --ranks 2 --steps 100
    python examples/compare_optimizers.py ds_configs/soap.json --ranks 1 --steps 100 --seed 1
    python examples/compare_optimizers.py --ranks 1 --rates 0.5 1 2 --seeds 5

Without configurations these are stock AdamW, stock Muon with and without its clipping, and
LayerWiseMuon. Every configuration is one ``deepspeed`` run of train_gpt.py, one after the other, on
the same windows from the same weights; with --rates one for each multiple of its learning rate
(AdamW's, or that of matrices). With --seeds the best of these rates by validation is run with
more seeds, and the table has means and standard deviations. Options that this script does not know
(--width, --data, --seed, ...) go to train_gpt.py, with the words after each, up to the next option
or configuration. A word that ends in .json is a configuration. Into --out go results.csv, loss.png,
and for each run a folder with its config.json and log.txt.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
CONFIGS = EXAMPLES.parent / "ds_configs"
DEFAULT_CONFIGS = ("stock_adamw", "stock_muon", "stock_muon_noclip", "quickstart")
COLUMNS = (
    "config",
    "optimizer",
    "clipping",
    "rate",
    "seed",
    "train_loss",
    "validation_bits_per_byte",
    "ms_per_step",
    "checkpoint_bytes",
)
#: Options that are not for train_gpt.py.
OPTIONS = ("-h", "--help", "--steps", "--ranks", "--rates", "--seeds", "--out")


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of this script in ``argv``, and the unknown ones."""
    parser = argparse.ArgumentParser(
        description="Compare optimizers on the small GPT of train_gpt.py.", allow_abbrev=False
    )
    parser.add_argument(
        "configs",
        nargs="*",
        type=Path,
        help=f"DeepSpeed configurations (default: {', '.join(DEFAULT_CONFIGS)} of ds_configs)",
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="optimizer steps of each run (default: 100)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of each run (default: 2)")
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="FACTOR",
        help="multiples of the learning rate that each configuration is run with (default: 1)",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs at the best of its rates (default: 1)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/compare"), help="folder (default: out/compare)"
    )
    configs: list[str] = []
    known: list[str] = []
    rest: list[str] = []
    options, into = known, known
    for word in argv:
        if word.startswith("-"):
            options = into = known if word.partition("=")[0] in OPTIONS else rest
        else:
            into = configs if word.endswith(".json") else options
        into.append(word)
    args = parser.parse_args([*configs, *known])
    args.configs = args.configs or [CONFIGS / f"{name}.json" for name in DEFAULT_CONFIGS]
    for config in args.configs:
        if not config.is_file():
            parser.error(f"{config}: no such configuration")
    if len({config.stem for config in args.configs}) < len(args.configs):
        parser.error(
            "two configurations have the same name, and a run is named after its configuration"
        )
    if min(args.rates) <= 0 or len(set(args.rates)) < len(args.rates):
        parser.error(f"--rates must be different numbers greater than 0, got {args.rates}")
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    if args.seeds > 1 and any(word.partition("=")[0] == "--seed" for word in rest):
        parser.error("--seeds chooses the seeds 0, 1, ...: leave out --seed")
    return args, rest


def with_rate(settings: dict[str, Any], factor: float) -> tuple[dict[str, Any], float]:
    """Return ``settings`` with the learning rate of matrices times ``factor``, and that rate.

    Stock AdamW has one rate for everything. Stock Muon and ours have ``muon_lr``, or ``lr`` where
    that is not given.
    """
    params = settings["optimizer"]["params"]
    rate = factor * params.get("muon_lr", params.get("lr"))
    key = "lr" if settings["optimizer"]["type"] == "AdamW" else "muon_lr"
    changed = params if factor == 1 else {**params, key: rate}
    return {**settings, "optimizer": {**settings["optimizer"], "params": changed}}, rate


def run(
    config: Path, factor: float, seed: int, args: argparse.Namespace, rest: list[str]
) -> dict[str, Any]:
    """Train with ``config``, ``factor`` times its rate, and ``seed``; return the row of the table.

    Raises:
        SystemExit: the run failed. The message has the end of its log.
    """
    name = config.stem if factor == 1 else f"{config.stem} x {factor:g}"
    if seed:
        name += f" seed {seed}"
        rest = [*rest, "--seed", str(seed)]
    out = args.out / name
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    settings, rate = with_rate(json.loads(config.read_text()), factor)
    (out / "config.json").write_text(json.dumps(settings))
    print(f"{name}: {args.steps} steps on {args.ranks} ranks, log in {log}", flush=True)
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        str(args.ranks),
        "--master_port",
        str(_free_port()),
        str(EXAMPLES / "train_gpt.py"),
        "--deepspeed_config",
        str(out / "config.json"),
        "--steps",
        str(args.steps),
        "--out",
        str(out),
        *rest,
    ]
    # Stock Muon compiles its kernels for each shape. On a CPU that takes longer than such a run
    # trains.
    environment = {"TORCHDYNAMO_DISABLE": "1", **os.environ}
    with open(log, "w") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{tail}\ncompare_optimizers.py: the run of {config} failed, see {log}")
    summary = json.loads((out / "summary.json").read_text())
    optimizer = settings["optimizer"]["params"].get(
        "matrix_optimizer", settings["optimizer"]["type"]
    )
    return {
        "config": name,
        "optimizer": optimizer,
        "clipping": settings.get("gradient_clipping"),
        "rate": rate,
        "seed": seed,
        **{key: summary[key] for key in COLUMNS[5:]},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| config | optimizer | clipping | learning rate of matrices | train loss | validation "
        "bits/byte | ms/step (median) | checkpoint MB |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        clipping = "default" if row["clipping"] is None else row["clipping"]
        lines.append(
            f"| {row['config']} | {row['optimizer']} | {clipping} | {row['rate']:g} | "
            f"{row['train_loss']:.3f} | {row['validation_bits_per_byte']:.3f} | "
            f"{row['ms_per_step']:.0f} | {row['checkpoint_bytes'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def table_of_seeds(tuned: dict[str, list[dict[str, Any]]]) -> str:
    """Return means and standard deviations over the seeds of each configuration, in Markdown."""
    lines = [
        "| config | rate | validation bits/byte | ms/step (median) | checkpoint MB |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, rows in tuned.items():
        bits = [row["validation_bits_per_byte"] for row in rows]
        speed = statistics.median(row["ms_per_step"] for row in rows)
        size = rows[0]["checkpoint_bytes"] / 1e6
        lines.append(
            f"| {name} | {rows[0]['rate']:g} | {statistics.mean(bits):.3f} ± "
            f"{statistics.stdev(bits):.3f} | {speed:.0f} | {size:.1f} |"
        )
    return "\n".join(lines)


def write_plot(curves: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Draw the training losses as loss.png: a line for each entry, the mean of its runs between
    their least and greatest."""
    try:
        import matplotlib
    except ImportError:
        print("no loss.png: pip install matplotlib draws one")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, rows in curves.items():
        losses: dict[int, list[float]] = {}
        for row in rows:
            with open(out / row["config"] / "metrics.csv", newline="") as file:
                for line in csv.DictReader(file):
                    losses.setdefault(int(line["step"]), []).append(float(line["train_loss"]))
        steps = list(losses)
        axes.plot(steps, [statistics.mean(values) for values in losses.values()], label=name)
        low, high = ([pick(values) for values in losses.values()] for pick in (min, max))
        axes.fill_between(steps, low, high, alpha=0.2)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    args, rest = parse_arguments(sys.argv[1:])
    rows, tuned = [], {}
    for config in args.configs:
        tried = [(run(config, factor, 0, args, rest), factor) for factor in args.rates]
        rows += [row for row, _ in tried]
        best, factor = min(tried, key=lambda pair: pair[0]["validation_bits_per_byte"])
        seeds = [run(config, factor, seed, args, rest) for seed in range(1, args.seeds)]
        rows += seeds
        tuned[config.stem] = [best, *seeds]
    with open(args.out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    if args.seeds > 1:
        write_plot(tuned, args.out)
        print(f"\n{table_of_seeds(tuned)}")
    else:
        write_plot({row["config"]: [row] for row in rows}, args.out)
    print(f"\n{table(rows)}\n\nresults in {args.out}")


if __name__ == "__main__":
    main()
