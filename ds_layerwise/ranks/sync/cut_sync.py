"""The transfer of updated parameters from owners to the cuts that ZeRO stage 3 keeps on all ranks,
and of written cuts back to the owners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_layerwise.errors import StepError, few
from ds_layerwise.plan.layout.layout import Layout
from ds_layerwise.plan.network.exchange_rounds import Deal, Shard, begun_backwards, has_owners
from ds_layerwise.plan.network.transport import MAX_PENDING
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.owned.buffers import OwnShards, lay_in_rows, out_of_rows
from ds_layerwise.ranks.owned.weight_writes import WeightWrites, check_same, differs


class Place(NamedTuple):
    """The place of a parameter in the shard of its owner."""

    name: str
    start: int
    """The offset of its first element in the shard."""
    numel: int
    cut: int
    """The number of elements in each rank's cut of the parameter."""


class CutRound(NamedTuple):
    """An all-to-all, in which each owner sends all ranks their cuts of one of its shards."""

    buckets: frozenset[int]
    """The buckets whose shards take part."""
    own: int | None
    """The bucket of this rank's shard; None if none takes part."""
    places: Mapping[int, tuple[Place, ...]]
    """The parameters that take part, by owner, in rank order."""

    def sizes(self, holders: int) -> list[int]:
        """Return the number of elements that each owner sends a rank, by owner."""
        sizes = [0] * holders
        for owner, places in self.places.items():
            sizes[owner] = sum(place.cut for place in places)
        return sizes


