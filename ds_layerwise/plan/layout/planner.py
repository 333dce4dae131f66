"""The placement of parameters: which rank owns which matrix, which parameters share a bucket, and
how long each shard is.

All functions are pure, from shapes to a :class:`Layout`. This module never sees a tensor, a device
or a process group, and decides with integers only, so that every rank, the command line and the
tests compute the same result from the same arguments. Sizes are in elements.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ds_layerwise.errors import LayoutError
from ds_layerwise.optimizers.mxfp8 import MXFP8, ParamWire
from ds_layerwise.plan.layout.draft_buckets import (
    Draft,
    cut_stream,
    draft_balanced,
    draft_owned,
    draft_split,
    row_limit,
    take_rows,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.layout.owners import Item, choose_owners, spread
from ds_layerwise.plan.layout.transport import Transport, padded


def plan_layout(
    specs: Sequence[ParamSpec],
    world_size: int,
    *,
    bucket_numel: int,
    policy: str = "balanced",
    alignment: int = 64,
    stage: int = 1,
    param_wire: ParamWire | None = None,
) -> Layout:
    """Place parameters over ``world_size`` ranks.

    Args:
        specs: in model order; buckets go through them backwards, in the order of gradients.
        bucket_numel: a bucket closes when it has this many elements, so it may be one large
            parameter, or a row of equal ones, see :mod:`.plan.layout.draft_buckets`.
        policy: ``balanced`` balances the whole model; each bucket has the transport that sends
            less, see :func:`.plan.layout.transport.transport_of`. ``lpt`` and ``size_matching``
            make the shards of each bucket equal, as Megatron-LM's layer-wise optimizer did in #4771
            and in #4509; ``lpt`` makes buckets larger if they would be mostly padding. The policy
            does not affect parameters that are cut by element.
        alignment: slots and shards start at multiples of this.
        stage: the ZeRO stage. From stage 2 on, no bucket is a row of equal matrices: their
            gradients would need memory of their own while they wait for each other. At stage 3,
            each parameter that is cut by element is cut by itself.
        param_wire: the format in which updated bfloat16 matrices are sent; None for their dtype.

    Raises:
        LayoutError: experts cannot be shared evenly, or two parameters have the same name.
    """
    streams = defaultdict(list)
    for position, spec in enumerate(reversed(specs)):
        if world_size % spec.ep_size:
            raise LayoutError(
                f"{spec.name} has ep_size {spec.ep_size}, which {world_size} ranks cannot share "
                "evenly"
            )
        streams[_Stream(spec.dtype, spec.whole, spec.ep_size, spec.wire)].append(
            Item(
                spec.name,
                position,
                spec.numel,
                padded(spec.numel, alignment),
                spec.work,
                spec.dtype,
                spec.ep_size,
            )
        )
    drafts = []
    owned = {}
    for stream, items in streams.items():
        holders = world_size // stream.ep_size
        if not stream.whole:
            transport: Transport = "even" if stage < 3 else "by_param"
            for bucket in cut_stream(items, bucket_numel):
                drafts.append(draft_split(bucket, holders, alignment, transport))
        elif policy == "size_matching":
            drafts += _match_sizes(items, holders, bucket_numel)
        elif policy == "lpt":
            for bucket in cut_stream(items, bucket_numel, holders):
                drafts.append(_equal_shards(bucket, holders))
        else:
            owned[stream] = items
    limit = row_limit(bucket_numel, sum(spec.numel for spec in specs)) if stage == 1 else 0
    drafts += _balance(owned, world_size, bucket_numel, limit, alignment)
    # A bucket can be reduced when its last gradient is complete. In this order no bucket waits for
    # a later one.
    drafts.sort(key=lambda draft: max(item.position for item in draft.items))
    return Layout(policy, world_size, alignment, _assemble(drafts, param_wire))


class _Stream(NamedTuple):
    """The properties that parameters of one bucket share."""

    dtype: str
    whole: bool
    ep_size: int
    wire: str


def _assemble(drafts: list[Draft], param_wire: ParamWire | None) -> tuple[Bucket, ...]:
    ends: dict[str, int] = defaultdict(int)
    buckets = []
    for index, draft in enumerate(drafts):
        item = draft.items[0]
        start = ends[item.dtype]
        slots = tuple(
            Slot(item.name, start + offset, item.numel)
            for item, offset in zip(draft.items, draft.offsets, strict=True)
        )
        bucket = Bucket(
            index,
            item.dtype,
            draft.whole,
            start,
            draft.shards,
            slots,
            draft.transport,
            item.ep_size,
            param_wire == MXFP8 and draft.whole and item.dtype == "bfloat16",
        )
        buckets.append(bucket)
        ends[item.dtype] = bucket.stop
    return tuple(buckets)


# --- lpt and size_matching: equal shards in each bucket


def _equal_shards(items: Sequence[Item], world_size: int) -> Draft:
    """Place the largest parameter first, on the emptiest shard. All shards become as long as the
    fullest.
    """
    heap = [(0, rank) for rank in range(min(world_size, len(items)))]  # sorted, so it is a heap
    owner_of = {}
    for item in sorted(items, key=lambda item: (-item.numel, item.position)):
        held, rank = heap[0]
        heapq.heapreplace(heap, (held + item.span, rank))
        owner_of[item.position] = rank
    owners = [owner_of[item.position] for item in items]
    return draft_owned(items, owners, world_size, max(heap)[0])


class _Shelves:
    """The parameters that are not placed yet, by size; within one size in backward order."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._shelves: dict[int, deque[Item]] = defaultdict(deque)
        for item in items:
            self._shelves[item.numel].append(item)
        self._sizes = sorted(self._shelves)

    def fill(self, room: int, numel: int) -> list[Item]:
        """Take parameters that fit into ``room``: first one of ``numel`` elements if there is any,
        then the largest that fit.
        """
        taken: list[Item] = []
        while fits := bisect_right(self._sizes, room):
            size = self._sizes[fits - 1]
            if not taken and numel in self._shelves:
                size = numel
            taken.append(self._shelves[size].popleft())
            room -= taken[-1].span
            if not self._shelves[size]:
                del self._shelves[size]
                self._sizes.remove(size)
        return taken


