"""The single costs of a layout, each a function: FLOPs of updates, elements on the wire, bytes of
memory, padding.

The planner, the start-up table and the command line share this model. Numbers are elements unless a
name says bytes or FLOPs.

Note: elements on the wire, and how they are counted
    A rank counts the elements that it sends in one optimizer step. To reduce a bucket, it sends
    every other rank that rank's shard: the bucket without its own shard. To gather the bucket, it
    sends its own shard to each of the others. Summed over R ranks, both are (R - 1) times the
    buffer, so the mean rank sends (R - 1)/R of it, twice. With equal shards, or cuts, every rank is
    the mean rank. A rank receives in one of the two as much as it sends in the other. For a bucket
    that travels in cuts, a rank also sends the elements of its cut that belong to others, as
    float32 sums, and the elements of its own shard in others' cuts, as parameters. Rings, trees and
    levels of nodes move the same number of elements per rank, on other paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ds_layerwise.optimizers.base import dtypes
from ds_layerwise.optimizers.base.dtypes import MasterDtype
from ds_layerwise.plan.forecast.host_pieces import (
    STAGING_SLOTS,
    StateBytes,
    master_bytes,
    pieces_on_host,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec
from ds_layerwise.plan.layout.shards import Ints, in_own_cuts
from ds_layerwise.plan.network.links import TCP, Group, Links, group_of
from ds_layerwise.plan.network.reduction import SUM_BYTES, Reduction, most_partial_sums, sum_dtype
from ds_layerwise.plan.network.transfer_plan import begun_backwards, deal, transfer_bytes
from ds_layerwise.plan.network.transport import MAX_PENDING, in_levels, itemsize
from ds_layerwise.routing.routes import Routes


def max_over_mean(loads: Sequence[int]) -> float:
    """Return the load of the busiest rank over the mean; 1 if there is no load."""
    if any(loads):
        return max(loads) * len(loads) / sum(loads)
    return 1.0


@dataclass(frozen=True)
class WireElements:
    """The number of elements that each rank sends in one step, by rank; see the note."""

    reduce: tuple[int, ...]
    gather: tuple[int, ...]
    forward: tuple[int, ...]
    """The sums that go on from cuts to their owners in float32. Parameters that go back are part of
    ``gather``.
    """


def wire_elements(layout: Layout, only: Container[int] | None = None) -> WireElements:
    """Count the elements that each rank sends for all buckets, or only for those with an index in
    ``only``.
    """
    by_ep_size = defaultdict(list)
    for bucket in layout.buckets:
        if only is None or bucket.index in only:
            by_ep_size[bucket.ep_size].append(bucket)
    total = np.zeros((3, layout.world_size), np.int64)
    for ep_size, buckets in by_ep_size.items():
        sent = np.zeros((3, buckets[0].holders), np.int64)
        reduce, gather, forward = sent
        others = buckets[0].holders - 1
        for bucket in buckets:
            if bucket.way == "ragged":
                filled, own = _filled_shards(bucket)
                reduce += bucket.numel
                reduce[filled] -= own
                gather[filled] += others * own
                continue
            reduce += bucket.numel - bucket.cut_numel
            gather += others * bucket.cut_numel
            if bucket.way == "cuts":
                forward += bucket.cut_numel
        in_cuts = [bucket for bucket in buckets if bucket.way == "cuts"]
        _, filled, own, stays = in_own_cuts(
            [b.shards for b in in_cuts], [b.cut_numel for b in in_cuts]
        )
        np.subtract.at(forward, filled, stays)
        np.add.at(gather, filled, own - stays)
        total += np.repeat(sent, ep_size, axis=1)
    return WireElements(*map(tuple, total.tolist()))


def cut_elements(layout: Layout, dtype: str) -> tuple[int, ...]:
    """Count the elements of parameters of ``dtype`` that each rank sends after a step of ZeRO stage
    3: as their owner, to the cuts of all other ranks.
    """
    sent = np.zeros(layout.world_size, np.int64)
    for dealt in deal(layout.buckets, by_param=True):
        if dealt.dtype == dtype:
            sent += dealt.row_sizes() * (layout.world_size - 1)
    return tuple(sent.tolist())


def fetched_elements(layout: Layout, dtype: str) -> int:
    """Count the elements of parameters of ``dtype`` that a rank sends when DeepSpeed gathers all of
    them once, at ZeRO stage 3: its cuts, to all other ranks.
    """
    cuts = 0
    for bucket in layout.buckets:
        if bucket.dtype == dtype:
            cuts += sum(map(bucket.cut_of, bucket.slots))
    return cuts * (layout.world_size - 1)


def _filled_shards(bucket: Bucket) -> tuple[Ints, Ints]:
    """Return the numbers and the lengths of the shards that are not empty."""
    return np.array(bucket.shards.filled, np.int64), np.array(bucket.shards.lengths, np.int64)


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank holds on its device between two steps, and on the host."""

    params: int
    grads: int
    """The buffer in which micro-batches accumulate, and the reduced float32 shards if they are a
    copy.
    """
    masters: int
    """The rank's shards in float32; 0 if the parameters themselves are float32."""
    states: int
    host: int = 0
    """Masters and states that live in host memory, and cuts of parameters."""
    staging: int = 0
    """The device memory for those while the optimizer steps."""

    @property
    def total(self) -> int:
        """The bytes on the device between two steps."""
        return self.params + self.grads + self.masters + self.states


