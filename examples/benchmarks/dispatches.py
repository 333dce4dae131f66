"""The number of operations that torch dispatches in a step and in a backward pass, beside those of
the bare module.

    python examples/benchmarks/dispatches.py [--by_name] [--stage 3]

The model is a GPT of 12 layers, width 128, in bf16, on one rank. In a launch-bound run each
operation costs microseconds of a host.

A ``torch._foreach_*`` call counts as one. On an accelerator it is a few launches. On a CPU torch
runs at least one operation for each of its tensors within it, which torch's profiler shows and
nothing here counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from conditions import conditions
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ds_layerwise

WIDTH, LAYERS, HEADS, TOKENS, LENGTH = 128, 12, 4, 512, 32

#: A note below the table.
ABOUT_FOREACH = """\
A torch._foreach_* call counts as one operation: on an accelerator it is a few launches, on a CPU at
least one operation for each of its tensors, within it, which torch's profiler shows. So these are
no counts of what a CPU runs."""

#: The most operations in a step, and in a backward pass for each of the bare module's.
MOST_IN_STEP, MOST_IN_BACKWARD = 1150, 1.2


class Operations(TorchDispatchMode):
    """A counter of dispatched operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention and a feed-forward network, before which their input is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add both to ``x``, of shape (batch, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A model that returns the loss of predicting the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss; ``tokens`` is (batch, length + 1)."""
        x = self.embed(tokens[:, :-1]) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(
            self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


def counted(bucket_numel: int, stage: int) -> dict[str, Counter[str]]:
    """Count the dispatched operations of a backward pass and a step, and of a backward pass of the
    bare module."""
    torch.manual_seed(0)
    tokens = torch.randint(TOKENS, (2, LENGTH + 1))
    bare, counts = Gpt().bfloat16(), {}
    for _ in range(2):
        loss = bare(tokens)
        with Operations() as found_here:
            loss.backward()
        counts["backward, bare"] = found_here.counts
        bare.zero_grad()
    model = Gpt()
    engine, *_ = ds_layerwise.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            # "auto" depends on the processor, and with it the number of operations.
            "optimizer": {
                "type": "LayerWiseMuon",
                "params": {"lr": 1e-3, "muon_lr": 0.02, "ns_dtype": "fp32"},
            },
            "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_numel},
        },
    )
    for _ in range(3):
        loss = engine(tokens)
        with Operations() as in_backward:
            engine.backward(loss)
        with Operations() as in_step:
            engine.step()
    return {**counts, "backward": in_backward.counts, "step": in_step.counts}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by_name", action="store_true", help="which they are, too")
    parser.add_argument("--bucket_numel", type=int, default=500_000_000)
    parser.add_argument("--stage", type=int, default=1, choices=[1, 2, 3])
    args = parser.parse_args()
    # Only inference uses this operator. Its memory is named after the port, which others may have,
    # too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_distributed(
            "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timedelta(minutes=5),
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        counted_at = counted(args.bucket_numel, args.stage)
        dist.destroy_process_group()
    print(
        "\nOperations that torch dispatches. python "
        f"examples/benchmarks/dispatches.py\n{conditions()}; torch {torch.__version__}\n\n| | "
        "operations | at most |\n|---|---|---|"
    )
    bounds = {
        "backward": int(MOST_IN_BACKWARD * sum(counted_at["backward, bare"].values())),
        "step": MOST_IN_STEP,
    }
    for where, counts in counted_at.items():
        print(f"| {where} | {sum(counts.values())} | {bounds.get(where, '')} |")
        if args.by_name:
            for name, count in counts.most_common(25):
                print(f"| - {name} | {count} | |")
    print(f"\n{ABOUT_FOREACH}")
    if more := [
        where for where, bound in bounds.items() if sum(counted_at[where].values()) > bound
    ]:
        sys.exit(f"more operations than there may be: {', '.join(more)}")


if __name__ == "__main__":
    main()
