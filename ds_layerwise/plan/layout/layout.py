"""The layout of parameters: the result of a plan, checked once and then only read.

There is one flat buffer per dtype. Buckets tile it; in a bucket, the shards of rank 0, 1, ...
follow one another; every parameter has one contiguous range, its slot. Offsets and sizes are in
elements, never bytes, and offsets count from the start of the buffer of the bucket's dtype.
Buckets and layouts check where parameters lie when they are made, so users of a layout need no
checks.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.errors import LayoutError
from ds_layerwise.optimizers.mxfp8 import GROUP, MXFP8
from ds_layerwise.plan.layout.transport import Transport

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The facts about one parameter that a planner needs.

    ``whole`` parameters get one owner, the others are cut by element over all ranks. ``work`` is
    the FLOPs of one update, 0 for a parameter that is cut. ``ep_size`` is the number of consecutive
    ranks that hold different parameters under this name, a pattern that repeats; it is more than 1
    for experts. ``wire`` is the dtype in which the gradient is sent; all parameters of a bucket
    have the same. ``to_peers`` is the bytes that an update sends to the ranks with the other tensor
    shards.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: bool
    work: int = 0
    ep_size: int = 1
    wire: str = "float32"
    to_peers: int = 0

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a 0-d parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one whole parameter: ``[start, stop)`` in its buffer."""

    name: str
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """The offset after the last element."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a slot that is in one rank's shard.

    ``start`` is an offset in the buffer, ``param_start`` the offset of the same element in the
    flattened parameter.
    """

    name: str
    start: int
    numel: int
    param_start: int


