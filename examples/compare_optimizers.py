"""Several optimizers on the GPT of train_gpt.py: one table, one picture of two curves.

    python examples/compare_optimizers.py --ranks 2 --steps 100
    python examples/compare_optimizers.py --size 127m
    python examples/compare_optimizers.py ds_configs/soap.json --ranks 1 --steps 100 --seed 1
    python examples/compare_optimizers.py --ranks 1 --rates 0.5 1 2 --seeds 5

Without configurations these are stock AdamW, stock Muon without its clipping (in the small size
with it, too), and LayerWiseMuon. Every configuration is one run of train_gpt.py, one after the
other, on the same windows from the same weights; with --rates one for each multiple of its learning
rate (AdamW's, or that of matrices). With --seeds the best of these rates by validation is run with
more seeds, and the table has means and standard deviations. --size 127m is a GPT for the GPUs of a
node, in bfloat16; its batches, buckets and warm-up take the place of those of configurations, and
a line below the table says so. What else differs between configurations has a line there, too.

Options that this script does not know (--width, --data, --seed, ...) go to train_gpt.py, with the
words after each, up to the next option or configuration. A word that ends in .json is a
configuration. Into --out go results.csv, loss.png (loss over tokens, and over seconds of training,
of the best rate of each configuration), and for each run a folder with its config.json, log.txt,
metrics.csv and summary.json. A run that fails is in the table as such, the others go on, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent
CONFIGS = EXAMPLES.parent / "ds_configs"

#: What a run has ended with, in its summary.json; of memory the fullest rank's.
MEASURED = (
    "tokens",
    "seconds",
    "train_loss",
    "validation_bits_per_byte",
    "tokens_per_s",
    "ms_per_step",
    "memory_gib",
    "checkpoint_bytes",
)
COLUMNS = ("config", "optimizer", "clipping", "rate", "seed", "exit_code", *MEASURED)
#: Options that are not for train_gpt.py.
OPTIONS = ("-h", "--help", "--size", "--steps", "--ranks", "--rates", "--seeds", "--out")
OTHERS = """Other options go to train_gpt.py, for example --data PATH (a text, or a folder of
texts), --seed N, --layers, --width, --heads, --context, --eval_every, --no-save. Its --help has
them all."""


SAME = "compare that, too: give all the same"
#: What should be the same in each configuration, and what to say where it is not.
DIFFERENCES = {
    **dict.fromkeys(
        ("scheduler", "batch", "betas", "weight_decay", "adam_lr", "precision"), f"Losses {SAME}"
    ),
    "gradient_clipping": f"Losses {SAME}, but for stock's Muon, which clips its update",
    "ZeRO stage": f"Speed and memory {SAME}",
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """A size of runs: the configurations and steps without others, options of train_gpt.py, and
    what takes the place of configurations' own settings, section by section; None for nothing."""

    configs: tuple[str, ...]
    steps: int
    options: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


