"""Buckets that do not know yet where in their buffer they start, and how parameters are laid into
one.
"""

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
    """A bucket whose offsets count from its own start; else as :class:`.plan.layout.layout.Bucket`
    has it.
    """

    whole: bool
    shard_numels: Numels
    items: Sequence[Item]
    """In memory order."""
    offsets: Sequence[int]
    wire: str
    """The dtype that its gradients travel in."""
    way: Way = "even"
    """Until it is chosen, which it must be where shards differ in length, ``even``."""

    def with_longer_last(self, more: int) -> Draft:
        """Return the bucket with ``more`` elements of padding in the last shard that has any."""
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
    """Cut a backward stream into buckets of at least ``bucket_numel`` elements; the last may hold
    fewer.

    With a number of ``equal_shards`` also of at least 90 % of as many times its largest parameter,
    which is how long all of its shards become: whatever a bucket has less than that is padding.
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


def draft_split(items: Sequence[Item], holders: int, wire: str, alignment: int) -> Draft:
    """Lay ``items`` back to back, cut into equal shards."""
    *offsets, total = accumulate((item.span for item in items), initial=0)
    shard = -(-total // holders)
    shard += -shard % alignment
    return Draft(False, Numels.equal(shard, holders), items, offsets, wire)


def draft_by_param(items: Sequence[Item], holders: int, wire: str, alignment: int) -> Draft:
    """Lay ``items`` back to back, each with room for as many equal, aligned cuts as there are
    ``holders``.
    """
    rooms = []
    for item in items:
        cut = -(-item.numel // holders)
        rooms.append(holders * (cut + -cut % alignment))
    *offsets, total = accumulate(rooms, initial=0)
    shards = Numels.equal(total // holders, holders)
    return Draft(False, shards, items, offsets, wire, "by_param")


def draft_owned(
    items: Sequence[Item], owners: Iterable[int], holders: int, wire: str, shard: int | None = None
) -> Draft:
    """Lay out whole parameters, one owner each; ``shard`` elements a shard, or any number."""
    by_rank: dict[int, list[Item]] = defaultdict(list)
    for item, owner in zip(items, owners, strict=True):
        by_rank[owner].append(item)
    in_order: list[Item] = []
    offsets: list[int] = []
    lengths: list[int] = []
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
    return Draft(True, numels, in_order, offsets, wire)
