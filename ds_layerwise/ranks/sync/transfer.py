"""Transfers between the cuts that all ranks hold and the owners of whole parameters, in the rounds
of :mod:`.plan.layout.transfer_plan`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.mxfp8 import MXFP8, decode_, encode, encoded_bytes, rounded
from ds_layerwise.plan.layout.transfer_plan import Deal, Round, Stretch, completed, seen_by
from ds_layerwise.plan.layout.transport import MAX_PENDING
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.streams import SideStream
from ds_layerwise.ranks.owned.buffers import DTYPES, lay_in_rows, out_of_rows

#: Returns this rank's cut of an item, or its shard of a bucket, 1-D.
Memory = Callable[[int], Tensor]

#: Takes the number of a parameter, the cuts of all ranks in rows, and its place in a shard.
Take = Callable[[int, Tensor, Tensor], None]


def _copy_in(_: int, rows: Tensor, place: Tensor) -> None:
    out_of_rows(rows, place)


def _go_on(_: Sequence[int]) -> None:
    """Do nothing."""


class Transfer:
    """Moves the contents of this rank's cuts to their owners, and back.

    Note: cuts in host memory
        What has arrived on a device is copied to them on a stream of its own, beside the next
        update. Before another round takes memory of the device, the computation waits for the copy,
        so that no more rounds have memory than with cuts on the device. The host waits once, in
        :meth:`finish`; where cuts are not page-locked, for each copy.

    Args:
        rank: the number of this rank in the layout.
        deals: the rounds of all ranks.
        group_of: returns the ranks that take part in a round, by its ep_size.
        cut_of: returns this rank's cut of an item, which may share memory with the same place in a
            shard.
        shard_of: returns this rank's shard of a bucket. Its dtype is that of the cuts, or one that
            holds it exactly and is rounded to it on the way to cuts of parameters. Asked for when
            its round begins.
        device: the device of all memory at owners.
        then: called with the buckets of which a round has the last shard: on the way to owners when
            no cut of theirs is read any more, on the way back when all of it has arrived. It is
            called again if it fails on the way back.
    """

    def __init__(
        self,
        rank: int,
        deals: Sequence[Deal],
        *,
        group_of: Callable[[int], comm.Group],
        cut_of: Memory,
        shard_of: Memory,
        device: torch.device,
        then: Callable[[Sequence[int]], None] = _go_on,
    ) -> None:
        self.rounds = seen_by(rank, deals)
        self._completed = completed(deals)
        self._group_of = group_of
        self._cut_of = cut_of
        self._shard_of = shard_of
        self._then = then
        self._outgoing: SideStream | None = None
        """The stream of copies to the host, if there were any."""
        self._leaving = comm.Pending()
        """The latest of these copies."""
        # A rank without a shard, or without a part of one, sends and receives nothing of a dtype.
        self._nothing = {
            dtype: torch.empty(0, dtype=torch_dtype, device=device)
            for dtype, torch_dtype in {**DTYPES, MXFP8: torch.bfloat16}.items()
        }
        self.restart()

    # --- to owners

    def all_to_owners(
        self,
        *,
        add: bool = False,
        take: Take = _copy_in,
        only: Collection[int] | None = None,
        pending: int = MAX_PENDING,
    ) -> None:
        """Send all cuts to their owners, and wait. Every rank of the groups must call this.

        Args:
            add: True to add them to the shards, False to overwrite these.
            take: called for each parameter that is cut by itself, in place of a copy into its
                shard.
            only: the buckets whose rounds take place; None for all.
            pending: the number of rounds that may be pending at a time.
        """
        begun: deque[comm.Pending] = deque()
        for round_, indices in zip(self.rounds, self._completed, strict=True):
            if only is None or not round_.deal.buckets.isdisjoint(only):
                begun.append(self.to_owners(round_, add=add, take=take))
                self._then(indices)
            if len(begun) == pending:
                begun.popleft().wait()
        for transfer in begun:
            transfer.wait()

    def to_owners(self, round_: Round, *, add: bool = False, take: Take = _copy_in) -> comm.Pending:
        """Begin one round: the cuts of all ranks into every owner's shard; see
        :meth:`all_to_owners`.
        """
        nothing = self._nothing[round_.deal.dtype]
        own = self._own(round_)
        runs = _parts(round_.runs, self._cut_of)
        packed = torch.cat([nothing, *(run.to(nothing.device) for run in runs)])
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

        def put(place: Tensor, value: Tensor) -> None:
            if add:
                place.add_(value)
            elif place.data_ptr() != value.data_ptr():
                place.copy_(value)

        # At once, so that nothing reads a cut any more.
        for stay in _parts(round_.stay, self._cut_of):
            put(stays, stay)

        def into_place() -> None:
            for place, value in new:
                put(place, value)
            for part, value, rows in _rows(round_, own, received):
                take(part.item, rows, value)

        return comm.Pending([work], into_place, keep=packed)

    def _own(self, round_: Round) -> Tensor:
        """Return this rank's shard that takes part, empty if there is none."""
        if round_.own is None:
            return self._nothing[round_.deal.dtype]
        return self._shard_of(round_.own)

    # --- to cuts

    def restart(self) -> None:
        """Forget what was launched. An interrupted update may have launched only some buckets of a
        round.
        """
        self.launched: set[int] = set()
        self._pending: deque[comm.Pending] = deque()
        self._begun = 0

    def launch(self, index: int) -> None:
        """Begin the rounds of which bucket ``index`` is the last that was missing, in one order on
        all ranks.

        At most :data:`~ds_layerwise.plan.layout.transport.MAX_PENDING` rounds are pending at a
        time, and none after the last. If it runs out of memory, it can be called again, and
        continues from there.
        """
        if self._begun == len(self.rounds) and not self._pending:
            self.restart()
        self.launched.add(index)
        self._end(but=1)
        while self._begun < len(self.rounds):
            round_ = self.rounds[self._begun]
            if not round_.deal.buckets <= self.launched:
                return
            self._pending.append(self.to_cuts(round_))
            self._begun += 1
            self._end(but=1)
        self._end(but=0)

    def finish(self) -> None:
        """Wait for all pending rounds. Cuts in host memory may be read on the host then."""
        self._end(but=0)
        self._leaving.wait()
        if self._outgoing is not None:
            self._outgoing.synchronize()
        self.restart()

    def _end(self, *, but: int) -> None:
        """End the pending rounds, except the latest ``but``."""
        while len(self._pending) > but:
            self._pending[0].wait()
            self._then(self._completed[self._begun - len(self._pending)])
            self._pending.popleft()

    def to_cuts(self, round_: Round) -> comm.Pending:
        """Begin one round of the way back: every owner's shard into the cuts of all ranks."""
        self._leaving.wait()
        nothing = self._nothing[round_.deal.dtype]
        own = self._own(round_)
        if round_.deal.in_mxfp8 and own.dtype == torch.float32:
            own = rounded(own)
        before, stays, behind = _split(round_, own)
        in_mxfp8 = round_.deal.dtype == MXFP8
        if round_.deal.by_param:
            sent = nothing.new_zeros(sum(round_.by_holder))
            for _, value, rows in _rows(round_, own, sent):
                lay_in_rows(value, rows)
        elif before.numel() and behind.numel():
            sent = torch.cat([before, behind])
        else:
            sent = before if before.numel() else behind
        packed = nothing.new_empty(sum(round_.by_owner))
        arrived = packed
        received = round_.by_owner
        sent_to = round_.by_holder
        if in_mxfp8:
            # All parts are whole groups.
            received = list(map(encoded_bytes, received))
            sent_to = list(map(encoded_bytes, sent_to))
            sent = encode(sent)
            arrived = sent.new_empty(sum(received))
        work = comm.all_to_all(
            arrived,
            sent,
            group=self._group_of(round_.deal.ep_size),
            received=received,
            sent_to=sent_to,
        )

        def into_place() -> None:
            if in_mxfp8:
                decode_(packed, arrived)
            cuts = _parts(round_.runs, self._cut_of)
            if not _on_host(cuts, beside=packed):
                unpack(packed, cuts)
            else:
                self._leaving.wait()
                self._outgoing = self._outgoing or SideStream()
                self._outgoing.follow()
                with self._outgoing:
                    unpack(packed, cuts)
                self._leaving = comm.Pending([self._outgoing.moment()], keep=packed)
            for stay in _parts(round_.stay, self._cut_of):
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


def _parts(runs: Sequence[Stretch], cut_of: Memory) -> list[Tensor]:
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


def _on_host(cuts: Sequence[Tensor], *, beside: Tensor) -> bool:
    """Tell whether any of ``cuts`` is in host memory, and ``beside`` is not."""
    return any(cut.device != beside.device for cut in cuts)


def unpack(packed: Tensor, places: list[Tensor]) -> None:
    """Copy the parts of ``packed`` into ``places``. For page-locked ones the host does not wait."""
    if places:
        parts = packed.split_with_sizes([place.numel() for place in places])
        torch._foreach_copy_(places, parts, non_blocking=True)