def state_bytes_by(
    routes: Routes, specs: Sequence[ParamSpec], *, in_float32: Container[str] = ()
) -> StateBytes:
    """Return :func:`state_bytes_of`, exact to the byte for states stored in blocks.

    Args:
        in_float32: the dtypes of stored states to count as float32.
    """
    by_share = state_bytes_of(specs)

    @cache
    def state_bytes(name: str, numel: int) -> int:
        if not any(spec.kept_as for spec in routes[name].states(1).values()):
            return by_share(name, numel)
        nbytes = 0
        for spec in routes[name].states(numel).values():
            if not spec.on_host:
                nbytes += spec.rule_nbytes if spec.kept_as in in_float32 else spec.nbytes
        return nbytes

    return state_bytes


def state_bytes_of(specs: Sequence[ParamSpec]) -> StateBytes:
    """Return a function that gives pieces of ``specs`` their share of the states of the whole."""
    spec_of = {spec.name: spec for spec in specs}

    def state_bytes(name: str, numel: int) -> int:
        return spec_of[name].state_bytes * numel // spec_of[name].numel

    return state_bytes


def memory_bytes(
    layout: Layout,
    *,
    state_bytes: StateBytes,
    stage: int = 1,
    grads_stored_as: Mapping[str, str] | None = None,
    wires: Sequence[str] | None = None,
    reduction: Reduction = "ordered",
    host_ratio: float = 0.0,
    params_on_host: bool = False,
    master_dtype: MasterDtype = "float32",
) -> tuple[RankMemory, ...]:
    """Count the bytes that each rank holds between two steps.

    Args:
        state_bytes: of what a rank holds of a parameter, see :func:`state_bytes_of`.
        stage: of ZeRO. From stage 2 on a rank keeps gradients of what it owns alone, in float32;
            during a backward pass there are at most two buckets of gradients, and what their shards
            are received in, beside. At stage 3 it keeps parameters that it owns, and its cuts of
            all; not counted is what DeepSpeed makes whole while modules run, and between steps
            (``stage3_max_live_parameters``, ``stage3_param_persistence_threshold``).
        grads_stored_as: the dtype gradients accumulate in, for each dtype of the layout; its own
            where missing.
        wires: what they travel in, by bucket; what they accumulate in if None.
        reduction: how sums are made; see :mod:`.plan.network.reduction`.
        host_ratio: how much of masters and states lives in host memory; see :func:`pieces_on_host`.
        params_on_host: whether the cuts of whole parameters, of stage 3, live there.
        master_dtype: what masters of bfloat16 parameters are kept in; float32 where there is a
            ``host_ratio``.

    Raises:
        LayoutError: the size of a dtype is unknown.
    """
    stored_as = {dtype: dtype for dtype in layout.dtypes} | dict(grads_stored_as or {})
    grads = 0
    if stage == 1:
        for dtype in layout.dtypes:
            grads += itemsize(stored_as[dtype]) * layout.buffer_numel(dtype)
    params, hosted = _param_bytes(layout, stage, params_on_host)
    reduced = [0] * layout.world_size
    masters = [0] * layout.world_size
    states = [0] * layout.world_size
    for bucket in layout.buckets:
        stored = stored_as[bucket.dtype]
        for rank, numel in bucket.non_empty_shards():
            masters[rank] += dtypes.master_bytes(numel, bucket.dtype, master_dtype)
            if stage > 1 or stored != "float32":
                reduced[rank] += SUM_BYTES * numel
        for rank, name, numel in _held(bucket):
            states[rank] += state_bytes(name, numel)
        if bucket.way == "cuts":
            sums = sum_dtype(wires[bucket.index] if wires else stored, reduction, stage)
            # Sums share the memory of the gradients, or have memory of their own.
            if stage > 1 or stored != sums:
                grads += itemsize(sums) * bucket.cut_numel
    memory = []
    for rank in range(layout.world_size):
        on_device = RankMemory(
            params[rank], grads + reduced[rank], masters[rank], states[rank], host=hosted
        )
        memory.append(_with_host(layout, rank, on_device, host_ratio, state_bytes))
    return tuple(memory)


