"""The exchange between equal cuts of buckets and the owners of what is in them: its rounds, and the
memory they take.

Note: rounds
    An owner has shards in several buckets that travel in cuts. In one round it takes part with one
    of them, in each round with the next, so that what arrives from all ranks, in rank order, is
    that shard as it lies in memory. Owners are balanced over the model, and so is a round.

Note: memory of a round
    What of a rank's cuts travels is copied, all together, whichever way it goes. A shard is sent
    from, and received, where it lies, unless what stays in its owner's own cut parts it, or it has
    another dtype there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.network.transport import MAX_UNDER_WAY, itemsize


class Shard(NamedTuple):
    """A shard, which takes part in a round."""

    bucket: Bucket
    owner: int
    """The number of the shard."""
    start: int
    """The range ``[start, stop)`` of the shard in the bucket."""
    stop: int

    def split_by_cut(self) -> tuple[int, int, int]:
        """Return how many elements lie before the owner's own cut, stay in it, and lie behind it.

        Fewer that stay than there are on both sides travel, too, so that all arrive in one piece,
        and count as before.
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
    """A round of all ranks, in which at most one shard of each owner takes part."""

    ep_size: int
    dtype: str
    """The layout's name for the dtype of what travels."""
    shards: tuple[Shard, ...]


def travels_in_cuts(bucket: Bucket) -> bool:
    """Tell whether ``bucket`` goes to its owners by way of equal cuts."""
    return bucket.way == "cuts"


def has_owners(bucket: Bucket) -> bool:
    """Tell whether the parameters of ``bucket`` have one owner each."""
    return bucket.whole


def deal(
    buckets: Iterable[Bucket],
    dtype_of: Callable[[Bucket], str] = lambda bucket: bucket.dtype,
    takes_part: Callable[[Bucket], bool] = travels_in_cuts,
) -> list[Deal]:
    """The rounds for those of ``buckets`` that take part, in the order given.

    Args:
        dtype_of: the layout's name for what travels of a bucket; that of parameters.
        takes_part: tells whether a bucket has shards in the rounds.
    """
    deals: list[Deal] = []
    kinds: dict[tuple[int, str], list[Bucket]] = defaultdict(list)
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
                rounds[turn[owner]].append(
                    Shard(bucket, owner, start - bucket.start, start - bucket.start + numel)
                )
                turn[owner] += 1
        deals += [Deal(ep_size, dtype, tuple(shards)) for shards in rounds]
    return deals


def begun_backwards(
    buckets: Sequence[Bucket], takes_part: Callable[[Bucket], bool] = travels_in_cuts
) -> list[Deal]:
    """The rounds in which parameters return, in the order in which they begin: once all of their
    buckets are updated.

    Args:
        buckets: of a layout; the last is updated first.
        takes_part: as in :func:`deal`.
    """

    def last_updated(each: Deal) -> int:
        return min(shard.bucket.index for shard in each.shards)

    rounds = deal(reversed(buckets), takes_part=takes_part)
    return sorted(rounds, key=last_updated, reverse=True)


def exchange_bytes(
    deals: Iterable[Deal], world_size: int, *, owners_have: str | None = None
) -> NDArray[np.int64]:
    """Return the most bytes that rounds hold at a time, by rank; see the note.

    Args:
        deals: in the order in which they begin. So many are under way at a time as buckets are.
        owners_have: the dtype that owners have what travels in; that of what travels if None.
    """
    most = np.zeros(world_size, np.int64)
    under_way: deque[NDArray[np.int64]] = deque(maxlen=MAX_UNDER_WAY)
    for each in deals:
        under_way.append(
            _held(each, world_size // each.ep_size, in_place=owners_have in (None, each.dtype))
        )
        most = np.maximum(most, np.sum(list(under_way), axis=0))
    return most


def cut_sizes(each: Deal) -> dict[int, int]:
    """Return the elements that each owner sends to every rank at ZeRO stage 3, by owner: the cuts
    of what is in its shard.
    """
    sizes = {}
    for shard in each.shards:
        bucket = shard.bucket
        pieces = bucket.pieces(shard.owner * bucket.ep_size)
        sizes[shard.owner] = sum(-(-piece.numel // bucket.holders) for piece in pieces)
    return sizes


def cut_bytes(deals: Iterable[Deal], world_size: int) -> NDArray[np.int64]:
    """Return the most bytes that rounds of parameters to the cuts of ZeRO stage 3 hold at a time,
    by rank: what an owner sends, and what everybody receives.
    """
    most = np.zeros(world_size, np.int64)
    under_way: deque[NDArray[np.int64]] = deque(maxlen=MAX_UNDER_WAY)
    for each in deals:
        sizes = cut_sizes(each)
        numel = np.full(world_size, sum(sizes.values()), np.int64)
        for owner, size in sizes.items():
            numel[owner] += size * world_size
        under_way.append(numel * itemsize(each.dtype))
        most = np.maximum(most, np.sum(list(under_way), axis=0))
    return most


def _held(each: Deal, holders: int, *, in_place: bool) -> NDArray[np.int64]:
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