def _match_sizes(items: list[Item], world_size: int, bucket_numel: int) -> list[Draft]:
    """Make buckets of rows. In a row, every shard has parameters of one size, or smaller ones that
    fit in its place.

    The first parameter of a row is the next one of the backward pass. The others come from anywhere
    in the model, so buckets are complete later than with the other policies.
    """
    shelves = _Shelves(items)
    placed: set[int] = set()
    drafts = []
    bucket = []
    owners = []
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
        is_last = len(placed) == len(items)
        if is_last or sum(item.numel for item in bucket) >= bucket_numel:
            drafts.append(draft_owned(bucket, owners, world_size, shard))
            bucket = []
            owners = []
            shard = 0
    return drafts


# --- balanced: owners over the whole model, and the transport that sends less for each bucket


#: The least gain, in percent of what is sent, for which rows are worth it: they make gradients
#: wait.
_MUST_GAIN = 2


def _balance(
    streams: Mapping[_Stream, list[Item]],
    world_size: int,
    bucket_numel: int,
    limit: int,
    alignment: int,
) -> list[Draft]:
    """Return buckets of whole parameters: with rows, if ranks then send less.

    Args:
        limit: the largest number of elements in a row; 0 for no rows.
    """
    cut = {stream: cut_stream(items, bucket_numel) for stream, items in streams.items()}
    owners = choose_owners(list(chain.from_iterable(cut.values())), world_size)
    plain = _draft_streams(cut, owners, world_size, alignment)
    in_rows = []
    by_holders: dict[int, list[list[Item]]] = defaultdict(list)
    left: dict[int, int] = {}
    for stream, items in streams.items():
        holders = world_size // stream.ep_size
        if holders == 1:
            continue
        rows = take_rows(items, owners, holders, bucket_numel=bucket_numel, limit=limit)
        in_rows += rows.drafts(holders)
        cut[stream] = cut_stream(rows.rest, bucket_numel)
        by_holders[holders] += cut[stream]
        left.update(rows.owners)
    if not in_rows:
        return plain
    for holders, buckets in by_holders.items():
        left.update(spread(buckets, left, holders))
    in_rows += _draft_streams(cut, {**owners, **left}, world_size, alignment)
    if 100 * _moved(in_rows) <= (100 - _MUST_GAIN) * _moved(plain):
        return in_rows
    return plain


def _draft_streams(
    cut: Mapping[_Stream, list[list[Item]]],
    owners: Mapping[int, int],
    world_size: int,
    alignment: int,
) -> list[Draft]:
    drafts = []
    for stream, buckets in cut.items():
        holders = world_size // stream.ep_size
        for bucket in buckets:
            ranks = [owners[item.position] for item in bucket]
            drafts.append(draft_balanced(bucket, ranks, holders, alignment))
    return drafts


def _moved(drafts: Iterable[Draft]) -> int:
    """Return the number of elements that the mean rank of a group sends each way, for all of
    ``drafts``, with padding: times ``(holders - 1) / holders``.
    """
    total = 0
    for draft in drafts:
        shards = draft.shards
        total += shards.numel
        if draft.transport == "cuts":
            total += shards.numel // shards.count
    return total