def checkpoint_bytes(layout: Layout, state_bytes: StateBytes, stage: int) -> int:
    """Count the bytes of a checkpoint: float32 masters, states, and before stage 3 weights as they
    are trained. What is not trained is not counted, nor what other ranks of model parallelism save.

    Args:
        state_bytes: of states as they are saved.
    """
    total = 0
    for bucket in layout.buckets:
        weight = itemsize(bucket.dtype) if stage < 3 else 0
        for slot in bucket.slots:
            saved = (weight + SUM_BYTES) * slot.numel + state_bytes(slot.name, slot.numel)
            # Of experts, each of so many ranks has its own under a name.
            total += bucket.ep_size * saved
    return total


def _held(bucket: Bucket) -> Iterator[tuple[int, str, int]]:
    """Yield rank, name and number of elements of what ranks hold of ``bucket``, without padding."""
    if bucket.whole:
        for slot in bucket.slots:
            for owner in bucket.owners(slot):
                yield owner, slot.name, slot.numel
        return
    for rank, _ in bucket.non_empty_shards():
        for piece in bucket.pieces(rank):
            yield rank, piece.name, piece.numel


def _param_bytes(layout: Layout, stage: int, on_host: bool) -> tuple[list[int], int]:
    """Count the bytes of parameters on each rank's device, and on its host.

    At stage 3 a rank holds the parameters that it owns, and its cuts of whole ones, which may be on
    the host. Cuts of the others are their shards.
    """
    if stage < 3:
        whole = sum(itemsize(dtype) * layout.buffer_numel(dtype) for dtype in layout.dtypes)
        return [whole] * layout.world_size, 0
    cuts = 0
    owned = [0] * layout.world_size
    for bucket in layout.buckets:
        if bucket.whole:
            cuts += itemsize(bucket.dtype) * sum(map(bucket.cut_of, bucket.slots))
        for rank, numel in bucket.non_empty_shards():
            owned[rank] += itemsize(bucket.dtype) * numel
    if on_host:
        return owned, cuts
    return [nbytes + cuts for nbytes in owned], 0


