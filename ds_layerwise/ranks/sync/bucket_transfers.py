"""How the ranks of one group send a bucket: what travels between whom, and how sums are made.

Note: two ways to add up
    ``native`` is the backend's reduce-scatter: on NCCL the fewest bytes out of a node; it adds in
    the dtype that travels and in an order of its own. ``ordered`` sends every rank all summands of
    its cut, and the rank adds them in float32, in rank order, so that the sum depends neither on
    the size of a bucket nor on the backend. Where several nodes have several ranks each it goes in
    two levels: first between the ranks of a node, then the sums of nodes, in the order of nodes,
    between the ranks in the same place on each; they travel in the dtype of the gradients, too. So
    a node sends what a hierarchical reduce-scatter does: of two nodes, half of the bucket.
    Gradients of which sums are made, or sent on, in float16 are multiplied by :func:`room_in`
    before: then none overflows that a rank's does not.

Note: the backend in two levels
    Rings through all ranks of many nodes are mostly latency. The buckets of ``rings`` take two:
    ``native`` sums are reduce-scattered inside each node and then between nodes, parameters
    gathered between nodes and then inside each.

Note: where each of gloo's collectives is fast
    gloo's ``reduce_scatter_tensor`` moves as much as its all-reduce, twice as much as an
    all-to-all. Its all-gather is a ring in which two ranks wait for each other: they are 1.5 times
    as fast with an all-to-all of copies, over links of 200 Mbit/s to 1 Gbit/s. From four ranks on
    the ring is the faster one there. torch gives that all-gather new memory for all that arrives,
    and copies it from there. On one node such copies are most of the work: a broadcast from each
    rank, straight to where it belongs, takes 0.3 to 0.4 times as long with 2 to 16 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.network.reduction import ROWS_AT_ONCE, most_partial_sums, partial_sums
from ds_layerwise.plan.network.transport import InLevels
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.ranks.comm.comm import Group, Pending
from ds_layerwise.ranks.comm.scratch import Turn

#: Up to so many ranks of one node gather by broadcasts, which are a launch a rank; see the note on
#: gloo.
_BROADCASTS_UP_TO = 8


@dataclass(slots=True, eq=False)
class Wire:
    """The ranks that share buckets, and how they send.

    Args:
        group: all of them.
        native: how sums are made, see the note.
        on_host: whether what travels lies in host memory, where gloo sends it.
        inside, across: the ranks of this node, and those in this rank's place on every node; both
            None where a node has one rank, or all, or nothing goes in two levels.
        one_node: whether all of them are on one node.
        rings: which buckets the backend reduces, and gathers on a device, in two levels; see the
            note.
    """

    group: Group
    native: bool = False
    on_host: bool = True
    inside: Group = None
    across: Group = None
    one_node: bool = False
    rings: InLevels = InLevels()
    rank: int = field(init=False)
    size: int = field(init=False)
    per_node: int = field(init=False)
    """Ranks of ``inside``; 1 where there is none."""

    def __post_init__(self) -> None:
        self.rank, self.size = comm.rank_of(self.group), comm.size_of(self.group)
        self.per_node = 1 if self.inside is None else comm.size_of(self.inside)

    def connect(self, device: torch.device) -> None:
        """Let each rank send something to every other. Every rank of the group must call this at
        the same point.

        NCCL connects two ranks when one first sends to the other: that takes seconds, and memory,
        and may fail, and would do so in the first backward pass, when memory is fullest.
        """
        for group in (
            self.group,
            *(level for level in (self.inside, self.across) if level is not None),
        ):
            some = torch.zeros(comm.size_of(group), dtype=torch.float32, device=device)
            if len(some) > 1:
                comm.all_to_all(torch.empty_like(some), some, group=group).wait()
                comm.all_gather(torch.empty_like(some), some[:1], group=group).wait()

    def reduce(
        self,
        memory: Tensor,
        bucket: Bucket,
        out: Tensor,
        *,
        divide_by: float,
        wire_dtype: torch.dtype,
        turn: Turn | None = None,
    ) -> Pending:
        """Average ``memory`` over the ranks: each gets its own shard, or its own cut where the
        bucket travels in cuts.

        Args:
            memory: 1-D, the whole of ``bucket``; read until the result has been waited for, and
                perhaps overwritten.
            out: float32, as long as this rank's shard or cut; may be that part of ``memory``. A cut
                may be of ``wire_dtype``, with a ``divide_by`` of 1: then the sum is left multiplied
                by :func:`room_in`.
            divide_by: the sum over ranks is divided by this, in float32.
            wire_dtype: what the elements travel in.
            turn: memory for what travels, which nobody else has until the result has been waited
                for; None for new.
        """
        turn = Turn(memory.device) if turn is None else turn
        if self.size == 1:
            return Pending(finish=lambda: _add_up([memory], out, divide_by))
        room = room_in(wire_dtype, self.size) if self.native or self.inside is not None else 1
        if room != 1:
            memory.mul_(room)
            divide_by = divide_by if out.dtype == wire_dtype else divide_by * room
        if bucket.way == "ragged":
            return self._reduce_ragged(
                turn, memory, tuple(bucket.shard_numels), out, divide_by, wire_dtype
            )
        if self.inside is not None and (not self.native or bucket.index in self.rings.reduce):
            return self._reduce_in_two_levels(turn, memory, out, divide_by, wire_dtype)
        if self.native:
            return self._reduce_natively(
                turn, turn.cast("sent", memory, wire_dtype), out, divide_by, self.group
            )
        return self._reduce_at_owners(
            turn, turn.cast("sent", memory, wire_dtype), None, out, divide_by
        )

    def _reduce_natively(
        self, turn: Turn, sent: Tensor, out: Tensor, divide_by: float, group: Group
    ) -> Pending:
        """The backend's sum over ``group`` of equal parts, in the dtype of ``sent``."""
        received = (
            out if out.dtype == sent.dtype else turn.empty("received", out.numel(), sent.dtype)
        )
        work = comm.reduce_scatter(received, sent, group=group)
        if received is out and divide_by == 1:
            return Pending([work], keep=sent)
        return Pending([work], lambda: _add_up([received], out, divide_by), keep=sent)

    def _reduce_ragged(
        self,
        turn: Turn,
        memory: Tensor,
        shard_numels: tuple[int, ...],
        out: Tensor,
        divide_by: float,
        wire_dtype: torch.dtype,
    ) -> Pending:
        sent = turn.cast("sent", memory, wire_dtype)
        if self.native and not self.on_host:
            received = turn.empty("received", out.numel(), wire_dtype)
            work = comm.reduce_scatter_ragged(
                received, sent.split_with_sizes(shard_numels), group=self.group
            )
            return Pending([work], lambda: _add_up([received], out, divide_by), keep=sent)
        return self._reduce_at_owners(turn, sent, shard_numels, out, divide_by)

    def _reduce_at_owners(
        self, turn: Turn, sent: Tensor, numels: Sequence[int] | None, out: Tensor, divide_by: float
    ) -> Pending:
        """Send every rank all summands of its own, by rank ``numels`` of them; equal parts if
        None.
        """
        own = out.numel()
        if self.size == 2:
            # Only the summands of the other rank travel; this one's are read where they are.
            other, of_other = 1 - self.rank, sent.numel() - own
            both = list(sent.split_with_sizes([own, of_other] if other else [of_other, own]))
            received = turn.empty("received", own, sent.dtype)
            work = comm.all_to_all(
                received,
                both[other],
                group=self.group,
                received=[0, own] if other else [own, 0],
                sent_to=[0, of_other] if other else [of_other, 0],
            )
            both[other] = received
            return Pending([work], lambda: _add_up(both, out, divide_by), keep=sent)
        received = turn.empty("received", self.size * own, sent.dtype)
        rows = turn.empty("received", (self.size, own), sent.dtype)
        spare = self._spare(turn, own * most_partial_sums(self.size))
        work = comm.all_to_all(
            received,
            sent,
            group=self.group,
            received=None if numels is None else [own] * self.size,
            sent_to=numels,
        )
        return Pending([work], lambda: average(rows, out, divide_by, spare), keep=sent)

    def _spare(self, turn: Turn, numel: int) -> Tensor | None:
        """Memory for partial sums, as :func:`average` takes it."""
        return (
            turn.empty("partial sums", numel, torch.float32) if numel and not self.on_host else None
        )

    def _reduce_in_two_levels(
        self, turn: Turn, memory: Tensor, out: Tensor, divide_by: float, wire_dtype: torch.dtype
    ) -> Pending:
        per_node, num_nodes, cut = self.per_node, self.size // self.per_node, out.numel()
        # All memory before the first collective: a rank that finds none between the two cannot
        # begin again.
        sums = turn.empty("sums", num_nodes * cut, wire_dtype if self.native else out.dtype)
        sent = turn.empty("sent", memory.numel(), wire_dtype)
        turn.empty("sent", (per_node, num_nodes, cut), wire_dtype).copy_(
            self._by_place(memory, cut)
        )
        if self.native:
            if out.dtype != wire_dtype:
                turn.empty("received", cut, wire_dtype)
            return Pending(
                [comm.reduce_scatter(sums, sent, group=self.inside)],
                lambda: self._reduce_natively(turn, sums, out, divide_by, self.across),
                keep=sent,
                is_chained=True,
            )
        received = turn.empty("received", memory.numel(), wire_dtype)
        spare = self._spare(turn, cut * most_partial_sums(self.size, per_node=per_node))
        work = comm.all_to_all(received, sent, group=self.inside)

        def between_nodes() -> Pending:
            average(turn.empty("received", (per_node, num_nodes * cut), wire_dtype), sums, 1, spare)
            # What the first level has sent, and received, nobody needs any more.
            rounded = turn.cast("received", sums, wire_dtype)
            arrived = turn.empty("sent", num_nodes * cut, wire_dtype)
            return Pending(
                [comm.all_to_all(arrived, rounded, group=self.across)],
                lambda: average(
                    turn.empty("sent", (num_nodes, cut), wire_dtype), out, divide_by, spare
                ),
                keep=rounded,
            )

        return Pending([work], between_nodes, keep=sent, is_chained=True)

    def _by_place(self, memory: Tensor, cut: int) -> Tensor:
        """1-D ``memory`` as cuts by their place in a node, and then by node: what each rank of a
        node, and those in its place on the other nodes, hold in the end. A view, in one call:
        thousands a step are milliseconds of a host."""
        return memory.as_strided(
            (self.per_node, self.size // self.per_node, cut), (cut, self.per_node * cut, 1)
        )

    def gather(self, memory: Tensor, bucket: Bucket, turn: Turn | None = None) -> Pending:
        """Fill every rank's ``memory`` in place with the shards, or the cuts, of all ranks; each
        gives its own.

        Args:
            turn: as in :meth:`reduce`, for two levels.
        """
        if self.size == 1:
            return Pending()
        cut = memory.numel() // self.size
        if self.on_host and self.one_node and self.size <= _BROADCASTS_UP_TO:
            shards = memory.split_with_sizes(
                [*bucket.shard_numels] if bucket.way == "ragged" else [cut] * self.size
            )
            return Pending(
                [
                    comm.broadcast(shard, out_of=rank, group=self.group)
                    for rank, shard in enumerate(shards)
                    if shard.numel()
                ]
            )
        if bucket.way == "ragged":
            numels = [*bucket.shard_numels]
            shards = memory.split_with_sizes(numels)
            own = shards[self.rank]
            if not self.on_host:
                return Pending([comm.all_gather_ragged(shards, own, group=self.group)])
            copies = own.repeat(self.size)
            return Pending(
                [
                    comm.all_to_all(
                        memory,
                        copies,
                        group=self.group,
                        received=numels,
                        sent_to=[own.numel()] * self.size,
                    )
                ],
                keep=copies,
            )
        own = memory.narrow(0, self.rank * cut, cut)
        if self.inside is not None and (self.on_host or bucket.index in self.rings.gather):
            return self._gather_in_two_levels(
                Turn(memory.device) if turn is None else turn, memory, own
            )
        if self.one_node or not self.on_host:
            return Pending([comm.all_gather(memory, own, group=self.group)])
        return gather_between_nodes(memory, own, group=self.group)

    def _gather_in_two_levels(self, turn: Turn, memory: Tensor, own: Tensor) -> Pending:
        per_node, num_nodes, cut = self.per_node, self.size // self.per_node, own.numel()
        # Before the first collective, as for reductions.
        of_my_place = turn.empty("of my place", num_nodes * cut, memory.dtype)
        everything = turn.empty("everything", memory.numel(), memory.dtype)

        def inside_the_node() -> Pending:
            def in_rank_order() -> None:
                self._by_place(memory, cut).copy_(
                    turn.empty("everything", (per_node, num_nodes, cut), memory.dtype)
                )

            return Pending(
                [comm.all_gather(everything, of_my_place, group=self.inside)],
                in_rank_order,
                keep=of_my_place,
            )

        gather = gather_between_nodes if self.on_host else comm.all_gather
        return Pending(
            [gather(of_my_place, own, group=self.across)],
            inside_the_node,
            keep=own,
            is_chained=True,
        )


#: By a bucket's ep_size, how those that hold the same experts send; by 1, all.
Wires = Mapping[int, Wire]


def make_wires(
    groups: comm.Groups,
    where: Sequence[int],
    *,
    native: bool,
    device: torch.device,
    rings: InLevels | None = None,
) -> dict[int, Wire]:
    """The wires of ``groups``. Every rank of the world must call this at the same point.

    Args:
        where: by rank of the world, its node; see :func:`.ranks.comm.nodes.node_of_each_rank`.
        rings: see :class:`Wire`; none if None.
    """
    on_host, rings = device.type == "cpu", rings or InLevels()
    levels = nodes.make_levels(
        groups, where, wants=not native or bool(rings.reduce or rings.gather)
    )
    if on_host:
        nodes.send_both_ways([*groups.values(), *(across for _, across in levels.values())], where)
    return {
        key: Wire(
            group,
            native,
            on_host,
            *levels.get(key, (None, None)),
            one_node=len({where[rank] for rank in comm.ranks_of(group)}) == 1,
            rings=rings,
        )
        for key, group in groups.items()
    }


def gather_between_nodes(out: Tensor, own: Tensor, *, group: Group) -> Pending:
    """Begin to gather equal parts of ranks on a node each."""
    size = comm.size_of(group)
    if size != 2:
        return Pending([comm.all_gather(out, own, group=group)], keep=own)
    copies = own.repeat(size)
    return Pending([comm.all_to_all(out, copies, group=group)], keep=copies)


def room_in(dtype: torch.dtype, ranks: int) -> float:
    """Return the power of two that keeps a sum over so many ranks in ``dtype`` as small as the
    largest summand.

    It is 1 but for float16: the others have the range of float32.
    """
    return 0.5 ** (ranks - 1).bit_length() if dtype == torch.float16 else 1.0


def average(rows: Tensor, out: Tensor, divide_by: float, spare: Tensor | None = None) -> None:
    """The sum of ``rows`` over ``divide_by``, into ``out``, float32.

    On a CPU it is made in the order of rows, a kernel a row: the kernel for many adds up the first
    elements of a row in another order than the last ones. On a device it is made in an order that
    depends on how many they are alone.

    Args:
        spare: on a device, 1-D, float32, room for :func:`~.plan.network.reduction.partial_sums` of
            so many rows; None for new.
    """
    if rows.shape[0] == 1 or out.device.type == "cpu":
        _add_up(rows.unbind(), out, divide_by)
        return
    _add_up_at_once(rows, out, spare)
    if divide_by != 1:
        out.div_(divide_by)


def _add_up_at_once(rows: Tensor, out: Tensor, spare: Tensor | None) -> None:
    if spare is None:
        spare = out.new_empty(out.numel() * sum(partial_sums(rows.shape[0])))
    for count in partial_sums(rows.shape[0]):
        sums, spare = spare[: count * out.numel()].view(count, -1), spare[count * out.numel() :]
        whole, rest = divmod(rows.shape[0], ROWS_AT_ONCE)
        torch.sum(
            rows[: whole * ROWS_AT_ONCE].view(whole, ROWS_AT_ONCE, -1),
            1,
            dtype=out.dtype,
            out=sums[:whole],
        )
        if rest:
            torch.sum(rows[-rest:], 0, dtype=out.dtype, out=sums[whole])
        rows = sums
    torch.sum(rows, 0, dtype=out.dtype, out=out)


def _add_up(rows: Sequence[Tensor], out: Tensor, divide_by: float) -> None:
    """:func:`average`, a kernel a row. One of two rows may be ``out``."""
    first, *others = rows
    if others and first.dtype == out.dtype:
        torch.add(first, others.pop(0), out=out)
    elif first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
        out.copy_(first)
    for row in others:
        out.add_(row)
    if divide_by != 1:
        out.div_(divide_by)
