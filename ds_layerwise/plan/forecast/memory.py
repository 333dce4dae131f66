"""The bytes that each rank holds between two steps, by kind, and the bytes that it works in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import nlargest
from math import prod
from typing import NamedTuple

import numpy as np

from ds_layerwise.optimizers.dtypes import MasterDtype, master_bytes
from ds_layerwise.optimizers.mxfp8 import encoded_bytes
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.plan.layout.transfer_plan import completed, deal
from ds_layerwise.plan.layout.transport import (
    MAX_PENDING,
    SUM_BYTES,
    Reduction,
    itemsize,
    most_partial_sums,
    sum_dtype,
)
from ds_layerwise.routing.routes import Routes

#: A function that returns the bytes of the states for a number of elements of a parameter, given by
#: name.
StateBytes = Callable[[str, int], int]

#: The number of buckets whose masters and states are copied from the host to the device at a time:
#: the one that is updated, and the next.
STAGING_SLOTS = 2


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank holds between two steps, on its device and on its host."""

    params: int
    grads: int
    """The buffer in which micro-batches accumulate at stage 1; 0 from stage 2 on."""
    masters: int
    """The rank's shards in float32, or in the form that ``master_dtype`` names; 0 if the parameters
    themselves are float32.
    """
    states: int
    host: int = 0
    """The masters and states in host memory, and at stage 3 the cuts of parameters there."""
    staging: int = 0
    """The device memory for those masters and states while the optimizer steps."""

    @property
    def total(self) -> int:
        """The bytes on the device between two steps."""
        return self.params + self.grads + self.masters + self.states


class Working(NamedTuple):
    """The bytes that the rank with most of them works in at a time, beside those that it holds.

    They are bounds from sizes alone. The memory of activations, of drivers and of libraries is not
    in them.
    """

    update: int
    """The sums of gradients at their owners, and the temporary matrices of one update, with the
    masters and states that it opens to float32 or gets from the host.
    """
    in_pass: int
    """The sums of gradients, the gradients that wait for the reduction of others at stages 2 and 3,
    and at stage 3 the parameters that DeepSpeed makes whole for a forward or backward pass alone.
    """
    exchange: int
    """The sums of gradients while they go from cuts to their owners."""
    transfers: int
    """The copies that pending buckets send and receive."""

    @property
    def total(self) -> int:
        """The sum, with the largest one of a pass, an exchange and an update, which take turns."""
        return max(self.update, self.in_pass, self.exchange) + self.transfers


class Sums(NamedTuple):
    """The bytes that sums of gradients beside their buffer add to the most that a rank holds.

    They are there from a backward pass to the end of its step. If gradients are read between two
    passes of a step at stages 2 and 3, there are those of both.
    """

    in_pass: int
    """The shards of buckets that travel straight to their owners, and the cuts of others."""
    exchange: int
    """The most while cuts become shards, round by round."""
    update: int
    """The shards of all buckets."""


def state_bytes_of(routes: Routes) -> StateBytes:
    """Return a function for the bytes of states on a device, in the form in which they are kept."""

    @cache
    def state_bytes(name: str, numel: int) -> int:
        states = routes[name].states(numel).values()
        return sum(state.nbytes for state in states if not state.on_host)

    return state_bytes


