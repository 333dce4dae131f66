"""The transport of a bucket between the ranks of one group, and its sums.

Note: two methods to sum
    ``native`` is the backend's reduce-scatter. On NCCL it sends the fewest bytes out of a node. It
    adds in the dtype on the wire and in an order of its own. ``ordered`` sends every rank all
    summands of its cut, and the rank adds them in float32, in rank order, so that the sum depends
    neither on the bucket size nor on the backend. If several nodes have several ranks each, it has
    two levels: first between the ranks of a node, then for the sums of nodes, in node order,
    between the ranks in the same place on each node. These sums are also sent in the dtype of the
    gradients. So a node sends as much as in a hierarchical reduce-scatter; with two nodes, half of
    the bucket. Before gradients are summed or sent in float16, they are multiplied by
    :func:`room_in`: then a sum overflows only if a gradient of a rank does.

Note: where each of gloo's collectives is fast
    gloo's ``reduce_scatter_tensor`` moves as much as its all-reduce, twice as much as an
    all-to-all. Its all-gather is a ring in which two ranks wait for each other: over links of 200
    Mbit/s to 1 Gbit/s, an all-to-all of copies is 1.5 times as fast for two ranks. From four ranks
    on the ring is faster there. For that all-gather torch allocates memory for everything that
    arrives, and copies from it. On one node these copies are most of the work: a broadcast from
    each rank, directly to its destination, takes 0.3 to 0.4 times as long with 2 to 16 ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_layerwise.optimizers.mxfp8 import decode_, encode
from ds_layerwise.plan.layout.transport import ROWS_AT_ONCE, most_partial_sums, partial_sums
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.ranks.comm.comm import Group, Pending
from ds_layerwise.ranks.comm.scratch import Turn

#: The largest number of ranks of one node that gather by broadcasts, one launch per rank; see the
#: note on gloo.
_BROADCASTS_UP_TO = 8


@dataclass(eq=False)
class Wire:
    """The ranks that share buckets, and their transports.

    Args:
        group: all of these ranks.
        native: True if the backend computes sums; see the note.
        on_host: True if the data is in host memory, from which gloo sends it.
        inside, across: the ranks of this node, and the ranks in this rank's place on every node.
            Both are None if a node has one rank or all ranks, or if the backend computes sums.
        one_node: True if all ranks are on one node.
    """

    group: Group
    native: bool = False
    on_host: bool = True
    inside: Group = None
    across: Group = None
    one_node: bool = False

    def __post_init__(self) -> None:
        self.rank = comm.rank_of(self.group)
        self.size = comm.size_of(self.group)
        self.per_node = 1 if self.inside is None else comm.size_of(self.inside)
        """The number of ranks of ``inside``; 1 if it is None."""

    def connect(self, device: torch.device) -> None:
        """Send something from each rank to every other. Every rank of the group must call this at
        the same point.

        NCCL connects two ranks when one first sends to the other. That takes seconds and memory,
        and may fail. Without this call it would happen in the first backward pass, when memory is
        fullest.
        """
        groups = [self.group]
        if self.inside is not None:
            groups += [self.inside, self.across]
        for group in groups:
            some = torch.zeros(comm.size_of(group), dtype=torch.float32, device=device)
            if len(some) > 1:
                comm.all_to_all(torch.empty_like(some), some, group=group).wait()
                comm.all_gather(torch.empty_like(some), some[:1], group=group).wait()

    def reduce(
        self,
        memory: Tensor,
        out: Tensor,
        *,
        divide_by: float,
        wire_dtype: torch.dtype,
        turn: Turn,
    ) -> Pending:
        """Average ``memory`` of a bucket over the ranks. Each rank gets its own shard, or its own
        cut if the bucket travels in cuts.

        Args:
            memory: 1-D, the whole bucket; read until the result has been waited for, and
                perhaps overwritten.
            out: float32, as long as this rank's shard or cut; may be that part of ``memory``. It
                may have ``wire_dtype`` if ``divide_by`` is 1 and the backend sums; the sum in it is
                then multiplied by :func:`room_in`.
            divide_by: the divisor of the sum over ranks, applied in float32.
            wire_dtype: the dtype in which elements are sent.
            turn: memory for data in transit, reserved until the result has been waited for.
        """
        if self.size == 1:
            sent = memory
            # Rounded as it would be among more ranks.
            if torch.promote_types(memory.dtype, wire_dtype) != wire_dtype:
                sent = turn.cast("sent", memory, wire_dtype)
            return Pending(finish=lambda: _add_up([sent], out, divide_by))
        if self.native or self.inside is not None:
            room = room_in(wire_dtype, self.size)
            if room != 1:
                memory.mul_(room)
                if out.dtype != wire_dtype:
                    divide_by *= room
        if self.inside is not None:
            return self._reduce_in_two_levels(turn, memory, out, divide_by, wire_dtype)
        sent = turn.cast("sent", memory, wire_dtype)
        if not self.native:
            return self._reduce_at_owners(turn, sent, out, divide_by)
        received = out
        if out.dtype != wire_dtype:
            received = turn.empty("received", out.numel(), wire_dtype)
        work = comm.reduce_scatter(received, sent, group=self.group)
        return Pending([work], lambda: _add_up([received], out, divide_by), keep=sent)

    def _reduce_at_owners(self, turn: Turn, sent: Tensor, out: Tensor, divide_by: float) -> Pending:
        """Send every rank all summands of its own part."""
        own = out.numel()
        if self.size == 2:
            # Only the other rank's summands are sent. This rank's own are read in place.
            other = 1 - self.rank
            both = list(sent.split_with_sizes([own, own]))
            received = turn.empty("received", own, sent.dtype)
            to_other = [0, 0]
            to_other[other] = own
            work = comm.all_to_all(
                received, both[other], group=self.group, received=to_other, sent_to=to_other
            )
            both[other] = received
            return Pending([work], lambda: _add_up(both, out, divide_by), keep=sent)
        received = turn.empty("received", self.size * own, sent.dtype)
        rows = turn.empty("received", (self.size, own), sent.dtype)
        spare = _spare(turn, out, most_partial_sums(self.size))
        work = comm.all_to_all(received, sent, group=self.group)
        return Pending([work], lambda: average(rows, out, divide_by, spare), keep=sent)

    def _reduce_in_two_levels(
        self, turn: Turn, memory: Tensor, out: Tensor, divide_by: float, wire_dtype: torch.dtype
    ) -> Pending:
        cut = out.numel()
        of_node = memory.numel() // self.per_node
        # Allocate everything before the first collective: a rank that runs out of memory between
        # the two cannot begin again.
        sums = turn.empty("sums", of_node, out.dtype)
        sent = turn.empty("sent", memory.numel(), wire_dtype)
        places = self._by_place(memory, cut)
        turn.empty("sent", tuple(places.shape), wire_dtype).copy_(places)
        received = turn.empty("received", memory.numel(), wire_dtype)
        spare = _spare(turn, out, most_partial_sums(self.size, per_node=self.per_node))
        work = comm.all_to_all(received, sent, group=self.inside)

        def between_nodes() -> Pending:
            average(turn.empty("received", (self.per_node, of_node), wire_dtype), sums, 1, spare)
            # The data that the first level has sent and received is not needed any more.
            rounded = turn.cast("received", sums, wire_dtype)
            arrived = turn.empty("sent", of_node, wire_dtype)
            rows = turn.empty("sent", (of_node // cut, cut), wire_dtype)
            return Pending(
                [comm.all_to_all(arrived, rounded, group=self.across)],
                lambda: average(rows, out, divide_by, spare),
                keep=rounded,
            )

        return Pending([work], between_nodes, keep=sent, is_chained=True)

    def _by_place(self, memory: Tensor, cut: int) -> Tensor:
        """View 1-D ``memory`` as cuts by their place in a node, and then by node.

        This is the order in which the ranks of a node, and then those in the same place on other
        nodes, get them. It is one call, because thousands of calls per step cost milliseconds of
        host time.
        """
        shape = (self.per_node, self.size // self.per_node, cut)
        return memory.as_strided(shape, (cut, self.per_node * cut, 1))

    def gather(self, memory: Tensor, *, in_mxfp8: bool = False) -> Pending:
        """Gather the shards, or the cuts, of all ranks into every rank's ``memory`` of a bucket, in
        place. Each rank sends its own.

        Args:
            in_mxfp8: True to send bfloat16 that MXFP8 holds, whole groups from each rank, in that.
                The wait decodes what arrives.
        """
        if self.size == 1:
            return Pending()
        if in_mxfp8:
            own = encode(memory.view(self.size, -1)[self.rank])
            encoded = own.new_empty(self.size * own.numel())
            encoded.view(self.size, -1)[self.rank].copy_(own)
            return self.gather(encoded).then(lambda: decode_(memory, encoded))
        cut = memory.numel() // self.size
        if self.on_host and self.one_node and self.size <= _BROADCASTS_UP_TO:
            works = []
            for rank, part in enumerate(memory.view(self.size, cut).unbind()):
                works.append(comm.broadcast(part, out_of=rank, group=self.group))
            return Pending(works)
        own = memory.narrow(0, self.rank * cut, cut)
        if self.inside is not None and self.on_host:
            return self._gather_in_two_levels(memory, own)
        if self.one_node or not self.on_host:
            return Pending([comm.all_gather(memory, own, group=self.group)])
        return gather_between_nodes(memory, own, group=self.group)

    def _gather_in_two_levels(self, memory: Tensor, own: Tensor) -> Pending:
        places = self._by_place(memory, own.numel())
        # Allocate before the first collective, as in reductions.
        of_my_place = memory.new_empty(memory.numel() // self.per_node)
        sorted_ = memory.new_empty(places.shape)

        def in_rank_order() -> None:
            places.copy_(sorted_)

        def inside_the_node() -> Pending:
            work = comm.all_gather(sorted_.view(-1), of_my_place, group=self.inside)
            return Pending([work], in_rank_order, keep=of_my_place)

        work = gather_between_nodes(of_my_place, own, group=self.across)
        return Pending([work], inside_the_node, keep=own, is_chained=True)


#: The wires of a rank by the ep_size of a bucket; 1 is the wire of all ranks.
Wires = Mapping[int, Wire]


def make_wires(
    groups: comm.Groups,
    where: Sequence[int],
    *,
    native: bool,
    device: torch.device,
) -> dict[int, Wire]:
    """Make the wires of ``groups``. Every rank of the world must call this at the same point.

    Args:
        where: the node of each rank of the world; see :func:`.ranks.comm.nodes.node_of_each_rank`.
    """
    on_host = device.type == "cpu"
    levels = nodes.make_levels(groups, where, wants=not native)
    if on_host:
        nodes.send_both_ways([*groups.values(), *(across for _, across in levels.values())], where)
    wires = {}
    for key, group in groups.items():
        inside, across = levels.get(key, (None, None))
        one_node = len({where[rank] for rank in comm.ranks_of(group)}) == 1
        wires[key] = Wire(group, native, on_host, inside, across, one_node)
    return wires


def gather_between_nodes(out: Tensor, own: Tensor, *, group: Group) -> Pending:
    """Begin to gather equal parts of ranks that are each on another node, two by an all-to-all of
    copies.
    """
    size = comm.size_of(group)
    if size != 2:
        return Pending([comm.all_gather(out, own, group=group)], keep=own)
    copies = own.repeat(size)
    return Pending([comm.all_to_all(out, copies, group=group)], keep=copies)


def room_in(dtype: torch.dtype, ranks: int) -> float:
    """Return the power of two that keeps a sum over ``ranks`` ranks in ``dtype`` no larger than the
    largest summand.

    It is 1 except for float16, because the other dtypes have the range of float32.
    """
    if dtype != torch.float16:
        return 1.0
    return 0.5 ** (ranks - 1).bit_length()


def _spare(turn: Turn, out: Tensor, num_sums: int) -> Tensor:
    """Return memory for so many partial sums as long as ``out``, which :func:`average` makes on a
    device.
    """
    if out.is_cpu:
        num_sums = 0
    return turn.empty("partial sums", num_sums * out.numel(), torch.float32)


def average(rows: Tensor, out: Tensor, divide_by: float, spare: Tensor) -> None:
    """Write the sum of ``rows`` divided by ``divide_by`` into ``out``, float32.

    On a CPU, rows are added in order, one kernel per row; a kernel for many rows adds the first
    elements of a row in another order than the last ones. On a device, the order depends only on
    the number of rows.

    Args:
        spare: on a device, 1-D float32 memory for :func:`~.plan.layout.transport.partial_sums` of
            that number of rows.
    """
    if rows.shape[0] == 1 or out.is_cpu:
        _add_up(rows.unbind(), out, divide_by)
        return
    _add_up_at_once(rows, out, spare)
    if divide_by != 1:
        out.div_(divide_by)


def _add_up_at_once(rows: Tensor, out: Tensor, spare: Tensor) -> None:
    numel = out.numel()
    for count in partial_sums(rows.shape[0]):
        sums = spare[: count * numel].view(count, -1)
        spare = spare[count * numel :]
        whole, rest = divmod(rows.shape[0], ROWS_AT_ONCE)
        groups = rows[: whole * ROWS_AT_ONCE].view(whole, ROWS_AT_ONCE, -1)
        torch.sum(groups, 1, dtype=out.dtype, out=sums[:whole])
        if rest:
            torch.sum(rows[-rest:], 0, dtype=out.dtype, out=sums[whole])
        rows = sums
    torch.sum(rows, 0, dtype=out.dtype, out=out)


def _add_up(rows: Sequence[Tensor], out: Tensor, divide_by: float) -> None:
    """Do the same as :func:`average`, with one kernel per row. If there are two rows, one may be
    ``out``.
    """
    first, *others = rows
    if others and first.dtype == out.dtype:
        torch.add(first, others.pop(0), out=out)
    elif first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
        out.copy_(first)
    for row in others:
        out.add_(row)
    if divide_by != 1:
        out.div_(divide_by)