@dataclass(frozen=True, slots=True)
class Shards:
    """The lengths of a bucket's shards.

    At 4,096 ranks most shards of most buckets are empty, or all are equal. So they are runs of
    equal ones, which keeps layouts of 10,000 buckets cheap.
    """

    runs: tuple[tuple[int, int], ...]
    """For each run the number of its shards, and the number of elements in each of them. No two
    runs of one length follow each other.
    """

    @classmethod
    def of(cls, lengths: Mapping[int, int], count: int) -> Shards:
        """Return ``count`` shards, all empty except those in ``lengths``, which are in order."""
        runs: list[tuple[int, int]] = []
        done = 0
        for number, numel in (*lengths.items(), (count, 0)):
            for many, each in ((number - done, 0), (int(number < count), numel)):
                if many and runs and runs[-1][1] == each:
                    many += runs.pop()[0]
                if many:
                    runs.append((many, each))
            done = number + 1
        return cls(tuple(runs))

    @property
    def count(self) -> int:
        """The number of shards."""
        return sum(count for count, _ in self.runs)

    @property
    def numel(self) -> int:
        """The number of elements in all of them together."""
        return sum(count * numel for count, numel in self.runs)

    @property
    def longest(self) -> int:
        """The length of the longest one."""
        return max(numel for _, numel in self.runs)


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of the buffer of ``dtype`` that one collective reduces: the shard of rank
    0, of rank 1, ...

    Shards may differ in length and may be empty. ``slots`` are in memory order. In a ``whole``
    bucket no slot crosses a border between shards. If parameters are experts, every ``ep_size``
    consecutive ranks of the layout have the same shard, each of its own experts, and a collective
    runs over the ranks with the same experts.

    Its transport is one of these:

    * ``even``: directly to the owners, whose shards have equal lengths.
    * ``cuts``: with shards of any length, in as many equal cuts as there are shards, cut r to
      holder r. From there, one exchange per step moves the elements of other owners.
    * ``by_param``: for parameters that are cut over the ranks. Each is cut evenly by itself, as
      ZeRO stage 3 does it, cut r to holder r, whose shard consists of its cuts of all parameters.
      Slots have room for as many equal cuts.

    Raises:
        LayoutError: a slot leaves the bucket, overlaps the previous one, or crosses a border that
            it must not cross; or the bucket does not allow the transport.
    """

    index: int
    dtype: str
    whole: bool
    start: int
    shards: Shards
    slots: tuple[Slot, ...]
    transport: Transport
    ep_size: int = 1
    in_mxfp8: bool = False
    """True if its updated parameters, bfloat16, are sent in MXFP8, and have values of that."""

    def __post_init__(self) -> None:
        allowed = {
            "even": self.is_even,
            "cuts": self.whole,
            "by_param": self.is_even and not self.whole,
        }
        if not allowed.get(self.transport):
            raise LayoutError(
                f"bucket {self.index} of {'whole' if self.whole else 'split'} parameters with "
                f"shards {self.shards.runs} has the transport {self.transport!r}, which it cannot "
                f"have; possible are {', '.join(name for name in allowed if allowed[name])}"
            )
        # Each slot ends before the next begins, and before the end of the shard of its owner; by
        # ``by_param``, so do all cuts of it.
        start = self.start
        ends = [slot.start for slot in self.slots[1:]]
        for slot, end in zip(self.slots, [*ends, self.stop], strict=True):
            stop = slot.stop
            if self.whole:
                end = min(end, self.shard(self.owner(slot))[1])
            elif self.transport == "by_param":
                stop = slot.start + self.holders * self.cut_of(slot)
            if not start <= slot.start < stop <= end:
                raise LayoutError(
                    f"{slot.name}: [{slot.start}, {stop}) leaves its place in bucket {self.index}, "
                    f"[{start}, {end})"
                )
            start = stop

    @cached_property
    def holders(self) -> int:
        """The number of shards: the size of a group of ranks that hold the bucket together."""
        return self.shards.count

    @cached_property
    def numel(self) -> int:
        """The number of elements in all shards together, with padding."""
        return self.shards.numel

    @property
    def cut_numel(self) -> int:
        """The length of each of as many equal cuts as there are shards, for the transport
        ``cuts``.
        """
        return self.numel // self.holders

    @cached_property
    def _numbers(self) -> list[int]:
        """The number of the first shard of each run, and the number of all."""
        return list(accumulate((count for count, _ in self.shards.runs), initial=0))

    @cached_property
    def _starts(self) -> list[int]:
        """The start in the buffer of each run, and the stop of the last."""
        numels = (count * numel for count, numel in self.shards.runs)
        return list(accumulate(numels, initial=self.start))

    @property
    def is_even(self) -> bool:
        """True if all shards have the same length."""
        return len(self.shards.runs) == 1

    @property
    def stop(self) -> int:
        """The offset after the last element."""
        return self.start + self.numel

    @property
    def world_size(self) -> int:
        """The number of ranks of the layout."""
        return self.holders * self.ep_size

    def shard(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of the shard of ``rank`` in the buffer. They are equal if it is
        empty.

        Raises:
            LayoutError: the layout has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank must be in [0, {self.world_size}), got {rank}")
        number = rank // self.ep_size
        run = bisect_right(self._numbers, number) - 1
        numel = self.shards.runs[run][1]
        start = self._starts[run] + (number - self._numbers[run]) * numel
        return start, start + numel

    def filled_numel(self, rank: int) -> int:
        """Return the length of the shard of ``rank`` without padding behind its last piece."""
        start, _ = self.shard(rank)
        return max((piece.start + piece.numel - start for piece in self.pieces(rank)), default=0)

    def sums_numel(self, rank: int) -> int:
        """Return the number of sums that ``rank`` keeps in its shard from stage 2 on: without that
        padding if whole parameters arrive straight at their owners.
        """
        if self.whole and self.transport == "even":
            return self.filled_numel(rank)
        start, stop = self.shard(rank)
        return stop - start

    def filled(self) -> Iterator[tuple[int, int, int]]:
        """Yield the number, the start and the length of every shard that has elements, in order."""
        for number, start, run in zip(self._numbers, self._starts, self.shards.runs):
            count, numel = run
            for i in range(count * bool(numel)):
                yield number + i, start + i * numel, numel

    def non_empty_shards(self) -> Iterator[tuple[int, int]]:
        """Yield ``(rank, numel)`` of every shard that has elements, in rank order."""
        for number, _, numel in self.filled():
            for ep_rank in range(self.ep_size):
                yield number * self.ep_size + ep_rank, numel

    def owners(self, slot: Slot) -> range:
        """Return the ranks that own ``slot``: one, or one for each of its experts."""
        owner = self.owner(slot)
        return range(owner, owner + self.ep_size)

    def owner(self, slot: Slot) -> int:
        """Return the rank that owns ``slot``, or the first expert of its name.

        Raises:
            LayoutError: slots of this bucket are cut over the ranks, or ``slot`` starts outside of
                it.
        """
        if not self.whole or not self.start <= slot.start < self.stop:
            raise LayoutError(
                f"{slot.name}: no rank owns [{slot.start}, {slot.stop}) in bucket {self.index}, "
                f"[{self.start}, {self.stop}), whole {self.whole}"
            )
        run = bisect_right(self._starts, slot.start) - 1
        number = self._numbers[run] + (slot.start - self._starts[run]) // self.shards.runs[run][1]
        return number * self.ep_size

    def sent_as(self, *, by_param: bool = False) -> str:
        """Return the format in which its updated parameters are sent.

        Args:
            by_param: True if they are sent to cuts of parameters; these are sent in MXFP8 if they
                are whole groups of that.
        """
        splits_groups = by_param and any(self.cut_of(slot) % GROUP for slot in self.slots)
        return MXFP8 if self.in_mxfp8 and not splits_groups else self.dtype

    def cut_of(self, slot: Slot) -> int:
        """Return the number of elements in each rank's cut of ``slot`` by itself. The last cut may
        have fewer.
        """
        return -(-slot.numel // self.holders)

    def offset_in_shard(self, slot: Slot) -> int:
        """Return the offset of a rank's cut of ``slot`` in its shard, for the transport
        ``by_param``.
        """
        return (slot.start - self.start) // self.holders

    def _pieces_by_param(self, rank: int) -> tuple[Piece, ...]:
        start = self.shard(rank)[0]
        pieces = []
        for slot in self.slots:
            cut = self.cut_of(slot)
            first = rank // self.ep_size * cut
            numel = min(cut, slot.numel - first)
            if numel > 0:
                pieces.append(Piece(slot.name, start + self.offset_in_shard(slot), numel, first))
        return tuple(pieces)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces in the shard of ``rank``, in memory order, without padding."""
        if self.transport == "by_param":
            return self._pieces_by_param(rank)
        start, stop = self.shard(rank)
        if start == stop:
            return ()
        first = bisect_right(self.slots, start, key=lambda slot: slot.stop)
        last = bisect_left(self.slots, stop, key=lambda slot: slot.start)
        pieces = []
        for slot in self.slots[first:last]:
            begin = max(slot.start, start)
            numel = min(slot.stop, stop) - begin
            pieces.append(Piece(slot.name, begin, numel, begin - slot.start))
        return tuple(pieces)

    def to_values(self) -> dict[str, Any]:
        """Return the bucket as JSON values; :meth:`of_values` reads them."""
        values: dict[str, Any] = {
            "dtype": self.dtype,
            "whole": self.whole,
            "start": self.start,
            "shards": self.shards.runs,
            "slots": [[slot.name, slot.start, slot.numel] for slot in self.slots],
        }
        if self.ep_size > 1:
            values["variants"] = self.ep_size
        if self.transport != "even":
            values["way"] = self.transport
        if self.in_mxfp8:
            values["in_mxfp8"] = True
        return values

    @classmethod
    def of_values(cls, index: int, values: dict[str, Any]) -> Bucket:
        """Make the bucket from the result of :meth:`to_values`.

        Shards of any length without a transport, or with "ragged", are those of an older save. They
        have no equal cuts; only the places of their pieces are asked for.
        """
        shards = Shards(tuple(map(tuple, values["shards"])))
        transport = values.get("way", "ragged")
        if transport == "ragged":
            transport = "even" if len(shards.runs) == 1 else "cuts"
        return cls(
            index,
            values["dtype"],
            values["whole"],
            values["start"],
            shards,
            tuple(Slot(*slot) for slot in values["slots"]),
            transport,
            values.get("variants", 1),
            values.get("in_mxfp8", False),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """A complete placement of parameters over ``world_size`` ranks.

    ``buckets`` are in launch order. Those of one dtype tile its buffer from 0, in that order,
    without gap or overlap. Slots and shards start at multiples of ``alignment``.

    Raises:
        LayoutError: one of these conditions does not hold, or a parameter has two slots.
    """

    policy: str
    world_size: int
    alignment: int
    buckets: tuple[Bucket, ...]
    buffers: dict[str, int] = field(init=False, repr=False, compare=False)
    """The length of the buffer of each dtype, with padding, in launch order of its first bucket."""
    _homes: dict[str, tuple[Bucket, Slot]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        buffers: dict[str, int] = {}
        homes: dict[str, tuple[Bucket, Slot]] = {}
        for index, bucket in enumerate(self.buckets):
            self._check_bucket(bucket, index, expected_start=buffers.get(bucket.dtype, 0))
            buffers[bucket.dtype] = bucket.stop
            for slot in bucket.slots:
                if slot.name in homes:
                    raise LayoutError(
                        f"{slot.name} is in bucket {homes[slot.name][0].index} and in bucket "
                        f"{index}"
                    )
                homes[slot.name] = bucket, slot
        object.__setattr__(self, "buffers", buffers)
        object.__setattr__(self, "_homes", homes)

    def _check_bucket(self, bucket: Bucket, index: int, expected_start: int) -> None:
        if bucket.index != index:
            raise LayoutError(f"bucket {bucket.index} is at place {index} of the launch order")
        if bucket.world_size != self.world_size:
            raise LayoutError(
                f"bucket {index} has {bucket.holders} shards with ep_size "
                f"{bucket.ep_size}, the layout {self.world_size} ranks"
            )
        if bucket.start != expected_start:
            raise LayoutError(
                f"bucket {index} starts at {bucket.start} of the {bucket.dtype} buffer, the one "
                f"before it stops at {expected_start}"
            )
        for _, numel in bucket.shards.runs:
            if numel % self.alignment:
                raise LayoutError(
                    f"bucket {index}: a shard has {numel} elements, not a multiple of "
                    f"{self.alignment}"
                )
        for slot in bucket.slots:
            if slot.start % self.alignment:
                raise LayoutError(
                    f"{slot.name} starts at {slot.start}, not a multiple of {self.alignment}"
                )

    def bucket_of(self, name: str) -> Bucket:
        """Return the bucket that holds the parameter ``name``."""
        return self._home(name)[0]

    def slot(self, name: str) -> Slot:
        """Return the slot of the parameter ``name``."""
        return self._home(name)[1]

    def _home(self, name: str) -> tuple[Bucket, Slot]:
        if name not in self._homes:
            raise LayoutError(f"{name} is not in this layout of {len(self._homes)} parameters")
        return self._homes[name]

    def with_sizes(self, numels: Mapping[str, int]) -> Layout:
        """Return this layout with every parameter in its place, but of ``numels``, which are not
        larger.
        """
        buckets = []
        for bucket in self.buckets:
            slots = (replace(slot, numel=numels[slot.name]) for slot in bucket.slots)
            buckets.append(replace(bucket, slots=tuple(slots)))
        return replace(self, buckets=tuple(buckets))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of ``rank``, bucket by bucket, in memory order."""
        return tuple(chain.from_iterable(bucket.pieces(rank) for bucket in self.buckets))

    def to_json(self) -> str:
        """Return the layout as one line of JSON, with shard lengths as runs ``[[how many, numel],
        ...]``.
        """
        values = {
            "policy": self.policy,
            "world_size": self.world_size,
            "alignment": self.alignment,
            "buckets": [bucket.to_values() for bucket in self.buckets],
        }
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Return the layout from the result of :meth:`to_json`.

        Raises:
            LayoutError: it breaks an invariant.
        """
        values = json.loads(text)
        values["buckets"] = tuple(map(Bucket.of_values, count(), values["buckets"]))
        return cls(**values)

    def digest(self) -> str:
        """Return a short hash: equal on two ranks if and only if their layouts are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]