def memory_bytes(
    layout: Layout,
    *,
    state_bytes: StateBytes,
    stage: int = 1,
    stored_as: Mapping[str, str] | None = None,
    host_ratio: float = 0.0,
    params_on_host: bool = False,
    master_dtype: MasterDtype = "float32",
    persistent: int = 0,
) -> tuple[RankMemory, ...]:
    """Count the bytes that each rank holds between two steps.

    From stage 2 on there are no gradients then. At stage 3 a rank keeps its cuts of all parameters,
    those that it owns in the form of :func:`owner_dtype`, and those that DeepSpeed leaves whole,
    with a copy that shows what a script writes into them.

    Args:
        state_bytes: the function for the bytes of states; see :func:`state_bytes_of`.
        stage: the ZeRO stage.
        stored_as: the dtype in which gradients accumulate, by dtype of the parameters; the default
            is the dtype of the parameters.
        host_ratio: the share of masters and states in host memory; see :func:`pieces_on_host`.
        params_on_host: True if the cuts of stage 3 are in host memory.
        master_dtype: the form of masters of bfloat16 parameters. Masters are float32 if there is a
            ``host_ratio``.
        persistent: the bytes of parameters that DeepSpeed leaves whole at stage 3.

    Raises:
        LayoutError: the size of a dtype is unknown.
    """
    grads = 0
    for dtype, numel in layout.buffers.items():
        stored = itemsize((stored_as or {}).get(dtype, dtype))
        grads += stored * numel * (stage == 1)
    dtype_of = partial(owner_dtype, master_dtype=master_dtype, host_ratio=host_ratio)
    params, hosted = _param_bytes(layout, stage, params_on_host, dtype_of)
    masters = [0] * layout.world_size
    states = [0] * layout.world_size
    for bucket in layout.buckets:
        padded = stage < 3 or dtype_of(bucket) == bucket.dtype
        for rank, numel in bucket.non_empty_shards():
            numel = numel if padded else bucket.filled_numel(rank)
            masters[rank] += master_bytes(numel, bucket.dtype, master_dtype)
        for rank, name, numel in _owned(bucket):
            states[rank] += state_bytes(name, numel)
    memory = []
    for rank in range(layout.world_size):
        on_device = RankMemory(
            params[rank] + 2 * persistent,
            grads,
            masters[rank],
            states[rank],
            host=hosted,
        )
        memory.append(_with_host(layout, rank, on_device, host_ratio, state_bytes))
    return tuple(memory)


def _owned(bucket: Bucket) -> Iterator[tuple[int, str, int]]:
    """Yield the rank, name and number of elements of each part of ``bucket``, without padding."""
    if bucket.whole:
        for slot in bucket.slots:
            for owner in bucket.owners(slot):
                yield owner, slot.name, slot.numel
        return
    for rank, _ in bucket.non_empty_shards():
        for piece in bucket.pieces(rank):
            yield rank, piece.name, piece.numel


def owner_dtype(bucket: Bucket, *, master_dtype: MasterDtype, host_ratio: float) -> str:
    """Return the layout's name of the dtype of the shards of ``bucket`` at ZeRO stage 3.

    Where cuts have the weights, owners need none: their shards are the float32 masters. Split
    masters are a part of the weight, and masters that go to the host are made of it.

    Args:
        host_ratio: the share of masters and states in host memory; see :func:`pieces_on_host`.
    """
    split = (bucket.dtype, master_dtype) == ("bfloat16", "bfloat16+remainder")
    if bucket.whole and not split and not host_ratio:
        return "float32"
    return bucket.dtype


def _param_bytes(
    layout: Layout, stage: int, on_host: bool, dtype_of: Callable[[Bucket], str]
) -> tuple[list[int], int]:
    """Count the bytes of parameters on each rank's device, and on its host.

    At stage 3 these are the cuts of whole parameters, and the shards that are no masters. Cuts of
    the others are their shards.
    """
    if stage < 3:
        whole = sum(itemsize(dtype) * numel for dtype, numel in layout.buffers.items())
        return [whole] * layout.world_size, 0
    cuts = 0
    owned = [0] * layout.world_size
    for bucket in layout.buckets:
        if bucket.whole:
            cuts += itemsize(bucket.dtype) * sum(map(bucket.cut_of, bucket.slots))
        if dtype_of(bucket) != bucket.dtype:
            continue
        for rank, numel in bucket.non_empty_shards():
            owned[rank] += itemsize(bucket.dtype) * numel
    if on_host:
        return owned, cuts
    return [nbytes + cuts for nbytes in owned], 0


