"""Time and memory of save, load, reshard and to-universal: LayerWiseMuon against stock DeepSpeed
AdamW, both ZeRO-1.

    python examples/benchmarks/checkpoints.py --rounds 3
    python examples/benchmarks/checkpoints.py --rounds 3 --bf16

Both sides live in the same processes and take turns. Before each operation earlier writes are on
disk (``sync``) and freed memory is given back; the time does not include this. Nothing is dropped
from the page cache. Every load starts from zeroed weights and states, and their norms must come
back. Stock refuses another world size, so its way to reshard is DeepSpeed's ``ds_to_universal.py``
and a universal load.

Memory is anonymous memory (``Pss_Anon`` in /proc, so Linux alone), without files that are mapped
for reading. It is the highest of a rank while the operation runs, over that before, sampled every 4
ms in a round of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, SINGLE_PARTITION_OF_FP32_GROUPS
from measuring import (
    FORK,
    INTERVAL_S,
    Clock,
    Event,
    Samples,
    anonymous_mb,
    extra_mb,
    family,
    run_ranks,
    settle,
)
from torch import Tensor, nn

import ds_layerwise
from ds_layerwise import cli

OURS, STOCK = "LayerWiseMuon", "stock AdamW"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # One step of Newton-Schulz is enough to make states that are not zero.
    OURS: {"type": "LayerWiseMuon", "params": {"muon_lr": 0.01, "adam_lr": 0.01, "ns_steps": 1}},
    STOCK: {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}
TAG = "saved"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a measurement. ``saved_by`` is the world size of the checkpoints that are
    resharded to ``ranks``."""

    folder: str
    layers: int = 12
    width: int = 768
    vocabulary: int = 32_000
    bucket_numel: int = 25_000_000
    ranks: int = 2
    saved_by: int = 3
    rounds: int = 5
    bf16: bool = False
    commands: bool = True

    def path(self, name: str, side: str) -> Path:
        """Return the path of the checkpoints ``name`` of ``side``."""
        return Path(self.folder, f"{name}-{side.replace(' ', '-')}")


class Shapes(nn.Module):
    """The parameters of a GPT with tied embeddings. Its loss is their norm, so a step costs little
    and moves all of them."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, inner = job.width, -(-8 * job.width // 192) * 64
        self.embed = nn.Embedding(job.vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(width, width, bias=False) for name in ("q", "k", "v", "o")},
                    "gate": nn.Linear(width, inner, bias=False),
                    "up": nn.Linear(width, inner, bias=False),
                    "down": nn.Linear(inner, width, bias=False),
                    "norm_1": nn.RMSNorm(width),
                    "norm_2": nn.RMSNorm(width),
                }
            )
            for _ in range(job.layers)
        )
        self.norm = nn.RMSNorm(width)

    def forward(self) -> Tensor:
        """Return half the square of the norm of all parameters: they are their own gradients."""
        return torch.stack([param.float().square().sum() for param in self.parameters()]).sum() / 2


# --- the ranks


def start_engine(job: Job, side: str) -> Any:
    """Return an engine that has done one step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": OPTIMIZERS[side],
        "steps_per_print": 10**9,
        "bf16": {"enabled": job.bf16},
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": job.bucket_numel,
            "allgather_bucket_size": job.bucket_numel,
        },
    }
    model = Shapes(job)
    engine, *_ = ds_layerwise.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    engine.backward(engine())
    engine.step()
    return engine


def held(engine: Any) -> Iterator[Tensor]:
    """Yield weights, masters and states, as views into live memory."""
    yield from (param.detach() for param in engine.module.parameters())
    state_dict = engine.optimizer.state_dict()
    yield from (master.detach() for master in state_dict[SINGLE_PARTITION_OF_FP32_GROUPS])
    for state in state_dict[BASE_OPTIMIZER_STATE]["state"].values():
        # The converter makes zeros for a missing state from one element, expanded.
        yield from (value for value in state.values() if value.is_contiguous())