def _with_host(
    layout: Layout, rank: int, memory: RankMemory, ratio: float, state_bytes: StateBytes
) -> RankMemory:
    """Return ``memory`` of ``rank`` with the share ``ratio`` of its masters and states on
    the host.
    """
    if not ratio:
        return memory
    names = pieces_on_host(layout, rank, ratio, state_bytes=state_bytes)
    masters = memory.masters
    states = memory.states
    moved = []
    for bucket in layout.buckets:
        pieces = bucket.pieces(rank)
        numel = state_nbytes = 0
        for piece in pieces:
            if piece.name in names:
                numel += piece.numel
                state_nbytes += state_bytes(piece.name, piece.numel)
        if not numel:
            continue
        # Host memory is a whole number of float32 elements.
        moved.append(-(-(numel * master_bytes(bucket) + state_nbytes) // 4) * 4)
        states -= state_nbytes
        # Masters that stay on the device have memory of their own, without the padding of the
        # shard.
        start, stop = bucket.shard(rank)
        left = sum(piece.numel for piece in pieces) - numel
        masters -= master_bytes(bucket) * (stop - start - left)
    return replace(
        memory,
        masters=masters,
        states=states,
        host=memory.host + sum(moved),
        staging=max(moved, default=0) * min(STAGING_SLOTS, len(moved)),
    )


@dataclass(frozen=True)
class RankTraffic:
    """The most bytes that one rank holds for pending buckets and their exchange."""

    sent: int
    """The copies of gradients to send; 0 if they are sent from the memory in which they
    accumulate.
    """
    received: int
    """The received bytes of all ranks, the sums of a node, and at stage 2 those that a further
    micro-batch adds; or the parameters that a device gathers in two levels, if these are more.
    """
    exchanged: int = 0
    """The copies of elements that go from cuts to owners, or back, and of those that do not arrive
    in place.
    """

    @property
    def total(self) -> int:
        """The total bytes of sent copies, received data, and the exchange."""
        return self.sent + self.received + self.exchanged


def traffic_bytes(
    layout: Layout,
    *,
    stage: int,
    stored_as: Mapping[str, str],
    wires: Sequence[str],
    reduction: Reduction = "ordered",
    links: Links | None = None,
) -> tuple[RankTraffic, ...]:
    """Count the most bytes that each rank holds in addition to :func:`memory_bytes` while buckets
    travel.

    Args:
        stored_as: the dtype in which gradients accumulate, by dtype of the layout.
        wires: the dtype in which they are sent, by bucket.
        reduction: the method of sums; see :mod:`.plan.network.reduction`. Only ``ordered`` holds
            the data of all ranks side by side.
        links: the links, which tell which ranks share a node, and whether the data is in host
            memory. In host memory, that of buckets stays allocated during the exchange. None for
            one rank per node, on a host.

    One case is not counted: at stage 2, if a script asks for sums between two micro-batches, the
    next exchange adds its data and so needs memory for all of it.
    """
    # Buckets take turns with memory that grows to the largest size: for sent data, for the sums of
    # a node, and by rank for received data, for partial sums and for added data.
    sent = [0] * MAX_PENDING
    node_sums = [0] * MAX_PENDING
    own = np.zeros((3, MAX_PENDING, layout.world_size), np.int64)
    gathered = 0
    links = links or TCP
    rings = in_levels(layout.buckets, wires, links, reduction)
    for bucket, wire in zip(layout.buckets, wires, strict=True):
        turn = bucket.index % MAX_PENDING
        group = group_of(bucket.holders, links, bucket.ep_size)
        for most, nbytes in zip(own, _own_bytes(bucket, wire, group, stage, reduction)):
            if bucket.way == "ragged":
                filled, lengths = _filled_shards(bucket)
                by_shard = most[turn].reshape(bucket.holders, bucket.ep_size)
                by_shard[filled] = np.maximum(by_shard[filled], lengths[:, None] * nbytes)
            else:
                np.maximum(most[turn], bucket.cut_numel * nbytes, out=most[turn])
        copies = int(stage > 1 or (bucket.holders > 1 and stored_as[bucket.dtype] != wire))
        if bucket.index in rings.reduce or _adds_in_nodes(bucket, group, reduction):
            # Sorted by the places in a node, at stage 2 in addition to the source.
            copies = min(stage, 2)
            sum_bytes = SUM_BYTES
            if reduction == "native":
                sum_bytes = itemsize(wire)
            node_sums[turn] = max(node_sums[turn], bucket.numel // group.local * sum_bytes)
        if bucket.index in rings.gather:
            numel = bucket.numel + bucket.numel // group.local
            gathered = max(gathered, numel * itemsize(bucket.dtype))
        sent[turn] = max(sent[turn], bucket.numel * itemsize(wire) * copies)
    rounds = deal(layout.buckets, lambda bucket: sum_dtype(wires[bucket.index], reduction, stage))
    there = transfer_bytes(rounds, layout.world_size, owners_have="float32").tolist()
    # The rounds in which parameters go back.
    returns = begun_backwards(layout.buckets, by_param=stage == 3)
    back = transfer_bytes(returns, layout.world_size).tolist()
    found = []
    for rank, received in enumerate((own.sum(axis=(0, 1)) + sum(node_sums)).tolist()):
        reduced = RankTraffic(sum(sent), received)
        if links.on_host:
            found.append(replace(reduced, exchanged=max(there[rank], back[rank])))
            continue
        returned = RankTraffic(0, gathered * (stage < 3), back[rank])
        moments = (reduced, RankTraffic(0, 0, there[rank]), returned)
        found.append(max(moments, key=lambda traffic: traffic.total))
    return tuple(found)


def _adds_in_nodes(bucket: Bucket, group: Group, reduction: Reduction) -> bool:
    return reduction == "ordered" and bucket.way != "ragged" and group.has_levels


def _own_bytes(
    bucket: Bucket, wire: str, group: Group, stage: int, reduction: Reduction
) -> tuple[int, int, int]:
    """Return the bytes per element of a rank's own part: received, partial sums, added."""
    added = SUM_BYTES if stage > 1 else 0
    holders = bucket.holders
    if holders == 1:
        return 0, 0, added
    received = itemsize(wire)
    if reduction == "native":
        # The backend may write directly to the place of the sums.
        stays = "float32"
        if bucket.way == "cuts":
            stays = sum_dtype(wire, reduction, stage)
        if bucket.way != "ragged" and wire == stays:
            received = 0
        return received, 0, added
    partial = 0
    if not group.links.on_host:
        inside = 1
        if _adds_in_nodes(bucket, group, reduction):
            inside = group.local
        partial = SUM_BYTES * most_partial_sums(holders, per_node=inside)
    # With two ranks, each reads its own part in place.
    return received * (holders if holders > 2 else 1), partial, added


@dataclass(frozen=True)
class LayoutReport:
    """The balance and padding of a layout. Tuples are by rank."""

    num_buckets: int
    numel: int
    """The number of elements in all parameters of a rank's model."""
    padding: int
    """The number of elements of the buffers that belong to no parameter."""
    work: tuple[int, ...]
    """Newton-Schulz FLOPs."""
    whole_numel: tuple[int, ...]
    """The elements of whole parameters, which ownership can unbalance."""

    @classmethod
    def of(cls, layout: Layout, specs: Sequence[ParamSpec]) -> LayoutReport:
        """Report on ``layout``, a plan of exactly these ``specs``."""
        work_of = {spec.name: spec.work for spec in specs}
        work = [0] * layout.world_size
        whole = [0] * layout.world_size
        for bucket in layout.buckets:
            for slot in bucket.slots if bucket.whole else ():
                for owner in bucket.owners(slot):
                    work[owner] += work_of[slot.name]
                    whole[owner] += slot.numel
        numel = sum(spec.numel for spec in specs)
        padding = sum(map(layout.buffer_numel, layout.dtypes)) - numel
        return cls(len(layout.buckets), numel, padding, tuple(work), tuple(whole))

    @property
    def padding_fraction(self) -> float:
        """Padding over the elements of all parameters."""
        if self.numel:
            return self.padding / self.numel
        return 0.0

    @property
    def work_max_over_mean(self) -> float:
        """The Newton-Schulz work of the busiest rank over the mean."""
        return max_over_mean(self.work)

    @property
    def whole_max_over_mean(self) -> float:
        """The elements of whole parameters on the fullest rank over the mean."""
        return max_over_mean(self.whole_numel)
