"""The cost of an update by each optimizer of whole matrices: time, FLOPs and states on this CPU,
Muon beside them.

    OMP_NUM_THREADS=1 python examples/benchmarks/matrix_rules.py

The timing covers one cycle of updates, in which every basis or root is computed anew once, and is
divided by the steps of the cycle. Work of the first step alone is not in it. The clock counts CPU
time of this thread; the rules take turns, and the best of all cycles counts. Each trains one matrix
with its defaults.
"""

from __future__ import annotations

import argparse
import time

import torch

from ds_layerwise.optimizers.recipe import Hyper, Recipe
from ds_layerwise.optimizers.registry import REGISTRY, names

SHAPES = [(256, 256), (256, 1024), (512, 512)]
HYPER = Hyper(lr=1e-3, weight_decay=0.1, momentum=0.95, betas=(0.9, 0.95), eps=1e-8)

#: Steps of a cycle: the ``precondition_frequency`` of all rules that have one.
CYCLE = 10


class Trained:
    """A matrix under a rule, after its first step."""

    def __init__(self, recipe: Recipe, shape: tuple[int, int]) -> None:
        g = torch.Generator().manual_seed(0)
        self.rule = recipe
        self.param = torch.randn(shape, generator=g)
        self.grads = [torch.randn(shape, generator=g) for _ in range(CYCLE)]
        self.state = self.rule.init_state(self.param)
        self.rule.update_([self.param], [self.grads[0]], [self.state], HYPER)

    def cycle_ms(self) -> float:
        """Return the milliseconds of CPU time that an update takes, on average over a cycle."""
        start = time.thread_time()
        for grad in self.grads:
            self.rule.update_([self.param], [grad], [self.state], HYPER)
        return 1000 * (time.thread_time() - start) / CYCLE


def rows_of(shape: tuple[int, int], repetitions: int) -> list[str]:
    """Return the table's rows for one shape."""
    recipes = {name: REGISTRY[name]() for name in names(whole=True)}
    runs = {name: Trained(recipe, shape) for name, recipe in recipes.items()}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repetitions):
        for name, run in runs.items():
            best[name] = min(best[name], run.cycle_ms())
    numel = shape[0] * shape[1]
    return [
        f"| {shape[0]}x{shape[1]} | {name} | {recipe.work(shape) / 1e9:.3f} | "
        f"{recipe.work(shape) / recipes['muon'].work(shape):.2f} | {best[name]:.1f} | "
        f"{best[name] / best['muon']:.2f} | {recipe.work(shape) / best[name] / 1e6:.0f} | "
        f"{state_bytes(recipe, shape) / numel:.1f} | {recipe.workspace(shape) / numel:.1f} |"
        for name, recipe in recipes.items()
    ]


def state_bytes(recipe: Recipe, shape: tuple[int, ...]) -> int:
    """Return the bytes of the states on the device."""
    return sum(state.nbytes for state in recipe.states(shape).values() if not state.on_host)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    print(
        "| matrix | optimizer | GFLOP a step | over Muon's | ms a step | over Muon's | GFLOP/s | "
        "bytes of states an element | bytes to work in an element |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        for row in rows_of(shape, repetitions):
            print(row, flush=True)


if __name__ == "__main__":
    main()
