"""Layouts whose buckets have another transport than the planner chose."""

from dataclasses import replace

import pytest

from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.zero.setup import run_plan


def in_cuts(layout: Layout, only=lambda bucket: True, *, even: bool = False) -> Layout:
    """Return ``layout`` with its whole buckets, or those that ``only`` selects, in equal cuts, and with ``even`` the
    others in shards of one length; with the padding for these."""
    buckets: list[Bucket] = []
    ends: dict[str, int] = {}
    for bucket in layout.buckets:
        start, holders = ends.get(bucket.dtype, 0), bucket.holders
        numels, transport = list(bucket.shard_numels), bucket.transport
        if bucket.whole and holders > 1 and only(bucket):
            last = max(i for i, numel in enumerate(numels) if numel)
            numels[last] += -sum(numels) % (holders * layout.alignment)
            transport = "cuts"
        elif bucket.whole and even:
            numels, transport = [max(numels)] * holders, "even"
        moved = [0] * holders
        for number in range(holders):
            moved[number] = start + sum(numels[:number]) - bucket.shard(number * bucket.ep_size)[0]
        slots = tuple(replace(slot, start=slot.start + (
            moved[bucket.owner(slot) // bucket.ep_size] if bucket.whole else start - bucket.start))
            for slot in bucket.slots)
        made = Bucket(bucket.index, bucket.dtype, bucket.whole, start, tuple(numels), slots, bucket.ep_size, transport)
        buckets.append(made)
        ends[bucket.dtype] = made.stop
    return replace(layout, buckets=tuple(buckets))


def plan_in_cuts(monkeypatch: pytest.MonkeyPatch, only=lambda bucket: True, *, even: bool = False) -> None:
    """Let every engine made from here on have its whole buckets, or those that ``only`` selects, in cuts, and with
    ``even`` the others in shards of one length."""
    made = run_plan.__dict__["plan_layout"]
    monkeypatch.setattr(
        run_plan, "plan_layout", lambda *args, **kwargs: in_cuts(made(*args, **kwargs), only, even=even))
