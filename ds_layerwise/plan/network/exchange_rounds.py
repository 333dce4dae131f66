"""The exchange between equal cuts of buckets and the owners of the parameters in them: its rounds,
and their memory.

Note: rounds
    An owner has shards in several buckets that travel in cuts. It takes part in each round with the
    next of these shards. So the elements that arrive from all ranks, in rank order, are that shard
    as it lies in memory. Owners are balanced over the model, and so is a round.

Note: memory of a round
    The elements of a rank's cuts that travel are copied together, in both directions. A shard is
    sent and received in place, unless the part in its owner's own cut splits it, or it has another
    dtype there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.layout.shards import Ints
from ds_layerwise.plan.network.transport import MAX_PENDING, itemsize


class Shard(NamedTuple):
    """A shard that takes part in a round."""

    bucket: Bucket
    owner: int
    """The number of the shard."""
    start: int
    """The range ``[start, stop)`` of the shard in the bucket."""
    stop: int

    def split_by_cut(self) -> tuple[int, int, int]:
        """Return how many elements lie before the owner's own cut, stay in it, and lie after it.

        If elements lie on both sides and fewer stay than travel, those travel, too, so that all
        arrive in one piece; they count as elements before the cut.
        """
        first = self.owner * self.bucket.cut_numel
        numel = self.stop - self.start
        before = min(max(first - self.start, 0), numel)
        behind = min(max(self.stop - first - self.bucket.cut_numel, 0), numel)
        stays = numel - before - behind
        if not stays or (before and behind and stays < before + behind):
            return numel, 0, 0
        return before, stays, behind


class Deal(NamedTuple):
    """A round of all ranks, with at most one shard of each owner."""

    ep_size: int
    dtype: str
    """The layout's name of the dtype that is sent."""
    shards: tuple[Shard, ...]


def travels_in_cuts(bucket: Bucket) -> bool:
    """Tell whether ``bucket`` travels to its owners in equal cuts."""
    return bucket.way == "cuts"


def has_owners(bucket: Bucket) -> bool:
    """Tell whether the parameters of ``bucket`` have one owner each."""
    return bucket.whole


def deal(
    buckets: Iterable[Bucket],
    dtype_of: Callable[[Bucket], str] = lambda bucket: bucket.dtype,
    takes_part: Callable[[Bucket], bool] = travels_in_cuts,
) -> list[Deal]:
    """Return the rounds for those of ``buckets`` that take part, in the given order.

    Args:
        dtype_of: returns the layout's name of the dtype in which a bucket is sent; by default that
            of its parameters.
        takes_part: tells whether a bucket has shards in the rounds.
    """
    deals = []
    kinds = defaultdict(list)
    for bucket in buckets:
        if takes_part(bucket):
            kinds[bucket.ep_size, dtype_of(bucket)].append(bucket)
    for (ep_size, dtype), alike in kinds.items():
        rounds: list[list[Shard]] = []
        turn: dict[int, int] = defaultdict(int)
        for bucket in alike:
            for owner, start, numel in zip(*bucket.shards[:3], strict=True):
                if turn[owner] == len(rounds):
                    rounds.append([])
                start -= bucket.start
                rounds[turn[owner]].append(Shard(bucket, owner, start, start + numel))
                turn[owner] += 1
        deals += [Deal(ep_size, dtype, tuple(shards)) for shards in rounds]
    return deals


def begun_backwards(
    buckets: Sequence[Bucket], takes_part: Callable[[Bucket], bool] = travels_in_cuts
) -> list[Deal]:
    """Return the rounds in which parameters go back, in the order in which they begin: after all of
    their buckets are updated.

    Args:
        buckets: the buckets of a layout; the last is updated first.
        takes_part: as in :func:`deal`.
    """

    def last_updated(each: Deal) -> int:
        return min(shard.bucket.index for shard in each.shards)

    rounds = deal(reversed(buckets), takes_part=takes_part)
    return sorted(rounds, key=last_updated, reverse=True)


def exchange_bytes(
    deals: Iterable[Deal], world_size: int, *, owners_have: str | None = None
) -> Ints:
    """Return the most bytes that rounds hold at a time, by rank; see the note.

    Args:
        deals: in the order in which they begin. As many rounds are pending at a time as buckets.
        owners_have: the dtype of the shards at their owners; None if it is the dtype that is sent.
    """

    def held(each: Deal) -> Ints:
        in_place = owners_have in (None, each.dtype)
        return _held(each, world_size // each.ep_size, in_place=in_place)

    return _most_under_way(map(held, deals), world_size)


def cut_sizes(each: Deal) -> dict[int, int]:
    """Return the number of elements that each owner sends to every rank at ZeRO stage 3, by owner:
    the cuts of the parameters in its shard.
    """
    sizes = {}
    for shard in each.shards:
        bucket = shard.bucket
        pieces = bucket.pieces(shard.owner * bucket.ep_size)
        sizes[shard.owner] = sum(-(-piece.numel // bucket.holders) for piece in pieces)
    return sizes


def cut_bytes(deals: Iterable[Deal], world_size: int) -> Ints:
    """Return the most bytes that rounds of parameters to the cuts of ZeRO stage 3 hold at a time,
    by rank: the elements that an owner sends and those that every rank receives.
    """

    def held(each: Deal) -> Ints:
        sizes = cut_sizes(each)
        numel = np.full(world_size, sum(sizes.values()), np.int64)
        for owner, size in sizes.items():
            numel[owner] += size * world_size
        return numel * itemsize(each.dtype)

    return _most_under_way(map(held, deals), world_size)


def _most_under_way(held: Iterable[Ints], world_size: int) -> Ints:
    """Return the most bytes of pending rounds, by rank, from the bytes of each round."""
    most = np.zeros(world_size, np.int64)
    under_way: deque[Ints] = deque(maxlen=MAX_PENDING)
    for each in held:
        under_way.append(each)
        most = np.maximum(most, np.sum(list(under_way), axis=0))
    return most


def _held(each: Deal, holders: int, *, in_place: bool) -> Ints:
    numel = np.zeros(holders, np.int64)
    for shard in each.shards:
        cut = shard.bucket.cut_numel
        first = shard.start // cut
        last = (shard.stop - 1) // cut
        numel[first : last + 1] += cut
        numel[first] -= shard.start - first * cut
        numel[last] -= (last + 1) * cut - shard.stop
        before, stays, behind = shard.split_by_cut()
        numel[shard.owner] -= stays
        if (before and behind) or not in_place:
            numel[shard.owner] += before + behind
    return np.repeat(numel * itemsize(each.dtype), each.ep_size)
