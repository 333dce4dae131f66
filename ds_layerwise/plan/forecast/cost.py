"""What a layout costs: Newton-Schulz FLOPs, elements on the wire, bytes of memory, padding.

The one model behind the planner, the start-up table and the command line. Elements unless a name
says bytes or FLOPs.

Note: what travels, and who counts it
    A rank counts what it sends in one optimizer step. To reduce a bucket it sends every other rank
    that rank's shard: the bucket without its own shard. To gather the bucket it sends its own shard
    to each of the others. Summed over R ranks both are (R - 1) times the buffer, so the mean rank
    sends (R - 1)/R of it, twice. With equal shards, or cuts, every rank is the mean rank. A rank
    receives in the one what it sends in the other. Of a bucket that travels in cuts, it sends what
    of its cut belongs to others once more, as float32 sums, and what of its own shard lies in
    others' cuts, as parameters. Rings, trees and levels of nodes move the same elements for each
    rank, on other ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.forecast.host_pieces import (
    STAGING_SLOTS,
    StateBytes,
    master_bytes,
    pieces_on_host,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec
from ds_layerwise.plan.layout.shards import in_own_cuts
from ds_layerwise.plan.network.exchange_rounds import begun_backwards, deal, exchange_bytes
from ds_layerwise.plan.network.links import Links, group_of
from ds_layerwise.plan.network.reduction import SUM_BYTES, Reduction, most_partial_sums, sum_dtype
from ds_layerwise.plan.network.transport import MAX_UNDER_WAY, InLevels, in_levels, itemsize
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.recipes.base import dtypes
from ds_layerwise.recipes.base.dtypes import MasterDtype


def max_over_mean(loads: Sequence[int]) -> float:
    """How much longer the busiest rank takes than the mean one; 1 where nobody has a load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Wire:
    """Elements that each rank sends in one step, by rank; see the note on what travels."""

    reduce: tuple[int, ...]
    gather: tuple[int, ...]
    forward: tuple[int, ...]
    """Sums that go on from cuts to their owners in float32. Parameters that come back are part of
    ``gather``.
    """


def wire_elements(
    layout: Layout, dtype: str | None = None, only: Container[int] | None = None
) -> Wire:
    """What each rank sends for the buckets of ``dtype``, or for all; of these for ``only`` some, by
    index.
    """
    # What all ranks send alike is one number, and what some send beside it an array.
    alike: NDArray[np.int64] = np.zeros(3, np.int64)
    sent: dict[int, NDArray[np.int64]] = {}
    in_cuts: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in layout.buckets:
        if dtype not in (None, bucket.dtype) or (only is not None and bucket.index not in only):
            continue
        holders, numel, cut = bucket.holders, bucket.numel, bucket.cut_numel
        if bucket.ep_size not in sent:
            sent[bucket.ep_size] = np.zeros((3, holders), np.int64)
        if bucket.way == "ragged":
            reduce, gather, _ = sent[bucket.ep_size]
            filled, own = _filled_shards(bucket)
            alike += numel, 0, 0
            reduce[filled] -= own
            gather[filled] += (holders - 1) * own
            continue
        alike += numel - cut, (holders - 1) * cut, cut if bucket.way == "cuts" else 0
        if bucket.way == "cuts":
            in_cuts[bucket.ep_size].append(bucket)
    for ep_size, buckets in in_cuts.items():
        _, gather, forward = sent[ep_size]
        _, filled, own, stays = in_own_cuts(
            [b.shards for b in buckets], [b.cut_numel for b in buckets]
        )
        np.subtract.at(forward, filled, stays)
        np.add.at(gather, filled, own - stays)
    total = sum(
        (np.repeat(each, ep_size, axis=1) for ep_size, each in sent.items()),
        start=np.repeat(alike[:, None], layout.world_size, axis=1),
    )
    return Wire(*(tuple(elements.tolist()) for elements in total))


def _filled_shards(bucket: Bucket) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers and lengths of the shards that are not empty."""
    return np.array(bucket.shards.filled, np.int64), np.array(bucket.shards.lengths, np.int64)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds on its device between two steps, and beside it."""

    params: int
    grads: int
    """The buffer that micro-batches accumulate in, and the reduced float32 shards where they are a
    copy.
    """
    masters: int
    """What there is of the rank's shards in float32 beside them; 0 where the parameters are float32
    themselves.
    """
    states: int
    host: int = 0
    """Masters and states that live in host memory."""
    staging: int = 0
    """What they take on the device while the optimizer steps."""

    @property
    def total(self) -> int:
        """The bytes on the device between two steps."""
        return self.params + self.grads + self.masters + self.states