def _with_host(
    layout: Layout, rank: int, memory: RankMemory, ratio: float, state_bytes: StateBytes
) -> RankMemory:
    """Return ``memory`` of ``rank`` with the share ``ratio`` of its masters and states on the
    host.
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
        moved.append(-(-(numel * _master_bytes(bucket) + state_nbytes) // 4) * 4)
        states -= state_nbytes
        # Masters that stay on the device have memory of their own, without the padding of the
        # shard.
        start, stop = bucket.shard(rank)
        left = sum(piece.numel for piece in pieces) - numel
        masters -= _master_bytes(bucket) * (stop - start - left)
    return replace(
        memory,
        masters=masters,
        states=states,
        host=memory.host + sum(moved),
        staging=max(moved, default=0) * min(STAGING_SLOTS, len(moved)),
    )


def pieces_on_host(
    layout: Layout, rank: int, ratio: float, *, state_bytes: StateBytes
) -> frozenset[str]:
    """Return the parameters whose piece on ``rank`` has its master and states in host memory.

    Pieces move as a whole. They are spread evenly over the buckets, so that one bucket can be
    updated while another is copied. They have at least the fraction ``ratio`` of the bytes of all
    masters and states on ``rank``, and exceed it by less than one piece. A float32 parameter is its
    own master, which stays on the device, so only its states count.

    Args:
        ratio: the fraction, from 0 for nothing to 1 for everything.
        state_bytes: the function for the bytes of states; see :func:`state_bytes_of`.
    """
    chosen = set()
    seen = taken = 0
    for bucket in layout.buckets:
        for piece in bucket.pieces(rank):
            nbytes = _master_bytes(bucket) * piece.numel + state_bytes(piece.name, piece.numel)
            seen += nbytes
            if nbytes and taken < ratio * seen:
                taken += nbytes
                chosen.add(piece.name)
    return frozenset(chosen)


def _master_bytes(bucket: Bucket) -> int:
    """Return the bytes of the float32 master of one element."""
    return master_bytes(1, bucket.dtype, "float32")


def update_bytes(
    layout: Layout,
    routes: Routes,
    master_dtype: MasterDtype,
    *,
    tp_size: int = 1,
    kept_as: Sequence[str] = (),
) -> int:
    """Return a bound of the bytes that an update works in, on the rank with most of them.

    An update has the equal matrices of one rank and bucket, or up to a full batch of those in
    several buckets, or the pieces of all split parameters of a bucket.

    Args:
        kept_as: the dtype in which sums of gradients are kept, by bucket, if not all in float32.
            Those of a bucket, and of what fills up its batches, become float32 together.
    """
    largest = max((bucket.numel for bucket in layout.buckets), default=0)
    most = opened = 0
    owned: dict[tuple[Recipe, int, int, int, str], Counter[int]] = {}
    for bucket in layout.buckets:
        shard = bucket.shards.longest
        forms = int((master_dtype, bucket.dtype) == ("bfloat16+remainder", "bfloat16"))
        forms += max(len(routes[slot.name].recipe.low_bit_dtypes()) for slot in bucket.slots)
        opened = max(opened, SUM_BYTES * forms * shard)
        for slot in bucket.slots:
            route = routes[slot.name]
            if not bucket.whole:
                most = max(most, route.recipe.workspace((shard,)))
                continue
            # A parameter that is copied for its update is updated alone.
            alone = slot.name if route.copied else ""
            for shape in route.seen(slot.numel).values():
                matrix = shape if len(shape) > 1 else (1, *shape)
                *batch, rows, cols = route.multiplied(matrix, tp_size)
                kind = route.recipe, rows, cols, route.copied, alone
                counts = owned.setdefault(kind, Counter())
                for owner in bucket.owners(slot):
                    counts[owner] += prod(batch)
    along = 0
    for (recipe, rows, cols, copied, _), counts in owned.items():
        along += recipe.full_batch_numel * (not copied)
        together = max(largest, recipe.full_batch_numel) // (rows * cols)
        count = min(max(counts.values()), max(1, together))
        most = max(most, recipe.workspace((count, rows, cols)) + copied)
    if {*kept_as} - {"float32"}:
        shards = [bucket.shards.longest for bucket in layout.buckets]
        opened += SUM_BYTES * min(max(shards) + along, sum(shards))
    return most + opened


def sums_bytes(
    layout: Layout,
    *,
    stage: int,
    stored_as: Mapping[str, str],
    wires: Sequence[str],
    reduction: Reduction,
    kept_as: Sequence[str] | None = None,
    beside: Sequence[int] = (0,),
) -> Sums:
    """Count the bytes of the sums of gradients; see :func:`transfer_bytes`.

    Args:
        kept_as: the dtype in which sums are kept, by bucket; None for float32.
        beside: what each rank holds beside them, in bytes. One that holds much may have few sums.
    """
    shards = np.zeros((len(layout.buckets), layout.world_size), np.int64)
    cuts = np.zeros(len(layout.buckets), np.int64)
    kept = [itemsize(dtype) for dtype in kept_as or ("float32",) * len(layout.buckets)]
    in_cuts = np.array([bucket.transport == "cuts" for bucket in layout.buckets], bool)

    def sent_as(bucket: Bucket) -> str:
        return sum_dtype(wires[bucket.index], reduction, stage)

    for bucket in layout.buckets:
        # Sums share the memory of the gradients if they have its dtype.
        shared = stored_as[bucket.dtype] if stage == 1 else None
        if shared != "float32":
            for rank, numel in bucket.non_empty_shards():
                if stage > 1:
                    numel = bucket.sums_numel(rank)
                shards[bucket.index, rank] = kept[bucket.index] * numel
        if in_cuts[bucket.index] and shared != sent_as(bucket):
            size = min(kept[bucket.index], itemsize(sent_as(bucket)))
            cuts[bucket.index] = size * bucket.cut_numel
    held = shards[~in_cuts].sum(0) + cuts.sum() + np.array(beside)
    in_pass = exchange = held.max()
    rounds = deal(layout.buckets, sent_as)
    for dealt, indices in zip(rounds, completed(rounds), strict=True):
        for owner, index in dealt.bucket_of.items():
            ranks = slice(owner * dealt.ep_size, (owner + 1) * dealt.ep_size)
            held[ranks] += shards[index, ranks]
        exchange = max(exchange, held.max())
        held -= cuts[indices].sum()
    update = (shards.sum(0) + np.array(beside)).max()
    return Sums(*(int(most) - max(beside) for most in (in_pass, exchange, update)))


def transfer_bytes(
    layout: Layout,
    *,
    stage: int,
    stored_as: Mapping[str, str],
    wires: Sequence[str],
    reduction: Reduction,
) -> int:
    """Return a bound of the bytes that pending buckets send and receive, on the rank with most of
    them.

    Args:
        stored_as: the dtype in which gradients accumulate, by dtype of the parameters.
        wires: the dtype in which gradients are sent, by bucket.
    """
    pending = []
    exchanges = [0]
    for bucket, wire in zip(layout.buckets, wires, strict=True):
        copies = int(stage > 1 or (bucket.holders > 1 and stored_as[bucket.dtype] != wire))
        own = SUM_BYTES * (stage > 1)
        if reduction == "ordered" and bucket.holders > 1:
            # The parts of all ranks, as they arrive and sorted by their places in a node.
            copies += 2
            own += SUM_BYTES * most_partial_sums(bucket.holders)
        elif bucket.holders > 1 and wire != "float32":
            own += itemsize(wire)
        pending.append(copies * itemsize(wire) * bucket.numel + own * bucket.cut_numel)
        if bucket.transport == "cuts" or (bucket.whole and stage == 3):
            nbytes = SUM_BYTES + 2 * bucket.in_mxfp8 * (stage == 3)
            exchanges.append(nbytes * (bucket.cut_numel + bucket.shards.longest))
    most = [sum(nlargest(MAX_PENDING, each)) for each in (pending, exchanges)]
    # The backend's own sums are made before anything is exchanged.
    return sum(most) if reduction == "ordered" else max(most)


def gathered_bytes(layout: Layout, *, stage: int) -> int:
    """Return the bytes of what is gathered in MXFP8, of all buckets at a time: they are there until
    the first use of a parameter. At ZeRO stage 3 nothing is gathered.
    """
    found = 0
    for bucket in layout.buckets:
        if bucket.in_mxfp8 and bucket.holders > 1 and stage < 3:
            found += encoded_bytes(bucket.numel)
    return found
