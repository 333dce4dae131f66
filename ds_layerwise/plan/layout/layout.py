"""The layout of parameters: the result of a plan, checked once and then only read.

There is one flat buffer per dtype. Buckets tile it; in a bucket, the shards of rank 0, 1, ...
follow one another; every parameter has one contiguous range, its slot. Offsets and sizes are in
elements, never bytes, and offsets count from the start of the buffer of the bucket's dtype.
Constructors check all values, so users of a layout need no checks.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, cast, get_args

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout.shards import Numels, Shards
from ds_layerwise.plan.layout.transport import Transport


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The facts about one parameter that a planner needs.

    ``whole`` parameters get one owner, the others are cut by element over all ranks. ``work`` is
    the FLOPs of one update, 0 for a parameter that is cut. ``ep_size`` is the number of consecutive
    ranks that hold different parameters under this name, a pattern that repeats; it is more than 1
    for experts. ``wire`` is the dtype in which the gradient is sent; all parameters of a bucket
    have the same.

    Raises:
        LayoutError: no name, no elements, ep_size below 1, or work for a parameter that is cut.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: bool
    work: int = 0
    ep_size: int = 1
    wire: str = "float32"

    def __post_init__(self) -> None:
        if not self.name or not self.dtype:
            raise LayoutError(
                f"a parameter needs a name and a dtype, got name {self.name!r}, dtype "
                f"{self.dtype!r}"
            )
        for size in self.shape:
            if size < 1:
                raise LayoutError(
                    f"{self.name}: every axis needs at least 1 element, got shape {self.shape}"
                )
        if self.ep_size < 1:
            raise LayoutError(f"{self.name}: ep_size must be at least 1, got {self.ep_size}")
        if self.work < 0 or (self.work and not self.whole):
            raise LayoutError(
                f"{self.name}: work must be at least 0, and 0 where whole is false, got "
                f"{self.work} with whole {self.whole}"
            )

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

    def __post_init__(self) -> None:
        if self.start < 0 or self.numel < 1:
            raise LayoutError(
                f"{self.name}: a slot needs start >= 0 and numel >= 1, got start {self.start}, "
                f"numel {self.numel}"
            )

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

    The default is ``even`` if all shards are equal, else ``cuts``.

    Raises:
        LayoutError: a slot leaves the bucket, overlaps the previous one, or crosses a border that
            it must not cross; or the bucket does not allow the transport.
    """

    index: int
    dtype: str
    whole: bool
    start: int
    shard_numels: Sequence[int]
    """The number of elements of each shard, stored as :class:`.plan.layout.shards.Numels`."""
    slots: tuple[Slot, ...]
    ep_size: int = 1
    transport: Transport = None  # type: ignore[assignment]  # the default depends on the shards
    shards: Shards = field(init=False, repr=False, compare=False)
    """The shards of ``shard_numels``; their starts are offsets in the buffer."""
    holders: int = field(init=False, repr=False, compare=False)
    """The number of shards: the size of a group of ranks that hold the bucket together."""
    cut_numel: int = field(init=False, repr=False, compare=False)
    """The length of each of as many equal cuts as there are shards, for the transport ``cuts``."""

    def __post_init__(self) -> None:
        if (
            self.index < 0
            or self.start < 0
            or not self.shard_numels
            or not self.slots
            or self.ep_size < 1
        ):
            raise LayoutError(
                f"bucket {self.index}: index and start must be at least 0, shards, slots and "
                f"ep_size at least 1, got start {self.start}, {len(self.shard_numels)} shards, "
                f"{len(self.slots)} slots, ep_size {self.ep_size}"
            )
        numels = Numels.of(self.shard_numels)
        object.__setattr__(self, "shard_numels", numels)
        shards = Shards.of(numels, self.start)
        if shards.shortest < 0:
            raise LayoutError(
                f"bucket {self.index}: shards must have at least 0 elements, that of rank "
                f"{self.ep_size * self.shard_numels.index(shards.shortest)} has {shards.shortest}"
            )
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "holders", numels.size)
        object.__setattr__(self, "cut_numel", shards.numel // numels.size)
        if cast("Transport | None", self.transport) is None:
            object.__setattr__(self, "transport", "even" if shards.is_even else "cuts")
        self._check_slots()
        self._check_transport()

    @property
    def _lengths(self) -> str:
        return f"{min(self.shard_numels)} to {max(self.shard_numels)} elements"

    def _check_transport(self) -> None:
        if self.transport not in get_args(Transport):
            raise LayoutError(
                f"bucket {self.index}: transport must be one of {', '.join(get_args(Transport))}, "
                f"got {self.transport!r}"
            )
        if not self.whole and (self.transport == "cuts" or not self.is_even):
            raise LayoutError(
                f"bucket {self.index}: slots that are cut over the ranks need equal shards and the "
                f"transport 'by_param' or 'even', got {self.transport!r} and shards of "
                f"{self._lengths}"
            )
        if self.whole and self.transport == "by_param":
            raise LayoutError(
                f"bucket {self.index}: the transport 'by_param' needs slots that are cut over the "
                "ranks"
            )
        if self.transport == "by_param":
            self._check_room()
        if self.transport == "even" and not self.is_even:
            raise LayoutError(
                f"bucket {self.index}: the transport 'even' needs equal shards, got {self._lengths}"
            )

    def _check_slots(self) -> None:
        end_of_previous = self.start
        for slot in self.slots:
            if not (self.start <= slot.start and slot.stop <= self.stop):
                raise LayoutError(
                    f"{slot.name}: [{slot.start}, {slot.stop}) leaves bucket {self.index}, "
                    f"[{self.start}, {self.stop})"
                )
            if slot.start < end_of_previous:
                raise LayoutError(
                    f"{slot.name}: [{slot.start}, {slot.stop}) starts before the end "
                    f"{end_of_previous} of the slot before it in bucket {self.index}"
                )
            end_of_previous = slot.stop
        if self.whole:
            self._check_owners()

    def _check_owners(self) -> None:
        filled, starts, lengths = self.shards[:3]
        i = 0
        for slot in self.slots:
            i = bisect_right(starts, slot.start, i) - 1
            stop = starts[i] + lengths[i]
            if slot.stop > stop:
                raise LayoutError(
                    f"{slot.name}: [{slot.start}, {slot.stop}) leaves the shard [{starts[i]}, "
                    f"{stop}) of rank {filled[i] * self.ep_size} in bucket {self.index}"
                )

    @property
    def is_even(self) -> bool:
        """True if all shards have the same length."""
        return self.shards.is_even

    @property
    def numel(self) -> int:
        """The number of elements in all shards together, with padding."""
        return self.shards.numel

    @property
    def stop(self) -> int:
        """The offset after the last element."""
        return self.start + self.shards.numel

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
        filled, starts, lengths = self.shards[:3]
        i = bisect_left(filled, number)
        if i == len(filled):
            return self.stop, self.stop
        return starts[i], starts[i] + (lengths[i] if filled[i] == number else 0)

    def non_empty_shards(self) -> Iterator[tuple[int, int]]:
        """Yield ``(rank, numel)`` of every shard that has elements, in rank order."""
        for number, numel in zip(self.shards.filled, self.shards.lengths, strict=True):
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
        return self.shards.filled[bisect_right(self.shards.starts, slot.start) - 1] * self.ep_size

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

    def _check_room(self) -> None:
        """Check that the cuts of each slot end before those of the next begin."""
        ends = [slot.start for slot in self.slots[1:]]
        for slot, end in zip(self.slots, [*ends, self.stop], strict=True):
            room = (end - slot.start) // self.holders
            if (slot.start - self.start) % self.holders or room < self.cut_of(slot):
                raise LayoutError(
                    f"{slot.name}: cuts of {self.cut_of(slot)} elements for {self.holders} ranks "
                    f"from {slot.start} on do not fit before {end} in bucket {self.index}"
                )

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
            "shards": Numels.of(self.shard_numels).runs(),
            "slots": [[slot.name, slot.start, slot.numel] for slot in self.slots],
        }
        if self.ep_size > 1:
            values["variants"] = self.ep_size
        if self.transport != "even":
            values["way"] = self.transport
        return values

    @classmethod
    def of_values(cls, index: int, values: dict[str, Any]) -> Bucket:
        """Make the bucket from the result of :meth:`to_values`.

        Shards of any length without a transport are those of an older save. They have no equal
        cuts; only the places of their pieces are asked for.
        """
        return cls(
            index,
            values["dtype"],
            values["whole"],
            values["start"],
            Numels.of_runs(values["shards"]),
            tuple(Slot(*slot) for slot in values["slots"]),
            values.get("variants", 1),
            values.get("way", cast("Transport", None)),
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
    _buffers: dict[str, int] = field(init=False, repr=False, compare=False)
    _homes: dict[str, tuple[Bucket, Slot]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.policy or self.world_size < 1 or self.alignment < 1:
            raise LayoutError(
                "a layout needs a policy, world_size >= 1 and alignment >= 1, got "
                f"{self.policy!r}, {self.world_size}, {self.alignment}"
            )
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
        object.__setattr__(self, "_buffers", buffers)
        object.__setattr__(self, "_homes", homes)

    def _check_bucket(self, bucket: Bucket, index: int, expected_start: int) -> None:
        if bucket.index != index:
            raise LayoutError(f"bucket {bucket.index} is at place {index} of the launch order")
        if bucket.world_size != self.world_size:
            raise LayoutError(
                f"bucket {index} has {len(bucket.shard_numels)} shards with ep_size "
                f"{bucket.ep_size}, the layout {self.world_size} ranks"
            )
        if bucket.start != expected_start:
            raise LayoutError(
                f"bucket {index} starts at {bucket.start} of the {bucket.dtype} buffer, the one "
                f"before it stops at {expected_start}"
            )
        for rank, numel in bucket.non_empty_shards():
            if numel % self.alignment:
                raise LayoutError(
                    f"bucket {index}: the shard of rank {rank} has {numel} elements, not a "
                    f"multiple of {self.alignment}"
                )
            if bucket.is_even:  # all have the same length
                break
        for slot in bucket.slots:
            if slot.start % self.alignment:
                raise LayoutError(
                    f"{slot.name} starts at {slot.start}, not a multiple of {self.alignment}"
                )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Every dtype that has a buffer, in launch order of its first bucket."""
        return tuple(self._buffers)

    def buffer_numel(self, dtype: str) -> int:
        """Return the length of the buffer of ``dtype``, with padding."""
        if dtype not in self._buffers:
            raise LayoutError(
                f"no parameter of this layout is {dtype}; it has "
                f"{', '.join(self._buffers) or 'none'}"
            )
        return self._buffers[dtype]

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
            LayoutError: ``text`` is not a layout or breaks an invariant.
        """
        try:
            values = json.loads(text)
            return cls(
                values["policy"],
                values["world_size"],
                values["alignment"],
                tuple(map(Bucket.of_values, count(), values["buckets"])),
            )
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError) as e:
            raise LayoutError(
                f"not a layout: {type(e).__name__}: {e}; the text starts with {text[:60]!r}"
            ) from e

    def digest(self) -> str:
        """Return a short hash: equal on two ranks if and only if their layouts are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]