SIZES = {
    "2m": Size(configs=("stock_adamw", "stock_muon", "stock_muon_noclip", "quickstart"), steps=100),
    # 16 windows a rank: a rank computes 15 TFLOP a step.
    "127m": Size(
        configs=("stock_adamw", "stock_muon_noclip", "quickstart"),
        steps=1000,
        options=(
            *("--layers", "10", "--width", "1024", "--heads", "8", "--context", "1024"),
            *("--data", "installed", "--eval_every", "100", "--no-save"),
        ),
        settings={
            "train_micro_batch_size_per_gpu": 16,
            "gradient_accumulation_steps": 1,
            "train_batch_size": None,
            "bf16": {"enabled": True},
            "fp16": None,
            "zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 50_000_000},
            "scheduler": {"params": {"warmup_num_steps": 100}},
            "timers": {"throughput": {"synchronized": False}},
        },
    ),
}


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of this script in ``argv``, and the unknown ones."""
    parser = argparse.ArgumentParser(
        description="Compare optimizers on the GPT of train_gpt.py.",
        epilog=OTHERS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "configs",
        nargs="*",
        type=Path,
        help="DeepSpeed configurations (default: "
        + "; ".join(f"{name}: {', '.join(size.configs)}" for name, size in SIZES.items())
        + " of ds_configs)",
    )
    parser.add_argument(
        "--size", choices=SIZES, default="2m", help="parameters of the GPT (default: 2m)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="optimizer steps of each run (default: "
        + ", ".join(f"{name}: {size.steps}" for name, size in SIZES.items())
        + ")",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="processes of each run (default: one for each visible device, 2 on a CPU)",
    )
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
    size = SIZES[args.size]
    args.configs = args.configs or [CONFIGS / f"{name}.json" for name in size.configs]
    args.steps = size.steps if args.steps is None else args.steps
    if len({config.stem for config in args.configs}) < len(args.configs):
        parser.error(
            "two configurations have the same name, and a run is named after its configuration"
        )
    if min(args.rates) <= 0 or len(set(args.rates)) < len(args.rates):
        parser.error(f"--rates must be different numbers greater than 0, got {args.rates}")
    if min(args.seeds, args.steps) < 1:
        parser.error(f"--seeds and --steps must be at least 1, got {args.seeds} and {args.steps}")
    if args.seeds > 1 and any(word.partition("=")[0] == "--seed" for word in rest):
        parser.error("--seeds chooses the seeds 0, 1, ...: leave out --seed")
    for config in args.configs:
        try:
            settings = json.loads(config.read_text())
        except OSError as error:
            parser.error(f"{config}: no such configuration: {error.strerror}")
        except json.JSONDecodeError as error:
            parser.error(f"{config}: not JSON: {error}")
        if args.rates != [1.0] and with_rate(settings, 1.0)[1] is None:
            parser.error(f"{config}: no learning rate that --rates could multiply: give muon_lr")
    if (args.out / "results.csv").exists():
        parser.error(f"--out {args.out} has the results of another comparison: name another folder")
    # It imports deepspeed, which takes longer than --help should.
    from train_gpt import argument_parser

    rest = [*size.options, *rest]
    of_runs = argument_parser().parse_args(rest)
    args.seed = of_runs.seed
    args.device, args.ranks = _device_and_ranks(parser, args.ranks)
    _refuse_text(parser, of_runs)
    _refuse_configs(parser, args)
    return args, rest


def _device_and_ranks(parser: argparse.ArgumentParser, asked: int | None) -> tuple[str, int]:
    """Return the name of the device, and the number of ranks: ``asked``, or one for each device."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device = accelerator.device_name()
    on_cpu = device == "cpu"
    devices = 2 if on_cpu else accelerator.device_count()
    ranks = devices if asked is None else asked
    if ranks < 1 or not on_cpu and ranks > devices:
        most = "" if on_cpu else f" to {devices}, the visible devices"
        parser.error(f"--ranks must be from 1{most}, got {ranks}")
    return device, ranks


def _refuse_text(parser: argparse.ArgumentParser, of_runs: argparse.Namespace) -> None:
    """Refuse a text of the user's that runs would refuse, one after the other."""
    from data import INSTALLED, load_corpus

    if of_runs.data in (None, INSTALLED):
        return
    try:
        load_corpus(of_runs.data, of_runs.context)
    except ValueError as error:
        parser.error(str(error))


def _refuse_configs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a configuration of ours that ``ds-layerwise check`` refuses. Of others a run is the
    only judge, but for a schedule that sets rates itself, where several are asked for."""
    from ds_layerwise.config.sections import is_for_us
    from ds_layerwise.errors import LayerWiseError
    from ds_layerwise.tools.dry_run import checked

    with tempfile.TemporaryDirectory() as folder:
        for config in args.configs:
            settings, _ = as_run(config, 1.0, args)
            if not is_for_us(settings):
                params = settings.get("scheduler", {}).get("params", {})
                if args.rates != [1.0] and (key := next(filter(_is_rate, params), None)):
                    parser.error(
                        f"{config}: scheduler.params.{key} takes the place of the rate that "
                        "--rates multiplies; take a schedule of ratios, WarmupCosineLR"
                    )
                continue
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(settings))
            try:
                checked(path)
            except LayerWiseError as error:
                parser.error(f"{config}: {error}")


def _is_rate(key: str) -> bool:
    return key.endswith("_lr")


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with ``changes``; a section that both have is merged likewise."""
    result = dict(settings)
    for key, value in changes.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = merged(below, value) if both else value
    return result


def of_size(settings: dict[str, Any], size: str) -> dict[str, Any]:
    """Return ``settings`` with those of a size. A run without a schedule stays without one."""
    changes = dict(SIZES[size].settings)
    if "scheduler" not in settings:
        changes.pop("scheduler", None)
    return {key: value for key, value in merged(settings, changes).items() if value is not None}


