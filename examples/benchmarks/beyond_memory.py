"""Training of a model whose weights, gradients and states exceed a rank's memory: stage 3 trains it
on 4 ranks, and stage 2 finds no memory.

    python examples/benchmarks/beyond_memory.py >
    examples/benchmarks/results/YYYY-MM_<hardware>_beyond_memory.md

Each rank limits its own memory (``RLIMIT_DATA``, so Linux alone) after imports and before it builds
the model. At stage 3 it builds the model under ``deepspeed.zero.Init``.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from conditions import conditions
from measuring import run_ranks
from torch import nn

import ds_layerwise

RANKS = 4
STEPS = 3


class Layers(nn.Module):
    """Square matrices one after the other."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


@contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """Let this process have so much more memory than it has now."""
    status = Path("/proc/self/status").read_text().split()
    now = 1024 * int(status[status.index("VmData:") + 1])
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def train(stage: int, layers: int, width: int, limit: int, into: Path, _: Any) -> None:
    """Train, and write the result."""
    sys.stdout = sys.stderr
    # M_MMAP_THRESHOLD: glibc would keep freed blocks below 32 MB.
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": 2 * width * width,
            "stage3_max_live_parameters": 2 * width * width,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": width * width,
        },
        "layerwise": {"batch_matrices": False, "max_waiting_buckets": 2},
        "optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02, "ns_steps": 1}},
    }
    # Threads and operators of the first engine do not belong to the model.
    small = Layers(1, 8)
    ds_layerwise.initialize(model=small, model_parameters=small.parameters(), config=config)
    losses = []
    with at_most(limit):
        try:
            with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
                model = Layers(layers, width)
            engine, *_ = ds_layerwise.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            x = torch.randn(8, width, generator=torch.Generator().manual_seed(dist.get_rank()))
            for _step in range(STEPS):
                loss = engine(x)
                engine.backward(loss)
                engine.step()
                losses.append(f"{float(loss):.4f}")
            outcome = f"trains: losses {', '.join(losses)}"
        except (RuntimeError, MemoryError, ds_layerwise.LayerWiseError) as error:
            outcome = f"fails: {str(error).splitlines()[0][:120]}"
    if dist.get_rank() == 0:
        into.write_text(outcome)
    # Ranks that have failed do not wait for others.
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that it runs")
    layers, width = (4, 64) if parser.parse_args().small else (192, 1024)
    numel = layers * width * width
    # Weights, gradients and momentum in float32.
    needed = 12 * numel
    # Between steps each of 4 ranks has 7 of these 12 bytes an element at stage 2, with sums in cuts
    # and at their owners, and 5 at stage 3. During a step it has more.
    limit = 13 * numel // 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in (2, 3):
            Path(folder, f"store-{RANKS}").unlink(missing_ok=True)
            into = Path(folder, str(stage))
            run_ranks(folder, RANKS, functools.partial(train, stage, layers, width, limit, into))
            rows.append(f"| {stage} | {into.read_text() if into.exists() else 'fails'} |")
    print("Beyond the memory of a rank. python examples/benchmarks/beyond_memory.py")
    print(
        f"{conditions()}; deepspeed {deepspeed.__version__}, torch {torch.__version__}. "
        f"{numel / 1e6:.1f} M parameters, float32: {needed / 1e6:.0f} MB of weights, gradients and "
        f"momentum; {RANKS} ranks, each with at most {limit / 1e6:.0f} MB more than before the "
        "model.\n"
    )
    print("| stage | result |\n|---|---|")
    print("\n".join(rows))
    if "trains" not in rows[1] or "fails" not in rows[0]:
        sys.exit("expected stage 2 to fail, and stage 3 to train")


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
