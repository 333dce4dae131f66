"""Transfers between the cuts that all ranks hold and the owners of whole parameters, in the rounds
of :mod:`.plan.layout.transfer_plan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_layerwise.plan.layout.transfer_plan import Round, Stretch
from ds_layerwise.plan.layout.transport import MAX_PENDING
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, lay_in_rows, out_of_rows

#: Returns this rank's cut of an item, 1-D.
CutOf = Callable[[int], Tensor]

#: Takes the number of a parameter, the cuts of all ranks in rows, and its place in a shard.
Take = Callable[[int, Tensor, Tensor], None]


def _copy_in(_: int, rows: Tensor, place: Tensor) -> None:
    out_of_rows(rows, place)


class Transfer:
    """Moves the contents of this rank's cuts to their owners, and back.

    Args:
        rounds: the rounds of all ranks, from the view of this one.
        group_of: returns the ranks that take part in a round, by its ep_size.
        device: the device of all memory at owners.
    """

    def __init__(
        self,
        rounds: Sequence[Round],
        group_of: Callable[[int], comm.Group],
        device: torch.device,
    ) -> None:
        self.rounds = rounds
        self._group_of = group_of
        # A rank without a shard, or without a part of one, sends and receives nothing of a dtype.
        self._nothing = {
            dtype: torch.empty(0, dtype=torch_dtype, device=device)
            for dtype, torch_dtype in DTYPES.items()
        }

    def all_to_owners(self, cut_of: CutOf, shard: CutOf, *, add: bool = False) -> None:
        """Send all cuts to their owners, and wait. Every rank of the groups must call this.

        Args:
            cut_of: returns this rank's cut of a bucket, which may share memory with the same place
                in a shard.
            shard: returns this rank's shard of a bucket, 1-D, which is overwritten, or added to
                with ``add``. Its dtype is that of the cuts, or one that holds it exactly.
        """
        pending: deque[comm.Pending] = deque()
        for round_ in self.rounds:
            own = None if round_.own is None else shard(round_.own)
            pending.append(self.to_owners(round_, cut_of, own, add=add))
            if len(pending) == MAX_PENDING:
                pending.popleft().wait()
        for transfer in pending:
            transfer.wait()

    def to_owners(
        self,
        round_: Round,
        cut_of: CutOf,
        shard: Tensor | None,
        *,
        add: bool = False,
        take: Take = _copy_in,
    ) -> comm.Pending:
        """Begin one round: the cuts of all ranks into every owner's ``shard``; see
        :meth:`all_to_owners`.

        Args:
            shard: this rank's shard of bucket ``round_.own``; None if it has none.
            take: called for each parameter that is cut by itself, in place of a copy into
                ``shard``.
        """
        nothing = self._nothing[round_.deal.dtype]
        own = nothing if shard is None else shard
        runs = _parts(round_.runs, cut_of)
        packed = pack([nothing, *(run.to(nothing.device) for run in runs)])
        before, stays, behind = _split(round_, own)
        new: list[tuple[Tensor, Tensor]] = []
        is_in_place = not (add or round_.deal.by_param) and own.dtype == nothing.dtype
        if is_in_place and not (before.numel() and behind.numel()):
            received = before if before.numel() else behind
        else:
            received = nothing.new_empty(sum(round_.by_holder))
            if not round_.deal.by_param:
                first, rest = received.split_with_sizes([before.numel(), behind.numel()])
                new += [(before, first), (behind, rest)]
        work = comm.all_to_all(
            received,
            packed,
            group=self._group_of(round_.deal.ep_size),
            received=round_.by_holder,
            sent_to=round_.by_owner,
        )
        if round_.stay is not None:
            new += [(stays, part) for part in _parts([round_.stay], cut_of)]

        def into_place() -> None:
            for place, value in new:
                if add:
                    place.add_(value)
                elif place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            for part, value, rows in _rows(round_, own, received):
                take(part.item, rows, value)

        return comm.Pending([work], into_place, keep=packed)

    def to_cuts(self, round_: Round, shard: Tensor | None, cut_of: CutOf) -> comm.Pending:
        """Begin one round of the way back: every owner's shard into the cuts of all ranks.

        Args:
            shard: this rank's shard of bucket ``round_.own``, 1-D; None if it has none.
            cut_of: returns this rank's cut of an item, of the same dtype; may share memory with the
                same place in ``shard``.
        """
        nothing = self._nothing[round_.deal.dtype]
        own = nothing if shard is None else shard
        before, stays, behind = _split(round_, own)
        if round_.deal.by_param:
            sent = own.new_zeros(sum(round_.by_holder))
            for _, value, rows in _rows(round_, own, sent):
                lay_in_rows(value, rows)
        elif before.numel() and behind.numel():
            sent = pack([before, behind])
        else:
            sent = before if before.numel() else behind
        packed = nothing.new_empty(sum(round_.by_owner))
        work = comm.all_to_all(
            packed,
            sent,
            group=self._group_of(round_.deal.ep_size),
            received=round_.by_owner,
            sent_to=round_.by_holder,
        )

        def into_place() -> None:
            unpack(packed, _parts(round_.runs, cut_of))
            if round_.stay is not None:
                (stay,) = _parts([round_.stay], cut_of)
                if stay.data_ptr() != stays.data_ptr():
                    stay.copy_(stays)

        return comm.Pending([work], into_place, keep=sent)


def _split(round_: Round, shard: Tensor) -> tuple[Tensor, ...]:
    """Return the elements of ``shard`` before the part that stays, in it, and after it; none if its
    parameters are cut by themselves.
    """
    if round_.deal.by_param:
        shard = shard[:0]
    return shard.split_with_sizes(round_.parts)


def _parts(runs: Sequence[Stretch], cut_of: CutOf) -> list[Tensor]:
    """Return ``runs`` of this rank's cuts: views, or whole cuts."""
    parts = []
    for run in runs:
        cut = cut_of(run.item)
        if run.numel != cut.numel():
            cut = cut[run.first : run.first + run.numel]
        parts.append(cut)
    return parts


def _rows(round_: Round, shard: Tensor, moved: Tensor) -> list[tuple[Stretch, Tensor, Tensor]]:
    """Return the parameters of ``shard`` that are cut by themselves, each with its cuts in
    ``moved``, a row for each rank.
    """
    found = []
    first = 0
    for row in round_.rows:
        value = shard[row.first : row.first + row.numel]
        by_rank = moved.view(len(round_.by_holder), -1)
        found.append((row, value, by_rank[:, first : first + row.cut]))
        first += row.cut
    return found


def pack(parts: list[Tensor]) -> Tensor:
    """Return ``parts`` concatenated."""
    return torch.cat(parts)


def unpack(packed: Tensor, places: list[Tensor]) -> None:
    """Undo :func:`pack`: copy ``packed`` into ``places``."""
    if places:
        torch._foreach_copy_(places, packed.split_with_sizes([place.numel() for place in places]))