def _places(shard: Shard) -> tuple[Place, ...]:
    bucket = shard.bucket
    found = []
    for piece in bucket.pieces(shard.owner * bucket.ep_size):
        start = piece.start - bucket.start - shard.start
        found.append(Place(piece.name, start, piece.numel, -(-piece.numel // bucket.holders)))
    return tuple(found)


def rounds_of(layout: Layout, rank: int) -> list[CutRound]:
    """Return the rounds for all buckets of whole parameters, in the order in which they begin."""

    def seen(dealt: Deal) -> CutRound:
        by_owner = {shard.owner: shard for shard in dealt.shards}
        own = by_owner.get(rank)
        return CutRound(
            frozenset(shard.bucket.index for shard in dealt.shards),
            None if own is None else own.bucket.index,
            {owner: _places(by_owner[owner]) for owner in sorted(by_owner)},
        )

    return [seen(dealt) for dealt in begun_backwards(layout.buckets, has_owners)]


class Cuts(Protocol):
    """This rank's cuts of parameters. Modules gather the whole parameters while they use them."""

    def of(self, name: str) -> Tensor:
        """Return the cut of a parameter, 1-D."""

    def release(self) -> None:
        """Release all parameters, so that none is whole."""

    def fetch_persistent(self) -> None:
        """Gather the parameters that stay whole, once the model has run. A collective."""

    def persistent(self) -> Mapping[str, Tensor]:
        """Return those that stay whole, and are, by name."""

    def written(self) -> Tensor:
        """Tell whether a signal shows that somebody has written a cut, or what stays whole, since
        :meth:`take_note`: 0-d bool; nobody waits for the device.
        """

    def take_note(self) -> None:
        """Let cuts count as not written."""

    def follow_persistent(self) -> None:
        """Copy writes into parameters that stay whole to their cuts."""


class CutSync:
    """Sends the parameters that owners have updated to every rank's cuts, in rounds.

    A round begins when its last bucket is launched, in one order on all ranks. At most
    :data:`~ds_layerwise.plan.network.transport.MAX_PENDING` rounds are pending at a time.
    Parameters that are split by element are not sent: their cuts are the shards.

    Args:
        values: this rank's shards.
        cuts: see :class:`Cuts`.
        group: the ranks that have the cuts.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        values: OwnShards,
        cuts: Cuts,
        *,
        group: comm.Group,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._values = values
        self._all_cuts = cuts
        self._group = group
        self._holders = comm.size_of(group)
        self._rounds = rounds_of(layout, rank)
        self._pending: deque[comm.Pending] = deque()
        self._start()

    def _start(self) -> None:
        self._launched: set[int] = set()
        self._next = 0

    # --- owners to cuts

    def launch(self, index: int) -> None:
        """Start to send bucket ``index``. Its shards must not be written until :meth:`finish`."""
        if not self._launched:
            # Parameters that are whole now have old values.
            self._all_cuts.release()
        self._launched.add(index)
        while self._next < len(self._rounds):
            round_ = self._rounds[self._next]
            if not round_.buckets <= self._launched:
                return
            while len(self._pending) >= MAX_PENDING:
                self._pending.popleft().wait()
            with profiled("gather"):
                self._pending.append(self._begin(round_))
            self._next += 1

    def _begin(self, round_: CutRound) -> comm.Pending:
        sizes = round_.sizes(self._holders)
        own = sizes[self._rank]
        like = self._shard(round_)
        rows = like.new_zeros((self._holders, own))
        first = 0
        for place in round_.places.get(self._rank, ()):
            value = like[place.start : place.start + place.numel]
            lay_in_rows(value, rows[:, first : first + place.cut])
            first += place.cut
        received = like.new_empty(sum(sizes))
        work = comm.all_to_all(
            received,
            rows.view(-1),
            group=self._group,
            received=sizes,
            sent_to=[own] * self._holders,
        )

        def into_place() -> None:
            cuts = self._cuts(round_)
            parts = received.split_with_sizes([cut.numel() for cut in cuts])
            torch._foreach_copy_(cuts, list(parts))

        return comm.Pending([work], into_place, keep=rows)

    def _shard(self, round_: CutRound) -> Tensor:
        """Return this rank's shard that takes part; an empty tensor of its dtype if there
        is none.
        """
        if round_.own is None:
            return self._values.tensors[min(round_.buckets)][:0]
        return self._values.tensors[round_.own]

    def _cuts(self, round_: CutRound) -> list[Tensor]:
        """Return this rank's cuts that take part, by owner."""
        cuts = []
        for places in round_.places.values():
            cuts += [self._all_cuts.of(place.name) for place in places]
        return cuts

    def send(self, indices: Iterable[int]) -> None:
        """Send the buckets ``indices``, in this order, and wait until nothing is pending."""
        for index in indices:
            self.launch(index)
        self.finish()

    def finish(self) -> None:
        """Wait for all pending rounds, and make persistent parameters whole."""
        if self._launched:
            self._wait()
            self._all_cuts.fetch_persistent()

    def _wait(self) -> None:
        while self._pending:
            self._pending.popleft().wait()
        # An interrupted update may have launched only some buckets of a round.
        self._start()
        self._all_cuts.take_note()

    def leave_pending(self) -> None:
        """Wait: DeepSpeed may fetch any cut from here on."""
        self.finish()

    def remove_hooks(self) -> None:
        """Do nothing: this class has no hooks."""

    # --- cuts to owners

    def written(self) -> Tensor:
        """See :meth:`Cuts.written`."""
        return self._all_cuts.written()

    def fetch(self, indices: Collection[int] | None = None) -> None:
        """Let the shards of owners follow the cuts of the buckets ``indices``; None for all. Every
        rank must call this at the same point.
        """
        for round_ in self._rounds:
            if indices is None or not round_.buckets.isdisjoint(indices):
                self._ask(round_, self._copy_in).wait()
        if indices is None:
            self._all_cuts.take_note()

    def follow_writes(self, indices: Collection[int] | None = None) -> None:
        """Let owners have what somebody has written into the cuts of the buckets ``indices``, None
        for all, since they were sent. Every rank must call this at the same point.
        """
        if indices is not None:
            # To send a few is cheaper than to look for writes.
            self._all_cuts.follow_persistent()
            self.fetch(indices)
        elif comm.sum_over_ranks(self.written().float(), group=self._group):
            self.take_over()

    def take_over(self) -> None:
        """Do what :meth:`follow_writes` does where something was written on any rank.

        Raises:
            StepError: ranks have written different values into what stays whole.
        """
        check_same(self._all_cuts.persistent(), {}, self._group)
        self._all_cuts.follow_persistent()
        self.fetch()

    def search(self) -> None:
        """Compare all cuts with the values that their owners have. Every rank must call this at the
        same point.

        Raises:
            StepError: on every rank, if a cut has other values, or ranks have different values of
                what stays whole.
        """
        check_same(self._all_cuts.persistent(), {}, self._group)
        lost = []

        def compare(name: str, own: Tensor, rows: Tensor) -> None:
            value = torch.empty_like(own)
            out_of_rows(rows, value)
            if differs(value, own).any():
                lost.append(name)

        for round_ in self._rounds:
            self._ask(round_, compare).wait()
        everywhere = comm.gather_objects(lost, group=self._group)
        if names := sorted(chain(*everywhere)):
            raise StepError(
                f"{few(names)} was written into the cuts of ZeRO stage 3 in a way that shows "
                "nowhere, and would be lost; call engine.optimizer.reload_weights() on all ranks "
                "after such a write, or write under deepspeed.zero.GatheredParameters with a "
                "modifier_rank"
            )

    def _ask(self, round_: CutRound, take: Callable[[str, Tensor, Tensor], None]) -> comm.Pending:
        """Start to send the cuts of a round to their owners.

        Args:
            take: called on the owner for each parameter, with its name, its place in the shard, and
                the cuts of all ranks in rows.
        """
        sizes = round_.sizes(self._holders)
        own = sizes[self._rank]
        shard = self._shard(round_)
        sent = torch.cat([shard[:0], *(cut.to(shard.device) for cut in self._cuts(round_))])
        rows = shard.new_empty((self._holders, own))
        work = comm.all_to_all(
            rows.view(-1),
            sent,
            group=self._group,
            received=[own] * self._holders,
            sent_to=sizes,
        )

        def arrived() -> None:
            first = 0
            for place in round_.places.get(self._rank, ()):
                value = shard[place.start : place.start + place.numel]
                take(place.name, value, rows[:, first : first + place.cut])
                first += place.cut

        return comm.Pending([work], arrived, keep=sent)

    @staticmethod
    def _copy_in(_: str, value: Tensor, rows: Tensor) -> None:
        out_of_rows(rows, value)


class CutWrites(WeightWrites):
    """The writes of scripts into cuts between two steps, which owners must follow."""

    def __init__(self, cut_sync: CutSync, *, group: comm.Group) -> None:
        super().__init__({}, {}, group=group)
        self._cut_sync = cut_sync

    def noticed(self, followed: Tensor) -> Tensor:
        """Return flags to be summed over all ranks, as :meth:`.WeightWrites.noticed` does."""
        return torch.stack([followed, self._cut_sync.written()]).float()

    def check(self) -> None:
        """Let owners have what was written; their masters follow in the update.

        Raises:
            StepError: see :meth:`CutSync.take_over`.
        """
        self._cut_sync.take_over()

    def search(self) -> None:
        """See :meth:`CutSync.search`."""
        self._cut_sync.search()

    def take_over(self) -> None:
        """See :meth:`CutSync.take_over`."""
        self._cut_sync.take_over()
