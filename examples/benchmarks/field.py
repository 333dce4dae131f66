"""Bytes, memory, Newton-Schulz work and padding of a step: ours from the plan, others from the
formulas of their sources.

    python examples/benchmarks/field.py

This needs no accelerator and starts no ranks. All train the same matrices by Muon and the rest by
AdamW, data-parallel, in bfloat16 with float32 masters, one micro-batch a step. Gradients and
weights travel in bfloat16 unless a project sets another dtype. The messages of an optimizer itself
have the dtype of its source. An all-reduce of n elements sends 2 (R-1)/R n of R ranks each, every
other collective (R-1)/R of the whole, an exchange the parts for other ranks.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ds_layerwise.plan.forecast.forecast import max_over_mean
from ds_layerwise.plan.forecast.memory import sums_bytes
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.tools.dry_run import DryRun

CONFIG = Path(__file__).resolve().parents[2] / "ds_configs" / "large.json"
CASES = (("llama-3-8b", 8), ("llama-3-8b", 64), ("llama-3-70b", 512))
GIB = 2**30

Loads = list[int]


@dataclass(frozen=True)
class Model:
    """The matrices and the other parameters of a model, in model order, and the ranks."""

    matrices: Sequence[ParamSpec]
    others: Sequence[ParamSpec]
    ranks: int

    @property
    def matrix_numel(self) -> int:
        """Return the elements that Muon updates."""
        return sum(spec.numel for spec in self.matrices)

    @property
    def other_numel(self) -> int:
        """Return the elements that AdamW updates."""
        return sum(spec.numel for spec in self.others)

    @property
    def numel(self) -> int:
        """Return the number of all elements."""
        return self.matrix_numel + self.other_numel

    @property
    def goes(self) -> float:
        """Return the part of a whole that a collective sends: (R-1)/R."""
        return 1 - 1 / self.ranks

    @property
    def by_layer(self) -> list[list[ParamSpec]]:
        """Return the matrices of each layer."""
        layers = itertools.groupby(
            self.matrices, lambda spec: re.findall(r"layers\.\d+\.", spec.name)
        )
        return [list(specs) for _, specs in layers]


@dataclass(frozen=True)
class Cost:
    """A row of the table."""

    sent: float
    """The bytes that the average rank sends in a step."""
    held: float
    """The bytes of weights, gradients, masters and states on the fullest rank, when a backward pass
    ends.
    """
    work: float
    """The Newton-Schulz FLOPs of the busiest rank over an even share, all by the same count."""
    padding: float = 0
    """The elements that are kept or exchanged beyond those of the model, over those."""

    @classmethod
    def of(
        cls,
        model: Model,
        sent: float,
        held: float,
        work: Iterable[int],
        padded: float = 0,
    ) -> Cost:
        """Return the row from the FLOPs of each rank, or of the ranks that are not idle."""
        share = sum(spec.work for spec in model.matrices) / model.ranks
        return cls(sent, held, max(work) / share, padded / model.numel)


def cut(spec: ParamSpec, ranks: int) -> int:
    """Return the elements of a rank's rows, where each rank has the same number of rows."""
    rows, *rest = spec.shape
    return math.ceil(rows / ranks) * math.prod(rest)


def ours(model: Model, *, name: str, stage: int) -> Cost:
    """ds_layerwise: plan/forecast/forecast.py, of ds_configs/large.json"""
    config = json.loads(CONFIG.read_text())
    config["zero_optimization"]["stage"] = stage
    (plan,) = DryRun.of(name, config, [model.ranks]).forecasts
    sent = sum(sum(traffic.gradients) + sum(traffic.parameters) for traffic in plan.sent.values())
    totals = [rank.total for rank in plan.memory]
    sums = sums_bytes(
        plan.layout,
        stage=plan.stage,
        stored_as=plan.stored_as,
        wires=plan.wires,
        reduction=plan.reduction,
        kept_as=plan.kept_as,
        beside=totals,
    )
    held = max(totals) + sums.in_pass
    report = plan.report
    return Cost(sent / model.ranks, held, max_over_mean(report.work), report.padding / report.numel)


