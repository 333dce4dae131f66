"""The cost of a step on a cluster with slow links, against stock DeepSpeed: bytes at the interface,
and seconds.

    sudo python examples/benchmarks/cluster.py >
    examples/benchmarks/results/YYYY-MM_<hardware>_cluster.md

Nodes are network namespaces of this machine, see namespaces.py, and ranks talk over gloo. All sides
of a comparison take turns in the same processes; the report has medians. Comparisons of the wire
alone use a model that is no more than its parameters, and leave out Newton-Schulz on all sides: the
cores of one machine are no cluster's.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import NamedTuple

import deepspeed
import torch
from cluster_ranks import (
    ADAMW,
    BUCKET_NUMEL,
    GPT,
    OPTIMIZERS,
    OURS,
    STOCK,
    GPTConfig,
    Wire,
    on_the_wire,
    one_matrix_a_bucket,
    whole_steps,
)
from conditions import commit, options, processor
from namespaces import Cluster, be_the_switch, run

MB = 1e6


class Bar(NamedTuple):
    """A measurement and its bound."""

    what: str
    found: float
    bound: float

    def row(self) -> str:
        """Return the row of a table."""
        met = "yes" if self.found <= self.bound else "no"
        return f"| {self.what} | {self.found:.3f} | {self.bound:.3f} | {met} |"


class Report:
    """The measurements so far: bars, and rows of seconds."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []
        self._seconds = [
            "| nodes | side | reduce, s | gather, s | both | MB out of a node: reduce | gather |",
            "|---|---|---|---|---|---|---|",
        ]

    def add(self, cluster: Cluster, name: str, wire: Wire) -> None:
        """Add a row of seconds and bytes."""
        self._seconds.append(
            f"| {cluster} | {name} | {wire.reduce.seconds:.2f} | {wire.gather.seconds:.2f} | "
            f"{wire.seconds:.2f} | {wire.reduce.sent / MB:.2f} | {wire.gather.sent / MB:.2f} |"
        )

    def print(self) -> None:
        """Print everything."""
        print("| what | found | at most | reached |\n|---|---|---|---|")
        print("\n".join(bar.row() for bar in self.bars), end="\n\n")
        print("\n".join(self._seconds), end="\n\n")


def bytes_of_steps(report: Report, config: GPTConfig, rounds: int) -> None:
    """Compare the bytes of a step at the interface with the model's."""
    for num_nodes in (2, 4):
        cluster = Cluster(num_nodes, 1, 1000)
        taken, model_bytes, _ = run(
            cluster,
            partial(
                on_the_wire,
                config=config,
                bucket_numel=BUCKET_NUMEL,
                rounds=rounds,
                names=[OURS, STOCK],
            ),
        )
        for name, wire in taken.items():
            report.add(cluster, name, wire)
        bound = 2 * (num_nodes - 1) / num_nodes
        sent = taken[OURS].reduce.sent + taken[OURS].gather.sent
        report.bars.append(
            Bar(
                f"bytes at the interface over the model's, {num_nodes} nodes",
                sent / model_bytes,
                1.02 * bound,
            )
        )


def several_ranks_behind_a_link(report: Report, config: GPTConfig, rounds: int) -> None:
    """Compare the bytes and seconds of several ranks behind a link with stock's."""
    cluster = Cluster(2, 4, 200)
    taken, model_bytes, _ = run(
        cluster,
        partial(
            on_the_wire,
            config=config,
            bucket_numel=BUCKET_NUMEL,
            rounds=rounds,
            names=list(OPTIMIZERS),
        ),
    )
    for name, wire in taken.items():
        report.add(cluster, name, wire)
    report.bars += [
        Bar(
            f"{cluster}: bytes of the reduction across a link over half of the model's",
            taken[OURS].reduce.sent / (model_bytes / 2),
            1.1,
        ),
        Bar(
            f"{cluster}: reduce + gather over stock Muon's",
            taken[OURS].seconds / taken[STOCK].seconds,
            0.65,
        ),
        Bar(
            f"{cluster}: reduce + gather over stock AdamW's",
            taken[OURS].seconds / taken[ADAMW].seconds,
            1.0,
        ),
    ]


def steps_of_two_nodes(report: Report, config: GPTConfig, tokens: int, rounds: int) -> list[str]:
    """Compare whole steps of two nodes with stock's; return rows of seconds."""
    cluster = Cluster(2, 1, 1000)
    taken = run(cluster, partial(whole_steps, config=config, tokens=tokens, rounds=rounds))
    wholes = {name: steps.whole for name, steps in taken.items()}
    ours = wholes[OURS].seconds
    report.bars += [
        Bar(f"{cluster}: whole step over stock Muon's", ours / wholes[STOCK].seconds, 0.72),
        Bar(f"{cluster}: whole step over stock AdamW's", ours / wholes[ADAMW].seconds, 1.1),
    ]
    return [
        f"| {name} | {cost.seconds:.2f} | {cost.sent / MB:.1f} |" for name, cost in wholes.items()
    ]


def one_matrix_over_even(report: Report, numel: int, rounds: int) -> None:
    """Compare one matrix a bucket with even shards of the same bytes."""
    cluster = Cluster(8, 1, 200)
    taken = run(cluster, partial(one_matrix_a_bucket, numel=numel, rounds=rounds))
    for name, wire in taken.items():
        report.add(cluster, name, wire)
    for dtype in ("float32", "bfloat16"):
        ours, even = taken[f"matrices {dtype}"], taken[f"even {dtype}"]
        report.bars += [
            Bar(
                f"{cluster}: one matrix a bucket over even shards, {dtype}, reduce",
                ours.reduce.seconds / even.reduce.seconds,
                1.15,
            ),
            Bar(f"{cluster}: the same, gather", ours.gather.seconds / even.gather.seconds, 1.2),
        ]


def main() -> None:
    """Print the report."""
    args = options(__doc__, 7)
    be_the_switch()
    rounds, small = args.rounds, args.small
    config = GPTConfig(layers=2, width=64) if small else GPTConfig(layers=6, width=384, heads=6)
    larger = GPTConfig(layers=2, width=64) if small else GPTConfig(layers=9, width=512, heads=8)
    load = os.getloadavg()[0]
    report = Report()
    bytes_of_steps(report, config, min(3, rounds))
    several_ranks_behind_a_link(report, config, rounds)
    one_matrix_over_even(report, 1 << 17 if small else 1_000_000, rounds)
    steps = steps_of_two_nodes(report, larger, larger.context * (1 if small else 4), rounds)
    numels = [
        sum(param.numel() for param in GPT(shape).parameters()) / MB for shape in (config, larger)
    ]
    print("Steps over slow links, against stock DeepSpeed. " + " ".join(["sudo python", *sys.argv]))
    print(
        f"{processor()}, gloo, deepspeed {deepspeed.__version__}, torch {torch.__version__}; "
        f"commit {commit()}; load before {load:.1f}, after {os.getloadavg()[0]:.1f}.\nGPT of "
        f"{numels[0]:.1f} M parameters, for whole steps {numels[1]:.1f} M, float32; medians of "
        f"{rounds} rounds.\n"
    )
    report.print()
    print("| whole step | s | MB out of a node |\n|---|---|---|\n" + "\n".join(steps))


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
