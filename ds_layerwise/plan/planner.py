"""Decide where parameters live: who owns which matrix, what shares a bucket, how long each shard is.

Pure functions from shapes to a :class:`Layout`. This module never sees a tensor, a device or a process group, and
decides by whole numbers only, so that every rank, the command line and the tests compute the same answer from the same
arguments. Sizes are in elements.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from ds_layerwise.config import LayoutPolicy
from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.owners import Item, choose_owners


def plan_layout(specs: Sequence[ParamSpec], world_size: int, *, bucket_numel: int, policy: str = "balanced",
                alignment: int = 64) -> Layout:
    """Place parameters over ``world_size`` ranks.

    Args:
        specs: in model order; buckets walk them backwards, as gradients come.
        bucket_numel: a bucket closes once it holds this many elements, so it may be one large parameter.
        policy: ``balanced`` balances the whole model, with shards of any length and no padding but that of aligned
            starts; ``lpt`` and ``size_matching`` make the shards of each bucket equal, as Megatron-LM's layer-wise
            optimizer did in #4771 and in #4509, and ``lpt`` makes buckets larger where they would be mostly padding.
            None matters to parameters that are cut by element.
        alignment: slots and shards start at multiples of this.

    Raises:
        LayoutError: an argument is out of range, or two parameters have the same name.
    """
    _check(specs, world_size, bucket_numel, policy, alignment)
    streams: dict[tuple[str, bool, int, str], list[Item]] = defaultdict(list)
    for position, spec in enumerate(reversed(specs)):
        span = spec.numel + -spec.numel % alignment
        streams[spec.dtype, spec.whole, spec.ep_size, spec.wire].append(
            Item(spec.name, position, spec.numel, span, spec.work, spec.dtype, spec.ep_size))
    drafts: list[_Draft] = []
    whole_buckets: list[list[Item]] = []
    for (_, whole, ep_size, _), items in streams.items():
        holders = world_size // ep_size
        if not whole:
            drafts += [_split(bucket, holders, alignment) for bucket in _cut_stream(items, bucket_numel)]
        elif policy == "size_matching":
            drafts += _match_sizes(items, holders, bucket_numel)
        else:
            whole_buckets += _cut_stream(items, bucket_numel, holders if policy == "lpt" else 0)
    if policy == "lpt":
        drafts += [_equal_shards(bucket, world_size // bucket[0].ep_size) for bucket in whole_buckets]
    else:
        owners = choose_owners(whole_buckets, world_size)
        drafts += [_draft_owned(bucket, [owners[item.position] for item in bucket], world_size // bucket[0].ep_size)
                   for bucket in whole_buckets]
    return Layout(policy, world_size, alignment, _assemble(drafts))


def _check(specs: Sequence[ParamSpec], world_size: int, bucket_numel: int, policy: str, alignment: int) -> None:
    for name, value in (("world_size", world_size), ("bucket_numel", bucket_numel), ("alignment", alignment)):
        if value < 1:
            raise LayoutError(f"{name} must be at least 1, got {value}")
    if policy not in get_args(LayoutPolicy):
        raise LayoutError(f"policy must be one of {', '.join(get_args(LayoutPolicy))}, got {policy!r}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise LayoutError(f"{spec.name} is there twice among {len(specs)} parameters; names must differ")
        if world_size % spec.ep_size:
            raise LayoutError(f"{spec.name} has ep_size {spec.ep_size}, which {world_size} ranks cannot share evenly")
        seen.add(spec.name)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A bucket that does not know yet where in its buffer it starts: offsets count from its own start."""

    whole: bool
    shard_numels: tuple[int, ...]
    items: Sequence[Item]  # in memory order
    offsets: Sequence[int]