def state_bytes_by(
    routes: Mapping[str, Route], specs: Sequence[ParamSpec], *, in_float32: bool = False
) -> StateBytes:
    """:func:`state_bytes_of`, to the byte where states are kept in blocks.

    Args:
        in_float32: as they would be if none were kept in fewer bits.
    """
    by_share = state_bytes_of(specs)

    @cache
    def state_bytes(name: str, numel: int) -> int:
        if not any(spec.kept_as for spec in routes[name].states(1).values()):
            return by_share(name, numel)
        return sum(
            spec.rule_nbytes if in_float32 else spec.nbytes
            for spec in routes[name].states(numel).values()
            if not spec.on_host
        )

    return state_bytes


def state_bytes_of(specs: Sequence[ParamSpec]) -> StateBytes:
    """For pieces of ``specs``, their share of the states of the whole parameter."""
    of = {spec.name: (spec.state_bytes, spec.numel) for spec in specs}

    def state_bytes(name: str, numel: int) -> int:
        nbytes, whole = of[name]
        return nbytes * numel // whole

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
    master_dtype: MasterDtype = "float32",
) -> tuple[RankMemory, ...]:
    """What each rank holds between two steps.

    Args:
        state_bytes: of what a rank holds of a parameter, see :func:`state_bytes_of`.
        stage: of ZeRO. At stage 2 a rank keeps gradients of what it owns alone, in float32; during
            a backward pass there are at most two buckets of gradients, and what their shards are
            received in, beside.
        grads_stored_as: the dtype gradients accumulate in, for each dtype of the layout; its own
            where missing.
        wires: what they travel in, by bucket; what they accumulate in if None.
        reduction: how sums are made; see :mod:`.plan.network.reduction`.
        host_ratio: how much of masters and states lives in host memory; see :func:`pieces_on_host`.
        master_dtype: what masters of bfloat16 parameters are kept in; float32 where there is a
            ``host_ratio``.

    Raises:
        LayoutError: a dtype whose size is not known.
    """
    stored_as = grads_stored_as or {}
    params = grads = 0
    masters, states = [0] * layout.world_size, [0] * layout.world_size
    for dtype in layout.dtypes:
        params += itemsize(dtype) * layout.buffer_numel(dtype)
        grads += (
            itemsize(stored_as.get(dtype, dtype)) * layout.buffer_numel(dtype) if stage == 1 else 0
        )
    reduced = [0] * layout.world_size
    for bucket in layout.buckets:
        reduced_bytes = (
            0 if stage == 1 and stored_as.get(bucket.dtype, bucket.dtype) == "float32" else 4
        )
        for rank, numel in bucket.non_empty_shards():
            masters[rank] += dtypes.master_bytes(numel, bucket.dtype, master_dtype)
            reduced[rank] += reduced_bytes * numel
    for bucket in (bucket for bucket in layout.buckets if bucket.way == "cuts"):
        stored = stored_as.get(bucket.dtype, bucket.dtype)
        sums = sum_dtype(wires[bucket.index] if wires else stored, reduction, stage)
        # They lie where the gradients do, or else in memory of their own.
        grads += 0 if stage == 1 and stored == sums else itemsize(sums) * bucket.cut_numel
    for rank, name, numel in _held(layout):
        states[rank] += state_bytes(name, numel)
    memory = [
        RankMemory(params, grads + r, m, s)
        for r, m, s in zip(reduced, masters, states, strict=True)
    ]
    if host_ratio:
        memory = [
            _with_host(layout, rank, each, host_ratio, state_bytes)
            for rank, each in enumerate(memory)
        ]
    return tuple(memory)


