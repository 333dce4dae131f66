"""Optimizers that others wrote, given to ``deepspeed.initialize``: results under stock ZeRO-1 and
this backend.

    OMP_NUM_THREADS=1 python examples/benchmarks/client_optimizers.py

This needs pytorch-optimizer. Each class trains a small model for some steps in one process, and,
made by the same function, on several ranks. Gradients are whole numbers, different in each step and
on each rank, so their sums are exact. Nothing is clipped. A difference is the largest of any
weight, over the largest that any weight has moved in one process: rounding makes 1e-6 of that and
less, steps in another direction about 1.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_optimizer as others
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import Optimizer

WIDTH = 24


def trained(name: str, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the class takes: torch's Muon and SCION take matrices alone."""
    takes_vectors = name not in ("torch.optim.Muon", "SCION")
    return [p for p in model.parameters() if takes_vectors or p.dim() == 2]


#: Functions that make each optimizer. Shampoo and SOAP renew whole matrices now and then, the
#: others at each step.
MADE: dict[str, Callable[[Any], Optimizer]] = {
    "torch.optim.AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "torch.optim.Muon": partial(torch.optim.Muon, lr=2e-2),
    "torch.optim.Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "SOAP": partial(others.SOAP, lr=1e-2, precondition_frequency=2),
    "Shampoo": partial(others.Shampoo, lr=1e-2, preconditioning_compute_steps=2),
    "CAME": partial(others.CAME, lr=1e-2),
    "Lamb": partial(others.Lamb, lr=1e-2),
    "MARS": partial(others.MARS, lr=1e-2),
    "SCION": partial(others.SCION, lr=1e-2),
}


class Model(nn.Module):
    """A model of vectors, and of matrices that cuts into equal parts cross."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 40), nn.LayerNorm(40), nn.Linear(40, 17), nn.Linear(17, WIDTH)
        )

    def forward(self, step: int, rank: int) -> Tensor:
        """Return a loss with gradients of whole numbers."""
        draw = torch.Generator().manual_seed(1000 * step + rank)
        return torch.stack(
            [(p * torch.randint(-8, 9, p.shape, generator=draw)).sum() for p in self.parameters()]
        ).sum()


def weights(model: nn.Module) -> Tensor:
    """Return all weights as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alone(name: str, steps: int, ranks: int) -> Tensor:
    """Return the weights after ``steps`` in one process, with the gradients of ``ranks``."""
    model = Model()
    optimizer = MADE[name](trained(name, model))
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(step, rank) / ranks).backward()
        optimizer.step()
    return weights(model)


def on_rank(rank: int, ranks: int, name: str, backend: str, steps: int, folder: str) -> None:
    """Run one rank; write the weights, or the error that ended it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        DS_ACCELERATOR="cpu",
        LOCAL_SIZE=str(ranks),
        TORCHDYNAMO_DISABLE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    import deepspeed

    import ds_layerwise

    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    own = {"layerwise": {}} if backend == "ours" else {"zero_allow_untested_optimizer": True}
    make = ds_layerwise.initialize if backend == "ours" else deepspeed.initialize
    model = Model()
    result: Any
    try:
        engine, *_ = make(
            model=model,
            model_parameters=trained(name, model),
            optimizer=MADE[name],
            config={**config, **own},
        )
        for step in range(steps):
            engine.backward(engine(step, rank))
            engine.step()
        result = weights(model)
    except Exception as error:  # The error that ends a run is its result.
        result = f"{type(error).__name__}: {' '.join(str(error).split())}"
    torch.save(result, f"{folder}/{rank}")
    os._exit(0)  # The other ranks may wait for this one, and would wait at its regular end.


def run(name: str, backend: str, ranks: int, steps: int, seconds: float) -> list[Tensor | str]:
    """Return each rank's result. A rank that is killed has a message in its place."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=on_rank, args=(rank, ranks, name, backend, steps, folder))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        return [
            torch.load(path) if (path := Path(folder, str(rank))).exists() else "killed"
            for rank in range(ranks)
        ]


def told(results: list[Tensor | str], expected: Tensor, start: Tensor) -> str:
    """Return a cell of the table."""
    errors = [result for result in results if isinstance(result, str) and result != "killed"]
    if errors:
        return f"error: {errors[0][:90]}"
    if "killed" in results:
        return "does not end"
    moved = (expected - start).abs().max()
    worst = max(
        float((result - expected).abs().max() / moved)
        for result in results
        if isinstance(result, Tensor)
    )
    return f"{worst:.1e}" if worst == worst else "not a number"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=MADE, default=list(MADE))
    parser.add_argument("--seconds", type=float, default=180, help="after which a run is ended")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| class | ranks | stock ZeRO-1 | this backend |")
    print("|---|---:|---|---|")
    for name in arguments.only:
        for ranks in arguments.ranks:
            expected, start = alone(name, arguments.steps, ranks), weights(Model())
            cells = [
                told(run(name, backend, ranks, arguments.steps, arguments.seconds), expected, start)
                for backend in ("stock", "ours")
            ]
            print(f"| {name} | {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
