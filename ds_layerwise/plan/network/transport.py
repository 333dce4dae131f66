"""The transports of buckets, and the times of a step's collectives, with the model of the links.

Note: the three transports and their costs
    ``even``, directly to owners with equal shards, costs the same as ZeRO-1's collectives.
    ``ragged``, directly to owners with shards of any length, costs more for a longer longest shard
    and for a longer chain of ranks. In equal ``cuts``, a bucket costs the same as with even shards,
    plus its part of the step's one exchange. In this exchange every rank sends the sums of its cuts
    to their owners, in the dtype :func:`.reduction.sum_dtype`, and later gets back updated
    parameters.

Note: rings in two levels
    A ring through all ranks moves the fewest bytes, but its latency is that of a message that
    passes each of them: 8 ms for 4,096 ranks on 512 nodes. A ring inside each node and one through
    the ranks with the same place in each node are together much shorter, and move as many bytes
    again inside the nodes. The backend uses two levels where that takes less time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from ds_layerwise.errors import LayoutError
from ds_layerwise.optimizers.base.dtypes import DTYPE_BYTES
from ds_layerwise.plan.layout.draft_buckets import Draft
from ds_layerwise.plan.layout.layout import Bucket, Way
from ds_layerwise.plan.layout.shards import Shards, in_own_cuts
from ds_layerwise.plan.network.links import Group, Links, group_of
from ds_layerwise.plan.network.reduction import SUM_BYTES, Reduction, sum_dtype

_T = TypeVar("_T")

#: The number of buckets, or rounds of an exchange, that are pending at a time. It bounds the memory
#: for sent and received data.
MAX_PENDING = 2


class Levels(NamedTuple):
    """The time of a collective inside nodes, and then between them, nanoseconds."""

    inside: int
    between: int


class InLevels(NamedTuple):
    """The indices of the buckets whose rings have two levels; see the note."""

    reduce: frozenset[int] = frozenset()
    gather: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Load:
    """The sizes that the time of a bucket depends on."""

    numel: int
    shards: Shards
    holders: int
    ep_size: int
    wire_bytes: int
    """The bytes of one element of a gradient on the wire."""
    param_bytes: int
    sum_bytes: int = SUM_BYTES
    """The bytes of a sum on the wire from a cut to its owner."""

    @classmethod
    def of_draft(cls, draft: Draft, reduction: Reduction = "ordered", stage: int = 1) -> Load:
        """Return the load of a bucket without a place in a layout yet."""
        item = draft.items[0]
        widths = _widths(item.wire, item.dtype, reduction, stage)
        shards = draft.shards
        return cls(shards.numel, shards, len(draft.shard_numels), item.ep_size, *widths)

    @classmethod
    def of_bucket(
        cls, bucket: Bucket, wire: str, reduction: Reduction = "ordered", stage: int = 1
    ) -> Load:
        """Return the load of a bucket in a layout, whose gradients are sent in the dtype
        ``wire``.
        """
        widths = _widths(wire, bucket.dtype, reduction, stage)
        return cls(bucket.numel, bucket.shards, bucket.holders, bucket.ep_size, *widths)

    @property
    def longest(self) -> int:
        """The number of elements of the longest shard."""
        if self.shards.is_even:
            return self.shards.shortest
        return max(self.shards.lengths)

    @property
    def spread(self) -> int:
        """The number of ranks of the group from the first with a shard to the last."""
        if self.shards.filled:
            return self.shards.filled[-1] - self.shards.filled[0]
        return 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers that determine the time of its reduction and its gather, with any
        transport.
        """
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


def _widths(wire: str, dtype: str, reduction: Reduction, stage: int) -> tuple[int, int, int]:
    return itemsize(wire), itemsize(dtype), itemsize(sum_dtype(wire, reduction, stage))


