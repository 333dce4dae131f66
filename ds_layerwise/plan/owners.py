"""Choose the owner of each whole parameter: balance over the whole model, then even shards in each bucket.

Pure functions of whole numbers, so that every rank chooses the same owners. A parameter is known by its position in the
backward pass; an owner is the number of a shard, which every ``ep_size`` consecutive ranks of the layout share.

Note: how owners are chosen
    Balance is a property of the whole model, so owners are chosen over the whole model: longest work first, always to
    the least loaded rank. A second pass by work and memory together is kept where it lowers the worse of the two and
    costs at most 2 % of either. After that only parameters of equal size and work change places, which alters no
    rank's total: each bucket hands its parameters to the ranks that have least of that bucket.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: What balancing memory as well may cost, in percent of what balancing work alone reaches.
_TOLERANCE_PERCENT = 2

#: Work and memory are compared as shares of their totals, in parts of this: whole numbers that fit 64 bits.
_PARTS = 2**40


class Item(NamedTuple):
    """A parameter on its way into a bucket. ``span`` is ``numel`` with the padding up to the next aligned start."""

    name: str
    position: int
    """In the backward pass."""
    numel: int
    span: int
    work: int
    dtype: str
    ep_size: int


def choose_owners(buckets: Sequence[Sequence[Item]], world_size: int) -> dict[int, int]:
    """The owner of each parameter of ``buckets``, by its position; all of one bucket have the same ``ep_size``."""
    owners: dict[int, int] = {}
    by_ep_size: dict[int, list[Sequence[Item]]] = defaultdict(list)
    for bucket in buckets:
        by_ep_size[bucket[0].ep_size].append(bucket)
    for ep_size, alike in by_ep_size.items():
        items, holders = [item for bucket in alike for item in bucket], world_size // ep_size
        if holders == 1:
            owners.update((item.position, 0) for item in items)
        else:
            owners.update(_spread(alike, _by_work_or_both(items, holders), holders))
    return owners


def _by_work_or_both(items: Sequence[Item], world_size: int) -> dict[int, int]:
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


def _maxima(items: Iterable[Item], owners: dict[int, int]) -> tuple[int, int]:
    work: dict[int, int] = defaultdict(int)
    numel: dict[int, int] = defaultdict(int)
    for item in items:
        work[owners[item.position]] += item.work
        numel[owners[item.position]] += item.numel
    return max(work.values()), max(numel.values())


def _longest_first(items: Iterable[Item], world_size: int) -> dict[int, int]:
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


def _longest_first_by_both(items: Iterable[Item], world_size: int, total_work: int,
                           total_numel: int) -> dict[int, int]:
    """Largest share of the model first, to the rank whose larger share, of work or of elements, stays smallest."""
    by_size: dict[tuple[int, int], list[Item]] = defaultdict(list)
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


def _spread(buckets: Sequence[Sequence[Item]], owners: dict[int, int], world_size: int) -> dict[int, int]:
    """Let equal parameters change owners so that the shards of each bucket become even, and no rank's total changes."""
    quotas: dict[tuple[int, int], NDArray[np.int64]] = defaultdict(lambda: np.zeros(world_size, np.int64))
    left: NDArray[np.int64] = np.zeros(world_size, np.int64)
    for bucket in buckets:
        for item in bucket:
            quotas[item.numel, item.work][owners[item.position]] += 1
            left[owners[item.position]] += item.numel
    spread: dict[int, int] = {}
    for bucket in buckets:
        by_size: dict[tuple[int, int], deque[Item]] = defaultdict(deque)
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


def _longest_shards(buckets: Iterable[Sequence[Item]], owners: dict[int, int]) -> int:
    """The lengths of the longest shard of each bucket, added up: what the collectives take."""
    total = 0
    for bucket in buckets:
        held: dict[int, int] = defaultdict(int)
        for item in bucket:
            held[owners[item.position]] += item.span
        total += max(held.values())
    return total
