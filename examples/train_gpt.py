"""Train a small GPT on bytes under the DeepSpeed launcher.

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed_config
    ds_configs/quickstart.json

Only the line ``ds_layerwise.register()`` is particular to ds_layerwise. The rest is any DeepSpeed
script; ``leave`` ends it as ``ds_layerwise.run`` would. Into --out go metrics.csv, summary.json,
loss.png and checkpoint/.

Seconds are those of training steps after the first of a start, which compiles and allocates:
neither the start, nor validations, nor the save count. Memory is the most that a rank had in use
at one time, in GiB: of a device's allocator, or on a CPU the whole process, with its libraries.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from data import INSTALLED, Corpus, load_corpus, training_windows, validation_windows
from deepspeed.accelerator import get_accelerator
from model import GPT, GPTConfig
from torch import Tensor
from tqdm import tqdm

import ds_layerwise
from ds_layerwise.run import leave

DEFAULT_STEPS = 200
LOG_EVERY = 10
COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "lr",
    "grad_norm",
    "ms_per_step",
    "tokens_per_s",
    "validation_bits_per_byte",
)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small GPT on bytes under the DeepSpeed launcher.",
        # A word that is cut short is more often a typing error than meant.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help=f"a text, or a folder of texts; {INSTALLED}: the source of installed packages "
        "(default: Python's own)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="optimizer steps; a scheduler's total_num_steps follows "
        f"(default: the scheduler's, or {DEFAULT_STEPS})",
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--context", type=int, default=128, help="tokens in a window (default: 128)"
    )
    parser.add_argument(
        "--tied", action="store_true", help="one matrix for the embedding and the head"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the windows")
    parser.add_argument(
        "--eval_every", type=int, default=50, help="steps between validations (default: 50)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for results (default: out)"
    )
    parser.add_argument(
        "--save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a checkpoint at the end",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument(
        "--local_rank", type=int, default=-1, help=argparse.SUPPRESS
    )  # the launcher passes it
    return deepspeed.add_config_arguments(parser)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser()
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error(
            "--deepspeed_config is missing; for example --deepspeed_config "
            "ds_configs/quickstart.json"
        )
    if args.eval_every < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--steps and --eval_every must be at least 1")
    if "LOCAL_RANK" not in os.environ:
        parser.error(
            "start this with the launcher: deepspeed --num_accelerators 2 examples/train_gpt.py ..."
        )
    return args


def load_config(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return the DeepSpeed configuration and the number of steps, on which its scheduler and
    ``--steps`` agree."""
    try:
        config = json.loads(Path(args.deepspeed_config).read_text())
    except OSError as error:
        raise ValueError(f"--deepspeed_config {args.deepspeed_config}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--deepspeed_config {args.deepspeed_config}: not JSON: {error}"
        ) from error
    schedule = config.get("scheduler", {}).get("params", {})
    steps = args.steps or schedule.get("total_num_steps", DEFAULT_STEPS)
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
    return config, steps


