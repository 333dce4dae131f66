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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, get_args

from ds_layerwise.config.sections import LayoutPolicy
from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout.draft_buckets import (
    Draft,
    cut_stream,
    draft_by_param,
    draft_owned,
    draft_split,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.layout.owners import Item, choose_owners, spread
from ds_layerwise.plan.network.links import NVLINK_IB, Links, group_of
from ds_layerwise.plan.network.reduction import Reduction
from ds_layerwise.plan.network.transport import (
    Load,
    WireTime,
    choose_ways,
    padded_for_cuts,
    time_of_drafts,
    wire_time,
)
from ds_layerwise.plan.planner.even_rows import row_limit, take_rows


def plan_layout(
    specs: Sequence[ParamSpec],
    world_size: int,
    *,
    bucket_numel: int,
    policy: str = "balanced",
    alignment: int = 64,
    links: Links = NVLINK_IB,
    reduction: Reduction = "ordered",
    stage: int = 1,
) -> Layout:
    """Place parameters over ``world_size`` ranks.

    Args:
        specs: in model order; buckets go through them backwards, in the order of gradients.
        bucket_numel: a bucket closes when it has this many elements, so it may be one large
            parameter, or a row of equal ones, see :mod:`.plan.planner.even_rows`. It closes earlier
            if there would otherwise be too few buckets for sums inside nodes to overlap with sums
            between them.
        policy: ``balanced`` balances the whole model; shards have any length, and padding only
            before aligned starts. ``lpt`` and ``size_matching`` make the shards of each bucket
            equal, as Megatron-LM's layer-wise optimizer did in #4771 and in #4509; ``lpt`` makes
            buckets larger if they would be mostly padding. The policy does not affect parameters
            that are cut by element.
        alignment: slots and shards start at multiples of this.
        links: the links for which ``balanced`` chooses transports.
        reduction: the method of sums; see :mod:`.plan.network.reduction`.
        stage: the ZeRO stage. From stage 2 on, no bucket is a row of equal matrices: their
            gradients would need memory of their own while they wait for each other. At stage 3,
            each parameter that is cut by element is cut by itself.

    Raises:
        LayoutError: an argument is out of range, or two parameters have the same name.
    """
    drafts = draft_layout(
        specs,
        world_size,
        bucket_numel=bucket_numel,
        policy=policy,
        alignment=alignment,
        links=links,
        reduction=reduction,
        stage=stage,
    )
    return Layout(policy, world_size, alignment, _assemble(drafts))


def draft_layout(
    specs: Sequence[ParamSpec],
    world_size: int,
    *,
    bucket_numel: int,
    policy: str,
    alignment: int,
    links: Links,
    reduction: Reduction,
    stage: int,
) -> list[Draft]:
    """Return the buckets of :func:`plan_layout` in launch order. Arguments and errors are the same.

    A prediction of times needs only these. They take half the time of a layout, and not its memory.
    """
    _check(specs, world_size, bucket_numel, policy, alignment, reduction)
    streams = defaultdict(list)
    for position, spec in enumerate(reversed(specs)):
        span = spec.numel + -spec.numel % alignment
        streams[_Stream(spec.dtype, spec.whole, spec.ep_size, spec.wire)].append(
            Item(
                spec.name,
                position,
                spec.numel,
                span,
                spec.work,
                spec.dtype,
                spec.ep_size,
                spec.wire,
            )
        )
    send = partial(_send, links=links, reduction=reduction, stage=stage, alignment=alignment)
    model_numel = sum(spec.numel for spec in specs)

    def made(bucket_numel: int) -> list[Draft]:
        drafts = []
        owned = {}
        for stream, items in streams.items():
            holders = world_size // stream.ep_size
            if not stream.whole:
                split = draft_split if stage < 3 else draft_by_param
                for bucket in cut_stream(items, bucket_numel):
                    drafts.append(split(bucket, holders, alignment))
            elif policy == "size_matching":
                drafts += _match_sizes(items, holders, bucket_numel)
            elif policy == "lpt":
                for bucket in cut_stream(items, bucket_numel, holders):
                    drafts.append(_equal_shards(bucket, holders))
            else:
                owned[stream] = items
        limit = row_limit(bucket_numel, model_numel) if stage == 1 else 0
        return drafts + _balance(owned, world_size, bucket_numel, limit, send)

    drafts = made(bucket_numel)
    may_gain = policy == "balanced" and len(drafts) <= _FEW_BUCKETS
    if may_gain and _levels_overlap(world_size, links, reduction):
        full = min(bucket_numel, model_numel)
        drafts = _or_faster(
            drafts,
            [made(-(-full // parts)) for parts in _PARTS],
            lambda drafts: time_of_drafts(drafts, links, reduction, stage),
        )
    # A bucket can be reduced when its last gradient is complete. In this order no bucket waits for
    # a later one.
    return sorted(drafts, key=lambda draft: draft.position)


#: The least gain, in percent of the time of the collectives, for which other buckets are worth it:
#: rows make gradients wait, and more buckets are more launches.
_MUST_GAIN = 2

#: Up to this number of buckets, sums inside nodes hardly overlap with those of another bucket
#: between nodes.
_FEW_BUCKETS = 8
#: The numbers of parts into which such a bucket may be cut.
_PARTS = (2, 4, 8)


def _levels_overlap(world_size: int, links: Links, reduction: Reduction) -> bool:
    """Tell whether sums of one bucket inside nodes can overlap with those of another
    between nodes.
    """
    on_devices = reduction == "ordered" and not links.on_host
    return on_devices and group_of(world_size, links, 1).has_levels


def _or_faster(
    drafts: list[Draft], others: Sequence[list[Draft]], took: Callable[[list[Draft]], WireTime]
) -> list[Draft]:
    """Return the fastest of ``others`` if it is faster by enough, else ``drafts``.

    The work that is left after the last gradient must not grow.

    The length of a backward pass is not known here, so half of the time that may overlap with it
    counts.
    """

    def felt(drafts: list[Draft]) -> int:
        wire = took(drafts)
        return wire.total - (wire.reduce - wire.last) // 2

    limit = took(drafts).tail
    able = [other for other in others if took(other).tail <= limit]
    fastest = min(able, key=felt, default=drafts)
    if 100 * felt(fastest) <= (100 - _MUST_GAIN) * felt(drafts):
        return fastest
    return drafts


class _Stream(NamedTuple):
    """The properties that parameters of one bucket share."""

    dtype: str
    whole: bool
    ep_size: int
    wire: str


def _check(
    specs: Sequence[ParamSpec],
    world_size: int,
    bucket_numel: int,
    policy: str,
    alignment: int,
    reduction: str,
) -> None:
    for name, value in (
        ("world_size", world_size),
        ("bucket_numel", bucket_numel),
        ("alignment", alignment),
    ):
        if value < 1:
            raise LayoutError(f"{name} must be at least 1, got {value}")
    for name, choice, known in (
        ("policy", policy, get_args(LayoutPolicy)),
        ("reduction", reduction, get_args(Reduction)),
    ):
        if choice not in known:
            raise LayoutError(f"{name} must be one of {', '.join(known)}, got {choice!r}")
    seen = set()
    for spec in specs:
        if spec.name in seen:
            raise LayoutError(
                f"{spec.name} is there twice among {len(specs)} parameters; names must differ"
            )
        if world_size % spec.ep_size:
            raise LayoutError(
                f"{spec.name} has ep_size {spec.ep_size}, which {world_size} ranks cannot share "
                "evenly"
            )
        seen.add(spec.name)


def _assemble(drafts: list[Draft]) -> tuple[Bucket, ...]:
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
            draft.shard_numels,
            slots,
            item.ep_size,
            draft.way,
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
        if sum(item.numel for item in bucket) >= bucket_numel:
            drafts.append(draft_owned(bucket, owners, world_size, shard))
            bucket = []
            owners = []
            shard = 0
    if bucket:
        drafts.append(draft_owned(bucket, owners, world_size, shard))
    return drafts


# --- balanced: owners over the whole model, and the best transport for the shards of each bucket


def _balance(
    streams: Mapping[_Stream, list[Item]],
    world_size: int,
    bucket_numel: int,
    limit: int,
    send: Callable[[list[Draft]], tuple[list[Draft], int]],
) -> list[Draft]:
    """Return buckets of whole parameters, with or without rows, whichever ``send`` makes faster.

    Args:
        limit: the largest number of elements in a row; 0 for no rows.
    """
    cut = {stream: cut_stream(items, bucket_numel) for stream, items in streams.items()}
    owners = choose_owners(list(chain.from_iterable(cut.values())), world_size)
    plain, plain_ns = send(_draft_streams(cut, owners, world_size))
    if not limit:
        return plain
    drafts = []
    by_holders: dict[int, list[list[Item]]] = defaultdict(list)
    left: dict[int, int] = {}
    for stream, items in streams.items():
        holders = world_size // stream.ep_size
        if holders == 1:
            continue
        rows = take_rows(items, owners, holders, bucket_numel=bucket_numel, limit=limit)
        drafts += rows.drafts(holders)
        cut[stream] = cut_stream(rows.rest, bucket_numel)
        by_holders[holders] += cut[stream]
        left.update(rows.owners)
    if not drafts:
        return plain
    for holders, buckets in by_holders.items():
        left.update(spread(buckets, left, holders))
    drafts += _draft_streams(cut, {**owners, **left}, world_size)
    in_rows, in_rows_ns = send(drafts)
    if 100 * in_rows_ns <= (100 - _MUST_GAIN) * plain_ns:
        return in_rows
    return plain


def _draft_streams(
    cut: Mapping[_Stream, list[list[Item]]], owners: Mapping[int, int], world_size: int
) -> list[Draft]:
    drafts = []
    for stream, buckets in cut.items():
        holders = world_size // stream.ep_size
        for bucket in buckets:
            ranks = [owners[item.position] for item in bucket]
            drafts.append(draft_owned(bucket, ranks, holders))
    return drafts


def _send(
    drafts: list[Draft], *, links: Links, reduction: Reduction, stage: int, alignment: int
) -> tuple[list[Draft], int]:
    """Return ``drafts`` with their transports, padded if they travel in cuts, and their
    time in ns.
    """
    loads = [Load.of_draft(draft, reduction, stage) for draft in drafts]
    ways = choose_ways(loads, links, reduction, alignment)
    for index, (load, way) in enumerate(zip(loads, ways, strict=True)):
        drafts[index] = replace(drafts[index], way=way)
        padding = padded_for_cuts(load.numel, load.holders, alignment) - load.numel
        if way == "cuts" and padding:
            drafts[index] = drafts[index].with_longer_last(padding)
            loads[index] = Load.of_draft(drafts[index], reduction, stage)
    return drafts, wire_time(loads, ways, links, reduction).total
