"""The lengths of a bucket's shards, by number, in a short form.

At 4,096 ranks most shards of most buckets are empty, or all are equal. Only other shards are stored
one by one. That keeps layouts of 10,000 buckets cheap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.errors import LayoutError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Numels(Sequence[int]):
    """The number of elements of each shard: a sequence that is like a tuple and equal to one."""

    size: int
    """The number of shards."""
    filled: Sequence[int]
    """The numbers of the shards that are not empty."""
    lengths: Sequence[int]
    """The lengths of these, if not all shards have the same length."""
    each: int | None = None
    """The length of every shard, if they are all equal."""

    @classmethod
    def equal(cls, each: int, size: int) -> Numels:
        """Return ``size`` shards of ``each`` elements."""
        return cls(size, range(size) if each else (), (), each)

    @classmethod
    def of_filled(cls, size: int, filled: Sequence[int], lengths: Sequence[int]) -> Numels:
        """Return ``size`` shards, all empty except ``filled``."""
        if not lengths or len(lengths) == size and lengths.count(lengths[0]) == size:
            return cls.equal(lengths[0] if lengths else 0, size)
        return cls(size, filled, lengths)

    @classmethod
    def of(cls, numels: Sequence[int]) -> Numels:
        """Return the shards with the lengths ``numels``."""
        if isinstance(numels, Numels):
            return numels
        return cls.of_filled(
            len(numels),
            tuple(compress(range(len(numels)), numels)),
            tuple(compress(numels, numels)),
        )

    @classmethod
    def of_runs(cls, runs: Iterable[Sequence[int]]) -> Numels:
        """Undo :meth:`runs`.

        Raises:
            LayoutError: a run has no shard, or a negative length.
        """
        size = 0
        filled: list[int] = []
        lengths = []
        for count, numel in runs:
            if type(count) is not int or type(numel) is not int or count < 1 or numel < 0:
                raise LayoutError(
                    f"a run of shards is [how many, numel], at least 1 and 0, got [{count!r}, "
                    f"{numel!r}]"
                )
            if numel:
                filled += range(size, size + count)
                lengths += [numel] * count
            size += count
        return cls.of_filled(size, tuple(filled), tuple(lengths))

    def runs(self) -> list[list[int]]:
        """``[[how many, numel], ...]``: runs of equal lengths, each as long as possible, so that
        equal sequences have one form.
        """
        if self.each is not None:
            return [[self.size, self.each]]
        runs: list[list[int]] = []

        def add(count: int, numel: int) -> None:
            if count and runs and runs[-1][1] == numel:
                runs[-1][0] += count
            elif count:
                runs.append([count, numel])

        done = 0
        for number, numel in zip(self.filled, self.lengths, strict=True):
            add(number - done, 0)
            add(1, numel)
            done = number + 1
        add(self.size - done, 0)
        return runs

    def __len__(self) -> int:
        """Return the number of shards."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        """Yield the number of elements of each shard, in order."""
        if self.each is not None:
            return repeat(self.each, self.size)
        numels = [0] * self.size
        for number, numel in zip(self.filled, self.lengths, strict=True):
            numels[number] = numel
        return iter(numels)

    def __getitem__(self, number: Any) -> Any:
        """Return the number of elements of a shard, or a tuple for a slice."""
        if isinstance(number, slice) or number < 0:
            return tuple(self)[number]
        if number >= self.size:
            raise IndexError(f"there are {self.size} shards, got number {number}")
        if self.each is not None:
            return self.each
        i = bisect_left(self.filled, number)
        if i < len(self.filled) and self.filled[i] == number:
            return self.lengths[i]
        return 0

    def __eq__(self, other: object) -> bool:
        """Tell whether ``other`` has the same lengths."""
        if isinstance(other, Numels):
            return (self.size, self.each) == (other.size, other.each) and (
                self.each is not None
                or (self.filled, self.lengths) == (other.filled, other.lengths)
            )
        return isinstance(other, (tuple, list)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the tuple."""
        return hash(tuple(self))

    def __repr__(self) -> str:
        """Return the shards as runs; see :meth:`runs`."""
        return f"Numels.of_runs({self.runs()})"


class Shards(NamedTuple):
    """Shards that lie back to back: their starts, their lengths and their sum."""

    filled: Sequence[int]
    """Numbers of the shards that are not empty."""
    starts: Sequence[int]
    """The starts of these."""
    lengths: Sequence[int]
    """The lengths of these."""
    numel: int
    """The number of elements in all shards together."""
    is_even: bool
    """True if all have the same length."""
    shortest: int
    """The length of the shortest shard that is not empty; if all have one length, that length;
    negative if any is.
    """

    @classmethod
    def of(cls, numels: Numels, start: int) -> Shards:
        """Return shards with ``numels`` elements, of which the first starts at ``start``."""
        filled = numels.filled
        lengths = numels.lengths
        each = numels.each
        if each is None:
            return cls(
                filled,
                tuple(accumulate(lengths[:-1], initial=start)),
                lengths,
                sum(lengths),
                False,
                min(lengths),
            )
        numel = len(numels) * each
        return cls(
            filled,
            range(start, start + numel, each) if each else (),
            numels if each else (),
            numel,
            True,
            each,
        )
