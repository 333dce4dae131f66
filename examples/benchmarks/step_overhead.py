"""The cost of a step in Python between the gradients and the collectives, at sizes for which no
machine is at hand.

    python examples/benchmarks/step_overhead.py >
    examples/benchmarks/results/YYYY-MM_<hardware>_step_overhead.md

Real layouts and the real synchronisation of one rank run on tensors without memory, in two levels
where a run would take them. Collectives, which a device does by itself, are stubs. So are the
operations that pack and divide. The launching is left: the hook of every gradient, every bucket
reduced and gathered once, and one exchange each way where buckets travel in cuts; at stage 3 the
rounds that send the cuts of updated matrices in place of the gathers. Numbers are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from conditions import conditions
from torch import nn

from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.plan.layout.transport import Reduction
from ds_layerwise.ranks.comm import comm, streams
from ds_layerwise.ranks.owned.buffers import FlatBuffer, new_shards
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync import transfer
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.cut_sync import CutSync
from ds_layerwise.ranks.sync.grad_sync import GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.model_specs import load_model_specs

META = torch.device("meta")


class Case(NamedTuple):
    """A row of the table."""

    model: str
    ranks: int
    bucket_numel: int
    """Elements of a bucket."""
    reduction: Reduction = "native"
    """The method of sums."""
    bound: int | None = None
    """The most milliseconds."""
    stage: int = 2


CASES = (
    Case("llama-3-8b", 64, 50_000_000),
    Case("llama-3-70b", 64, 50_000_000),
    Case("llama-3-405b", 64, 50_000_000),
    Case("llama-3-70b", 1024, 50_000_000, bound=5),
    Case("llama-3-70b", 1024, 500_000_000, bound=5),
    Case("llama-3-405b", 16384, 500_000_000, bound=20),
    Case("llama-3-70b", 1024, 50_000_000, "ordered"),
    Case("llama-3-405b", 16384, 500_000_000, "ordered"),
    Case("llama-3-70b", 512, 50_000_000, stage=3),
    Case("llama-3-70b", 512, 500_000_000, stage=3),
)


class Ranks(NamedTuple):
    """The size of a process group and the rank in it."""

    size: int
    rank: int


class Stream:
    """A device's stream on which nothing takes any time."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once: there is nothing to wait for."""

    wait_event = wait_stream

    def record_event(self) -> Stream:
        """Return an event that others can wait for."""
        return self

    def __enter__(self) -> None:
        """Do nothing: nothing is queued here."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


class Stubs:
    """Collectives that are over at once, counted, and a device with streams."""

    def __init__(self) -> None:
        self.calls = 0
        comm.size_of, comm.rank_of = (lambda group: group.size), (lambda group: group.rank)
        comm.opposite_of = lambda group: None
        self.work = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
        comm.dist = SimpleNamespace(
            **dict.fromkeys(
                (
                    "all_to_all_single",
                    "reduce_scatter_tensor",
                    "reduce_scatter",
                    "all_gather_into_tensor",
                    "all_gather",
                ),
                self.collective,
            )
        )
        current = Stream()
        device = SimpleNamespace(
            is_synchronized_device=lambda: False,
            Stream=Stream,
            stream=lambda stream: stream,
            current_stream=lambda: current,
        )
        streams.get_accelerator = lambda: device
        # torch writes these out in Python for tensors without memory, which takes milliseconds.
        transfer.unpack = lambda packed, places: None
        torch._foreach_div_ = lambda tensors, by: None
        torch.Tensor.div_ = lambda tensor, by: tensor
        torch.sum = lambda rows, dim, *, dtype, out: out

    def collective(self, *_: object, **__: object) -> Any:
        """Count a collective."""
        self.calls += 1
        return self.work


class Cuts:
    """The cuts of one rank at stage 3, of a model whose modules hold no whole parameter, and that
    nobody else writes."""

    def __init__(self, layout: Layout) -> None:
        slots = [
            (slot.name, -(-slot.numel // bucket.holders))
            for bucket in layout.buckets
            if bucket.whole
            for slot in bucket.slots
        ]
        names, sizes = zip(*slots, strict=True)
        self.tensors = [torch.empty(sum(sizes), dtype=torch.bfloat16, device=META)]
        self._of = dict(zip(names, self.tensors[0].split(sizes), strict=True))

    def of(self, name: str) -> torch.Tensor:
        """Return the cut of a parameter, 1-D."""
        return self._of[name]

    def release(self) -> None:
        """Do nothing: no parameter is whole, and nobody writes a cut."""

    fetch_persistent = follow_persistent = take_note = release

    def persistent(self) -> dict[str, torch.Tensor]:
        """Return no parameter."""
        return {}

    def written(self) -> torch.Tensor:
        """Return that nobody has written a cut."""
        return torch.zeros((), dtype=torch.bool, device=META)


class Step:
    """A rank's work between gradients and collectives, of a model in bf16 whose gradients add up in
    bf16."""

    def __init__(
        self, specs: Sequence[ParamSpec], layout: Layout, reduction: Reduction, stage: int
    ) -> None:
        rank, size, per_node = layout.world_size // 2, layout.world_size, 8
        levels = {}
        if reduction == "ordered":
            levels["inside"] = Ranks(per_node, rank % per_node)
            levels["across"] = Ranks(size // per_node, rank // per_node)
        wires = {
            1: Wire(
                Ranks(size, rank),
                native=reduction == "native",
                on_host=False,
                **levels,
            )
        }
        self._params = {
            slot.name: nn.Parameter(torch.empty(slot.numel, dtype=torch.bfloat16, device=META))
            for bucket in layout.buckets
            for slot in bucket.slots
        }
        self._gradients = {name: torch.empty_like(param) for name, param in self._params.items()}
        grads = FlatBuffer(layout, META)
        self._grad_sync = GradSync(
            self._params,
            ReducedGradients(layout, rank, grads, META),
            grads,
            wires=wires,
            divide_by=float(size),
            sent_as=["bfloat16"] * len(layout.buckets),
        )
        self._param_sync: ParamSync | CutSync
        if stage == 3:
            values = new_shards(layout, rank, META, attrgetter("dtype"))
            group = Ranks(size, rank)
            self._param_sync = CutSync(values, Cuts(layout), groups={1: group}, ep_size={})
        else:
            values = FlatBuffer(layout, META)
            self._param_sync = ParamSync(rank, self._params, values, wires=wires)
        self._backwards = range(len(layout.buckets) - 1, -1, -1)

    def begin(self) -> None:
        """Do the part of autograd, and end the step before."""
        self._grad_sync.reset()
        for name, param in self._params.items():
            param.grad = self._gradients[name]

    def reduce(self) -> None:
        """Run the part of a backward pass that concerns gradients."""
        for name in self._params:
            self._grad_sync.accumulate(name, launch=True)
        self._grad_sync.reduce()
        self._grad_sync.finish()

    def gather(self) -> None:
        """Run the rest of a step after the updates."""
        for index in self._backwards:
            self._param_sync.launch(index)
        self._param_sync.finish()


def medians_ms(step: Step, times: int) -> tuple[float, float]:
    """Return the medians of the reduction and the gather of ``times`` steps, in milliseconds of
    this thread on a processor."""
    taken = []
    for _ in range(times + 1):
        step.begin()
        start = time.thread_time()
        step.reduce()
        reduced = time.thread_time()
        step.gather()
        taken.append((reduced - start, time.thread_time() - reduced))
    reduces, gathers = zip(*taken[1:], strict=True)
    return 1000 * statistics.median(reduces), 1000 * statistics.median(gathers)


def row(stubs: Stubs, times: int, case: Case) -> str:
    """Return a case as a row of the table."""
    specs = load_model_specs(case.model)
    layout = plan_layout(
        specs,
        case.ranks,
        bucket_numel=case.bucket_numel,
        stage=case.stage,
    )
    step = Step(specs, layout, case.reduction, case.stage)
    reduce, gather = medians_ms(step, times)
    stubs.calls = 0
    step.begin(), step.reduce(), step.gather()
    transports = Counter(bucket.transport for bucket in layout.buckets)
    cells = (
        case.model,
        case.ranks,
        case.stage,
        f"{case.bucket_numel:.0e}",
        case.reduction,
        f"{len(layout.buckets)}: "
        + ", ".join(str(transports[each]) for each in ("even", "cuts", "by_param")),
        stubs.calls,
        f"{reduce:.1f}",
        f"{gather:.1f}",
        f"{reduce + gather:.1f}",
        "" if case.bound is None else case.bound,
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    stubs = Stubs()
    print(
        "Python of a step between gradients and collectives. python "
        f"examples/benchmarks/step_overhead.py\n{conditions()}\n"
        f"CPU time of one thread, medians of {args.times}.\n"
    )
    print(
        "| model | ranks | stage | bucket | sums | buckets: even, in cuts, cut by "
        "parameter | collectives | reduce, ms | gather, ms | "
        "both | bound |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    # A backward pass and a step run without gradients, too.
    with torch.no_grad():
        for case in CASES:
            print(row(stubs, args.times, case), flush=True)


if __name__ == "__main__":
    main()