def norms(engine: Any) -> list[float]:
    """Return the norms of the weights and of all else, which a load at any world size must bring
    back."""
    num_params = sum(1 for _ in engine.module.parameters())
    squares = torch.tensor(
        [
            float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2 if value.dim() else 0.0
            for value in held(engine)
        ],
        dtype=torch.float64,
    )
    rest = squares[num_params:].sum()
    dist.all_reduce(rest)
    return [float(squares[:num_params].sum().sqrt()), float(rest.sqrt())]


def one_round(
    job: Job,
    engines: dict[str, Any],
    sides: list[str],
    clock: Clock,
    norms_of: dict[str, list[float]],
) -> None:
    """Run every operation once on each side."""
    for side in sides:
        engine, folder = engines[side], job.path("round", side)
        for what, save in (("save", save_only), ("save and fsync", save_and_sync)):
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            clock(what, side, lambda: save(engine, folder))
        check_load(clock, "load", side, engine, folder, norms(engine))
    for side in sides:
        if side == OURS:
            check_load(
                clock, "reshard", side, engines[side], job.path("source", side), norms_of[side]
            )
        check_load(
            clock,
            "load universal",
            side,
            engines[side],
            job.path("universal", side),
            norms_of[side],
        )


def save_only(engine: Any, folder: Path) -> None:
    """Save as a training script does."""
    engine.save_checkpoint(str(folder), TAG)


def save_and_sync(engine: Any, folder: Path) -> None:
    """Save, and let every rank wait until its files are on the disk: a save that must survive a
    loss of power does this."""
    save_only(engine, folder)
    for path in (folder / TAG).glob("*.pt"):
        if f"pp_rank_{dist.get_rank()}_" in path.name or (
            dist.get_rank() == 0 and "pp_rank" not in path.name
        ):
            with path.open("rb") as file:
                os.fsync(file.fileno())


def check_load(
    clock: Clock, what: str, side: str, engine: Any, folder: Path, expected: list[float]
) -> None:
    """Load from ``folder`` into zeroed memory.

    Raises:
        RuntimeError: a norm did not come back.
    """
    for value in held(engine):
        value.zero_()
    engine._config.load_universal_checkpoint = what == "load universal"
    clock(what, side, lambda: engine.load_checkpoint(str(folder), TAG))
    loaded = norms(engine)
    if any(abs(f - e) > 1e-9 * e for f, e in zip(loaded, expected, strict=True)):
        raise RuntimeError(f"{what}, {side}: norms {loaded} after the load, {expected} before")


def refusal(job: Job, engine: Any) -> str:
    """Return stock's error at a checkpoint of another world size."""
    try:
        engine.load_checkpoint(str(job.path("source", STOCK)), TAG)
    except deepspeed.runtime.zero.utils.ZeRORuntimeException as e:
        return f"{type(e).__name__}: {e}"
    return ""


def write_sources(job: Job, watched: Any) -> None:
    """Write the checkpoints that are converted and resharded, and their norms."""
    for side in OPTIMIZERS:
        engine = start_engine(job, side)
        found = norms(engine)
        engine.save_checkpoint(str(job.path("source", side)), TAG)
        if dist.get_rank() == 0:
            job.path("source", side).joinpath("norms").write_text(json.dumps(found))
        engine.destroy()


def run_rounds(job: Job, watched: Any) -> None:
    """Run a round to warm up, ``job.rounds`` rounds on the clock, and one that is sampled."""
    clock, engines = Clock(watched), {side: start_engine(job, side) for side in OPTIMIZERS}
    sources = {
        side: json.loads(job.path("source", side).joinpath("norms").read_text())
        for side in OPTIMIZERS
    }
    said = refusal(job, engines[STOCK])
    for index in range(job.rounds + 2):
        clock.timed = 1 <= index <= job.rounds
        dist.barrier()
        if index > job.rounds:
            watched.set()
        one_round(job, engines, list(OPTIMIZERS)[:: 1 if index % 2 else -1], clock, sources)
    Path(job.folder, f"events-{dist.get_rank()}").write_text(
        json.dumps([asdict(event) for event in clock.events])
    )
    Path(job.folder, "refusal").write_text(said)