class Trainer:
    """An engine, a corpus, and the position in both."""

    def __init__(
        self, engine: deepspeed.DeepSpeedEngine, corpus: Corpus, args: argparse.Namespace
    ) -> None:
        self.engine = engine
        self.corpus = corpus
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batch = engine.train_micro_batch_size_per_gpu()
        self.accumulation = engine.gradient_accumulation_steps()
        self.tokens_per_step = self.batch * self.accumulation * self.world_size * args.context
        self.step_seconds: list[float] = []

    def train(self, steps: int) -> dict[str, Any]:
        """Train up to step ``steps``; return the last row of the metrics."""
        start = self.engine.global_steps
        bar = tqdm(total=steps, initial=start, unit="step", mininterval=1, disable=self.rank != 0)
        losses, row = [], {}
        for step in range(start, steps):
            began = time.perf_counter()
            losses.append(self.train_step(step))
            self.step_seconds.append(time.perf_counter() - began)
            done = step + 1
            bar.update()
            if done % LOG_EVERY and done % self.args.eval_every and done != steps:
                continue
            row = self.metrics(done, losses)
            if done % self.args.eval_every == 0 or done == steps:
                row["validation_bits_per_byte"] = self.bits_per_byte()
            losses = []
            self.report(row, bar)
        bar.close()
        return row

    def train_step(self, step: int) -> float:
        """Train on all micro-batches of one step; return this rank's mean loss."""
        total = 0.0
        for micro in range(self.accumulation):
            batches_before = (step * self.accumulation + micro) * self.world_size + self.rank
            windows = training_windows(
                self.corpus.train,
                seed=self.args.seed,
                first=batches_before * self.batch,
                size=self.batch,
                context=self.args.context,
            )
            loss = self.loss(windows)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / self.accumulation

    def loss(self, windows: Tensor) -> Tensor:
        windows = windows.to(self.engine.device)
        return self.engine(windows[:, :-1], windows[:, 1:])

    @torch.no_grad()
    def bits_per_byte(self) -> float:
        """Return the loss of the held-out text in bits per byte, over all ranks."""
        self.engine.eval()
        nats, count = 0.0, 0
        for windows in validation_windows(
            self.corpus.validation,
            rank=self.rank,
            world_size=self.world_size,
            size=self.batch,
            context=self.args.context,
        ):
            nats += self.loss(windows).item() * len(windows)
            count += len(windows)
        self.engine.train()
        nats, count = self.sum_over_ranks(nats, count)
        return nats / count / math.log(2)

    def metrics(self, step: int, losses: list[float]) -> dict[str, Any]:
        """Return a row: losses averaged over the steps since the last row and over ranks, times
        from rank 0."""
        seconds = statistics.median(self.step_seconds[-len(losses) :])
        norm = self.engine.get_global_grad_norm()
        return {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "seconds": sum(self.step_seconds[1:]),
            "train_loss": self.sum_over_ranks(sum(losses) / len(losses))[0] / self.world_size,
            "lr": "/".join(dict.fromkeys(f"{lr:.3g}" for lr in self.engine.get_lr())),
            "grad_norm": None if norm is None else float(norm),
            "ms_per_step": 1000 * seconds,
            "tokens_per_s": self.tokens_per_step / seconds,
            "validation_bits_per_byte": None,
        }

    def memory_gib(self) -> list[float]:
        """Return the most memory that each rank had in use so far."""
        if self.engine.device.type == "cpu":
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        else:
            peak = get_accelerator().max_memory_allocated()
        of_ranks = [0.0] * self.world_size
        of_ranks[self.rank] = peak / 2**30
        return self.sum_over_ranks(*of_ranks)

    def sum_over_ranks(self, *values: float) -> list[float]:
        total = torch.tensor(values, dtype=torch.float32, device=self.engine.device)
        dist.all_reduce(total)
        return total.tolist()

    def report(self, row: dict[str, Any], bar: tqdm) -> None:
        """Write to the progress bar, metrics.csv, and the monitors of the configuration."""
        if self.rank != 0:
            return
        bits = row["validation_bits_per_byte"]
        bar.set_postfix_str(
            f"loss {row['train_loss']:.3f}, lr {row['lr']}, {row['tokens_per_s']:,.0f} tokens/s"
        )
        if bits is not None:
            bar.write(
                f"step {row['step']}: train loss {row['train_loss']:.3f}, validation {bits:.3f} "
                "bits per byte"
            )
        with open(self.args.out / "metrics.csv", "a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        if self.engine.monitor.enabled:
            # The engine counts samples, and W&B ignores values that are counted otherwise.
            samples = self.engine.global_samples
            events = [("Train/Samples/train_loss", row["train_loss"], samples)]
            if bits is not None:
                events.append(("Train/Samples/validation_bits_per_byte", bits, samples))
            self.engine.monitor.write_events(events)


def prepare_out(args: argparse.Namespace) -> None:
    """Make the result folder. A fresh run starts a fresh metrics.csv, a resumed one goes on with
    it."""
    args.out.mkdir(parents=True, exist_ok=True)
    metrics = args.out / "metrics.csv"
    if not args.resume or not metrics.exists():
        metrics.write_text(",".join(COLUMNS) + "\n")


def write_plot(out: Path) -> None:
    """Draw metrics.csv as loss.png."""
    try:
        import matplotlib
    except ImportError:
        print("no loss.png: pip install matplotlib draws one")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for column, scale, marker, label in (
        ("train_loss", math.log(2), None, "training"),
        ("validation_bits_per_byte", 1.0, "o", "validation"),
    ):
        points = [(int(row["step"]), float(row[column]) / scale) for row in rows if row[column]]
        axes.plot(*zip(*points), marker=marker, label=label)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def summarize(row: dict[str, Any], memory: list[float], trainer: Trainer, out: Path) -> None:
    """Write summary.json, loss.png and the last line."""
    timed = trainer.step_seconds[1:] or trainer.step_seconds
    checkpoint_bytes = sum(
        file.stat().st_size for file in (out / "checkpoint").rglob("*") if file.is_file()
    )
    summary = {
        "steps": row["step"],
        "tokens": row["tokens"],
        "seconds": sum(timed),
        "train_loss": row["train_loss"],
        "validation_bits_per_byte": row["validation_bits_per_byte"],
        "ms_per_step": 1000 * statistics.median(timed),
        "tokens_per_s": trainer.tokens_per_step * len(timed) / sum(timed),
        "memory_gib": memory,
        "checkpoint_bytes": checkpoint_bytes,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_plot(out)
    print(
        f"done: {summary['steps']} steps, train loss {summary['train_loss']:.3f}, validation "
        f"{summary['validation_bits_per_byte']:.3f} bits per byte, {summary['tokens_per_s']:,.0f} "
        f"tokens/s, {max(memory):.2f} GiB; results in {out}"
    )


def main() -> None:
    args = parse_arguments()
    try:
        config, steps = load_config(args)
        corpus = load_corpus(args.data, args.context)
        model = GPT(
            GPTConfig(
                layers=args.layers,
                width=args.width,
                heads=args.heads,
                context=args.context,
                tie_embeddings=args.tied,
                seed=args.seed,
            )
        )
    except ValueError as error:
        raise SystemExit(f"train_gpt.py: {error}") from error

    ds_layerwise.register()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    checkpoint = args.out / "checkpoint"
    if args.resume and engine.load_checkpoint(str(checkpoint))[0] is None:
        raise SystemExit(f"train_gpt.py: --resume: no checkpoint in {checkpoint}")
    if engine.global_steps >= steps:
        raise SystemExit(
            f"train_gpt.py: --resume: the checkpoint is at step {engine.global_steps}, nothing is "
            f"left of --steps {steps}"
        )
    trainer = Trainer(engine, corpus, args)
    if trainer.rank == 0:
        prepare_out(args)
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters; "
            f"{trainer.tokens_per_step:,} tokens a step; {corpus.source}: {len(corpus.train):,} "
            f"bytes to train on, {len(corpus.validation):,} held out"
        )
    row = trainer.train(steps)
    memory = trainer.memory_gib()
    if args.save:
        engine.save_checkpoint(str(checkpoint))
    if trainer.rank == 0:
        summarize(row, memory, trainer, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
