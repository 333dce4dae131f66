"""What layouts cost on links, as the model of them predicts: reduce and gather over ring reduce-scatter and all-gather.

    python examples/benchmarks/links.py > examples/benchmarks/results/YYYY-MM_<hardware>_links.md

A calculation: it needs no network, no accelerator and no torch, and says nothing that was measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ds_layerwise.plan.drafts import cut_stream
from ds_layerwise.plan.layout import Layout, ParamSpec
from ds_layerwise.plan.links import LINKS, Links, group_of
from ds_layerwise.plan.model_file import load_model_specs
from ds_layerwise.plan.owners import Item
from ds_layerwise.plan.planner import plan_layout
from ds_layerwise.plan.ways import (
    Exchange,
    Levels,
    Load,
    Reduction,
    exchange,
    gather_levels,
    itemsize,
    ordered_levels,
    wire_time,
)

MODELS = Path(__file__).resolve().parents[2] / "ds_layerwise" / "plan" / "models"
NAMES = ("gpt2-124m", "qwen3-0.6b", "llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "deepseek-v3")
RANKS = (8, 64, 512, 4096)
BUCKET_NUMELS = (50_000_000, 500_000_000)
WIRES = ("bfloat16", "float32")
#: What reduce and gather may take, over ring reduce-scatter and all-gather.
BARS: dict[Reduction, float] = {"native": 1.1, "ordered": 1.5}


def rings_ns(specs: Sequence[ParamSpec], ranks: int, bucket_numel: int, links: Links) -> tuple[int, int]:
    """Ring reduce-scatter and all-gather of the same model in buckets of the same size, one after another.

    Buckets are those that a ZeRO-1 without owners makes of such a model: every parameter is cut over all ranks.
    """
    items = [Item(s.name, i, s.numel, s.numel, 0, s.dtype, 1) for i, s in enumerate(reversed(specs))]
    wire, dtype = itemsize(specs[0].wire), itemsize(specs[0].dtype)
    buckets = [sum(item.numel for item in bucket) for bucket in cut_stream(items, bucket_numel)]
    group = group_of(ranks, links, 1)
    return sum(group.ring(n * wire) for n in buckets), sum(group.ring(n * dtype) for n in buckets)
