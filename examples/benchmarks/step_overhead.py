"""What a step costs in Python between the gradients and the collectives, at sizes that no machine at hand has.

    python examples/benchmarks/step_overhead.py > examples/benchmarks/results/YYYY-MM_<hardware>_step_overhead.md

Real layouts and the real synchronisation of one rank, on tensors without memory; collectives, which a device does by
itself, are stubs, and so is what packs and divides. What is left is the launching: every bucket reduced and gathered
once, and one exchange each way where buckets travel in cuts. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conditions import conditions
from torch import nn

from ds_layerwise.plan.layout import Layout
from ds_layerwise.plan.model_file import load_model_specs
from ds_layerwise.plan.planner import plan_layout
from ds_layerwise.ranks import comm, exchange
from ds_layerwise.ranks.buffers import FlatBuffer, ShardBuffer
from ds_layerwise.ranks.param_sync import ParamSync
from ds_layerwise.ranks.sync import GradSync
from ds_layerwise.ranks.wires import Wire

MODELS = Path(__file__).resolve().parents[2] / "ds_layerwise" / "plan" / "models"
META = torch.device("meta")
#: Model, ranks, elements of a bucket, and the bound in milliseconds.
CASES = (("llama-3-8b", 64, 50_000_000, None), ("llama-3-70b", 64, 50_000_000, None),
         ("llama-3-405b", 64, 50_000_000, None), ("llama-3-70b", 1024, 50_000_000, 5),
         ("llama-3-70b", 1024, 500_000_000, 5), ("llama-3-405b", 16384, 500_000_000, 20))


class Stubs:
    """Collectives that are over at once, counted."""

    def __init__(self) -> None:
        self.calls = 0
        self.work = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
        comm.dist = SimpleNamespace(**dict.fromkeys((
            "all_to_all_single", "reduce_scatter_tensor", "reduce_scatter", "all_gather_into_tensor", "all_gather"),
            self.collective))
        # Without memory torch writes them out in Python, for milliseconds.
        exchange.pack = lambda parts: parts[-1].new_empty(sum(part.numel() for part in parts))
        exchange.unpack = lambda packed, places: None
        torch._foreach_div_ = lambda tensors, by: None

    def collective(self, *_: object, **__: object) -> Any:
        """Count one."""
        self.calls += 1
        return self.work


def median_ms(action: Callable[[], None], times: int) -> float:
    """The median of ``times`` runs, in milliseconds of this thread on a processor."""
    taken = []
    for _ in range(times + 1):
        start = time.thread_time()
        action()
        taken.append(time.thread_time() - start)
    return 1000 * statistics.median(taken[1:])


def syncs(layout: Layout, rank: int) -> tuple[GradSync, ParamSync]:
    """One rank's, of a model in bf16 whose gradients add up in bf16."""
    sizes = {"rank_of": rank, "size_of": layout.world_size}
    for name, value in sizes.items():
        setattr(comm, name, lambda group, value=value: value)
    by_ep_size = {1: Wire(None, native=True, on_host=False)}
    params = {slot.name: nn.Parameter(torch.empty(slot.numel, dtype=torch.bfloat16, device=META))
              for bucket in layout.buckets for slot in bucket.slots}
    values, grads = FlatBuffer(layout, META), FlatBuffer(layout, META)
    reduced = ShardBuffer(layout, rank, [torch.empty(stop - start, device=META)
                                         for start, stop in (bucket.shard(rank) for bucket in layout.buckets)])
    grad_sync = GradSync(layout, rank, params, grads, reduced, wires=by_ep_size, divide_by=float(layout.world_size),
                         wire_dtype=lambda bucket: torch.bfloat16)
    return grad_sync, ParamSync(layout, rank, params, values, wires=by_ep_size)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    stubs = Stubs()
    print("Python of a step between gradients and collectives. python examples/benchmarks/step_overhead.py\n"
          f"{conditions()}\nSums of the backend, buckets on NVLink and InfiniBand; CPU time of one thread, medians of "
          f"{args.times}.\n")
    print("| model | ranks | bucket | buckets: even, ragged, in cuts | collectives a step | reduce, ms | gather, ms | "
          "both | bound |\n|---|---|---|---|---|---|---|---|---|")
    for model, ranks, bucket_numel, bound in CASES:
        layout = plan_layout(load_model_specs(MODELS / f"{model}.yaml"), ranks, bucket_numel=bucket_numel,
                             reduction="native")
        grad_sync, param_sync = syncs(layout, ranks // 2)
        everything = {slot.name for bucket in layout.buckets for slot in bucket.slots}

        def reduce(grad_sync: GradSync = grad_sync, everything: set[str] = everything) -> None:
            grad_sync._has_grad, grad_sync._finished = everything, False
            grad_sync._ready = len(grad_sync.layout.buckets)
            grad_sync._advance(wait=True)
            grad_sync._wait()
            grad_sync._end_pass()
            grad_sync._launched = 0

        def gather(param_sync: ParamSync = param_sync) -> None:
            param_sync.send(reversed(range(len(param_sync.layout.buckets))))

        stubs.calls = 0
        reduce(), gather()
        calls, times = stubs.calls, [median_ms(action, args.times) for action in (reduce, gather)]
        ways = Counter(bucket.way for bucket in layout.buckets)
        counts = ", ".join(str(ways[way]) for way in ("even", "ragged", "cuts"))
        print(f"| {model} | {ranks} | {bucket_numel:.0e} | {len(layout.buckets)}: {counts} | {calls} | "
              f"{times[0]:.1f} | {times[1]:.1f} | {sum(times):.1f} | {'' if bound is None else bound} |", flush=True)


if __name__ == "__main__":
    main()
