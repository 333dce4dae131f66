"""The exchange between equal cuts of buckets and the owners of the parameters in them, in the
rounds of :mod:`.plan.network.exchange_rounds`.
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
from ds_layerwise.plan.network.transport import MAX_PENDING
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.bucket_transfers import Wire


class Run(NamedTuple):
    """A part of a cut."""

    bucket: int
    first: int
    numel: int

    def of(self, cuts: Mapping[int, Tensor]) -> Tensor:
        """Return this part of this rank's ``cuts`` by bucket: a view, or the whole cut itself."""
        cut = cuts[self.bucket]
        if self.numel == cut.numel():
            return cut
        return cut[self.first : self.first + self.numel]


@dataclass(frozen=True)
class Round:
    """An all-to-all of an :class:`Exchange`, from the view of one rank."""

    ep_size: int
    dtype: str
    """The layout's name of the dtype that is sent."""
    own: int | None
    """The bucket whose shard on this rank takes part; None if no more does."""
    by_holder: Sequence[int]
    """The number of elements of this rank's shard of ``own`` to exchange with the cut of each rank
    of the group.
    """
    by_owner: Sequence[int]
    """The number of elements of this rank's cuts to exchange with each rank of the group."""
    runs: Sequence[Run]
    """The parts of this rank's cuts to exchange, by owner."""
    stay: Run | None
    """The part of this rank's shard that is in its own cut and stays; see the note."""
    parts: tuple[int, int, int]
    """The number of elements of this rank's shard before the part that stays, in it, and
    after it.
    """
    buckets: frozenset[int]
    """The buckets of which a shard of any rank takes part."""

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
    """Return the rounds for those of ``buckets`` that travel in cuts, in the given order.

    Args:
        rank: the rank in the layout.
        dtype_of: returns the layout's name of the dtype in which a bucket is sent; by default that
            of its parameters.
    """
    found = []
    for dealt in deal(buckets, dtype_of):
        found.append(_as_seen(dealt, rank // dealt.ep_size))
    return found


def _in_cut(shard: Shard, number: int) -> tuple[int, int]:
    """Return the offset of a shard in a cut of its bucket, and the number of its elements there."""
    cut = shard.bucket.cut_numel
    first = max(shard.start, number * cut)
    return first - number * cut, min(shard.stop, (number + 1) * cut) - first


def _as_seen(dealt: Deal, holder: int) -> Round:
    """Return a round from the view of the rank with the cuts number ``holder``."""
    holders = dealt.shards[0].bucket.holders
    by_holder = [0] * holders
    by_owner = [0] * holders
    runs = {}
    own = None
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
    """Moves the contents of this rank's cuts to their owners, and back.

    Args:
        buckets: of the layout, in the order in which they take part.
        rank: the rank in the layout.
        wires: the wires by ep_size.
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
            cuts: this rank's cuts by bucket, 1-D; may share memory with the same place in a shard.
            shard: returns this rank's shard of a bucket, 1-D, which is overwritten, or added to
                with ``add``. Its dtype is that of ``cuts``, or one that holds it exactly.
        """
        pending: deque[comm.Pending] = deque()
        for round_ in self.rounds:
            pending.append(self._send_to_owners(round_, cuts, shard, add))
            if len(pending) == MAX_PENDING:
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
        new = []
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
            shard: this rank's shard of bucket ``round_.own``, 1-D; empty if it has none.
            cuts: this rank's cuts by bucket, 1-D, of the same dtype; may share memory with the same
                place in ``shard``.
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
    """Return ``parts`` concatenated."""
    return torch.cat(parts)


def unpack(packed: Tensor, places: list[Tensor]) -> None:
    """Undo :func:`pack`: copy ``packed`` into ``places``."""
    if places:
        torch._foreach_copy_(places, packed.split_with_sizes([place.numel() for place in places]))
