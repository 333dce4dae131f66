"""Decide where parameters live: who owns which matrix, what shares a bucket, how long each shard is.

Pure functions from shapes to a :class:`Layout`. This module never sees a tensor, a device or a process group, and
decides by whole numbers only, so that every rank, the command line and the tests compute the same answer from the same
arguments. Sizes are in elements.

Note: how ``balanced`` chooses owners
    Balance is a property of the whole model, so owners are chosen over the whole model: longest work first, always to
    the least loaded rank. A second pass by work and memory together is kept where it lowers the worse of the two and
    costs at most 2 % of either. After that only parameters of equal size and work change places, which alters no
    rank's total: each bucket hands its parameters to the ranks that have least of that bucket.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.config import LayoutPolicy
from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout import Bucket, Layout, ParamSpec, Slot

#: What balancing memory as well may cost, in percent of what balancing work alone reaches.
_TOLERANCE_PERCENT = 2

#: Work and memory are compared as shares of their totals, in parts of this: whole numbers that fit 64 bits.
_PARTS = 2**40


def plan_layout(specs: Sequence[ParamSpec], world_size: int, *, bucket_numel: int, policy: str = "balanced",
                alignment: int = 64) -> Layout:
    """Place parameters over ``world_size`` ranks.

    Args:
        specs: in model order; buckets walk them backwards, as gradients come.
        bucket_numel: a bucket closes once it holds this many elements, so it may be one large parameter.
        policy: ``balanced`` balances the whole model, with shards of any length and no padding but that of aligned
            starts; ``lpt`` and ``size_matching`` make the shards of each bucket equal. None matters to parameters
            that are cut by element.
        alignment: slots and shards start at multiples of this.

    Raises:
        LayoutError: an argument is out of range, or two parameters have the same name.
    """
    _check(specs, world_size, bucket_numel, policy, alignment)
    streams: dict[tuple[str, bool, int, str], list[_Item]] = defaultdict(list)
    for position, spec in enumerate(reversed(specs)):
        span = spec.numel + -spec.numel % alignment
        streams[spec.dtype, spec.whole, spec.ep_size, spec.wire].append(
            _Item(spec.name, position, spec.numel, span, spec.work, spec.dtype, spec.ep_size))
    drafts: list[_Draft] = []
    whole_buckets: dict[int, list[list[_Item]]] = defaultdict(list)
    for (_, whole, ep_size, _), items in streams.items():
        holders = world_size // ep_size
        if not whole:
            drafts += [_split(bucket, holders, alignment) for bucket in _cut_stream(items, bucket_numel)]
        elif policy == "size_matching":
            drafts += _match_sizes(items, holders, bucket_numel)
        else:
            whole_buckets[ep_size] += _cut_stream(items, bucket_numel)
    for ep_size, buckets in whole_buckets.items():
        if policy == "lpt":
            drafts += [_equal_shards(bucket, world_size // ep_size) for bucket in buckets]
        else:
            drafts += _balance(buckets, world_size // ep_size)
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


class _Item(NamedTuple):
    """A parameter on its way into a bucket. ``span`` is ``numel`` with the padding up to the next aligned start."""

    name: str
    position: int  # in the backward pass
    numel: int
    span: int
    work: int
    dtype: str
    ep_size: int


@dataclass(frozen=True, slots=True)
class _Draft:
    """A bucket that does not know yet where in its buffer it starts: offsets count from its own start."""

    whole: bool
    shard_numels: tuple[int, ...]
    items: Sequence[_Item]  # in memory order
    offsets: Sequence[int]


def _cut_stream(items: Iterable[_Item], bucket_numel: int) -> list[list[_Item]]:
    """Cut a backward stream into buckets of at least ``bucket_numel`` elements; the last may hold fewer."""
    buckets: list[list[_Item]] = []
    held = bucket_numel
    for item in items:
        if held >= bucket_numel:
            buckets.append([])
            held = 0
        buckets[-1].append(item)
        held += item.numel
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


def _split(items: list[_Item], world_size: int, alignment: int) -> _Draft:
    """Back to back, cut into equal shards."""
    *offsets, total = accumulate((item.span for item in items), initial=0)
    shard = -(-total // world_size)
    shard += -shard % alignment
    return _Draft(False, (shard,) * world_size, items, offsets)


def _draft_owned(items: Sequence[_Item], owners: Sequence[int], world_size: int, shard: int | None = None) -> _Draft:
    """A bucket of whole parameters, one owner each; shards of ``shard`` elements, or else as long as they need be."""
    by_rank: dict[int, list[_Item]] = defaultdict(list)
    for item, owner in zip(items, owners, strict=True):
        by_rank[owner].append(item)
    in_order: list[_Item] = []
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

def _equal_shards(items: list[_Item], world_size: int) -> _Draft:
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

    def __init__(self, items: Iterable[_Item]) -> None:
        self._shelves: dict[int, deque[_Item]] = defaultdict(deque)
        for item in items:
            self._shelves[item.numel].append(item)
        self._sizes = sorted(self._shelves)

    def fill(self, room: int, numel: int) -> list[_Item]:
        """Take what goes into ``room``: one of ``numel`` elements first if there is any, then the largest that fit."""
        taken: list[_Item] = []
        while fits := bisect_right(self._sizes, room):
            size = numel if not taken and numel in self._shelves else self._sizes[fits - 1]
            taken.append(self._shelves[size].popleft())
            room -= taken[-1].span
            if not self._shelves[size]:
                del self._shelves[size]
                self._sizes.remove(size)
        return taken


def _match_sizes(items: list[_Item], world_size: int, bucket_numel: int) -> list[_Draft]:
    """Buckets of rows: in a row every shard holds parameters of one size, or smaller ones that fit in its place.

    The seed of a row is the next parameter of the backward pass; those that share its row come from anywhere in the
    model, so buckets are complete later than with the other policies.
    """
    shelves = _Shelves(items)
    placed: set[int] = set()
    drafts: list[_Draft] = []
    bucket: list[_Item] = []
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


# --- balanced: owners over the whole model, shards of any length -----------------------------------------------------

def _balance(buckets: list[list[_Item]], world_size: int) -> list[_Draft]:
    items = [item for bucket in buckets for item in bucket]
    if world_size == 1:
        owners = {item.position: 0 for item in items}
    else:
        owners = _spread(buckets, _choose_owners(items, world_size), world_size)
    return [_draft_owned(bucket, [owners[item.position] for item in bucket], world_size) for bucket in buckets]


def _choose_owners(items: Sequence[_Item], world_size: int) -> dict[int, int]:
    """The owner of each parameter, by its position: by work, or by work and memory where that is the better trade."""
    by_work = _longest_first(items, world_size)
    total_work, total_numel = sum(item.work for item in items), sum(item.numel for item in items)
    if total_work == 0:
        return by_work
    by_both = _longest_first_by_both(items, world_size, total_work, total_numel)
    most_work, most_numel = _maxima(items, by_work)
    work, numel = _maxima(items, by_both)
    within = 100 + _TOLERANCE_PERCENT
    if 100 * work > within * most_work or 100 * numel > within * most_numel:
        return by_work
    # Shares of different totals, compared by cross-multiplication.
    worse_of_both = max(work * total_numel, numel * total_work)
    return by_both if worse_of_both < max(most_work * total_numel, most_numel * total_work) else by_work


def _maxima(items: Iterable[_Item], owners: dict[int, int]) -> tuple[int, int]:
    work: dict[int, int] = defaultdict(int)
    numel: dict[int, int] = defaultdict(int)
    for item in items:
        work[owners[item.position]] += item.work
        numel[owners[item.position]] += item.numel
    return max(work.values()), max(numel.values())


def _longest_first(items: Iterable[_Item], world_size: int) -> dict[int, int]:
    """Most work first, ties in model order, to the rank with least work, then least elements, then lowest number."""
    heap = [(0, 0, rank) for rank in range(world_size)]
    owners: dict[int, int] = {}
    # Parameters without work come last. They would all go to the one rank with least work, whatever it holds, so for
    # them only elements count.
    items = sorted(items, key=lambda item: (-item.work, -item.position))
    split = next((i for i, item in enumerate(items) if not item.work), len(items))
    for item in items[:split]:
        work, numel, rank = heap[0]
        heapq.heapreplace(heap, (work + item.work, numel + item.numel, rank))
        owners[item.position] = rank
    by_numel = [(numel, rank) for _, numel, rank in heap]
    heapq.heapify(by_numel)
    for item in sorted(items[split:], key=lambda item: (-item.numel, -item.position)):
        numel, rank = by_numel[0]
        heapq.heapreplace(by_numel, (numel + item.numel, rank))
        owners[item.position] = rank
    return owners


def _longest_first_by_both(items: Iterable[_Item], world_size: int, total_work: int,
                           total_numel: int) -> dict[int, int]:
    """Largest share of the model first, to the rank whose larger share, of work or of elements, stays smallest."""
    by_size: dict[tuple[int, int], list[_Item]] = defaultdict(list)
    for item in items:
        by_size[item.work * _PARTS // total_work, item.numel * _PARTS // total_numel].append(item)
    work: NDArray[np.int64] = np.zeros(world_size, np.int64)
    numel: NDArray[np.int64] = np.zeros(world_size, np.int64)
    owners: dict[int, int] = {}
    for shares in sorted(by_size, key=lambda shares: (max(shares), shares), reverse=True):
        equal = deque(by_size[shares])
        while equal:
            after = np.maximum(work + shares[0], numel + shares[1])
            # Whoever takes one of these grows by at least the smaller share, so none of the ranks that are ahead by
            # less gets a second one before all of them have one.
            ranks = np.flatnonzero(after < after.min() + max(1, min(shares)))
            if len(ranks) > len(equal):
                ranks = ranks[np.argsort(after[ranks], kind="stable")[:len(equal)]]
            work[ranks] += shares[0]
            numel[ranks] += shares[1]
            owners.update((equal.popleft().position, rank) for rank in ranks.tolist())
    return owners


def _spread(buckets: Sequence[list[_Item]], owners: dict[int, int], world_size: int) -> dict[int, int]:
    """Let equal parameters change owners so that the shards of each bucket become even, and no rank's total changes."""
    quotas: dict[tuple[int, int], NDArray[np.int64]] = defaultdict(lambda: np.zeros(world_size, np.int64))
    left: NDArray[np.int64] = np.zeros(world_size, np.int64)
    for bucket in buckets:
        for item in bucket:
            quotas[item.numel, item.work][owners[item.position]] += 1
            left[owners[item.position]] += item.numel
    spread: dict[int, int] = {}
    for bucket in buckets:
        by_size: dict[tuple[int, int], deque[_Item]] = defaultdict(deque)
        for item in bucket:
            by_size[item.numel, item.work].append(item)
        held: NDArray[np.int64] = np.zeros(world_size, np.int64)
        for size in sorted(by_size, reverse=True):
            equal, quota = by_size[size], quotas[size]
            while equal:
                # To the emptiest ranks, and of these to those that still have most to take: else the last buckets
                # would be left with a few ranks that must take everything.
                open_to = quota.nonzero()[0]
                loads = held[open_to]
                ranks = open_to[loads == loads.min()]
                if len(ranks) > len(equal):
                    ranks = ranks[np.lexsort((-left[ranks], -quota[ranks]))[:len(equal)]]
                quota[ranks] -= 1
                left[ranks] -= size[0]
                held[ranks] += equal[0].span
                spread.update((equal.popleft().position, rank) for rank in ranks.tolist())
    return min(owners, spread, key=lambda candidate: _longest_shards(buckets, candidate))


def _longest_shards(buckets: Iterable[list[_Item]], owners: dict[int, int]) -> int:
    """The lengths of the longest shard of each bucket, added up: what the collectives take."""
    total = 0
    for bucket in buckets:
        held: dict[int, int] = defaultdict(int)
        for item in bucket:
            held[owners[item.position]] += item.span
        total += max(held.values())
    return total