def leaves(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings that are no sections, each after its path."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def replaced(config: Path, size: str) -> str:
    """Return a line that says what ``size`` gives a configuration, and what that was before; or an
    empty one."""
    settings = json.loads(config.read_text())
    before = dict(leaves(settings))
    after = dict(leaves(of_size(settings, size)))
    changed = []
    for path in {**before, **after}:
        if before.get(path) != after.get(path):
            was = f" (was {json.dumps(before[path])})" if path in before else ""
            changed.append(f"{path} {json.dumps(after.get(path))}{was}")
    return f"{config.stem}, by --size {size}: {', '.join(changed)}" if changed else ""


def comparable(settings: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return what should be the same in each configuration of a comparison: values of DIFFERENCES.

    AdamW has no ``adam_lr`` here: its one rate is what is compared.
    """
    section = settings.get("optimizer", {})
    params = section.get("params", {})
    batch = settings.get("train_batch_size")
    if batch is None:
        accumulation = settings.get("gradient_accumulation_steps", 1)
        batch = settings.get("train_micro_batch_size_per_gpu", 1) * ranks * accumulation
    by_path = dict(leaves(settings))
    same = {
        "scheduler": settings.get("scheduler"),
        "batch": batch,
        "betas": params.get("betas"),
        "weight_decay": params.get("scalar_weight_decay", params.get("weight_decay")),
        "gradient_clipping": settings.get("gradient_clipping", 0),
        "precision": [half for half in ("bf16", "fp16") if by_path.get(f"{half}.enabled")],
        "ZeRO stage": by_path.get("zero_optimization.stage", 0),
    }
    if section.get("type") != "AdamW":
        same["adam_lr"] = params.get("adam_lr", params.get("lr"))
    return same


def differences(configs: list[Path], size: str, ranks: int) -> list[str]:
    """Return a line for each setting that is not the same in configurations that have it."""
    settings = {config.stem: of_size(json.loads(config.read_text()), size) for config in configs}
    of = {name: comparable(each, ranks) for name, each in settings.items()}
    told = []
    for key, advice in DIFFERENCES.items():
        values = {name: each[key] for name, each in of.items() if key in each}
        first = next(iter(values), "")
        others = [name for name, value in values.items() if value != values[first]]
        if others:
            told.append(f"{', '.join(others)}: not the {key} of {first}. {advice}")
    return told


def with_rate(settings: dict[str, Any], factor: float) -> tuple[dict[str, Any], float | None]:
    """Return ``settings`` with the learning rate of matrices times ``factor``, and that rate; None
    where the configuration leaves it to the optimizer, which takes a ``factor`` of 1.

    Stock AdamW has one rate for everything. Stock Muon and ours have ``muon_lr``, or ``lr`` where
    that is not given.
    """
    section = settings.get("optimizer", {})
    params = section.get("params", {})
    rate = params.get("muon_lr", params.get("lr"))
    if factor == 1:
        return settings, rate
    key = "lr" if section["type"] == "AdamW" else "muon_lr"
    return merged(settings, {"optimizer": {"params": {key: factor * rate}}}), factor * rate


def as_run(
    config: Path, factor: float, args: argparse.Namespace
) -> tuple[dict[str, Any], float | None]:
    """Return the settings that a run of ``config`` has, with ``factor`` times its rate, and that
    rate."""
    settings, rate = with_rate(json.loads(config.read_text()), factor)
    settings = of_size(settings, args.size)
    if "total_num_steps" in settings.get("scheduler", {}).get("params", {}):
        # As train_gpt.py does, so that config.json is what has run.
        changes = {"params": {"total_num_steps": args.steps}}
        settings = merged(settings, {"scheduler": changes})
    return settings, rate


def run(
    config: Path, factor: float, seed: int, args: argparse.Namespace, rest: list[str]
) -> dict[str, Any]:
    """Train with ``config``, ``factor`` times its rate, and ``seed``.

    Returns:
        The row of results.csv. Of a run that failed ``exit_code`` is not 0, and what is MEASURED is
        None; the end of its log is printed.
    """
    name = config.stem if factor == 1 else f"{config.stem} x {factor:g}"
    if seed:
        name += f" seed {seed}"
        rest = [*rest, "--seed", str(seed)]
    out = args.out / name
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    settings, rate = as_run(config, factor, args)
    (out / "config.json").write_text(json.dumps(settings))
    print(
        f"{name}: {args.steps} steps on {args.ranks} ranks ({args.device}), log in {log}",
        flush=True,
    )
    command = [
        # This launcher leaves CUDA_VISIBLE_DEVICES as it is, and finds a free port. The address
        # keeps it from the name of the machine, which may lead nowhere.
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local_addr", "127.0.0.1", "--nproc_per_node", str(args.ranks)),
        *(str(EXAMPLES / "train_gpt.py"), "--deepspeed_config", str(out / "config.json")),
        *("--steps", str(args.steps), "--out", str(out), *rest),
    ]
    environment = dict(os.environ)
    if args.device == "cpu":
        # Stock Muon compiles its kernels for each shape. On a CPU that takes longer than such a
        # run trains.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    code = _train(command, environment, log)
    if code:
        lines = log.read_text(errors="replace").splitlines()
        # From here on it is the launcher's own traceback, which says nothing of the ranks'.
        of_ranks = takewhile(
            lambda line: "torch/distributed/elastic/multiprocessing" not in line, lines
        )
        tail = "\n".join(list(of_ranks)[-20:])
        print(f"{tail}\ncompare_optimizers.py: the run of {config} failed, see {log}", flush=True)
        measured = dict.fromkeys(MEASURED)
    else:
        summary = json.loads((out / "summary.json").read_text())
        measured = {key: summary[key] for key in MEASURED}
        measured["memory_gib"] = max(measured["memory_gib"])
    section = settings.get("optimizer", {})
    return {
        "config": name,
        "optimizer": section.get("params", {}).get("matrix_optimizer", section.get("type")),
        "clipping": settings.get("gradient_clipping"),
        "rate": rate,
        "seed": seed,
        "exit_code": code,
        **measured,
    }


def _train(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Run ``command`` with its output in ``log``, and return its exit code. What interrupts this
    process ends the ranks first."""
    with (
        open(log, "w") as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, in columns of one width each."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        f"| {row[0]:<{widths[0]}} | {' | '.join(map(str.rjust, row[1:], widths[1:]))} |"
        for row in (header, rule, *cells[1:])
    )


def _takes(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the median speed of ``rows`` and the most memory, as tables have them."""
    speed = statistics.median(row["tokens_per_s"] for row in rows)
    return f"{speed:,.0f}", f"{max(row['memory_gib'] for row in rows):.2f}"


def table(rows: list[dict[str, Any]], best: Container[str]) -> str:
    """Return all runs in Markdown, those of the names in ``best`` with a star."""
    cells = []
    for row in rows:
        name = f"{row['config']} *" if row["config"] in best else row["config"]
        if row["exit_code"]:
            cells.append((name, "failed", "", "", ""))
            continue
        losses = f"{row['train_loss']:.3f}", f"{row['validation_bits_per_byte']:.3f}"
        cells.append((name, *losses, *_takes([row])))
    return markdown(("optimizer", "train loss", "validation", "tokens/s", "GiB a rank"), cells)


def table_of_seeds(tuned: dict[str, list[dict[str, Any]]]) -> str:
    """Return means and standard deviations over the seeds of each configuration, in Markdown."""
    cells = []
    for name, rows in tuned.items():
        bits = [row["validation_bits_per_byte"] for row in rows]
        spread = f" ± {statistics.stdev(bits):.3f}" if len(bits) > 1 else ""
        mean = f"{statistics.mean(bits):.3f}{spread}"
        cells.append((name, f"{rows[0]['rate'] or 0:g}", mean, *_takes(rows)))
    return markdown(("optimizer", "rate", "validation", "tokens/s", "GiB a rank"), cells)


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Return tokens, seconds and training loss of a run, by step."""
    with open(folder / "metrics.csv", newline="") as file:
        return {
            int(line["step"]): {
                key: float(line[key]) for key in ("tokens", "seconds", "train_loss")
            }
            for line in csv.DictReader(file)
        }


def table_of_reaching(folders: dict[str, Path]) -> str:
    """Return in Markdown after how many tokens and seconds each run first has the last training
    loss of the first, also as parts of what the first took."""
    runs = {name: list(read_metrics(folder).values()) for name, folder in folders.items()}
    last = next(iter(runs.values()))[-1]
    cells = []
    for name, lines in runs.items():
        reached = (line for line in lines if line["train_loss"] <= last["train_loss"])
        found = next(reached, None)
        columns = []
        for key, digits in (("tokens", 0), ("seconds", 1)):
            # The first step is not timed, and may be the last.
            part = f" ({found[key] / last[key]:.0%})" if found and last[key] else ""
            columns.append(f"{found[key]:,.{digits}f}{part}" if found else "-")
        cells.append((name, *columns))
    return markdown((f"reaches {last['train_loss']:.3f}", "tokens", "seconds"), cells)


def draw(curves: dict[str, list[Path]]) -> Any:
    """Return the matplotlib figure of training losses over tokens, and over seconds of training: a
    line for each entry, the mean of its runs between their least and greatest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for name, folders in curves.items():
        runs = [read_metrics(folder) for folder in folders]
        steps = list(runs[0])
        losses = [[run[step]["train_loss"] for run in runs] for step in steps]
        for panel, key in zip(panels, ("tokens", "seconds")):
            x = [statistics.mean(run[step][key] for run in runs) for step in steps]
            # With less than two points there is no line.
            panel.plot(x, list(map(statistics.mean, losses)), marker=".", label=name)
            panel.fill_between(x, list(map(min, losses)), list(map(max, losses)), alpha=0.2)
    panels[0].set(xlabel="tokens", ylabel="training loss (nats a byte)")
    panels[1].set(xlabel="seconds of training")
    panels[0].legend()
    return figure


def write_results(rows: list[dict[str, Any]], out: Path) -> None:
    """Write results.csv."""
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _validation(tried: tuple[dict[str, Any], float]) -> float:
    """Return what a run is judged by. One that diverged is behind all others."""
    bits: float = tried[0]["validation_bits_per_byte"]
    return math.inf if math.isnan(bits) else bits


def at_edge(name: str, best: float, factors: Iterable[float]) -> str:
    """Return a line that says what to try if the best factor is the least or the greatest; else an
    empty one."""
    least, *_, greatest = tried = sorted(factors)
    if best not in (least, greatest):
        return ""
    beside = tried[1] if best == least else tried[-2]
    further = best * best / beside
    return f"{name}: the best rate is at the edge: try --rates {further:g} with another --out"


def main() -> int:
    """Compare, and return the exit code: 1 if a run failed."""
    args, rest = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    draws = find_spec("matplotlib") is not None
    if not draws:
        print("there will be no loss.png: it takes matplotlib (pip install matplotlib)", flush=True)
    notes = [line for config in args.configs if (line := replaced(config, args.size))]
    notes += differences(args.configs, args.size, args.ranks)
    rows: list[dict[str, Any]] = []

    def trained(config: Path, factor: float, seed: int) -> dict[str, Any]:
        rows.append(run(config, factor, seed, args, rest))
        # After each run, so that an interrupted comparison has those before.
        write_results(rows, args.out)
        return rows[-1]

    tuned = {}
    for config in args.configs:
        tried = [(trained(config, factor, args.seed), factor) for factor in args.rates]
        ended = [each for each in tried if not each[0]["exit_code"]]
        if ended:
            best, factor = min(ended, key=_validation)
            seeds = [trained(config, factor, seed) for seed in range(1, args.seeds)]
            tuned[config.stem] = [best, *(row for row in seeds if not row["exit_code"])]
            if args.rates[1:] and (edge := at_edge(config.stem, factor, args.rates)):
                notes.append(edge)
    if args.seeds > 1:
        print(f"\n{table_of_seeds(tuned)}")
    folders = {of[0]["config"]: [args.out / row["config"] for row in of] for of in tuned.values()}
    if draws and folders:
        draw(folders).savefig(args.out / "loss.png", dpi=120)
    print(f"\n{table(rows, folders if args.rates[1:] else ())}")
    if folders:
        print(f"\n{table_of_reaching({name: of[0] for name, of in folders.items()})}")
    legend = [
        *(["*: the best of its rates by validation, and in loss.png"] if args.rates[1:] else []),
        "train loss: nats a byte, of the last steps; validation: bits a byte",
        "tokens/s: of all ranks, without the first step",
        "GiB: the most that the fullest rank had in use, on a CPU its whole process",
        "reaches: when a run first has the last training loss of the run in this table's first "
        "row, and what part of that run's whole length that is; -: not at all",
    ]
    print("", *legend, *notes, f"results in {args.out}", sep="\n")
    return 1 if any(row["exit_code"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
