"""The exchange between equal cuts of buckets and the owners of what is in them, in the rounds of
:mod:`.plan.network.exchange_rounds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.network.exchange_rounds import Deal, Shard, deal
from ds_layerwise.plan.network.transport import MAX_UNDER_WAY
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.bucket_transfers import Wire


class Run(NamedTuple):
    """A part of a cut."""

    bucket: int
    first: int
    numel: int

    def of(self, cuts: Mapping[int, Tensor]) -> Tensor:
        """Return the elements meant, of this rank's ``cuts`` by bucket: a view, or the whole cut
        itself.
        """
        cut = cuts[self.bucket]
        if self.numel == cut.numel():
            return cut
        return cut[self.first : self.first + self.numel]


@dataclass(frozen=True, slots=True)
class Round:
    """An all-to-all of an :class:`Exchange`, as one rank sees it."""

    ep_size: int
    dtype: str
    """The layout's name for the dtype of what travels."""
    own: int | None
    """The bucket of which this rank's shard takes part; None where it has no more."""
    by_holder: Sequence[int]
    """The elements of this rank's shard of ``own`` that travel between here and the cut of each
    rank of the group.
    """
    by_owner: Sequence[int]
    """The elements of this rank's cuts that travel between here and each rank of the group."""
    runs: Sequence[Run]
    """The parts of this rank's cuts that travel, by owner."""
    stay: Run | None
    """The part of this rank's shard that stays in its own cut; see the note."""
    parts: tuple[int, int, int]
    """The elements of this rank's shard before what stays, those that stay, and those behind."""
    buckets: frozenset[int]
    """The buckets of which anybody's shard takes part."""

    @property
    def held(self) -> Sequence[Run]:
        """The parts of this rank's cuts that take part."""
        if self.stay is None:
            return self.runs
        return (*self.runs, self.stay)


def rounds_of(
    buckets: Iterable[Bucket],
    rank: int,
    dtype_of: Callable[[Bucket], str] = attrgetter("dtype"),
) -> list[Round]:
    """Return the rounds for those of ``buckets`` that travel in cuts, which take part in the order
    given.

    Args:
        rank: of the layout.
        dtype_of: returns the layout's name for what travels of a bucket; that of parameters.
    """
    found = []
    for dealt in deal(buckets, dtype_of):
        found.append(_as_seen(dealt, rank // dealt.ep_size))
    return found


def _in_cut(shard: Shard, number: int) -> tuple[int, int]:
    """Return where a shard begins in a cut of its bucket, and the number of its elements there."""
    cut = shard.bucket.cut_numel
    first = max(shard.start, number * cut)
    return first - number * cut, min(shard.stop, (number + 1) * cut) - first


def _as_seen(dealt: Deal, holder: int) -> Round:
    """Return a round as the rank with the cuts number ``holder`` sees it."""
    holders = dealt.shards[0].bucket.holders
    by_holder = [0] * holders
    by_owner = [0] * holders
    runs: dict[int, Run] = {}
    own: int | None = None
    parts = (0, 0, 0)
    for shard in dealt.shards:
        cut = shard.bucket.cut_numel
        first, numel = _in_cut(shard, holder)
        if numel > 0:
            runs[shard.owner] = Run(shard.bucket.index, first, numel)
            by_owner[shard.owner] = numel
        if shard.owner == holder:
            own = shard.bucket.index
            parts = shard.split_by_cut()
            for number in range(shard.start // cut, -(-shard.stop // cut)):
                by_holder[number] = _in_cut(shard, number)[1]
    stay = runs.pop(holder) if parts[1] else None
    if stay is not None:
        by_holder[holder] = by_owner[holder] = 0
    return Round(
        dealt.ep_size,
        dealt.dtype,
        own,
        tuple(by_holder),
        tuple(by_owner),
        tuple(runs[owner] for owner in sorted(runs)),
        stay,
        parts,
        frozenset(shard.bucket.index for shard in dealt.shards),
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
        dtype_of: Callable[[Bucket], str] = attrgetter("dtype"),
    ) -> None:
        self.rounds = rounds_of(buckets, rank, dtype_of)
        self._wires = wires

    def to_owners(
        self, cuts: Mapping[int, Tensor], shard: Callable[[int], Tensor], *, add: bool = False
    ) -> None:
        """Send ``cuts`` to their owners, and wait. Every rank of the groups must call this.

        Args:
            cuts: by bucket, this rank's cut, 1-D; may share memory with the same place in a shard.
            shard: returns this rank's shard of a bucket, 1-D: overwritten, or added to with
                ``add``; of the dtype of ``cuts``, or of one that holds it exactly.
        """
        pending: deque[comm.Pending] = deque()
        for round_ in self.rounds:
            pending.append(self._send_to_owners(round_, cuts, shard, add))
            if len(pending) == MAX_UNDER_WAY:
                pending.popleft().wait()
        for transfer in pending:
            transfer.wait()

    def _send_to_owners(
        self, round_: Round, cuts: Mapping[int, Tensor], shard: Callable[[int], Tensor], add: bool
    ) -> comm.Pending:
        like = cuts[min(round_.buckets)]
        packed = pack([like[:0], *(run.of(cuts) for run in round_.runs)])
        own = like[:0]
        if round_.own is not None:
            own = shard(round_.own)
        before, stays, behind = own.split_with_sizes(round_.parts)
        new: list[tuple[Tensor, Tensor]] = []
        if add or own.dtype != like.dtype or (before.numel() and behind.numel()):
            out = like.new_empty(before.numel() + behind.numel())
            new += [(before, out[: before.numel()]), (behind, out[before.numel() :])]
        else:
            out = before if before.numel() else behind
        group = self._wires[round_.ep_size].group
        work = comm.all_to_all(
            out, packed, group=group, received=round_.by_holder, sent_to=round_.by_owner
        )
        if round_.stay is not None:
            new.append((stays, round_.stay.of(cuts)))

        def into_place() -> None:
            for place, value in new:
                if add:
                    place.add_(value)
                elif place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        return comm.Pending([work], into_place, keep=packed)

    def to_cuts(self, round_: Round, shard: Tensor, cuts: Mapping[int, Tensor]) -> comm.Pending:
        """Begin one round of the way back: every owner's shard into the cuts of all ranks.

        Args:
            shard: this rank's of bucket ``round_.own``, 1-D; empty where it has none.
            cuts: by bucket, 1-D, of the same dtype; may share memory with the same place in
                ``shard``.
        """
        before, stays, behind = shard.split_with_sizes(round_.parts)
        sent = before if before.numel() else behind
        if before.numel() and behind.numel():
            sent = pack([before, behind])
        packed = shard.new_empty(sum(round_.by_owner))
        group = self._wires[round_.ep_size].group
        work = comm.all_to_all(
            packed, sent, group=group, received=round_.by_owner, sent_to=round_.by_holder
        )

        def into_place() -> None:
            unpack(packed, [run.of(cuts) for run in round_.runs])
            if round_.stay is not None:
                stay = round_.stay.of(cuts)
                if stay.data_ptr() != stays.data_ptr():
                    stay.copy_(stays)

        return comm.Pending([work], into_place, keep=sent)


def pack(parts: list[Tensor]) -> Tensor:
    """Return ``parts`` back to back."""
    return torch.cat(parts)


def unpack(packed: Tensor, places: list[Tensor]) -> None:
    """Undo :func:`pack`, into ``places``."""
    if places:
        torch._foreach_copy_(places, packed.split_with_sizes([place.numel() for place in places]))
