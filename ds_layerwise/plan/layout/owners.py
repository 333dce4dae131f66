"""The choice of the owner of each whole parameter: balanced over the whole model first, then even
shards in each bucket.

All functions are pure and compute with integers, so every rank chooses the same owners. A parameter
is identified by its position in the backward pass; an owner is the number of a shard. With an
``ep_size`` of ``e``, shard ``h`` is on the ranks from ``h * e`` up to ``(h + 1) * e``, each with
its own experts. All of these ranks get the same load from it.

Note: how owners are chosen
    Balance is a property of the whole model, so owners are chosen over the whole model, dense
    matrices and experts together: longest work first, always to the least loaded rank, or to the
    ``ep_size`` ranks whose busiest rank has the least load. A second pass balances work and memory
    together. Its result is used if it lowers the worse of the two and costs at most 2 % of either.
    Longest-first never revises a decision, so after it the busiest ranks swap one or two parameters
    with other ranks as long as this lowers the maximum of work, or of memory; no swap raises either
    maximum. Finally, only parameters of equal size and work change places, which changes no rank's
    total: each bucket assigns its parameters to the ranks that have least of that bucket.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.plan.layout.layout import Ints

#: The most that balancing memory as well may cost, in percent of the maximum from balancing work
#: alone.
_TOLERANCE_PERCENT = 2

#: Work and memory are compared as shares of their totals, in units of 1 / _PARTS, so that integers
#: fit 64 bits.
_PARTS = 2**40

#: The most swaps that one search, and all searches together, examine: a few seconds at most. The
#: number of swaps is the number of shards, times the kinds on the busiest shard, times all kinds;
#: with two parameters on each side, times the squares of both.
_MAX_AT_ONCE = 2**22
_MAX_COMBINATIONS = 2**27


class Item(NamedTuple):
    """A parameter before it is placed in a bucket. ``span`` is ``numel`` plus the padding up to the
    next aligned start.
    """

    name: str
    position: int
    """The position in the backward pass."""
    numel: int
    span: int
    work: int
    dtype: str
    ep_size: int


#: Parameters in some order.
Items = Sequence[Item]

#: The owner of each parameter, by position.
Owners = dict[int, int]


class _Kind(NamedTuple):
    """The sizes of parameters that are interchangeable."""

    ep_size: int
    work: int
    numel: int


#: Work and elements, or shares of both, of a parameter of each kind.
_Sizes = Mapping[_Kind, tuple[int, int]]


@dataclass(slots=True)
class _Placed:
    """The parameters on each shard, and the resulting loads."""

    shards: dict[_Kind, list[int]]
    """The shard of each parameter of a kind, in the order of placement."""
    loads: Ints
    """Work and elements by rank: (2, ranks)."""


def choose_owners(buckets: Sequence[Items], world_size: int) -> Owners:
    """Return the owners of the parameters of ``buckets`` by position. Each bucket has one
    ``ep_size``.
    """
    by_ep_size = defaultdict(list)
    by_kind = defaultdict(list)
    for bucket in buckets:
        by_ep_size[bucket[0].ep_size].append(bucket)
        for item in bucket:
            by_kind[_Kind(item.ep_size, item.work, item.numel)].append(item.position)
    placed = _place({kind: len(positions) for kind, positions in by_kind.items()}, world_size)
    owners: Owners = {}
    for kind, positions in by_kind.items():
        in_model_order = sorted(positions, reverse=True)
        owners.update(zip(in_model_order, placed[kind], strict=True))
    for ep_size, alike in by_ep_size.items():
        owners.update(spread(alike, owners, world_size // ep_size))
    return owners


def _place(counts: Mapping[_Kind, int], world_size: int) -> dict[_Kind, list[int]]:
    """Place parameters by work, or by work and memory if that is the better trade-off."""
    total_work = sum(kind.ep_size * kind.work * count for kind, count in counts.items())
    total_numel = sum(kind.ep_size * kind.numel * count for kind, count in counts.items())
    # Work must fit 64 bits: dividing by the common factor changes no comparison, and dropping bits
    # beyond 62 does not affect the balance.
    unit = max(1, math.gcd(*(kind.work for kind in counts)))
    unit <<= max(0, (total_work // unit).bit_length() - 62)
    total_work //= unit
    exact = {kind: (kind.work // unit, kind.numel) for kind in counts}
    placed = _longest_first(counts, world_size, exact)
    if total_work:
        shares = {}
        for kind, (work, numel) in exact.items():
            shares[kind] = (work * _PARTS // total_work, numel * _PARTS // total_numel)
        by_both = _longest_first(counts, world_size, exact, shares)
        if _is_better_trade(by_both, placed, total_work, total_numel):
            placed = by_both
    _swap(placed, exact)
    return placed.shards


def _is_better_trade(by_both: _Placed, by_work: _Placed, total_work: int, total_numel: int) -> bool:
    work, numel = by_both.loads.max(axis=1).tolist()
    least_work, its_numel = by_work.loads.max(axis=1).tolist()
    within = 100 + _TOLERANCE_PERCENT
    if 100 * work > within * least_work or 100 * numel > within * its_numel:
        return False
    # Shares of different totals are compared by cross-multiplication.
    worse = max(work * total_numel, numel * total_work)
    return bool(worse < max(least_work * total_numel, its_numel * total_work))


def _longest_first(
    counts: Mapping[_Kind, int],
    world_size: int,
    exact: _Sizes,
    shares: _Sizes | None = None,
) -> _Placed:
    """Place parameters with the most work first, on the ranks with the least work, then elements,
    then number.

    With ``shares``, place the largest share of the model first, on the ranks whose larger share, of
    work or of elements, stays smallest. Parameters without work come last, and only elements count
    for them: otherwise all would go to the one rank with the least work, whatever it holds.
    """
    sizes = shares or exact
    placed = _Placed({kind: [] for kind in counts}, np.zeros((2, world_size), np.int64))
    loads = np.zeros_like(placed.loads)

    def longest(kind: _Kind) -> tuple[int, int, int, int]:
        work, numel = sizes[kind]
        return (work if shares is None else max(work, numel)), work, numel, kind.ep_size

    for kind in sorted(counts, key=longest, reverse=True):
        left = counts[kind]
        work, numel = sizes[kind]
        by_shard = loads.reshape(2, -1, kind.ep_size)
        exactly = placed.loads.reshape(2, -1, kind.ep_size)
        while left:  # each pass places at least one
            held = by_shard.max(axis=2)
            # ``after`` is the load after placement, ``then`` breaks ties, and ``step`` is the least
            # by which a rank that takes one grows: among ranks that are ahead by less, none gets a
            # second parameter before all of them have one.
            if shares is not None:
                after = np.maximum(held[0] + work, held[1] + numel)
                then = held[0] * 0
                step = max(1, min(work, numel))
            elif work:
                after, then = held
                step = work
            else:
                then, after = held
                step = numel
            highest = after.min() + step - 1
            if left < len(after):  # a full sort would take longest
                highest = min(highest, np.partition(after, left - 1)[left - 1])
            chosen = np.flatnonzero(after <= highest)
            chosen = chosen[np.lexsort((then[chosen], after[chosen]))[:left]]
            # A pass over all ranks leaves their differences as they are, so the next passes are the
            # same.
            same = len(chosen) == len(after) and (shares is None or len(after) == 1)
            times = left // len(after) if same else 1
            exactly[:, chosen] += times * np.array(exact[kind])[:, None, None]
            by_shard[:, chosen] += times * np.array(sizes[kind])[:, None, None]
            left -= times * len(chosen)
            placed.shards[kind] += times * chosen.tolist()
    return placed


def _swap(placed: _Placed, exact: _Sizes) -> None:
    """Swap parameters between shards while that lowers the maximum of work, then of elements,
    without raising the other maximum.
    """
    by_ep_size = defaultdict(list)
    for kind in sorted(placed.shards):
        by_ep_size[kind.ep_size].append(kind)
    swaps = []
    for ep_size, kinds in by_ep_size.items():
        if len(kinds) * placed.loads.shape[1] <= _MAX_AT_ONCE * ep_size:
            swaps.append(_Swaps(kinds, placed, np.array([exact[kind] for kind in kinds])))
    lowered = True
    while lowered:
        lowered = False
        for load in (0, 1):
            while any([alike.lower(load) for alike in swaps]):
                lowered = True


class _Swaps:
    """Swaps between the shards of all parameters with one ``ep_size``. ``load`` is 0 for work, 1
    for elements.
    """

    def __init__(self, kinds: Sequence[_Kind], placed: _Placed, sizes: Ints) -> None:
        self._loads = placed.loads.reshape(2, -1, kinds[0].ep_size)
        self._shards = [placed.shards[kind] for kind in kinds]
        # The work and elements of each kind (kinds + 1, 2), and the number of each kind on each
        # shard (kinds + 1, shards). The last kind means no parameter; every shard has it.
        self._nothing = len(kinds)
        self._sizes = np.vstack((sizes, [0, 0]))
        held = []
        for shards in self._shards:
            held.append(np.bincount(shards, minlength=self._loads.shape[1]))
        self._held = np.array([*held, np.full(self._loads.shape[1], 2)])
        self._left = _MAX_COMBINATIONS

    def lower(self, load: int) -> bool:
        """Lower the maximum of ``load`` with one swap per shard that has it. Return False if one of
        them keeps it.
        """
        most = self._loads[load].max()
        most_of_other = self._loads[1 - load].max()
        for _ in range(self._loads.shape[1]):
            loads = self._loads.max(axis=2)
            if loads[load].max() < most:
                break
            # The maximum cannot fall below the mean, or below the largest parameter.
            if most <= max(self._sizes[:, load].max(), -(-loads[load].sum() // loads.shape[1])):
                return False
            busiest = int(loads[load].argmax())
            swap = self._best(load, loads, busiest, 1) or self._best(load, loads, busiest, 2)
            if swap is None:
                return False
            other, give, take = swap
            self._hand_over(give, busiest, other)
            self._hand_over(take, other, busiest)
        # Each True means a lower maximum here and no higher one in the other load, so the search
        # ends.
        return bool(self._loads[load].max() < most and self._loads[1 - load].max() <= most_of_other)

    def _best(
        self, load: int, loads: Ints, busiest: int, num: int
    ) -> tuple[int, list[int], list[int]] | None:
        """Find the swap that leaves the busier of its two shards with the lowest load. Return the
        other shard, the parameters it gets, and those it gives; None if no swap helps.

        Each side gives at most ``num`` parameters.
        """
        mine_to_give = np.flatnonzero(self._held[:-1, busiest]).tolist()
        combinations = (
            math.comb(len(mine_to_give) + num, num)
            * math.comb(self._nothing + num, num)
            * loads.shape[1]
        )
        if combinations > min(self._left, _MAX_AT_ONCE):
            return None
        self._left -= combinations
        give = self._bundles(mine_to_give, num)
        take = self._bundles(range(self._nothing), num)
        give = give[self._has(give, np.array([busiest]))[:, 0]]
        over = self._sizes[give].sum(axis=1)[:, None] - self._sizes[take].sum(
            axis=1
        )  # (give, take, 2)
        mine = loads[:, busiest] - over
        most = loads.max(axis=1)
        gives, takes = np.nonzero((over[..., load] > 0) & (mine[..., 1 - load] <= most[1 - load]))
        over = over[gives, takes]
        mine = mine[gives, takes]
        order = np.lexsort((loads[1 - load], loads[load]))
        theirs = loads[:, order]
        # The other shard must have the parameters that it gives, stay below the maximum in one
        # load, and not exceed it in the other. The shard with the least load before also has the
        # least after.
        able = self._has(take, order)[takes]
        able &= theirs[load] < (most[load] - over[:, load])[:, None]
        able &= theirs[1 - load] <= (most[1 - load] - over[:, 1 - load])[:, None]
        rows = np.flatnonzero(able.any(axis=1))
        if not len(rows):
            return None
        others = order[able[rows].argmax(axis=1)]
        after = np.maximum(mine[rows], loads[:, others].T + over[rows])
        best = np.lexsort((after[:, 1 - load], after[:, load]))[0]
        return (
            int(others[best]),
            give[gives[rows[best]]].tolist(),
            take[takes[rows[best]]].tolist(),
        )

    def _bundles(self, kinds: Iterable[int], num: int) -> Ints:
        """Return all sets of up to ``num`` parameters of ``kinds``: (bundles, num), padded with the
        empty kind.
        """
        return np.array(list(combinations_with_replacement([*kinds, self._nothing], num)))

    def _has(self, bundles: Ints, shards: Ints) -> NDArray[np.bool_]:
        """Return which of ``shards`` have all parameters of a bundle: (bundles, shards)."""
        needed = (bundles[:, :, None] == bundles[:, None, :]).sum(axis=2)[:, :, None]
        has: NDArray[np.bool_] = np.all(self._held[:, shards][bundles] >= needed, axis=1)
        return has

    def _hand_over(self, bundle: list[int], giver: int, taker: int) -> None:
        for kind in bundle:
            if kind != self._nothing:
                self._shards[kind][self._shards[kind].index(giver)] = taker
                self._held[kind, giver] -= 1
                self._held[kind, taker] += 1
                self._loads[:, giver] -= self._sizes[kind][:, None]
                self._loads[:, taker] += self._sizes[kind][:, None]


def spread(buckets: Sequence[Items], owners: Owners, world_size: int) -> Owners:
    """Let equal parameters change owners, so that the shards of each bucket become even and no
    rank's total changes.
    """
    quotas: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    left = [0] * world_size
    for bucket in buckets:
        for item in bucket:
            quotas[item.numel, item.work][owners[item.position]] += 1
            left[owners[item.position]] += item.numel
    takers = {size: _Takers(quota, left) for size, quota in quotas.items()}
    spread = {}
    for bucket in buckets:
        by_size: dict[tuple[int, int], deque[Item]] = defaultdict(deque)
        for item in bucket:
            by_size[item.numel, item.work].append(item)
        held: dict[int, int] = {}
        for size in sorted(by_size, reverse=True):
            equal = by_size[size]
            while equal:
                for rank in takers[size].take(len(equal), held):
                    item = equal.popleft()
                    left[rank] -= item.numel
                    held[rank] = held.get(rank, 0) + item.span
                    spread[item.position] = rank
    return min(owners, spread, key=lambda candidate: _longest_shards(buckets, candidate))


class _Takers:
    """The ranks that parameters of one size go to, and the number that each still has to take.

    Args:
        quota: the number of parameters by rank.
        left: the elements of all sizes that each rank still has to take; updated as ranks take
            parameters.
    """

    def __init__(self, quota: Mapping[int, int], left: list[int]) -> None:
        self._quota = {rank: quota[rank] for rank in sorted(quota)}
        self._left = left
        # A heap entry may be older than the rank's last parameter; it is then earlier than the
        # rank's true place.
        self._heap = [self._key(rank) for rank in self._quota]
        heapq.heapify(self._heap)

    def _key(self, rank: int) -> tuple[int, int, int]:
        return -self._quota[rank], -self._left[rank], rank

    def take(self, num: int, held: Mapping[int, int]) -> list[int]:
        """Take up to ``num`` ranks, one parameter each: those with the least elements of this
        bucket, by ``held``.

        Among equal ranks, those with the most left to take come first. Otherwise the last buckets
        would be left with a few ranks that must take everything.
        """
        found, passed = self._most_to_take(num + 1, held)
        if not found:
            least = min(held[rank] for rank in self._quota)
            found = sorted((rank for rank in self._quota if held[rank] == least), key=self._key)
        if len(found) > num:
            taken = found[:num]
        else:
            taken = sorted(found)
        for rank in taken:
            self._quota[rank] -= 1
        for rank in passed:
            if self._quota[rank]:
                heapq.heappush(self._heap, self._key(rank))
            else:
                del self._quota[rank]
        return taken

    def _most_to_take(self, num: int, held: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Return up to ``num`` ranks that hold nothing of the bucket, and all ranks that were
        removed from the heap.
        """
        found: list[int] = []
        passed = []
        while self._heap and len(found) < num:
            entry = heapq.heappop(self._heap)
            rank = entry[2]
            if entry != (key := self._key(rank)):
                heapq.heappush(self._heap, key)
                continue
            passed.append(rank)
            if rank not in held:
                found.append(rank)
        return found, passed


def _longest_shards(buckets: Iterable[Items], owners: Owners) -> int:
    """Return the sum over buckets of the longest shard, which determines the time of the
    collectives.
    """
    total = 0
    for bucket in buckets:
        held: dict[int, int] = defaultdict(int)
        for item in bucket:
            held[owners[item.position]] += item.span
        total += max(held.values())
    return total
