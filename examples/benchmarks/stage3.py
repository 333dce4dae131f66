"""The cost of a step at ZeRO stage 3, against stock DeepSpeed's Muon and AdamW at stage 3: bytes at
the interface, seconds over a slow link, and seconds on one machine.

    sudo python examples/benchmarks/stage3.py >
    examples/benchmarks/results/YYYY-MM_<hardware>_stage3.md

Nodes are network namespaces of this machine, see namespaces.py, and ranks talk over gloo. All sides
of a comparison take turns in the same processes; numbers are medians. Comparisons of bytes leave
out Newton-Schulz on all sides. Every parameter is fetched anew in each pass, as in a model that
does not fit: DeepSpeed would keep a small one from the forward to the backward pass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import deepspeed
import torch
from cluster_ranks import ADAMW, GPT, OURS, STOCK, GPTConfig, Steps, whole_steps
from conditions import commit, options, processor
from namespaces import Cluster, be_the_switch, run

MB = 1e6
FETCHED_ANEW = {
    "stage": 3,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


class Table:
    """Rows of measurements, and of bars."""

    def __init__(self) -> None:
        self.bars = ["| what | found | at most | reached |", "|---|---|---|---|"]
        self.rows = [
            "| where | side | s a step | optimizer, s | MB out of a node | over the model's |",
            "|---|---|---|---|---|---|",
        ]

    def add(self, where: object, taken: Mapping[str, Steps], model_bytes: int) -> None:
        """Add the rows of one comparison."""
        for name, steps in taken.items():
            seconds, sent = steps.whole
            self.rows.append(
                f"| {where} | {name} | {seconds:.2f} | {steps.optimizer_seconds:.2f} | "
                f"{sent / MB:.2f} | {sent / model_bytes:.3f} |"
            )

    def bar(self, what: str, found: float, bound: float) -> None:
        """Add a row of bars."""
        met = "yes" if found <= bound else "no"
        self.bars.append(f"| {what} | {found:.3f} | {bound:.3f} | {met} |")


def owned_matrices(config: GPTConfig) -> int:
    """Return the elements of matrices that have owners: those inside blocks."""
    return sum(
        param.numel()
        for name, param in GPT(config).named_parameters()
        if param.dim() == 2 and "blocks" in name
    )


def bytes_of_steps(table: Table, config: GPTConfig, rounds: int) -> None:
    """Measure two fetches, one reduction, and the exchange each way."""
    numel = sum(param.numel() for param in GPT(config).parameters())
    matrices = owned_matrices(config)
    for num_nodes, per_node in ((2, 1), (4, 1), (2, 2)):
        cluster = Cluster(num_nodes, per_node, 1000)
        taken = run(
            cluster,
            partial(
                whole_steps,
                config=config,
                tokens=config.context,
                rounds=rounds,
                zero=FETCHED_ANEW,
                updates=False,
            ),
        )
        table.add(cluster, taken, 4 * numel)
        if per_node > 1:
            continue
        others = (num_nodes - 1) / num_nodes
        expected = 3 * others + 2 * others * matrices / numel / num_nodes
        table.bar(
            f"{cluster}: bytes at the interface over the model's",
            taken[OURS].whole.sent / (4 * numel),
            1.02 * expected,
        )


def steps_of_two_nodes(table: Table, config: GPTConfig, tokens: int, rounds: int) -> None:
    """Measure whole steps over a link of 1 Gbit/s."""
    cluster = Cluster(2, 1, 1000)
    numel = sum(param.numel() for param in GPT(config).parameters())
    taken = run(
        cluster,
        partial(whole_steps, config=config, tokens=tokens, rounds=rounds, zero=FETCHED_ANEW),
    )
    table.add(f"{cluster}, {tokens} tokens a rank", taken, 4 * numel)
    for side, bound in ((STOCK, 0.5), (ADAMW, 1.15)):
        table.bar(
            f"{cluster}: whole step of {tokens} tokens a rank over {side}'s",
            taken[OURS].whole.seconds / taken[side].whole.seconds,
            bound,
        )


def optimizer_part(table: Table, config: GPTConfig, rounds: int) -> None:
    """Measure steps of 16 tokens without their passes."""
    numel = sum(param.numel() for param in GPT(config).parameters())
    for ranks, bound in ((2, 0.4), (4, 0.3)):
        cluster = Cluster(1, ranks, 1000)
        short = replace(config, context=16)
        taken = run(
            cluster,
            partial(whole_steps, config=short, tokens=16, rounds=rounds, zero={"stage": 3}),
        )
        table.add(f"one machine, {ranks} ranks", taken, 4 * numel)
        table.bar(
            f"one machine, {ranks} ranks: optimizer part of a step over stock Muon's",
            taken[OURS].optimizer_seconds / taken[STOCK].optimizer_seconds,
            bound,
        )


def main() -> None:
    """Print the report."""
    args = options(__doc__, 5)
    be_the_switch()
    small = args.small
    config = GPTConfig(layers=2, width=64) if small else GPTConfig(layers=6, width=384, heads=6)
    larger = GPTConfig(layers=2, width=64) if small else GPTConfig(layers=9, width=512, heads=8)
    load = os.getloadavg()[0]
    table = Table()
    optimizer_part(table, larger, args.rounds)
    bytes_of_steps(table, config, min(3, args.rounds))
    for windows in (1,) if small else (1, 4):
        steps_of_two_nodes(table, larger, larger.context * windows, args.rounds)
    print("Steps at ZeRO stage 3. " + " ".join(["sudo python", *sys.argv]))
    print(
        f"{processor()}, gloo, deepspeed {deepspeed.__version__}, torch {torch.__version__}; "
        f"commit {commit()}; load before {load:.1f}, after {os.getloadavg()[0]:.1f}. float32; "
        f"medians of {args.rounds} rounds.\n"
    )
    print("\n".join(table.bars), end="\n\n")
    print("\n".join(table.rows))


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
