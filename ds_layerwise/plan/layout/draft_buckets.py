"""Buckets without a start in their buffer yet, and the placement of parameters in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ds_layerwise.plan.layout.layout import Shards
from ds_layerwise.plan.layout.owners import Item, Items
from ds_layerwise.plan.layout.transport import Transport, padded, transport_of


@dataclass(frozen=True, slots=True)
class Draft:
    """A bucket whose offsets count from its own start; otherwise like
    :class:`.plan.layout.layout.Bucket`.
    """

    whole: bool
    shards: Shards
    items: Items
    """In memory order."""
    offsets: Sequence[int]
    transport: Transport = "even"


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


def draft_split(items: Items, holders: int, alignment: int, transport: Transport) -> Draft:
    """Lay out ``items`` back to back, cut into equal shards; for ``by_param`` each with room for
    ``holders`` equal, aligned cuts.
    """
    cuts = holders if transport == "by_param" else 1
    rooms = (padded(item.numel, alignment, cuts) for item in items)
    *offsets, total = accumulate(rooms, initial=0)
    shards = Shards(((holders, padded(total, alignment, holders) // holders),))
    return Draft(False, shards, items, offsets, transport)


def draft_owned(items: Items, owners: Iterable[int], holders: int, shard: int) -> Draft:
    """Lay out whole parameters with one owner each, in shards of ``shard`` elements."""
    in_order = []
    offsets = []
    for rank, own in _by_rank(items, owners).items():
        end = rank * shard
        for item in own:
            in_order.append(item)
            offsets.append(end)
            end += item.span
    return Draft(True, Shards(((holders, shard),)), in_order, offsets)


def draft_balanced(items: Items, owners: Iterable[int], holders: int, alignment: int) -> Draft:
    """Lay out whole parameters with one owner each, for the transport that sends less."""
    lengths = {}
    in_order = []
    for rank, own in _by_rank(items, owners).items():
        lengths[rank] = sum(item.span for item in own)
        in_order += own
    numel = sum(lengths.values())
    longest = max(lengths.values())
    if transport_of(numel, longest, holders) == "even":
        return draft_owned(items, owners, holders, longest)
    *offsets, _ = accumulate((item.span for item in in_order), initial=0)
    lengths[max(lengths)] += padded(numel, alignment, holders) - numel
    return Draft(True, Shards.of(lengths, holders), in_order, offsets, "cuts")


def _by_rank(items: Items, owners: Iterable[int]) -> dict[int, list[Item]]:
    """Return the items of each owner that has any, in the order of ranks."""
    by_rank = defaultdict(list)
    for item, owner in zip(items, owners, strict=True):
        by_rank[owner].append(item)
    return dict(sorted(by_rank.items()))


#: A row has at most this fraction (1 / 16) of the model, unless it fits into a bucket anyway: a
#: reduction cannot overlap with the backward pass before its row is complete.
_PART_OF_MODEL = 16


@dataclass(frozen=True)
class Rows:
    """The parts of a stream: the rows, and the rest."""

    buckets: Sequence[Items]
    """Buckets of one row or several. Parameter i of a row belongs to shard i."""
    rest: Items
    """In backward order."""
    owners: Mapping[int, int]
    """The owners of the parameters that are in no row, by position."""

    def drafts(self, holders: int) -> list[Draft]:
        """Return the buckets of rows, laid out in ``holders`` equal shards."""
        drafts = []
        for bucket in self.buckets:
            owners = [*range(holders)] * (len(bucket) // holders)
            shard = sum(item.span for item in bucket) // holders
            drafts.append(draft_owned(bucket, owners, holders, shard))
        return drafts


def row_limit(bucket_numel: int, model_numel: int) -> int:
    """Return the largest number of elements in a row of such a model."""
    return max(bucket_numel, model_numel // _PART_OF_MODEL)


def take_rows(
    items: Items, owners: Mapping[int, int], holders: int, *, bucket_numel: int, limit: int
) -> Rows:
    """Take as many rows out of a stream as its owners allow.

    Args:
        items: in backward order, of one dtype.
        owners: the shard of each, by position. The number of rows of a size is limited by the rank
            that owns fewest of that size.
        bucket_numel: consecutive complete rows share a bucket until it has this many elements.
        limit: the largest number of elements in a row.
    """
    by_size = defaultdict(list)
    for item in items:
        by_size[item.numel, item.work].append(item)
    rows = []
    new_owners = {}
    for (numel, _), equal in by_size.items():
        counts = np.bincount([owners[item.position] for item in equal], minlength=holders)
        num_rows = int(counts.min()) if numel * holders <= limit else 0
        rows += [equal[i * holders : (i + 1) * holders] for i in range(num_rows)]
        # Rows take the first parameters in backward order. The rest makes the last reductions,
        # which overlap with nothing, short.
        left = np.repeat(np.arange(holders), counts - num_rows).tolist()
        for item, owner in zip(equal[num_rows * holders :], left, strict=True):
            new_owners[item.position] = owner
    rows.sort(key=lambda row: row[-1].position)
    buckets: list[list[Item]] = []
    in_bucket = bucket_numel
    for row in rows:
        if in_bucket >= bucket_numel:
            buckets.append([])
            in_bucket = 0
        buckets[-1] += row
        in_bucket += row[0].numel * holders
    return Rows(buckets, [item for item in items if item.position in new_owners], new_owners)