# --- conversion


def convert_ours(source: Path, target: Path) -> None:
    """Convert as ``ds-layerwise to-universal`` does by default."""
    if code := cli.main(["to-universal", str(source), str(target)]):
        sys.exit(code)


def convert_stock(source: Path, target: Path) -> None:
    """Convert as ``python -m deepspeed.checkpoint.ds_to_universal`` does by default."""
    # Stock's own checkpoints lack entries that it needs here; ours have them.
    sys.argv = [
        "",
        "--input_folder",
        str(source),
        "--output_folder",
        str(target),
        *["--inject_missing_state"] * ("stock" in source.parent.name),
    ]
    ds_to_universal.main(ds_to_universal.parse_arguments())


def command_ours(source: Path, target: Path) -> None:
    """Convert from the shell, with all imports."""
    subprocess.run(
        [sys.executable, "-m", "ds_layerwise.cli", "to-universal", source, target], check=True
    )


def command_stock(source: Path, target: Path) -> None:
    """Convert from the shell, with all imports."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            "--input_folder",
            source,
            "--output_folder",
            target,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


CONVERSIONS = [
    ("to-universal", OURS, OURS, convert_ours),
    ("to-universal", STOCK, OURS, convert_stock),
    ("whole command", OURS, OURS, command_ours),
    ("whole command", STOCK, OURS, command_stock),
    ("stock's to-universal", STOCK, STOCK, convert_stock),
]


def convert(
    source: Path, target: Path, converter: Callable[[Path, Path], None], *, watch: bool
) -> tuple[float, float]:
    """Return seconds, and extra anonymous memory in MB of all processes that take part."""
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    settle()
    before, most, start = anonymous_mb(os.getpid()), 0.0, time.monotonic()
    process = FORK.Process(target=_quietly, args=(converter, source, target))
    process.start()
    while watch and process.is_alive():
        most = max(most, sum(anonymous_mb(pid) for pid in family(os.getpid())) - before)
        time.sleep(INTERVAL_S)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{converter.__name__} of {source} failed with code {process.exitcode}")
    return time.monotonic() - start, most


def _quietly(converter: Callable[[Path, Path], None], source: Path, target: Path) -> None:
    torch.set_num_threads(1)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        converter(source, target)


# --- the report


class Results:
    """Seconds of every timed repetition, and extra memory of the watched one, by operation and
    side.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.memory: dict[tuple[str, str], float] = defaultdict(float)

    def add_conversions(self, job: Job) -> None:
        """Convert in turns, with both converters."""
        for index in range(job.rounds + 1):
            for what, side, of, converter in CONVERSIONS[:: 1 if index % 2 else -1]:
                if what == "whole command" and not job.commands:
                    continue
                source, target = (
                    job.path("source", of),
                    job.path("universal" if side == of else "again", of),
                )
                seconds, mb = convert(
                    source / TAG, target / TAG, converter, watch=index == job.rounds
                )
                if index < job.rounds:
                    self.seconds[what, side].append(seconds)
                else:
                    self.memory[what, side] = mb

    def add_events(self, job: Job, samples: Samples) -> None:
        """Add the operations of the ranks: the slowest rank counts, and the one that needs most
        memory."""
        by_rank = [
            [Event(**event) for event in json.loads(Path(job.folder, f"events-{rank}").read_text())]
            for rank in range(job.ranks)
        ]
        for events in zip(*by_rank, strict=True):
            key = events[0].what, events[0].side
            if events[0].timed:
                self.seconds[key].append(max(event.end - event.start for event in events))
            for event in events:
                self.memory[key] = max(self.memory[key], extra_mb(samples, event))
        # Stock converts first.
        self.seconds["reshard", STOCK] = [
            one + other
            for one, other in zip(
                self.seconds["stock's to-universal", STOCK],
                self.seconds["load universal", STOCK],
                strict=True,
            )
        ]
        self.memory["reshard", STOCK] = max(
            self.memory["stock's to-universal", STOCK], self.memory["load universal", STOCK]
        )

    def rows(self) -> Iterator[str]:
        """Yield the lines of the table."""
        yield (
            "| operation | ours s | stock s | ours/stock | ours min-max | stock min-max | ours +MB "
            "| stock +MB |"
        )
        yield "|---|--:|--:|--:|--:|--:|--:|--:|"
        for what in dict.fromkeys(what for what, side in self.seconds if side == OURS):
            times = [self.seconds[what, side] for side in OPTIMIZERS]
            medians = [statistics.median(values) for values in times]
            cells = [
                what,
                *[f"{median:.2f}" for median in medians],
                f"{medians[0] / medians[1]:.2f}",
                *[f"{min(values):.2f}-{max(values):.2f}" for values in times],
                *[f"{self.memory[what, side]:.0f}" for side in OPTIMIZERS],
            ]
            yield f"| {' | '.join(cells)} |"


