"""Which way a bucket travels, and what a step's collectives take: chosen, and predicted, by the
model of the links.

Note: the three ways, and what they cost
    Straight to owners with equal shards, ``even``, costs what ZeRO-1's collectives do. Straight to
    owners with shards of any length, ``ragged``, costs more the longer the longest is, or the chain
    of ranks. In equal ``cuts`` a bucket costs the same as even shards, and its part of the step's
    one exchange, in which every rank sends the sums of its cuts to their owners, and later gets
    back updated parameters; their dtype is :func:`.reduction.sum_dtype`.

Note: rings in two levels
    A ring through all ranks moves the fewest bytes, and its latency is that of a message that
    passes each of them: 8 ms for 4,096 ranks on 512 nodes. A ring inside each node and one through
    the ranks with the same place in each are together much shorter, and move as much once more
    inside the nodes. So does the backend wherever that takes less.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout.draft_buckets import Draft
from ds_layerwise.plan.layout.layout import Bucket, Way
from ds_layerwise.plan.layout.shards import Shards, in_own_cuts
from ds_layerwise.plan.network.links import Group, Links, group_of
from ds_layerwise.plan.network.reduction import SUM_BYTES, Reduction, sum_dtype
from ds_layerwise.recipes.base.dtypes import DTYPE_BYTES

_T = TypeVar("_T")

#: Buckets, or rounds of an exchange, that travel at a time: it bounds the memory for what is sent
#: and received.
MAX_UNDER_WAY = 2


class Levels(NamedTuple):
    """What a collective takes inside nodes, and between them, nanoseconds. One follows the
    other.
    """

    inside: int
    between: int


class InLevels(NamedTuple):
    """Indices of the buckets whose rings are in two levels; see the note."""

    reduce: frozenset[int] = frozenset()
    gather: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Load:
    """What the time of a bucket depends on."""

    numel: int
    shards: Shards
    holders: int
    ep_size: int
    wire_bytes: int
    """The bytes of one element of a gradient on its way."""
    param_bytes: int
    sum_bytes: int = SUM_BYTES
    """The bytes of a sum on its way from a cut to its owner."""

    @classmethod
    def of_draft(cls, draft: Draft, reduction: Reduction = "ordered", stage: int = 1) -> Load:
        """Make the load of a bucket that has no place in a layout yet."""
        item = draft.items[0]
        return cls(
            draft.shards.numel,
            draft.shards,
            len(draft.shard_numels),
            item.ep_size,
            itemsize(draft.wire),
            itemsize(item.dtype),
            itemsize(sum_dtype(draft.wire, reduction, stage)),
        )

    @classmethod
    def of_bucket(
        cls, bucket: Bucket, wire: str, reduction: Reduction = "ordered", stage: int = 1
    ) -> Load:
        """Make the load of a bucket in a layout, whose gradients travel in the dtype ``wire``."""
        return cls(
            bucket.numel,
            bucket.shards,
            bucket.holders,
            bucket.ep_size,
            itemsize(wire),
            itemsize(bucket.dtype),
            itemsize(sum_dtype(wire, reduction, stage)),
        )

    @property
    def longest(self) -> int:
        """Elements of the longest shard."""
        return self.shards.shortest if self.shards.is_even else max(self.shards.lengths)

    @property
    def spread(self) -> int:
        """Ranks of the group from the first that has a shard to the last."""
        return self.shards.filled[-1] - self.shards.filled[0] if self.shards.filled else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """What decides how long its reduction and its gather take, whichever way it goes."""
        return (
            self.numel,
            self.holders,
            self.ep_size,
            self.wire_bytes,
            self.param_bytes,
            self.sum_bytes,
            self.longest,
            len(self.shards.filled),
            self.spread,
        )


def itemsize(dtype: str) -> int:
    """Bytes of an element.

    Raises:
        LayoutError: they are not known.
    """
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"the size of {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def padded_for_cuts(numel: int, holders: int, alignment: int) -> int:
    """``numel`` with the padding that makes all cuts equal, and multiples of ``alignment``."""
    return numel + -numel % (holders * alignment)


# --- one bucket


def reduce_ns(load: Load, way: Way, numel: int, group: Group, reduction: Reduction) -> int:
    """From the gradients of all ranks to sums at the owners, or in cuts, of a bucket of ``numel``
    elements.
    """
    if way != "ragged":
        return sum(reduce_levels(load, numel, group, reduction))
    if reduction == "native":
        return _ragged_ring(load, load.wire_bytes, group)
    # The busiest rank is the one that receives most: its shard from everybody.
    most = max(load.longest * (group.size - 1), numel) * load.wire_bytes
    return group.all_to_all(
        most, numel * load.wire_bytes * (group.size - 1) / group.size
    ) + group.added_up(load.longest * group.size * load.wire_bytes, load.longest * SUM_BYTES)


def reduce_levels(load: Load, numel: int, group: Group, reduction: Reduction) -> Levels:
    """What the reduction of equal shards or cuts takes at its levels; all of it at the second where
    there is one.
    """
    if reduction == "ordered":
        return ordered_levels(numel, load.wire_bytes, group)
    return _ring(numel * load.wire_bytes, group)


def reduce_all_ns(
    loads: Iterable[Load], ways: Iterable[Way], links: Links, reduction: Reduction
) -> int:
    """From the gradients of all ranks to sums at the owners, or in cuts, of buckets that start in
    this order.
    """
    # When the first level of the latest is over, and all levels of those that are under way.
    first, over = 0, deque([0] * MAX_UNDER_WAY)

    @_once
    def levels(load: Load, way: Way) -> tuple[int, int]:
        group = group_of(load.holders, links, load.ep_size)
        if way == "ragged":
            return reduce_ns(load, way, load.numel, group, reduction), 0
        inside, between = reduce_levels(load, load.numel, group, reduction)
        # Nothing is beside it, or it has the second level alone.
        return (inside + between, 0) if links.on_host or not inside else (inside, between)

    for load, way in zip(loads, ways, strict=True):
        took, beside = levels(load, way)
        first = max(first, over.popleft()) + took
        over.append(max(first, over[-1]) + beside if beside else first)
    return max(over)


def ordered_levels(
    numel: int, wire_bytes: int, group: Group, sum_bytes: int | None = None
) -> Levels:
    """What a reduction of equal shards or cuts takes that adds up in rank order: inside nodes, then
    between them.

    Args:
        sum_bytes: of what a node has added up, on its way to the others; as the gradients travel if
            None.
    """
    sum_bytes = wire_bytes if sum_bytes is None else sum_bytes
    if not group.has_levels:
        took = group.all_to_all(
            numel * wire_bytes * (group.size - 1) / group.size
        ) + group.added_up(numel * wire_bytes, numel / group.size * SUM_BYTES)
        return Levels(took, 0) if group.nodes == 1 else Levels(0, took)
    inner, outer, part = group.inner, group.outer, numel / group.local
    return Levels(
        inner.all_to_all(numel * wire_bytes * (inner.size - 1) / inner.size)
        + inner.added_up(numel * wire_bytes, part * sum_bytes),
        outer.all_to_all(part * sum_bytes * (outer.size - 1) / outer.size)
        + outer.added_up(part * sum_bytes, part / outer.size * SUM_BYTES),
    )


def gather_ns(load: Load, way: Way, numel: int, group: Group) -> int:
    """From updated parameters at the owners, or in cuts, to all ranks, of a bucket of ``numel``
    elements.
    """
    nbytes = numel * load.param_bytes
    if way == "ragged":
        if not group.links.on_host:
            return _ragged_ring(load, load.param_bytes, group)
        most = max(load.longest * (group.size - 1), numel) * load.param_bytes
        return group.all_to_all(most, nbytes * (group.size - 1) / group.size)
    return sum(gather_levels(nbytes, group) if group.links.on_host else _ring(nbytes, group))


def gather_levels(nbytes: float, group: Group) -> Levels:
    """An all-gather of equal parts between nodes first, then inside each."""
    if not group.has_levels:
        return Levels(group.ring(nbytes), 0) if group.nodes == 1 else Levels(0, group.ring(nbytes))
    return Levels(group.inner.ring(nbytes), group.outer.ring(nbytes / group.local))


def ring_levels(nbytes: float, group: Group) -> Levels:
    """A reduce-scatter or an all-gather of equal parts as a ring inside each node and one between
    nodes.

    In memory the parts are in rank order: they are sorted by the places in a node, which reads and
    writes all of them.
    """
    return Levels(
        group.inner.ring(nbytes) + group.inner.added_up(nbytes, nbytes),
        group.outer.ring(nbytes / group.local),
    )


def takes_levels(nbytes: float, group: Group) -> bool:
    """Whether the two of :func:`ring_levels`, one after the other, take less than one ring through
    all ranks.
    """
    return group.has_levels and sum(ring_levels(nbytes, group)) < group.ring(nbytes)


def _ring(nbytes: float, group: Group) -> Levels:
    """A ring through all ranks, or the two of :func:`ring_levels`, whichever takes less."""
    return (
        ring_levels(nbytes, group) if takes_levels(nbytes, group) else Levels(0, group.ring(nbytes))
    )


def _ragged_ring(load: Load, itemsize: int, group: Group) -> int:
    return group.ragged_ring(
        load.numel * itemsize,
        longest=load.longest * itemsize,
        num_shards=len(load.shards.filled),
        spread=load.spread,
    )


def _once(of: Callable[[Load, Way], _T]) -> Callable[[Load, Way], _T]:
    """``of``, called once for all loads of the same sizes that go the same way: there may be 50,000
    of them.
    """
    known: dict[tuple[tuple[int, ...], Way], _T] = {}

    def looked_up(load: Load, way: Way) -> _T:
        key = load.sizes, way
        if key not in known:
            known[key] = of(load, way)
        return known[key]

    return looked_up


# --- all buckets


class Exchange(NamedTuple):
    """What moving sums from cuts to owners takes, and updated parameters back, nanoseconds."""

    sums: int
    params: int


def exchange(loads: Iterable[Load], group: Group) -> Exchange:
    """One exchange for all of ``loads``, which travel in cuts within the same ``group``.

    What of a shard lies in its owner's own cut stays there. The busiest rank is the one that
    receives, or sends, most. Not counted: the latency of all rounds but one, see
    :mod:`.plan.network.exchange_rounds`; of DeepSeek-V3 in buckets of 50 M on 512 ranks that is 10
    ms of 4.8 s.
    """
    loads = list(loads)
    cuts = [-(-load.numel // group.size) for load in loads]
    counts, filled, lengths, stays = in_own_cuts([load.shards for load in loads], cuts)
    received: NDArray[np.int64] = np.zeros((2, group.size), np.int64)
    sent = np.zeros_like(received)
    for row, nbytes in enumerate(
        ([load.sum_bytes for load in loads], [load.param_bytes for load in loads])
    ):
        of_each = np.repeat(np.array(nbytes, np.int64), counts)
        np.add.at(received[row], filled, (lengths - stays) * of_each)
        sent[row] = sum(map(mul, cuts, nbytes))
        np.subtract.at(sent[row], filled, stays * of_each)
    if not sent.any():
        return Exchange(0, 0)
    return Exchange(
        *(
            group.all_to_all(int(max(one.max(), other.max())), int(one.sum()) / group.size)
            for one, other in zip(received, sent, strict=True)
        )
    )


def choose_ways(
    loads: Sequence[Load], links: Links, reduction: Reduction, alignment: int
) -> list[Way]:
    """The way of each of ``loads`` that makes the collectives of a step take least.

    Those with equal shards go ``even``. Of the others, those go in cuts for which that pays if an
    exchange is on its way anyhow, provided that all of them together make up for the exchange. All
    of them do where sums in rank order are made inside nodes first: ragged shards are added up all
    at once, so that the way would change what is added to what.
    """
    ways: list[Way] = ["even" if load.shards.is_even else "ragged" for load in loads]
    cuts: Way = "cuts"
    gains: dict[int, dict[int, int]] = defaultdict(dict)

    @_once
    def gain(load: Load, way: Way) -> int:
        """What cuts gain without their part of an exchange that is on its way anyhow; 0 if less
        than that takes.
        """
        group, numel = (
            group_of(load.holders, links, load.ep_size),
            padded_for_cuts(load.numel, load.holders, alignment),
        )
        straight, cut = (
            reduce_ns(load, each, n, group, reduction) + gather_ns(load, each, n, group)
            for each, n in ((way, load.numel), (cuts, numel))
        )
        moved = load.numel / load.holders * (load.holders - 1) / load.holders
        part = sum(
            group.all_to_all(moved * each) - group.all_to_all(0)
            for each in (load.sum_bytes, load.param_bytes)
        )
        return straight - cut if cut + part < straight else 0

    for index, load in enumerate(loads):
        if ways[index] == "even":
            continue
        if reduction == "ordered" and group_of(load.holders, links, load.ep_size).has_levels:
            ways[index] = cuts
        elif gained := gain(load, ways[index]):
            gains[load.ep_size][index] = gained
    for ep_size, of in gains.items():
        group = group_of(loads[next(iter(of))].holders, links, ep_size)
        if sum(of.values()) > sum(exchange((loads[index] for index in of), group)):
            for index in of:
                ways[index] = "cuts"
    return ways


class WireTime(NamedTuple):
    """What the collectives of a step take, nanoseconds, one after another."""

    reduce: int
    """All reductions, without the exchange."""
    sums: int
    """The exchange of sums from cuts to owners."""
    params: int
    """The exchange of updated parameters from owners to cuts."""
    gather: int
    """All gathers, without the exchange."""
    last: int
    """The last of the reductions, which nothing of the backward pass is left to hide."""

    @property
    def total(self) -> int:
        """The time of all collectives of a step."""
        return self.reduce + self.sums + self.params + self.gather

    @property
    def tail(self) -> int:
        """What is left to do for the sums when the last gradient is in, at least."""
        return self.last + self.sums


def wire_time(
    loads: Sequence[Load], ways: Sequence[Way], links: Links, reduction: Reduction
) -> WireTime:
    """What ``loads`` take in a step, of which each goes its way; the last of them is reduced
    last.
    """
    gather = last = 0
    in_cuts: dict[int, list[Load]] = defaultdict(list)

    @_once
    def reduced_and_gathered(load: Load, way: Way) -> tuple[int, int]:
        group = group_of(load.holders, links, load.ep_size)
        return reduce_ns(load, way, load.numel, group, reduction), gather_ns(
            load, way, load.numel, group
        )

    for load, way in zip(loads, ways, strict=True):
        last, gathered = reduced_and_gathered(load, way)
        gather += gathered
        if way == "cuts":
            in_cuts[load.ep_size].append(load)
    moved = [
        exchange(cut, group_of(cut[0].holders, links, ep_size)) for ep_size, cut in in_cuts.items()
    ]
    reduce = reduce_all_ns(loads, ways, links, reduction)
    return WireTime(
        reduce, sum(each.sums for each in moved), sum(each.params for each in moved), gather, last
    )


def time_of_drafts(
    drafts: Iterable[Draft], links: Links, reduction: Reduction, stage: int
) -> WireTime:
    """What ``drafts`` take in a step; see :func:`wire_time`."""
    drafts = sorted(drafts, key=lambda draft: draft.position)
    return wire_time(
        [Load.of_draft(draft, reduction, stage) for draft in drafts],
        [draft.way for draft in drafts],
        links,
        reduction,
    )


def in_levels(
    buckets: Iterable[Bucket], wires: Sequence[str], links: Links, reduction: Reduction
) -> InLevels:
    """Which of ``buckets`` the backend reduces, and gathers, as rings in two levels.

    Sums that are ``ordered``, and what gloo gathers, are in two levels wherever several nodes have
    several ranks.

    Args:
        wires: what gradients travel in, by bucket.
    """
    reduce, gather = set(), set()
    for bucket in buckets:
        group = group_of(bucket.holders, links, bucket.ep_size)
        if bucket.way == "ragged":
            continue
        if reduction == "native" and takes_levels(
            bucket.numel * itemsize(wires[bucket.index]), group
        ):
            reduce.add(bucket.index)
        if not links.on_host and takes_levels(bucket.numel * itemsize(bucket.dtype), group):
            gather.add(bucket.index)
    return InLevels(frozenset(reduce), frozenset(gather))