def itemsize(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        LayoutError: the dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"the size of {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def padded_for_cuts(numel: int, holders: int, alignment: int) -> int:
    """Return ``numel`` with the padding that makes all cuts equal and multiples of
    ``alignment``.
    """
    return numel + -numel % (holders * alignment)


# --- one bucket


def reduce_ns(load: Load, way: Way, numel: int, group: Group, reduction: Reduction) -> int:
    """Return the time from the gradients of all ranks to sums at the owners, or in cuts, for a
    bucket of ``numel`` elements.
    """
    if way != "ragged":
        return sum(reduce_levels(load, numel, group, reduction))
    if reduction == "native":
        return _ragged_ring(load, load.wire_bytes, group)
    moved = _ragged_all_to_all(load, load.wire_bytes, numel, group)
    return moved + group.added_up(
        load.longest * group.size * load.wire_bytes, load.longest * SUM_BYTES
    )


def reduce_levels(load: Load, numel: int, group: Group, reduction: Reduction) -> Levels:
    """Return the time of reducing equal shards or cuts, by level. For a ring, all time is in the
    second level.
    """
    if reduction == "ordered":
        return ordered_levels(numel, load.wire_bytes, group)
    return _ring(numel * load.wire_bytes, group)


def reduce_all_ns(
    loads: Iterable[Load], ways: Iterable[Way], links: Links, reduction: Reduction
) -> int:
    """Return the time from the gradients of all ranks to sums at the owners, or in cuts, for
    buckets that start in this order.
    """
    # The end of the first level of the latest bucket, and the end of all levels of the pending
    # ones.
    first = 0
    over = deque([0] * MAX_PENDING)

    @_once
    def levels(load: Load, way: Way) -> tuple[int, int]:
        group = _group(load, links)
        if way == "ragged":
            return reduce_ns(load, way, load.numel, group, reduction), 0
        inside, between = reduce_levels(load, load.numel, group, reduction)
        # Nothing overlaps, or there is only the second level.
        if links.on_host or not inside:
            return inside + between, 0
        return inside, between

    for load, way in zip(loads, ways, strict=True):
        took, beside = levels(load, way)
        first = max(first, over.popleft()) + took
        over.append(max(first, over[-1]) + beside if beside else first)
    return max(over)


def ordered_levels(numel: int, wire_bytes: int, group: Group) -> Levels:
    """Return the time of reducing equal shards or cuts in rank order, inside nodes and between
    them. A node's sum is sent in the dtype of the gradients.
    """
    if group.nodes == 1:
        return Levels(_added_up(numel, wire_bytes, SUM_BYTES, group), 0)
    return Levels(
        _added_up(numel, wire_bytes, wire_bytes, group.inner),
        _added_up(numel / group.local, wire_bytes, SUM_BYTES, group.outer),
    )


def _added_up(numel: float, itemsize: int, sum_bytes: int, group: Group) -> int:
    moved = group.all_to_all(numel * itemsize * (group.size - 1) / group.size)
    return moved + group.added_up(numel * itemsize, numel / group.size * sum_bytes)


def gather_ns(load: Load, way: Way, numel: int, group: Group) -> int:
    """Return the time from updated parameters at the owners, or in cuts, to all ranks, for a bucket
    of ``numel`` elements.
    """
    nbytes = numel * load.param_bytes
    if way == "ragged":
        if not group.links.on_host:
            return _ragged_ring(load, load.param_bytes, group)
        return _ragged_all_to_all(load, load.param_bytes, numel, group)
    return sum(gather_levels(nbytes, group) if group.links.on_host else _ring(nbytes, group))


def gather_levels(nbytes: float, group: Group) -> Levels:
    """Return the time of an all-gather of equal parts between nodes first, then inside each."""
    return Levels(group.inner.ring(nbytes), group.outer.ring(nbytes / group.local))


def ring_levels(nbytes: float, group: Group) -> Levels:
    """Return the time of a reduce-scatter or an all-gather of equal parts as a ring inside each
    node and one between nodes.

    In memory the parts are in rank order. They are sorted by their places in a node, which reads
    and writes all of them.
    """
    return Levels(
        group.inner.ring(nbytes) + group.inner.added_up(nbytes, nbytes),
        group.outer.ring(nbytes / group.local),
    )


def takes_levels(nbytes: float, group: Group) -> bool:
    """Tell whether the two rings of :func:`ring_levels` take less time than one through all
    ranks.
    """
    return group.has_levels and sum(ring_levels(nbytes, group)) < group.ring(nbytes)


def _ring(nbytes: float, group: Group) -> Levels:
    """Return the time of a ring through all ranks, or of :func:`ring_levels` if that is less."""
    if takes_levels(nbytes, group):
        return ring_levels(nbytes, group)
    return Levels(0, group.ring(nbytes))


def _ragged_all_to_all(load: Load, itemsize: int, numel: int, group: Group) -> int:
    # The busiest rank receives, or sends, most: its shard from or to every rank.
    most = max(load.longest * (group.size - 1), numel) * itemsize
    return group.all_to_all(most, numel * itemsize * (group.size - 1) / group.size)


def _ragged_ring(load: Load, itemsize: int, group: Group) -> int:
    return group.ragged_ring(
        load.numel * itemsize,
        longest=load.longest * itemsize,
        num_shards=len(load.shards.filled),
        spread=load.spread,
    )


def _once(of: Callable[[Load, Way], _T]) -> Callable[[Load, Way], _T]:
    """Call ``of`` once for all loads with the same sizes and transport: there may be 50,000 of
    them.
    """
    known = {}

    def looked_up(load: Load, way: Way) -> _T:
        key = load.sizes, way
        if key not in known:
            known[key] = of(load, way)
        return known[key]

    return looked_up


# --- all buckets


class Exchange(NamedTuple):
    """The times to move sums from cuts to owners, and updated parameters back, nanoseconds."""

    sums: int
    params: int


def exchange(loads: Iterable[Load], group: Group) -> Exchange:
    """Return the time of one exchange for all of ``loads``, which travel in cuts within ``group``.

    The elements of a shard in its owner's own cut stay there. The busiest rank is the one that
    receives, or sends, most. The latency of all rounds but one is not counted, see
    :mod:`.plan.network.transfer_plan`; for DeepSeek-V3 in buckets of 50 M on 512 ranks that is 10
    ms of 4.8 s.
    """
    loads = list(loads)
    cuts = [-(-load.numel // group.size) for load in loads]
    counts, filled, lengths, stays = in_own_cuts([load.shards for load in loads], cuts)
    received = np.zeros((2, group.size), np.int64)
    sent = np.zeros_like(received)
    widths = np.array([(load.sum_bytes, load.param_bytes) for load in loads], np.int64).T
    for row, nbytes in enumerate(widths):
        of_each = np.repeat(nbytes, counts)
        np.add.at(received[row], filled, (lengths - stays) * of_each)
        sent[row] = nbytes @ cuts
        np.subtract.at(sent[row], filled, stays * of_each)
    if not sent.any():
        return Exchange(0, 0)
    most = np.maximum(received, sent).max(axis=1).tolist()
    mean = [total / group.size for total in received.sum(axis=1).tolist()]
    return Exchange(*map(group.all_to_all, most, mean))


def choose_ways(
    loads: Sequence[Load], links: Links, reduction: Reduction, alignment: int
) -> list[Way]:
    """Return the transport of each of ``loads`` that makes the collectives of a step fastest.

    Buckets with equal shards are ``even``. Of the others, a bucket travels in cuts if that pays
    when there is an exchange anyway, provided that all such buckets together make up for the
    exchange. If sums in rank order are made inside nodes first, all others travel in cuts: ragged
    shards are summed in one level, so the transport would change the order of additions.
    """
    ways: list[Way] = ["even" if load.shards.is_even else "ragged" for load in loads]
    gains: dict[int, dict[int, int]] = defaultdict(dict)

    @_once
    def gain(load: Load, way: Way) -> int:
        """Return the gain of cuts, without their part of an exchange that happens anyway.

        It is 0 if the gain is less than the time of that part.
        """
        group = _group(load, links)
        straight = sum(_both_ns(load, way, load.numel, group, reduction))
        numel = padded_for_cuts(load.numel, load.holders, alignment)
        cut = sum(_both_ns(load, "cuts", numel, group, reduction))
        moved = load.numel / load.holders * (load.holders - 1) / load.holders
        part = group.all_to_all(moved * load.sum_bytes) + group.all_to_all(moved * load.param_bytes)
        part -= 2 * group.all_to_all(0)
        if cut + part < straight:
            return straight - cut
        return 0

    for index, load in enumerate(loads):
        if ways[index] == "even":
            continue
        if reduction == "ordered" and _group(load, links).has_levels:
            ways[index] = "cuts"
        elif gained := gain(load, ways[index]):
            gains[load.ep_size][index] = gained
    for gained_by in gains.values():
        cut_loads = [loads[index] for index in gained_by]
        if sum(gained_by.values()) > sum(exchange(cut_loads, _group(cut_loads[0], links))):
            for index in gained_by:
                ways[index] = "cuts"
    return ways


class WireTime(NamedTuple):
    """The times of a step's collectives, one after another, nanoseconds."""

    reduce: int
    """All reductions, without the exchange."""
    sums: int
    """The exchange of sums from cuts to owners."""
    params: int
    """The exchange of updated parameters from owners to cuts."""
    gather: int
    """All gathers, without the exchange."""
    last: int
    """The last reduction, which does not overlap with the backward pass."""

    @property
    def total(self) -> int:
        """The time of all collectives of a step."""
        return self.reduce + self.sums + self.params + self.gather

    @property
    def tail(self) -> int:
        """The least time that the sums take after the last gradient."""
        return self.last + self.sums


def wire_time(
    loads: Sequence[Load], ways: Sequence[Way], links: Links, reduction: Reduction, stage: int = 1
) -> WireTime:
    """Return the times of a step for ``loads`` with these transports. The last load is reduced
    last.

    At ZeRO stage 3 DeepSpeed gathers every parameter twice, for one forward and one backward pass,
    from cuts, and owners send all whole parameters to cuts.
    """
    gather = last = 0
    in_cuts = defaultdict(list)
    from_owners = defaultdict(list)

    @_once
    def both(load: Load, way: Way) -> tuple[int, int]:
        return _both_ns(load, way, load.numel, _group(load, links), reduction)

    for load, way in zip(loads, ways, strict=True):
        last, gathered = both(load, way)
        gather += gathered
        if way == "cuts":
            in_cuts[load.ep_size].append(load)
        if stage == 3 and way != "by_param":
            from_owners[load.ep_size].append(load)
    sums = params = 0
    for cut in in_cuts.values():
        moved = exchange(cut, _group(cut[0], links))
        sums += moved.sums
        params += moved.params
    if stage == 3:
        fetched = [gather_ns(load, "cuts", load.numel, _group(load, links)) for load in loads]
        gather = 2 * sum(fetched)
        params = 0
        for whole in from_owners.values():
            params += _to_cuts_ns(whole, _group(whole[0], links))
    reduce = reduce_all_ns(loads, ways, links, reduction)
    return WireTime(reduce, sums, params, gather, last)


def _to_cuts_ns(loads: Iterable[Load], group: Group) -> int:
    """Return the time in which owners send every rank its cut of each whole parameter, at ZeRO
    stage 3.
    """
    sent = np.zeros(group.size)
    for load in loads:
        lengths = np.fromiter(load.shards.lengths, np.float64, len(load.shards.filled))
        np.add.at(sent, np.array(load.shards.filled, np.int64), lengths * load.param_bytes)
    sent *= (group.size - 1) / group.size
    return group.all_to_all(sent.max(), sent.mean())


def _group(load: Load, links: Links) -> Group:
    return group_of(load.holders, links, load.ep_size)


def _both_ns(
    load: Load, way: Way, numel: int, group: Group, reduction: Reduction
) -> tuple[int, int]:
    reduced = reduce_ns(load, way, numel, group, reduction)
    return reduced, gather_ns(load, way, numel, group)


def time_of_drafts(
    drafts: Iterable[Draft], links: Links, reduction: Reduction, stage: int
) -> WireTime:
    """Return the times of a step for ``drafts``; see :func:`wire_time`."""
    drafts = sorted(drafts, key=lambda draft: draft.position)
    return wire_time(
        [Load.of_draft(draft, reduction, stage) for draft in drafts],
        [draft.way for draft in drafts],
        links,
        reduction,
        stage,
    )


def in_levels(
    buckets: Iterable[Bucket], wires: Sequence[str], links: Links, reduction: Reduction
) -> InLevels:
    """Return which of ``buckets`` the backend reduces, and which it gathers, as rings in two
    levels.

    ``ordered`` sums, and gathers over gloo, have two levels whenever several nodes have several
    ranks.

    Args:
        wires: the dtype in which gradients are sent, by bucket.
    """
    reduce = set()
    gather = set()
    for bucket in buckets:
        if bucket.way == "ragged":
            continue
        group = group_of(bucket.holders, links, bucket.ep_size)
        sent = bucket.numel * itemsize(wires[bucket.index])
        if reduction == "native" and takes_levels(sent, group):
            reduce.add(bucket.index)
        if not links.on_host and takes_levels(bucket.numel * itemsize(bucket.dtype), group):
            gather.add(bucket.index)
    return InLevels(frozenset(reduce), frozenset(gather))