def size_mb(folder: Path) -> float:
    """Return the size of all files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def conditions(job: Job) -> str:
    """Return the machine, the versions, the model and the settings."""
    numel = sum(param.numel() for param in Shapes(job).parameters())
    sizes = "; ".join(
        f"{side} {size_mb(job.path('round', side)):.0f} MB, universal "
        f"{size_mb(job.path('universal', side)):.0f} MB"
        for side in OPTIMIZERS
    )
    return (
        f"{os.cpu_count()} CPUs {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end, "
        f"deepspeed {deepspeed.__version__}, torch {torch.__version__}.\n{numel / 1e6:.1f} M "
        f"parameters, {'bf16' if job.bf16 else 'fp32'}, {job.layers} layers x {job.width}, "
        f"vocabulary {job.vocabulary}; {job.ranks} ranks over gloo, buckets of "
        f"{job.bucket_numel / 1e6:g} M elements, {4e-6 * job.bucket_numel:.0f} MB in fp32; "
        f"{job.rounds} rounds, medians.\nreshard: {job.saved_by} ranks to {job.ranks}; stock "
        f"converts and loads the result. {sizes}.\nStock's load_checkpoint of that: "
        f"{Path(job.folder, 'refusal').read_text().splitlines()[0]}"
    )


def parse_job(folder: str) -> Job:
    """Return the job of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--bf16", action="store_true", help="a bf16 model, whose masters are apart from its weights"
    )
    parser.add_argument(
        "--small", action="store_true", help="a tiny model and one round: shows that all of it runs"
    )
    args = parser.parse_args()
    if args.small:
        return Job(
            folder=folder,
            layers=1,
            width=64,
            vocabulary=500,
            bucket_numel=20_000,
            rounds=1,
            bf16=args.bf16,
            commands=False,
        )
    return Job(folder=folder, rounds=args.rounds, bf16=args.bf16)


def main() -> None:
    """Print one markdown table, after all output of the engines."""
    with tempfile.TemporaryDirectory() as folder:
        job, results = parse_job(folder), Results()
        # The first optimizer imports this, for seconds; forks then find it there. The collector
        # need not look through imported objects before every operation.
        importlib.import_module("torch._dynamo")
        gc.freeze()
        run_ranks(job.folder, job.saved_by, functools.partial(write_sources, job))
        results.add_conversions(job)
        results.add_events(
            job, run_ranks(job.folder, job.ranks, functools.partial(run_rounds, job))
        )
        print("\n".join([conditions(job), "", *results.rows()]))


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
