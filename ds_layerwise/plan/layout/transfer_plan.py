"""The plan of a transfer between owners, which hold whole shards, and cuts, of which every rank
holds one of each item: the ranges that move, in rounds.

Note: rounds
    An owner has shards in several buckets. It takes part in each round with the next of them. So
    the elements of a cut bucket that arrive from all ranks, in rank order, are that shard as it
    lies in memory. Owners are balanced over the model, and so is a round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ds_layerwise.plan.layout.layout import Bucket, Ints

#: The rows of a :class:`Placement`.
Rows = list[tuple[int, int, int, int, int, int]]


class Placement(NamedTuple):
    """The ranges that owners hold, a row each, sorted by owner."""

    item: Ints
    """The index of the bucket, or the number of the parameter; see :func:`param_names`."""
    owner: Ints
    start: Ints
    """The first element of the range in the item."""
    numel: Ints
    offset: Ints
    """The offset of the range in the shard of its owner."""
    cut: Ints
    """The length of each of the equal cuts of the item, one a rank."""

    def of(self, owner: int) -> Placement:
        """Return the ranges of ``owner``."""
        return Placement(*(column[self.owner == owner] for column in self))


class Moves(NamedTuple):
    """The ranges that an owner and a cut share, a row each, sorted by owner and rank."""

    owner: Ints
    holder: Ints
    numel: Ints
    before: Ints
    """The number of elements of the owner's range before it."""
    first: Ints
    """The offset in the cut of its holder."""
    item: Ints


class Stretch(NamedTuple):
    """A part of a cut or of a shard."""

    item: int
    first: int
    numel: int
    cut: int = 0
    """The length of each rank's cut of a parameter that is cut by itself."""


class Deal(NamedTuple):
    """A round of all ranks, with at most one shard of each owner."""

    ep_size: int
    dtype: str
    """The layout's name of the dtype that is sent, or MXFP8, in which nothing goes to owners."""
    holders: int
    """The number of ranks that take part."""
    bucket_of: Mapping[int, int]
    """The bucket of the shard of each owner."""
    buckets: frozenset[int]
    placement: Placement
    by_param: bool
    """True if each parameter of a shard is cut by itself, false if the bucket is cut."""
    in_mxfp8: bool
    """See :attr:`.Bucket.in_mxfp8`."""

    def row_sizes(self) -> Ints:
        """Return the number of elements that each owner sends every rank, by owner."""
        return _sums(self.placement.owner, self.placement.cut, self.holders)

    def seen_by(self, holder: int) -> Round:
        """Return the round from the view of the rank with the cuts number ``holder``."""
        index = self.bucket_of.get(holder)
        own = self.placement.of(holder)
        if self.by_param:
            by_owner = self.row_sizes()
            by_holder = np.full(self.holders, by_owner[holder])
            item, *_, cut = self.placement
            runs = _parts(item, np.zeros_like(item), cut)
            rows = _parts(own.item, own.offset, own.numel, own.cut)
            return Round(self, index, by_holder.tolist(), by_owner.tolist(), runs, rows=rows)
        sent = moves(own)
        held = moves(self.placement, only=holder)
        by_owner = _sums(held.owner, held.numel, self.holders)
        by_holder = _sums(sent.holder, sent.numel, self.holders)
        runs = _parts(held.item, held.first, held.numel)
        at_home = sent.holder == holder
        before = int(sent.before[at_home].sum())
        stays = int(sent.numel[at_home].sum())
        behind = int(sent.numel.sum()) - before - stays
        stay: list[Stretch] = []
        if not stays or (before and behind and stays < before + behind):
            # If elements lie on both sides and fewer stay than travel, those travel, too, so that
            # all arrive in one piece; they count as elements before the cut.
            before += stays + behind
            stays = behind = 0
        if stays:
            stay.append(runs.pop(held.owner.tolist().index(holder)))
            by_holder[holder] = by_owner[holder] = 0
        parts = (before, stays, behind)
        return Round(self, index, by_holder.tolist(), by_owner.tolist(), runs, parts, stay)


class Round(NamedTuple):
    """An all-to-all of a transfer, from the view of one rank."""

    deal: Deal
    own: int | None
    """The bucket whose shard on this rank takes part; None if no more does."""
    by_holder: list[int]
    """The number of elements of this rank's shard to exchange with the cuts of each rank."""
    by_owner: list[int]
    """The number of elements of this rank's cuts to exchange with each rank."""
    runs: Sequence[Stretch]
    """The parts of this rank's cuts to exchange, by owner."""
    parts: tuple[int, int, int] = (0, 0, 0)
    """The number of elements of this rank's shard before the part that stays in this rank's own
    cut, in that part, and after it.
    """
    stay: Sequence[Stretch] = ()
    """The part that stays, if any does, in the cut."""
    rows: Sequence[Stretch] = ()
    """The parameters of this rank's shard, if they are cut by themselves."""


