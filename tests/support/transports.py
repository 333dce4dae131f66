"""Layouts whose buckets have another transport than the planner chose, and the memory of transfers to the byte."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ds_layerwise.plan.layout.draft_buckets import Draft
from ds_layerwise.plan.layout.layout import Bucket, Layout, Shards, Slot
from ds_layerwise.plan.layout.transfer_plan import moves
from ds_layerwise.plan.layout.transport import Transport, itemsize
from ds_layerwise.zero.setup import run_plan


def numels_of(bucket: Bucket | Draft) -> tuple[int, ...]:
    """Return the length of every shard."""
    return tuple(numel for count, numel in bucket.shards.runs for _ in range(count))


def bucket_of(index: int, dtype: str, whole: bool, start: int, numels: Sequence[int], slots: Sequence[Slot],
              ep_size: int = 1, transport: Transport | None = None) -> Bucket:
    """Return the bucket with shards of these lengths; even if they are equal, else in cuts."""
    shards = Shards.of({i: numel for i, numel in enumerate(numels) if numel}, len(numels))
    transport = transport or ("even" if len(set(numels)) == 1 else "cuts")
    return Bucket(index, dtype, whole, start, shards, tuple(slots), transport, ep_size)


def in_cuts(layout: Layout, only=lambda bucket: True, *, even: bool = False) -> Layout:
    """Return ``layout`` with its whole buckets, or those that ``only`` selects, in equal cuts, and with ``even`` the
    others in shards of one length; with the padding for these."""
    buckets: list[Bucket] = []
    ends: dict[str, int] = {}
    for bucket in layout.buckets:
        start, holders = ends.get(bucket.dtype, 0), bucket.holders
        numels, transport = list(numels_of(bucket)), bucket.transport
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
        made = bucket_of(bucket.index, bucket.dtype, bucket.whole, start, numels, slots, bucket.ep_size, transport)
        buckets.append(replace(made, in_mxfp8=bucket.in_mxfp8))
        ends[bucket.dtype] = made.stop
    return replace(layout, buckets=tuple(buckets))


def plan_in_cuts(monkeypatch: pytest.MonkeyPatch, only=lambda bucket: True, *, even: bool = False) -> None:
    """Let every engine made from here on have its whole buckets, or those that ``only`` selects, in cuts, and with
    ``even`` the others in shards of one length."""
    made = run_plan.__dict__["plan_layout"]
    monkeypatch.setattr(
        run_plan, "plan_layout", lambda *args, **kwargs: in_cuts(made(*args, **kwargs), only, even=even))


def held_bytes(deal, *, in_place: bool):
    """Return the bytes that a round holds, by rank of the layout. The elements of a rank's cuts that travel are copied
    together. A shard is sent and received in place, unless the part in its owner's own cut splits it, or it has another
    dtype there, or several parameters in it are cut by themselves."""
    if deal.by_param:
        sizes = deal.row_sizes()
        numel = sizes.sum() + sizes * deal.holders
    else:
        moved = moves(deal.placement)
        before, stays, behind = np.array([deal.seen_by(holder).parts for holder in range(deal.holders)]).T
        numel = -stays
        np.add.at(numel, moved.holder, moved.numel)
        numel += ((before > 0) & (behind > 0) | (not in_place)) * (before + behind)
    return np.repeat(numel * itemsize(deal.dtype), deal.ep_size)


def held_at_a_time(deals, world_size: int, *, pending: int = 2, owners_have: str | None = None):
    """Return the most bytes that rounds hold at a time, by rank, with ``pending`` of them pending. Shards have the
    dtype ``owners_have`` at their owners; None if it is the one that is sent."""
    most = np.zeros(world_size, np.int64)
    held: deque[np.ndarray] = deque(maxlen=pending)
    for deal in deals:
        held.append(held_bytes(deal, in_place=owners_have in (None, deal.dtype)))
        most = np.maximum(most, np.sum(list(held), axis=0))
    return most