def _cut_stream(items: Iterable[Item], bucket_numel: int, equal_shards: int = 0) -> list[list[Item]]:
    """Cut a backward stream into buckets of at least ``bucket_numel`` elements; the last may hold fewer.

    With a number of ``equal_shards`` also of at least 90 % of as many times its largest parameter, which is how long
    all of its shards become: whatever a bucket has less than that is padding.
    """
    buckets: list[list[Item]] = []
    held = least = bucket_numel
    for item in items:
        if held >= least:
            buckets.append([])
            held, least = 0, bucket_numel
        buckets[-1].append(item)
        held += item.numel
        least = max(least, equal_shards * item.numel * 9 // 10)
    return buckets


def _assemble(drafts: list[_Draft]) -> tuple[Bucket, ...]:
    # A bucket can be reduced when its last gradient is in. Launching in that order, none waits for a later one.
    drafts.sort(key=lambda draft: max(item.position for item in draft.items))
    ends: dict[str, int] = defaultdict(int)
    buckets: list[Bucket] = []
    for index, draft in enumerate(drafts):
        dtype, ep_size = draft.items[0].dtype, draft.items[0].ep_size
        start = ends[dtype]
        slots = tuple(Slot(item.name, start + offset, item.numel)
                      for item, offset in zip(draft.items, draft.offsets, strict=True))
        buckets.append(Bucket(index, dtype, draft.whole, start, draft.shard_numels, slots, ep_size))
        ends[dtype] = buckets[-1].stop
    return tuple(buckets)


def _split(items: list[Item], world_size: int, alignment: int) -> _Draft:
    """Back to back, cut into equal shards."""
    *offsets, total = accumulate((item.span for item in items), initial=0)
    shard = -(-total // world_size)
    shard += -shard % alignment
    return _Draft(False, (shard,) * world_size, items, offsets)


def _draft_owned(items: Sequence[Item], owners: Sequence[int], world_size: int, shard: int | None = None) -> _Draft:
    """A bucket of whole parameters, one owner each; shards of ``shard`` elements, or else as long as they need be."""
    by_rank: dict[int, list[Item]] = defaultdict(list)
    for item, owner in zip(items, owners, strict=True):
        by_rank[owner].append(item)
    in_order: list[Item] = []
    offsets: list[int] = []
    numels = [shard or 0] * world_size
    shard_start = 0
    for rank in sorted(by_rank):
        offset = shard_start if shard is None else rank * shard
        for item in by_rank[rank]:
            in_order.append(item)
            offsets.append(offset)
            offset += item.span
        if shard is None:
            numels[rank] = offset - shard_start
            shard_start = offset
    return _Draft(True, tuple(numels), in_order, offsets)


# --- lpt and size_matching: equal shards in each bucket -------------------------------------------------------------

def _equal_shards(items: list[Item], world_size: int) -> _Draft:
    """Largest parameter first, to the emptiest shard; all shards as long as the fullest."""
    heap = [(0, rank) for rank in range(min(world_size, len(items)))]  # sorted, so a heap
    owner_of: dict[int, int] = {}
    for item in sorted(items, key=lambda item: (-item.numel, item.position)):
        held, rank = heap[0]
        heapq.heapreplace(heap, (held + item.span, rank))
        owner_of[item.position] = rank
    return _draft_owned(items, [owner_of[item.position] for item in items], world_size, max(heap)[0])


class _Shelves:
    """Parameters that have no place yet, by size; within one size in backward order."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._shelves: dict[int, deque[Item]] = defaultdict(deque)
        for item in items:
            self._shelves[item.numel].append(item)
        self._sizes = sorted(self._shelves)

    def fill(self, room: int, numel: int) -> list[Item]:
        """Take what goes into ``room``: one of ``numel`` elements first if there is any, then the largest that fit."""
        taken: list[Item] = []
        while fits := bisect_right(self._sizes, room):
            size = numel if not taken and numel in self._shelves else self._sizes[fits - 1]
            taken.append(self._shelves[size].popleft())
            room -= taken[-1].span
            if not self._shelves[size]:
                del self._shelves[size]
                self._sizes.remove(size)
        return taken


def _match_sizes(items: list[Item], world_size: int, bucket_numel: int) -> list[_Draft]:
    """Buckets of rows: in a row every shard holds parameters of one size, or smaller ones that fit in its place.

    The seed of a row is the next parameter of the backward pass; those that share its row come from anywhere in the
    model, so buckets are complete later than with the other policies.
    """
    shelves = _Shelves(items)
    placed: set[int] = set()
    drafts: list[_Draft] = []
    bucket: list[Item] = []
    owners: list[int] = []
    shard = 0
    for seed in items:
        if seed.position in placed:
            continue
        for rank in range(world_size):
            taken = shelves.fill(seed.span, seed.numel)
            if not taken:
                break
            bucket += taken
            owners += [rank] * len(taken)
            placed.update(item.position for item in taken)
        shard += seed.span
        if sum(item.numel for item in bucket) >= bucket_numel:
            drafts.append(_draft_owned(bucket, owners, world_size, shard))
            bucket, owners, shard = [], [], 0
    if bucket:
        drafts.append(_draft_owned(bucket, owners, world_size, shard))
    return drafts
