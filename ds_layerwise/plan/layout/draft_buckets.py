"""Buckets without a start in their buffer yet, and the placement of parameters in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ds_layerwise.plan.layout.layout import Way
from ds_layerwise.plan.layout.owners import Item
from ds_layerwise.plan.layout.shards import Numels, Shards


@dataclass(frozen=True, slots=True)
class Draft:
    """A bucket whose offsets count from its own start; otherwise like
    :class:`.plan.layout.layout.Bucket`.
    """

    whole: bool
    shard_numels: Numels
    items: Sequence[Item]
    """In memory order."""
    offsets: Sequence[int]
    way: Way = "even"
    """The transport; ``even`` until it is chosen. If shards differ in length, it must be chosen."""

    def with_longer_last(self, more: int) -> Draft:
        """Return the bucket with ``more`` elements of padding in its last non-empty shard."""
        return replace(self, shard_numels=self.shard_numels.with_longer_last(more))

    @property
    def shards(self) -> Shards:
        """The shards of ``shard_numels``."""
        return Shards.of(self.shard_numels, 0)

    @property
    def position(self) -> int:
        """The position of the bucket's last gradient in the backward pass."""
        return max(item.position for item in self.items)


def cut_stream(items: Iterable[Item], bucket_numel: int, equal_shards: int = 0) -> list[list[Item]]:
    """Cut a backward stream into buckets of at least ``bucket_numel`` elements; the last may have
    fewer.

    With ``equal_shards``, a bucket also has at least 90 % of ``equal_shards`` times its largest
    parameter. All of its shards become as long as that parameter, and the missing elements are
    padding.
    """
    buckets: list[list[Item]] = []
    numel = least = bucket_numel
    for item in items:
        if numel >= least:
            buckets.append([])
            numel = 0
            least = bucket_numel
        buckets[-1].append(item)
        numel += item.numel
        least = max(least, equal_shards * item.numel * 9 // 10)
    return buckets


def draft_split(items: Sequence[Item], holders: int, alignment: int) -> Draft:
    """Lay out ``items`` back to back, cut into equal shards."""
    *offsets, total = accumulate((item.span for item in items), initial=0)
    shard = -(-total // holders)
    shard += -shard % alignment
    return Draft(False, Numels.equal(shard, holders), items, offsets)


def draft_by_param(items: Sequence[Item], holders: int, alignment: int) -> Draft:
    """Lay out ``items`` back to back, each with room for ``holders`` equal, aligned cuts."""
    rooms = []
    for item in items:
        cut = -(-item.numel // holders)
        rooms.append(holders * (cut + -cut % alignment))
    *offsets, total = accumulate(rooms, initial=0)
    shards = Numels.equal(total // holders, holders)
    return Draft(False, shards, items, offsets, "by_param")


def draft_owned(
    items: Sequence[Item], owners: Iterable[int], holders: int, shard: int | None = None
) -> Draft:
    """Lay out whole parameters with one owner each. Shards have ``shard`` elements, or any length
    if it is None.
    """
    by_rank = defaultdict(list)
    for item, owner in zip(items, owners, strict=True):
        by_rank[owner].append(item)
    in_order = []
    offsets = []
    lengths = []
    end = 0
    for rank in sorted(by_rank):
        if shard is None:
            start = end
        else:
            start = rank * shard
        end = start
        for item in by_rank[rank]:
            in_order.append(item)
            offsets.append(end)
            end += item.span
        lengths.append(end - start)
    if shard is None:
        numels = Numels.of_filled(holders, tuple(sorted(by_rank)), tuple(lengths))
    else:
        numels = Numels.equal(shard, holders)
    return Draft(True, numels, in_order, offsets)
