"""Matrices of several buckets that are updated together if a rank has few of each bucket.

Note: why, and how far
    A batch of equal matrices takes as many launches as one matrix, and small matrices fill a device
    better in a batch. In a bucket that is shared by many ranks, an owner has one or two matrices of
    each shape, so that every matrix would be an update of its own. On the other hand, updates of
    matrices whose buckets have a later turn delay this bucket, and with it the first gather. So
    matrices of other buckets are added only until those of their shape have the elements of a full
    batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter: one, a batch of them, or parts of different shapes."""

    name: str
    alike: Hashable
    """A key, equal for parameters that one update may combine."""
    numels: Sequence[tuple[tuple[int, int], int]] = ()
    """The number of elements in all its matrices of a shape, by (rows, cols), sorted."""
    most: int = 0
    """The number of elements of one shape up to which others are added; with 0 it adds none and is
    not added.
    """


def together(buckets: Sequence[Sequence[Matrices]]) -> list[list[tuple[Matrices, ...]]]:
    """Return the updates of each bucket at its turn, last bucket first.

    Each update has parameters of the bucket with equal keys, then those added from lower buckets.

    Args:
        buckets: the matrices of one rank, by bucket.
    """
    # The parameters that may be added, by kind and shapes, next turn first.
    waiting: dict[Hashable, dict[tuple[tuple[int, int], ...], deque[tuple[int, Matrices]]]] = {}
    for index in reversed(range(len(buckets))):
        for matrices in buckets[index]:
            if matrices.most:
                shapes = tuple(shape for shape, _ in matrices.numels)
                queues = waiting.setdefault(matrices.alike, {})
                queues.setdefault(shapes, deque()).append((index, matrices))
    updates: list[list[tuple[Matrices, ...]]] = [[] for _ in buckets]
    taken: set[str] = set()
    for index in reversed(range(len(buckets))):
        own: dict[Hashable, list[Matrices]] = {}
        for matrices in buckets[index]:
            if matrices.name not in taken:
                own.setdefault(matrices.alike, []).append(matrices)
        for alike, members in own.items():
            along = _take_along(members, list(waiting.get(alike, {}).values()), index)
            taken.update(matrices.name for matrices in along)
            updates[index].append((*members, *along))
    return updates


def _take_along(
    own: Sequence[Matrices], queues: Sequence[deque[tuple[int, Matrices]]], index: int
) -> list[Matrices]:
    """Take matrices that fill up the batches of ``own``, all of one bucket, from ``queues`` of
    lower buckets.
    """
    filled: Counter[tuple[int, int]] = Counter()
    for matrices in own:
        filled.update(dict(matrices.numels))
    for queue in queues:
        while queue and queue[0][0] >= index:
            queue.popleft()

    def fits(matrices: Matrices) -> bool:
        most = own[0].most
        for shape, numel in matrices.numels:
            if not (shape in filled and filled[shape] + numel <= most):
                return False
        return True

    taken = []
    while fitting := [queue for queue in queues if queue and fits(queue[0][1])]:
        # Those with the next turn.
        matrices = max(fitting, key=lambda queue: queue[0][0]).popleft()[1]
        taken.append(matrices)
        filled.update(dict(matrices.numels))
    return taken
