"""The way between equal cuts of buckets and the owners of what is in them, in the rounds of
:mod:`.plan.network.exchange_rounds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.network.exchange_rounds import Deal, deal
from ds_layerwise.plan.network.transport import MAX_UNDER_WAY
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.bucket_transfers import Wire


class Run(NamedTuple):
    """A part of a cut."""

    bucket: int
    first: int
    numel: int

    def of(self, cuts: Mapping[int, Tensor]) -> Tensor:
        """The elements meant, of this rank's ``cuts`` by bucket: a view, or where they are all of a
        cut, the cut.
        """
        cut = cuts[self.bucket]
        return cut if self.numel == cut.numel() else cut[self.first : self.first + self.numel]


@dataclass(frozen=True, slots=True)
class Round:
    """One all-to-all of an :class:`Exchange`, as one rank sees it."""

    ep_size: int
    dtype: str
    """The layout's name for the dtype of what travels."""
    own: int | None
    """The bucket of which this rank's shard takes part; None where it has no more."""
    by_holder: tuple[int, ...]
    """By rank of the group, how many elements of this rank's shard of ``own`` travel between its
    cut and here.
    """
    by_owner: tuple[int, ...]
    """By rank of the group, how many elements of the shard that it takes part with travel between
    here and there.
    """
    runs: tuple[Run, ...]
    """What of this rank's cuts travels, by owner."""
    stay: Run | None
    """What of this rank's shard stays in its own cut; see the note."""
    parts: tuple[int, int, int]
    """Of this rank's shard, the elements before what stays, those that stay, and those behind."""
    buckets: frozenset[int]
    """Every bucket of which anybody's shard takes part."""

    @property
    def held(self) -> tuple[Run, ...]:
        """What of this rank's cuts takes part."""
        return self.runs if self.stay is None else (*self.runs, self.stay)


def rounds_of(
    buckets: Iterable[Bucket],
    rank: int,
    dtype_of: Callable[[Bucket], str] = lambda bucket: bucket.dtype,
) -> list[Round]:
    """The rounds for those of ``buckets`` that travel in cuts, which take part in the order given.

    Args:
        rank: of the layout.
        dtype_of: the layout's name for what travels of a bucket; that of parameters.
    """
    return [_as_seen(each, rank // each.ep_size) for each in deal(buckets, dtype_of)]


def _as_seen(each: Deal, holder: int) -> Round:
    holders = each.shards[0].bucket.holders
    by_holder, by_owner = [0] * holders, [0] * holders
    runs: dict[int, Run] = {}
    own: int | None = None
    parts = (0, 0, 0)
    for shard in each.shards:
        cut = shard.bucket.cut_numel
        first, last = max(shard.start, holder * cut), min(shard.stop, (holder + 1) * cut)
        if first < last:
            runs[shard.owner] = Run(shard.bucket.index, first - holder * cut, last - first)
            by_owner[shard.owner] = last - first
        if shard.owner == holder:
            own, parts = shard.bucket.index, shard.split_by_cut()
            for other in range(shard.start // cut, -(-shard.stop // cut)):
                by_holder[other] = min(shard.stop, (other + 1) * cut) - max(
                    shard.start, other * cut
                )
    stay = runs.pop(holder) if parts[1] else None
    if stay is not None:
        by_holder[holder] = by_owner[holder] = 0
    return Round(
        each.ep_size,
        each.dtype,
        own,
        tuple(by_holder),
        tuple(by_owner),
        tuple(run for _, run in sorted(runs.items())),
        stay,
        parts,
        frozenset(shard.bucket.index for shard in each.shards),
    )


class Exchange:
    """Moves what is in this rank's cuts to its owners, and back.

    Args:
        buckets: of the layout, in the order in which they take part.
        rank: of the layout.
        wires: by ep_size.
        dtype_of: as in :func:`rounds_of`.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        rank: int,
        wires: Mapping[int, Wire],
        dtype_of: Callable[[Bucket], str] = lambda bucket: bucket.dtype,
    ) -> None:
        self.rounds = rounds_of(buckets, rank, dtype_of)
        self._wires = wires

    def to_owners(
        self, cuts: Mapping[int, Tensor], shard: Callable[[int], Tensor], *, add: bool = False
    ) -> None:
        """Send ``cuts`` to their owners, and wait. Every rank of the groups must call this.

        Args:
            cuts: by bucket, this rank's cut, 1-D; may share memory with the same place in a shard.
            shard: of a bucket, this rank's, 1-D: overwritten, or added to with ``add``; of the
                dtype of ``cuts``, or of one that holds it exactly.
        """
        under_way: deque[comm.Pending] = deque()
        for each in self.rounds:
            under_way.append(self._send_to_owners(each, cuts, shard, add))
            if len(under_way) == MAX_UNDER_WAY:
                under_way.popleft().wait()
        for pending in under_way:
            pending.wait()

    def _send_to_owners(
        self, each: Round, cuts: Mapping[int, Tensor], shard: Callable[[int], Tensor], add: bool
    ) -> comm.Pending:
        like = cuts[min(each.buckets)]
        packed = pack([like[:0], *(run.of(cuts) for run in each.runs)])
        own = like.new_empty(0) if each.own is None else shard(each.own)
        before, stays, behind = own.split_with_sizes(each.parts)
        in_place = not add and own.dtype == like.dtype and not (before.numel() and behind.numel())
        out = (
            (before if before.numel() else behind)
            if in_place
            else like.new_empty(before.numel() + behind.numel())
        )
        work = comm.all_to_all(
            out,
            packed,
            group=self._wires[each.ep_size].group,
            received=each.by_holder,
            sent_to=each.by_owner,
        )

        def into_place() -> None:
            new = (
                []
                if in_place
                else [(before, out[: before.numel()]), (behind, out[before.numel() :])]
            )
            if each.stay is not None:
                new.append((stays, each.stay.of(cuts)))
            for place, value in new:
                if add:
                    place.add_(value)
                elif place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        return comm.Pending([work], into_place, keep=packed)

    def to_cuts(self, each: Round, shard: Tensor, cuts: Mapping[int, Tensor]) -> comm.Pending:
        """Begin one round of the way back: every owner's shard into the cuts of all ranks.

        Args:
            shard: this rank's of bucket ``each.own``, 1-D; empty where it has none.
            cuts: by bucket, 1-D, of the same dtype; may share memory with the same place in
                ``shard``.
        """
        before, stays, behind = shard.split_with_sizes(each.parts)
        sent = (
            before
            if not behind.numel()
            else behind
            if not before.numel()
            else pack([before, behind])
        )
        packed = shard.new_empty(sum(each.by_owner))
        work = comm.all_to_all(
            packed,
            sent,
            group=self._wires[each.ep_size].group,
            received=each.by_owner,
            sent_to=each.by_holder,
        )

        def into_place() -> None:
            unpack(packed, [run.of(cuts) for run in each.runs])
            if (
                each.stay is not None
                and (kept := each.stay.of(cuts)).data_ptr() != stays.data_ptr()
            ):
                kept.copy_(stays)

        return comm.Pending([work], into_place, keep=sent)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` back to back."""
    return torch.cat(list(parts))


def unpack(packed: Tensor, places: Sequence[Tensor]) -> None:
    """Undo :func:`pack`, into ``places``."""
    if places:
        torch._foreach_copy_(
            list(places), packed.split_with_sizes([place.numel() for place in places])
        )
