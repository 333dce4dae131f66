"""Layouts whose buckets travel in another way than the planner chose."""

from dataclasses import replace

import pytest

from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.zero.setup import run_plan


def in_cuts(layout: Layout, only=lambda bucket: True) -> Layout:
    """Return ``layout`` with its whole buckets, or those that ``only`` selects, in equal cuts and the padding for
    these."""
    buckets: list[Bucket] = []
    ends: dict[str, int] = {}
    for bucket in layout.buckets:
        start, holders = ends.get(bucket.dtype, 0), bucket.holders
        slots = tuple(replace(slot, start=slot.start - bucket.start + start) for slot in bucket.slots)
        numels, way = list(bucket.shard_numels), bucket.way
        if bucket.whole and holders > 1 and only(bucket):
            last = max(i for i, numel in enumerate(numels) if numel)
            numels[last] += -sum(numels) % (holders * layout.alignment)
            way = "cuts"
        made = Bucket(bucket.index, bucket.dtype, bucket.whole, start, tuple(numels), slots, bucket.ep_size, way)
        buckets.append(made)
        ends[bucket.dtype] = made.stop
    return replace(layout, buckets=tuple(buckets))


def plan_in_cuts(monkeypatch: pytest.MonkeyPatch, only=lambda bucket: True) -> None:
    """Let every engine made from here on have its whole buckets, or those that ``only`` selects, in cuts."""
    made = run_plan.__dict__["plan_layout"]
    monkeypatch.setattr(run_plan, "plan_layout", lambda *args, **kwargs: in_cuts(made(*args, **kwargs), only))
