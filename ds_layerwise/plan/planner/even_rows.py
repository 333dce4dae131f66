"""Rows: as many equal parameters as there are shards, one for each, so that a bucket of rows has
equal shards.

A row is as fast as ZeRO-1's buckets, and needs no padding. But its parameters come from several
layers, and all of their gradients must be complete. Rows do not change the owners' loads: only
equal parameters change places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds_layerwise.plan.layout.draft_buckets import Draft, draft_owned
from ds_layerwise.plan.layout.owners import Item

#: A row has at most this fraction (1 / 16) of the model, unless it fits into a bucket anyway: a
#: reduction cannot overlap with the backward pass before its row is complete.
_PART_OF_MODEL = 16


@dataclass(frozen=True)
class Rows:
    """The parts of a stream: the rows, and the rest."""

    buckets: Sequence[Sequence[Item]]
    """Buckets of one row or several. Parameter i of a row belongs to shard i."""
    rest: Sequence[Item]
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
    items: Sequence[Item], owners: Mapping[int, int], holders: int, *, bucket_numel: int, limit: int
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