def stock(model: Model) -> Cost:
    """deepspeed 0.19.8: runtime/zero/stage_1_and_2.py"""
    length = math.ceil(model.matrix_numel / model.ranks)
    momentum: Loads = [0] * model.ranks
    work: Loads = [0] * model.ranks
    start = 0
    for spec in _sorted_by_stock(model):
        end = start + spec.numel
        # A matrix that a cut crosses is whole on each of the ranks beside it.
        for rank in range(start // length, (end - 1) // length + 1):
            momentum[rank] += spec.numel
            work[rank] += spec.work
        start = end
    # The messages are an all-reduce, and a gather of weights.
    sent = 3 * model.goes * 2 * model.numel
    # The momentum has the dtype of gradients, and a second copy until a step has survived.
    own = 4 * length + 12 * model.other_numel / model.ranks
    return Cost.of(model, sent, 4 * model.numel + own + 2 * 2 * max(momentum), work)


def stock_3(model: Model, *, bucket: int = 500_000_000) -> Cost:
    """deepspeed 0.19.8: runtime/zero/stage3.py"""
    work: Loads = [0] * model.ranks
    moved = 0
    chunks: list[list[ParamSpec]] = [[]]
    # Sub-groups, of 1e9 elements a rank, are longer than these models.
    for spec in _sorted_by_stock(model):
        if sum(member.numel for member in chunks[-1]) + spec.numel > bucket:
            chunks.append([])
        chunks[-1].append(spec)
    for chunk in chunks:
        for start in range(0, len(chunk), model.ranks):
            round_ = chunk[start : start + model.ranks]
            for rank, spec in enumerate(round_):
                work[rank] += spec.work
            moved += model.ranks * max(spec.numel for spec in round_)
    # The messages are two gathers of weights and an all-reduce; a gather of gradients and momenta;
    # rounds of both.
    elements = 4 * model.numel + 2 * model.matrix_numel + 2 * moved
    held = (10 * model.matrix_numel + 16 * model.other_numel) / model.ranks
    padded = moved - model.matrix_numel
    return Cost.of(model, model.goes * 2 * elements, held, work, padded)


def _sorted_by_stock(model: Model) -> list[ParamSpec]:
    """Return matrices by shape, as runtime/zero/muon/original_muon.py sorts them, unless
    ``zero.Init`` has cut the model before.
    """
    return sorted(model.matrices, key=lambda spec: spec.shape, reverse=True)


def megatron(model: Model) -> Cost:
    """NVIDIA/Megatron-LM d98e8a6: core/optimizer/layer_wise_optimizer.py"""
    ranks = model.ranks
    owned: Loads = [0] * ranks
    work: Loads = [0] * ranks
    costs: Loads = [0] * ranks
    align = math.lcm(64, math.lcm(ranks, 128) // ranks)
    buffer = 0
    for bucket in _megatron_buckets(model, align):
        most = 1.3 * sum(spec.numel for spec in bucket) / ranks
        filled: Loads = [0] * ranks
        for spec in sorted(bucket, key=lambda spec: -_cost(spec)):
            free = [r for r in range(ranks) if _up(filled[r], 64) + spec.numel <= most]
            if free:
                owner = min(free, key=costs.__getitem__)
            else:
                owner = filled.index(min(filled))
            filled[owner] = _up(filled[owner], 64) + spec.numel
            costs[owner] += _cost(spec)
            owned[owner] += spec.numel
            work[owner] += spec.work
        buffer += ranks * _up(max(filled), align)
    kept = buffer + model.other_numel
    # Gradients, in bfloat16 with --grad-reduce-in-bf16, are reduced. Weights are gathered.
    held = 4 * kept + 8 * max(owned) + 12 * model.other_numel / ranks
    return Cost.of(model, model.goes * 4 * kept, held, work, buffer - model.matrix_numel)


def _megatron_buckets(model: Model, align: int) -> Iterator[list[ParamSpec]]:
    """Divide matrices from the last one on: a bucket is closed once it is large enough and the next
    matrix does not fit into its padding.
    """
    bucket: list[ParamSpec] = []
    filled: Loads = [0] * model.ranks
    for spec in reversed(model.matrices):
        if bucket:
            least = max(40_000_000, 1_000_000 * model.ranks)
            least = max(least, int(0.9 * model.ranks * max(member.numel for member in bucket)))
            fits = _up(min(filled), 64) + spec.numel <= _up(max(filled), align)
            if sum(member.numel for member in bucket) >= least and not fits:
                yield bucket
                bucket, filled = [], [0] * model.ranks
        rank = filled.index(min(filled))
        filled[rank] = _up(filled[rank], 64) + spec.numel
        bucket.append(spec)
    yield bucket


def _cost(spec: ParamSpec) -> int:
    return max(spec.shape) * min(spec.shape) ** 2


def _up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


def fsdp_muon(model: Model) -> Cost:
    """NVIDIA/Megatron-LM 00aeb2c: megatron_fsdp/experimental/orthogonalized_optimizer.py"""
    ranks = model.ranks
    work: Loads = [0] * ranks
    costs: Loads = [0] * ranks
    buffers = moved = 0
    cuts: list[tuple[ParamSpec, dict[int, int]]] = []
    for layer in model.by_layer:
        # Rows are whole, so matrices and cuts begin at multiples of all their lengths.
        align = math.lcm(*(spec.shape[1] for spec in layer))
        starts = [0]
        for spec in layer:
            starts.append(_up(starts[-1] + spec.numel, align))
        length = _up(starts[-1], align * ranks) // ranks
        buffers += length * ranks
        for spec, start in zip(layer, starts, strict=False):
            end = start + spec.numel
            parts = {}
            for rank in range(start // length, (end - 1) // length + 1):
                parts[rank] = min(end, (rank + 1) * length) - max(start, rank * length)
            cuts.append((spec, parts))
    # Matrices of one rank stay there. Others go to the rank with least work among those that have a
    # part, longest first over all buffers: so say the documents of later versions. 00aeb2c balances
    # each buffer by itself.
    for spec, parts in sorted(cuts, key=lambda each: (len(each[1]) > 1, -_fsdp_cost(each[0]))):
        owner = min(parts, key=costs.__getitem__)
        costs[owner] += _fsdp_cost(spec)
        work[owner] += spec.work
        moved += spec.numel - parts[owner]
    kept = buffers + model.other_numel
    # The messages are two gathers of weights and a reduction; parts go to owners and back, in
    # float32.
    sent = model.goes * 6 * kept + 8 * moved / ranks
    held = (12 * buffers + 16 * model.other_numel) / ranks
    return Cost.of(model, sent, held, work, buffers - model.matrix_numel)


def _fsdp_cost(spec: ParamSpec) -> int:
    return spec.numel * (5 * min(spec.shape) + 1)


def matrix_fsdp(model: Model) -> Cost:
    """songbingze/matrix-fsdp 2de5182: planning/planner.py, planning/auto_planner.py"""
    owned: Loads = [0] * model.ranks
    work: Loads = [0] * model.ranks
    for layer in model.by_layer:
        for spec in sorted(layer, key=lambda spec: -spec.numel):
            owner = owned.index(min(owned))
            owned[owner] += spec.numel
            work[owner] += spec.work
    held = 12 * max(owned) + 16 * model.other_numel / model.ranks
    return Cost.of(model, model.goes * 6 * model.numel, held, work)


def dion(model: Model) -> Cost:
    """microsoft/dion 0a059a4: dion/megabatch_base.py with FSDP2"""
    exchanged, work = _dion_batches(model, rows_are_cut=True)
    # The messages are two gathers of weights and a reduction; all matrices become whole and go
    # back, in bfloat16.
    sent = model.goes * (6 * _fsdp2_numel(model) + 4 * exchanged)
    padded = exchanged - model.matrix_numel
    return Cost.of(model, sent, _fsdp2_held(model), [work], padded)


def dion_ddp(model: Model) -> Cost:
    """microsoft/dion 0a059a4: dion/megabatch_base.py with DDP"""
    gathered, work = _dion_batches(model, rows_are_cut=False)
    sent = model.goes * (4 * model.numel + 2 * gathered)
    held = 12 * model.matrix_numel + 16 * model.other_numel
    return Cost.of(model, sent, held, [work], gathered - model.matrix_numel)


def _dion_batches(model: Model, *, rows_are_cut: bool) -> tuple[int, int]:
    """Count the elements of all batches, which are filled up to a multiple of the ranks, and the
    FLOPs of each rank.
    """
    elements = work = 0
    by_shape = sorted(model.matrices, key=lambda spec: spec.shape)
    for _, batch in itertools.groupby(by_shape, lambda spec: spec.shape):
        spec, *rest = batch
        of_rank = math.ceil((1 + len(rest)) / model.ranks)
        numel = model.ranks * cut(spec, model.ranks) if rows_are_cut else spec.numel
        elements += of_rank * model.ranks * numel
        work += of_rank * spec.work
    return elements, work


def dist_muon(model: Model) -> Cost:
    """pytorch/torchtitan b5bcd76: torchtitan/distributed/flex_shard/dist_muon.py"""
    ranks = model.ranks
    work: Loads = [0] * ranks
    costs: Loads = [0] * ranks
    layers = model.by_layer
    moved = 0
    # Buckets of models/kimi_k2_7/config_registry.py are the first layer, then pairs.
    for first in (0, *range(1, len(layers), 2)):
        bucket = [spec for layer in layers[first : first + (2 if first else 1)] for spec in layer]
        heap = [(0, 0, costs[rank], rank) for rank in range(ranks)]
        heapq.heapify(heap)
        for spec in sorted(bucket, key=lambda spec: (-_dist_cost(spec), -spec.numel, spec.name)):
            cost, numel, _, owner = heapq.heappop(heap)
            costs[owner] += _dist_cost(spec)
            work[owner] += spec.work
            moved += spec.numel - cut(spec, ranks)
            cost += _dist_cost(spec)
            heapq.heappush(heap, (cost, numel + spec.numel, costs[owner], owner))
    # The messages are two gathers of weights and a reduction; rows go to owners and back, in
    # float32.
    sent = model.goes * 6 * _fsdp2_numel(model) + 8 * moved / ranks
    padded = _fsdp2_numel(model) - model.numel
    return Cost.of(model, sent, _fsdp2_held(model), work, padded)


def _dist_cost(spec: ParamSpec) -> int:
    short, long = sorted(spec.shape)
    return 5 * short**2 * (2 * long + short)


def _fsdp2_numel(model: Model) -> int:
    """Count elements with the rows that FSDP2 adds, so that all ranks gather the same number."""
    return model.ranks * sum(cut(spec, model.ranks) for spec in (*model.matrices, *model.others))


def _fsdp2_held(model: Model) -> int:
    """Count float32 rows of weights, gradients and states; there is no copy in 16 bits."""
    of_matrices = sum(cut(spec, model.ranks) for spec in model.matrices)
    return 12 * of_matrices + 16 * sum(cut(spec, model.ranks) for spec in model.others)


def torch_muon(model: Model) -> Cost:
    """torch 2.13: torch/optim/_muon.py with DDP"""
    work = sum(spec.work for spec in model.matrices)
    held = 12 * model.matrix_numel + 16 * model.other_numel
    return Cost.of(model, model.goes * 4 * model.numel, held, [work])


#: Formulas by name: projects that keep the weights on every rank, and projects that cut them.
WHOLE: dict[str, Callable[[Model], Cost]] = {
    "stock Muon, stage 1": stock,
    "Megatron-LM, layer-wise": megatron,
    "dion, DDP": dion_ddp,
    "torch.optim.Muon, DDP": torch_muon,
}
CUT: dict[str, Callable[[Model], Cost]] = {
    "stock Muon, stage 3": stock_3,
    "Megatron-FSDP, FsdpMuon": fsdp_muon,
    "MatrixFSDP": matrix_fsdp,
    "dion, FSDP2": dion,
    "torchtitan, DistMuon": dist_muon,
}


def rows_of(name: str, ranks: int) -> dict[str, Cost]:
    """Return the rows of a model on so many ranks."""
    specs = DryRun.of(name, CONFIG, [ranks]).specs
    model = Model([s for s in specs if s.whole], [s for s in specs if not s.whole], ranks)
    ours_at = partial(ours, model, name=name)
    rows = {"ours, stage 1": ours_at(stage=1), "ours, stage 2": ours_at(stage=2)}
    rows |= {project: formula(model) for project, formula in WHOLE.items()}
    rows["ours, stage 3"] = ours_at(stage=3)
    return rows | {project: formula(model) for project, formula in CUT.items()}


def main() -> None:
    """Print a table for each case, and the source of each formula."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for name, ranks in CASES:
        print(f"{f'{name} on {ranks} ranks':28}{'sent':>10}{'held':>10}{'work':>8}{'padding':>10}")
        for project, cost in rows_of(name, ranks).items():
            print(
                f"{project:28}{cost.sent / GIB:10,.1f}{cost.held / GIB:10,.1f}{cost.work:8.2f}"
                f"{cost.padding:10.1%}"
            )
        print()
    for project, formula in {"ours": ours, **WHOLE, **CUT}.items():
        print(f"{project:28}{formula.__doc__}")


if __name__ == "__main__":
    main()
