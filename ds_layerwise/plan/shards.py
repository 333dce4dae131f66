"""Lengths of the shards of a bucket, by number: which are empty, where the others start, and their short form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, compress
from typing import NamedTuple


class Shards(NamedTuple):
    """What follows from the lengths of shards that lie back to back.

    At 1024 ranks most shards of most buckets are empty, or all are equal and these are ranges: that keeps layouts of
    10,000 buckets cheap.
    """

    filled: Sequence[int]
    """Numbers of the shards that are not empty."""
    starts: Sequence[int]
    """Where these start."""
    lengths: Sequence[int]
    """How long these are."""
    numel: int
    """All together."""
    is_even: bool
    """Whether all have the same length."""
    shortest: int
    """The length of the shortest that is not empty, or of all; below 0 if any is."""

    @classmethod
    def of(cls, numels: tuple[int, ...], start: int) -> Shards:
        """Make shards of ``numels`` elements, the first of which starts at ``start``."""
        if numels.count(numels[0]) == len(numels):
            count, each = len(numels), numels[0]
            numel = count * each
            return cls(range(count) if each else (), range(start, start + numel, each) if each else (),
                       numels if each else (), numel, True, each)
        return cls.of_filled(tuple(compress(_count_to(len(numels)), numels)), tuple(compress(numels, numels)), start)

    @classmethod
    def of_filled(cls, filled: Sequence[int], lengths: Sequence[int], start: int) -> Shards:
        """Make shards of which all but ``filled`` are empty, and not all are equal; at least one is not empty."""
        return cls(filled, tuple(accumulate(lengths[:-1], initial=start)), lengths, sum(lengths), False, min(lengths))


@lru_cache(maxsize=4)
def _count_to(size: int) -> tuple[int, ...]:
    return tuple(range(size))


def run_lengths(numels: Sequence[int], shards: Shards) -> list[list[int]]:
    """``[[how many, numel], ...]``: runs of equal lengths, each as long as it can be, so that equal shards have one
    form."""
    if shards.is_even:
        return [[len(numels), numels[0]]]
    runs: list[list[int]] = []

    def add(count: int, numel: int) -> None:
        if count and runs and runs[-1][1] == numel:
            runs[-1][0] += count
        elif count:
            runs.append([count, numel])

    done = 0
    for number in shards.filled:
        add(number - done, 0)
        add(1, numels[number])
        done = number + 1
    add(len(numels) - done, 0)
    return runs
