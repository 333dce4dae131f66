"""The traffic of one optimizer step: LayerWiseMuon against stock DeepSpeed Muon, counted by one
script.

    python examples/benchmarks/collectives.py --ranks 2 4

It counts the elements that a rank sends, on average over the ranks, by the usual bounds: an
all-reduce of n elements is 2(R-1)/R n, every other collective (R-1)/R of the whole; of an
all-to-all it counts the parts for other ranks. It needs no network and no accelerator: R processes
over gloo.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from torch import nn

import ds_layerwise


class WireCounter:
    """A counter of the collectives of ``deepspeed.comm`` by kind: calls, and elements and bytes
    that the average rank sends."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, sent: int, itemsize: int) -> None:
        """Count one call in which this rank, or the mean one, sends so many elements to others."""
        self.calls[kind] += 1
        self.elements[kind] += sent
        self.bytes[kind] += sent * itemsize

    def averaged(self) -> WireCounter:
        """Return the average over all ranks: one may send more in an all-to-all than another."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.elements, self.bytes))
        mean = WireCounter()
        mean.calls = self.calls
        for kind in self.elements:
            mean.elements[kind] = round(
                sum(elements[kind] for elements, _ in everyone) / len(everyone)
            )
            mean.bytes[kind] = round(sum(sent[kind] for _, sent in everyone) / len(everyone))
        return mean

    @contextmanager
    def counting(self) -> Iterator[WireCounter]:
        """Wrap the collectives of ``deepspeed.comm`` for the length of a ``with`` block."""
        whole: dict[str, Callable[..., tuple[Any, int]]] = {
            "all_reduce": lambda tensor, *_, **__: (tensor, tensor.numel()),
            "broadcast": lambda tensor, *_, **__: (tensor, tensor.numel()),
            "reduce": lambda tensor, *_, **__: (tensor, tensor.numel()),
            "all_gather_into_tensor": lambda output, tensor, *_, **__: (output, output.numel()),
            "all_gather": lambda tensors, tensor, *_, **__: (
                tensor,
                sum(t.numel() for t in tensors),
            ),
            "reduce_scatter_tensor": lambda output, tensor, *_, **__: (tensor, tensor.numel()),
        }
        size = dist.get_world_size()

        def by_mean_rank(name: str, *args: Any, **kwargs: Any) -> tuple[Any, int]:
            tensor, numel = whole[name](*args, **kwargs)
            return tensor, round((2 if name == "all_reduce" else 1) * numel * (size - 1) / size)

        sent = {name: partial(by_mean_rank, name) for name in whole} | {
            "all_to_all_single": _sent_to_others
        }
        originals = {name: getattr(dist, name) for name in sent}
        for name, of_call in sent.items():
            setattr(dist, name, self._wrapped(name, originals[name], of_call))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    def _wrapped(
        self, name: str, original: Callable[..., Any], sent: Callable[..., tuple[Any, int]]
    ) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensor, numel = sent(*args, **kwargs)
            self.add(name, numel, tensor.element_size())
            return original(*args, **kwargs)

        return collective


def _sent_to_others(
    output: Any,
    tensor: Any,
    *_: Any,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    **__: Any,
) -> tuple[Any, int]:
    """Return the elements that an all-to-all sends, without this rank's own part."""
    size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
    own = tensor.numel() // size if input_split_sizes is None else input_split_sizes[rank]
    return tensor, tensor.numel() - own


class Block(nn.Module):
    """Matrices of four shapes, a norm and biases: an MLP with one attention-like square layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` and the MLP's output, of the same shape."""
        return x + self.down(torch.relu(self.up(self.mix(self.norm(x)))))


def build_model(width: int = 64, layers: int = 3, rows: int = 256) -> nn.Module:
    """Return an embedding, ``layers`` blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(rows, width),
        *[Block(width) for _ in range(layers)],
        nn.Linear(width, rows, bias=False),
    )


def count_step(
    optimizer: dict[str, Any], *, bucket_numel: int = 100_000, steps: int = 3, **sections: Any
) -> tuple[WireCounter, int]:
    """Count the last of ``steps`` steps. Return the counter and the number of trained elements."""
    model = build_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": True,
            "reduce_bucket_size": bucket_numel,
            "allgather_bucket_size": bucket_numel,
        },
        "optimizer": optimizer,
        "steps_per_print": 10**9,
        **sections,
    }
    engine, *_ = ds_layerwise.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    counter = WireCounter()
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 256, (2, 8), device=engine.device)
        counter = WireCounter()
        with counter.counting():
            logits = engine(tokens)
            engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
            engine.step()
    numel = sum(p.numel() for p in model.parameters())
    engine.destroy()
    return counter.averaged(), numel


OPTIMIZERS = {
    "LayerWiseMuon": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.01, "adam_lr": 0.01}},
    "stock Muon": {"type": "Muon", "params": {"lr": 0.01, "torch_adam": True}},
}


def write_rows(folder: str, _watched: object) -> None:
    """Count with each optimizer, and write a row for each on rank 0."""
    size = dist.get_world_size()
    for name, optimizer in OPTIMIZERS.items():
        counter, numel = count_step(optimizer)
        if dist.get_rank() == 0:
            total = sum(counter.elements.values())
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counter.calls.items()))
            with open(f"{folder}/rows", "a") as rows:
                rows.write(
                    f"| {size} | {name} | {total} | {total / numel:.3f} | "
                    f"{2 * (size - 1) / size:.3f} | {3 * (size - 1) / size:.3f} | {kinds} |\n"
                )


def main() -> None:
    """Print one markdown table, after all output of the engines."""
    # A test imports the rest of this file without its folder on the path.
    from measuring import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    table = [
        "| ranks | optimizer | elements sent a rank and step | / model | 2(R-1)/R | 3(R-1)/R | "
        "calls |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(folder, size, partial(write_rows, folder))
            table += Path(folder, "rows").read_text().splitlines()
    print("\n".join(table))


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
