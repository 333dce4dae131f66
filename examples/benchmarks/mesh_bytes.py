"""The bytes of a step at the interface of each rank of a mesh, against those of its plan.

    sudo python examples/benchmarks/mesh_bytes.py >
    examples/benchmarks/results/YYYY-MM_<hardware>_mesh_bytes.md

Each of four ranks is a node of its own, a network namespace of this machine, see namespaces.py. The
model is no more than its parameters, so that nothing but gradients and weights travels, and what
ranks agree on.
"""

from __future__ import annotations

import os
import statistics
import sys
from functools import partial
from typing import Any

import deepspeed
import torch
from cluster_ranks import Parameters, leave_out_newton_schulz, spent_by
from conditions import commit, options, processor
from deepspeed.moe.layer import MoE
from namespaces import Cluster, be_the_switch, run
from torch import nn

import ds_layerwise

RANKS, MB = 4, 1e6
#: The most bytes at the interface over those of the plan.
BAR = 1.02


def of_step(
    cluster: Cluster, *, ep_size: int, sequences: int, stage: int, width: int, rounds: int
) -> tuple[float, float, float]:
    """Return the bytes that the mean rank sends in a step at the interface, and by the plan over
    all axes and over that of experts alone.
    """
    leave_out_newton_schulz()
    expert = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    experts = MoE(width, expert, num_experts=8, ep_size=ep_size)
    dense = [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    model = Parameters(nn.Sequential(nn.Embedding(1024, width), *dense, experts))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4_000_000},
        "optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3}},
    }
    mesh = {"mesh_param": (cluster.ranks // sequences, sequences)} if sequences > 1 else {}
    engine = ds_layerwise.initialize(
        model=model, model_parameters=model.parameters(), config=config, **mesh
    )[0]

    def step() -> None:
        engine.backward(engine())
        engine.step()
        engine.optimizer.wait_for_params()

    sent = [spent_by(step, cluster).sent for _ in range(rounds + 1)]
    forecast = engine.optimizer.forecast()
    planned = sum(sum(each) for pair in forecast.sent.values() for each in pair) / cluster.ranks
    return statistics.median(sent[1:]), planned, float(forecast.sent_by_axis["expert-data"])


def main() -> None:
    """Print the report."""
    args = options(__doc__, 5)
    be_the_switch()
    width = 64 if args.small else 512
    rows = []
    for stage in (1, 2):
        for ep_size, sequences in ((2, 1), (2, 2), (4, 2)):
            work = partial(
                of_step,
                ep_size=ep_size,
                sequences=sequences,
                stage=stage,
                width=width,
                rounds=args.rounds,
            )
            found, planned, of_experts = run(Cluster(RANKS, 1, 1000), work)
            met = "yes" if found <= BAR * planned else "no"
            rows.append(
                f"| {stage} | {ep_size} | {sequences} | {found / MB:.2f} | {planned / MB:.2f} | "
                f"{of_experts / MB:.2f} | {found / planned:.4f} | {BAR:.2f} | {met} |"
            )
    print("Bytes of a mesh against its plan. " + " ".join(["sudo python", *sys.argv]))
    print(
        f"{processor()}, gloo, deepspeed {deepspeed.__version__}, torch {torch.__version__}; "
        f"commit {commit()}.\n{RANKS} ranks, each on a node of its own; 8 experts, "
        f"float32, width {width}; medians of {args.rounds} steps; MB out of the mean rank.\n"
    )
    print("| stage | ep_size | sequences | found | plan | expert-data | over | at most | reached |")
    print("|---" * 9 + "|")
    print("\n".join(rows))


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
