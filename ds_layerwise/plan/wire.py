"""How a bucket travels: straight to its owners, or in two hops, and how many at a time.

Note: two hops
    An owner receives its shard from every rank, R times its own length. Of a bucket that is one matrix that is R times
    the bucket, which neither fits nor arrives in time, so a skewed bucket takes two hops: first it is cut evenly, and
    each rank receives and sums its cut; then the float32 sums go on to the owners. A rank then receives the bucket
    once, and sends its cut of sums more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

#: A bucket whose longest shard is more than this many times the mean one takes two hops.
MAX_SKEW = 4

#: Buckets that travel at a time: it bounds the memory for what is sent and received.
MAX_UNDER_WAY = 2


def takes_two_hops(shard_numels: Sequence[int]) -> bool:
    """Whether a bucket of these shards is summed in even cuts first; see the note on two hops."""
    return len(shard_numels) * max(shard_numels) > MAX_SKEW * sum(shard_numels)


def even_cuts(numel: int, size: int) -> list[int]:
    """Lengths of ``size`` cuts of ``numel`` elements; the first may be longer by one."""
    return [numel // size + (rank < numel % size) for rank in range(size)]


def overlaps(lengths: Sequence[int], others: Sequence[int], rank: int) -> list[int]:
    """How much of piece ``rank`` of ``lengths`` lies in each piece of ``others``, both cutting the same range."""
    start = sum(lengths[:rank])
    stop = start + lengths[rank]
    ends = list(accumulate(others, initial=0))
    return [max(0, min(stop, high) - max(start, low)) for low, high in zip(ends, ends[1:])]