def _with_host(
    layout: Layout, rank: int, memory: RankMemory, ratio: float, state_bytes: StateBytes
) -> RankMemory:
    """``memory`` of ``rank`` once ``ratio`` of its masters and states has moved to the host."""
    names = pieces_on_host(layout, rank, ratio, state_bytes=state_bytes)
    masters, states, moved = memory.masters, memory.states, []
    for bucket in layout.buckets:
        there = [piece for piece in bucket.pieces(rank) if piece.name in names]
        if not there:
            continue
        numel = sum(piece.numel for piece in there)
        of_states = sum(state_bytes(piece.name, piece.numel) for piece in there)
        # The host's memory is a whole number of float32.
        moved.append(-(-(numel * master_bytes(bucket) + of_states) // 4) * 4)
        states -= of_states
        # Masters that are left behind have memory of their own, without the padding of the shard.
        start, stop = bucket.shard(rank)
        left = sum(piece.numel for piece in bucket.pieces(rank)) - numel
        masters -= master_bytes(bucket) * (stop - start - left)
    return replace(
        memory,
        masters=masters,
        states=states,
        host=sum(moved),
        staging=max(moved, default=0) * min(STAGING_SLOTS, len(moved)),
    )


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Bytes that one rank holds for buckets under way, and their exchange, at the moment when they
    are most.
    """

    sent: int
    """Copies of gradients that travel; 0 where they travel from the memory that they accumulate
    in.
    """
    received: int
    """What arrives from all ranks, the sums of a node, and at stage 2 those that a further
    micro-batch adds; or parameters that are gathered in two levels on a device, where those are
    more."""
    exchanged: int = 0
    """What goes from cuts to owners, or comes back: copies of it, and what does not arrive where it
    belongs.
    """

    @property
    def total(self) -> int:
        """The bytes sent from copies, received, and exchanged, together."""
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
    """What each rank holds at most while gradients are reduced, or parameters gathered, beside
    :func:`memory_bytes`.

    Args:
        stored_as: what gradients accumulate in, by dtype of the layout.
        wires: what they travel in, by bucket.
        reduction: how sums are made; see :mod:`.plan.network.reduction`. Only ``ordered`` has what
            all ranks sent side by side.
        links: of them it counts which ranks share a node, and whether what travels lies in host
            memory, where that of buckets stays when it comes to the exchange; None for a node each,
            on a host.

    Not counted: at stage 2, where somebody asks for sums between two micro-batches, the next
    exchange adds what arrives, and so has memory for all of it.
    """
    size = layout.world_size
    # Buckets take turns with memory that grows to what the largest needs: of what is sent, of the
    # sums of a node, of what is received, added up in parts, and added.
    sent, sums = [0] * MAX_UNDER_WAY, [0] * MAX_UNDER_WAY
    received, parts, added = (np.zeros((MAX_UNDER_WAY, size), np.int64) for _ in range(3))
    gathered = 0
    rings = InLevels() if links is None else in_levels(layout.buckets, wires, links, reduction)
    for bucket, wire in zip(layout.buckets, wires, strict=True):
        turn = bucket.index % MAX_UNDER_WAY
        holders, wire_bytes = bucket.holders, itemsize(wire)
        group = None if links is None else group_of(holders, links, bucket.ep_size)
        copied = stage == 2 or (holders > 1 and stored_as[bucket.dtype] != wire)
        if stage == 2:
            _raise_to_own(added[turn], bucket, SUM_BYTES)
        # The backend may write straight to where sums stay.
        stays = sum_dtype(wire, reduction, stage) if bucket.way == "cuts" else "float32"
        if holders > 1 and reduction == "ordered":
            if group and not group.links.on_host:
                inside = group.local if bucket.way != "ragged" and group.has_levels else 1
                _raise_to_own(
                    parts[turn], bucket, SUM_BYTES * most_partial_sums(holders, per_node=inside)
                )
            # Of two ranks each reads its own where they are.
            _raise_to_own(received[turn], bucket, wire_bytes * (holders if holders > 2 else 1))
        elif holders > 1 and (bucket.way == "ragged" or wire != stays):
            _raise_to_own(received[turn], bucket, wire_bytes)
        copies = int(copied)
        if group and (
            bucket.index in rings.reduce
            if reduction == "native"
            else bucket.way != "ragged" and group.has_levels
        ):
            # Sorted by the places of a node, beside the memory that it all comes from.
            copies = 1 + (stage == 2)
            of_node = (
                bucket.numel // group.local * (wire_bytes if reduction == "native" else SUM_BYTES)
            )
            sums[turn] = max(sums[turn], of_node)
        if group and bucket.index in rings.gather:
            gathered = max(
                gathered, (bucket.numel + bucket.numel // group.local) * itemsize(bucket.dtype)
            )
        sent[turn] = max(sent[turn], bucket.numel * wire_bytes * copies)
    sums_moved, params_moved = _exchanged(layout, stage=stage, wires=wires, reduction=reduction)
    reduced = [(sum(sent), sum(sums) + each) for each in (received + parts + added).sum(0).tolist()]
    if links is None or links.on_host:
        return tuple(
            RankTraffic(*each, moved)
            for each, moved in zip(
                reduced, np.maximum(sums_moved, params_moved).tolist(), strict=True
            )
        )
    return tuple(
        max(
            (RankTraffic(*each), RankTraffic(0, 0, there), RankTraffic(0, gathered, back)),
            key=lambda traffic: traffic.total,
        )
        for each, there, back in zip(
            reduced, sums_moved.tolist(), params_moved.tolist(), strict=True
        )
    )


def _raise_to_own(most: NDArray[np.int64], bucket: Bucket, nbytes: int) -> None:
    """Raise ``most``, by rank, to ``nbytes`` an element of the rank's own shard of ``bucket``, or
    of its cut.
    """
    if bucket.way != "ragged":
        np.maximum(most, bucket.cut_numel * nbytes, out=most)
        return
    filled, lengths = _filled_shards(bucket)
    by_shard = most.reshape(bucket.holders, bucket.ep_size)
    by_shard[filled] = np.maximum(by_shard[filled], lengths[:, None] * nbytes)


def _exchanged(
    layout: Layout, *, stage: int, wires: Sequence[str], reduction: Reduction
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """By rank, the most bytes that the exchange of sums holds at a time, and that of parameters."""
    there = deal(layout.buckets, lambda bucket: sum_dtype(wires[bucket.index], reduction, stage))
    return (
        exchange_bytes(there, layout.world_size, owners_have="float32"),
        exchange_bytes(begun_backwards(layout.buckets), layout.world_size),
    )


def _held(layout: Layout, *, only_whole: bool = False) -> Iterator[tuple[int, str, int]]:
    """Yield rank, name and elements of what each rank holds of parameters, or ``only_whole`` ones,
    without padding.
    """
    for bucket in layout.buckets:
        if bucket.whole:
            for slot in bucket.slots:
                for owner in bucket.owners(slot):
                    yield owner, slot.name, slot.numel
        elif not only_whole:
            for rank, _ in bucket.non_empty_shards():
                for piece in bucket.pieces(rank):
                    yield rank, piece.name, piece.numel


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """What there is to say about a layout before anything runs. Tuples are by rank."""

    num_buckets: int
    numel: int
    """Elements of all parameters of a rank's model."""
    padding: int
    """Elements of the buffers that belong to no parameter."""
    work: tuple[int, ...]
    """Newton-Schulz FLOPs."""
    whole_numel: tuple[int, ...]
    """Elements of whole parameters, which is what ownership can unbalance."""

    @classmethod
    def of(cls, layout: Layout, specs: Sequence[ParamSpec]) -> LayoutReport:
        """The report on ``layout``, a plan of exactly these ``specs``.

        Raises:
            LayoutError: a parameter is in one of the two only.
        """
        work_of = {spec.name: spec.work for spec in specs}
        placed = {slot.name for bucket in layout.buckets for slot in bucket.slots}
        if only_one := placed.symmetric_difference(work_of):
            raise LayoutError(
                f"{min(only_one)} is in only one of the layout ({len(placed)} parameters) and the "
                f"specs ({len(work_of)})"
            )
        work, whole = ([0] * layout.world_size for _ in range(2))
        for rank, name, numel in _held(layout, only_whole=True):
            work[rank] += work_of[name]
            whole[rank] += numel
        numel = sum(slot.numel for bucket in layout.buckets for slot in bucket.slots)
        return cls(
            num_buckets=len(layout.buckets),
            numel=numel,
            padding=sum(layout.buffer_numel(dtype) for dtype in layout.dtypes) - numel,
            work=tuple(work),
            whole_numel=tuple(whole),
        )

    @property
    def padding_fraction(self) -> float:
        """Padding over the elements of all parameters."""
        return self.padding / self.numel if self.numel else 0.0

    @property
    def work_max_over_mean(self) -> float:
        """Newton-Schulz work of the busiest rank over the mean."""
        return max_over_mean(self.work)

    @property
    def whole_max_over_mean(self) -> float:
        """Elements of whole parameters on the fullest rank over the mean."""
        return max_over_mean(self.whole_numel)