def moves(placement: Placement, *, only: int | None = None) -> Moves:
    """Return what moves between shards and cuts.

    Args:
        only: the one rank whose cuts count; None for all ranks.
    """
    item, owner, start, numel, _, cut = placement
    first = start // cut
    last = (start + numel - 1) // cut
    if only is not None:
        first = np.maximum(first, only)
        last = np.minimum(last, only)
    counts = np.maximum(last - first + 1, 0)
    row = np.repeat(np.arange(len(item)), counts)
    holder = np.arange(len(row)) + (first - np.cumsum(counts) + counts)[row]
    begin = np.maximum(start[row], holder * cut[row])
    end = np.minimum((start + numel)[row], (holder + 1) * cut[row])
    return Moves(
        owner[row], holder, end - begin, begin - start[row], begin - holder * cut[row], item[row]
    )


def _sums(place: Ints, numel: Ints, size: int) -> Ints:
    """Return the sums of ``numel`` by ``place``."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, place, numel)
    return sums


def _parts(*columns: Ints) -> list[Stretch]:
    return list(map(Stretch, *(column.tolist() for column in columns)))


def param_names(buckets: Iterable[Bucket]) -> list[str]:
    """Return the names of parameters in the order of their numbers in a :class:`Placement`."""
    names: list[str] = []
    for bucket in sorted(buckets, key=attrgetter("index")):
        names += [slot.name for slot in bucket.slots]
    return names


def deal(
    buckets: Iterable[Bucket],
    dtype_of: Callable[[Bucket], str] = attrgetter("dtype"),
    *,
    by_param: bool = False,
) -> list[Deal]:
    """Return the rounds for those of ``buckets`` that travel in cuts, in the given order.

    Args:
        dtype_of: returns the layout's name of the dtype in which a bucket is sent; by default that
            of its parameters.
        by_param: True for the rounds of all buckets of whole parameters to the cuts of parameters
            that ZeRO stage 3 keeps.
    """
    buckets = list(buckets)
    numbers = {name: number for number, name in enumerate(param_names(buckets))}
    kinds = defaultdict(list)
    for bucket in buckets:
        if bucket.whole if by_param else bucket.transport == "cuts":
            kinds[bucket.ep_size, dtype_of(bucket)].append(bucket)
    deals = []
    for (ep_size, dtype), same in kinds.items():
        rounds: dict[int, dict[int, tuple[int, Rows]]] = defaultdict(dict)
        turn: dict[int, int] = defaultdict(int)
        for bucket in same:
            for owner, start, numel in bucket.filled():
                first = start - bucket.start
                rows: Rows = [(bucket.index, owner, first, numel, 0, bucket.cut_numel)]
                if by_param:
                    rows = _param_rows(bucket, owner, start, numbers)
                rounds[turn[owner]][owner] = bucket.index, rows
                turn[owner] += 1
        for shards in rounds.values():
            table: Rows = []
            for owner in sorted(shards):
                table += shards[owner][1]
            placement = Placement(*np.array(table, np.int64).reshape(-1, len(Placement._fields)).T)
            bucket_of = {owner: index for owner, (index, _) in shards.items()}
            deals.append(
                Deal(
                    ep_size,
                    dtype,
                    same[0].holders,
                    bucket_of,
                    frozenset(bucket_of.values()),
                    placement,
                    by_param,
                    same[0].in_mxfp8,
                )
            )
    return deals


def _param_rows(bucket: Bucket, owner: int, start: int, numbers: Mapping[str, int]) -> Rows:
    """Return the rows of a placement for the parameters in the shard that starts at ``start``."""
    rows: Rows = []
    for piece in bucket.pieces(owner * bucket.ep_size):
        cut = -(-piece.numel // bucket.holders)
        rows.append((numbers[piece.name], owner, 0, piece.numel, piece.start - start, cut))
    return rows


def completed(deals: Sequence[Deal]) -> list[list[int]]:
    """Return the buckets of which each round has the last shard, last bucket first."""
    last: dict[int, int] = {}
    for number, dealt in enumerate(deals):
        last.update(dict.fromkeys(dealt.buckets, number))
    found: list[list[int]] = [[] for _ in deals]
    for index in sorted(last, reverse=True):
        found[last[index]].append(index)
    return found


def begun_backwards(buckets: Sequence[Bucket], *, by_param: bool = False) -> list[Deal]:
    """Return the rounds in which parameters go back, in the order in which they begin: after all of
    their buckets are updated.

    Args:
        buckets: the buckets of a layout; the last is updated first.
        by_param: as in :func:`deal`.
    """
    rounds = deal(reversed(buckets), partial(Bucket.sent_as, by_param=by_param), by_param=by_param)
    return sorted(rounds, key=lambda dealt: min(dealt.buckets), reverse=True)


def seen_by(rank: int, deals: Iterable[Deal]) -> list[Round]:
    """Return the rounds of ``deals`` from the view of a rank of the layout."""
    return [dealt.seen_by(rank // dealt.ep_size) for dealt in deals]
