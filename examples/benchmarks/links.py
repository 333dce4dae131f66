"""The cost of layouts on links, as the model of links predicts: reduce and gather over ring
reduce-scatter and all-gather.

    python examples/benchmarks/links.py > examples/benchmarks/results/YYYY-MM_calculated_links.md

This is a calculation: it needs no network, no accelerator and no torch, and measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conditions import commit

from ds_layerwise.plan.layout.draft_buckets import cut_stream
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.layout.owners import Item
from ds_layerwise.plan.network.links import LINKS, Links, group_of
from ds_layerwise.plan.network.reduction import Reduction
from ds_layerwise.plan.network.transport import Load, WireTime, itemsize, wire_time
from ds_layerwise.plan.planner.planner import plan_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.model_specs import load_model_specs

NAMES = (
    "gpt2-124m",
    "qwen3-0.6b",
    "llama-2-7b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3-405b",
    "deepseek-v3",
)
RANKS = (8, 64, 512, 4096)
BUCKET_NUMELS = (50_000_000, 500_000_000)
#: The most that reduce and gather may take, over ring reduce-scatter and all-gather.
BARS: dict[Reduction, float] = {"native": 1.1, "ordered": 1.5}


def rings_ns(
    specs: Sequence[ParamSpec], ranks: int, bucket_numel: int, links: Links
) -> tuple[int, int]:
    """Return the time of ring reduce-scatter and all-gather of the same model in buckets of the
    same size, one after another.

    Buckets are those that a ZeRO-1 without owners makes of such a model: every parameter is cut
    over all ranks.
    """
    items = [
        Item(s.name, i, s.numel, s.numel, 0, s.dtype, 1, s.wire)
        for i, s in enumerate(reversed(specs))
    ]
    wire, dtype = itemsize(specs[0].wire), itemsize(specs[0].dtype)
    buckets = [sum(item.numel for item in bucket) for bucket in cut_stream(items, bucket_numel)]
    group = group_of(ranks, links, 1)
    return sum(group.ring(n * wire) for n in buckets), sum(group.ring(n * dtype) for n in buckets)


def predicted(layout: Layout, wire: str, links: Links, reduction: Reduction) -> WireTime:
    """Return the time of the collectives of ``layout``, one after another."""
    return wire_time(
        [Load.of_bucket(bucket, wire, reduction) for bucket in layout.buckets],
        [bucket.way for bucket in layout.buckets],
        links,
        reduction,
    )


@dataclass(frozen=True)
class Row:
    """A model on so many ranks, with all times over those of rings."""

    model: str
    ranks: int
    bucket_numel: int
    rings_ms: tuple[float, float]
    ways: tuple[str, str]
    reduce: dict[Reduction, float]
    gather: dict[Reduction, float]

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        return [
            self.model,
            f"{self.ranks:,}",
            f"{self.bucket_numel / 1e6:.0f} M",
            *(f"{milliseconds:,.1f}" for milliseconds in self.rings_ms),
            self.ways[0],
            f"{self.reduce['native']:.3f}",
            f"{self.gather['native']:.3f}",
            self.ways[1],
            f"{self.reduce['ordered']:.2f}",
            f"{self.gather['ordered']:.2f}",
        ]


HEADER = (
    "model",
    "ranks",
    "bucket",
    "ring reduce, ms",
    "ring gather, ms",
    "native ways",
    "reduce",
    "gather",
    "ordered ways",
    "reduce",
    "gather",
)


def measure(names: Sequence[str], ranks: Sequence[int], wire: str, links: Links) -> Iterator[Row]:
    """Yield a row for each model, number of ranks and bucket size."""
    for name in names:
        specs = [replace(spec, wire=wire) for spec in load_model_specs(name)]
        for size in ranks:
            for bucket_numel in BUCKET_NUMELS:
                yield row(name, specs, size, bucket_numel, links)


def row(name: str, specs: Sequence[ParamSpec], ranks: int, bucket_numel: int, links: Links) -> Row:
    """Plan a layout for native sums and one for ordered ones, and return the times of both."""
    wire = specs[0].wire
    rings = rings_ns(specs, ranks, bucket_numel, links)
    layouts = {
        reduction: plan_layout(
            specs, ranks, bucket_numel=bucket_numel, links=links, reduction=reduction
        )
        for reduction in BARS
    }
    times = {
        reduction: predicted(layout, wire, links, reduction)
        for reduction, layout in layouts.items()
    }
    counts = [
        Counter(bucket.way for bucket in layout.buckets if bucket.whole)
        for layout in layouts.values()
    ]
    native, ordered = (
        " / ".join(str(count[way]) for way in ("even", "ragged", "cuts")) for count in counts
    )
    return Row(
        name,
        ranks,
        bucket_numel,
        (rings[0] / 1e6, rings[1] / 1e6),
        (native, ordered),
        {key: (taken.reduce + taken.sums) / rings[0] for key, taken in times.items()},
        {key: (taken.gather + taken.params) / rings[1] for key, taken in times.items()},
    )


def worst(rows: Sequence[Row], key: Reduction, kind: str) -> str:
    """Return the largest value of a column, and the rows above its bar."""
    bar = BARS[key]
    by_value = sorted(((getattr(row, kind)[key], row) for row in rows), key=lambda pair: -pair[0])
    above = [
        f"{row.model} x {row.ranks:,} ({row.bucket_numel / 1e6:.0f} M) {value:.2f}"
        for value, row in by_value
        if value > bar
    ]
    return f"at most {by_value[0][0]:.3f}; {len(above)} of {len(rows)} above {bar}" + (
        f": {', '.join(above[:6])}{', ...' if len(above) > 6 else ''}" if above else ""
    )


def main() -> None:
    """Print a table for each set of links, and a summary for both dtypes on the wire."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    args = parser.parse_args()
    print(
        "Layouts on links: predicted reduce and gather over ring reduce-scatter and all-gather. "
        f"python examples/benchmarks/links.py\nCalculated, nothing measured; commit {commit()}; "
        "bfloat16 parameters; alignment 64; ways: buckets of matrices, even / ragged / cuts."
    )
    print("""
ring: buckets of the same size without owners, one after another, as ZeRO-1 has them. reduce and
gather: over these. Ordered sums are made inside a node first: one bucket is there while the one
before is between nodes. Native sums, and gathers on accelerators, go inside nodes and between them
where that takes less than one ring.
""")
    summary = []
    for name, links in LINKS.items():
        for wire in ("bfloat16", "float32"):
            rows = list(measure(args.models, args.ranks, wire, links))
            summary += [
                f"| {name} | {wire} | {key} | {kind} | {worst(rows, key, kind)} |"
                for kind in ("reduce", "gather")
                for key in BARS
            ]
            if wire == "bfloat16":
                print(
                    f"{name}: {links.inside_gb_s:g} GB/s inside nodes of {links.ranks_per_node}, "
                    f"{links.rails} x {links.between_gb_s:g} GB/s between them; gradients travel "
                    f"in {wire}\n"
                )
                print("| " + " | ".join(HEADER) + " |\n|---|" + "---:|" * (len(HEADER) - 1))
                print("\n".join("| " + " | ".join(row.cells()) + " |" for row in rows) + "\n")
    print(
        "Over the bars (native 1.1, ordered 1.5):\n\n| links | wire | sums | what | result "
        "|\n|---|---|---|---|---|\n" + "\n".join(summary)
    )


if __name__ == "__main__":
    main()
