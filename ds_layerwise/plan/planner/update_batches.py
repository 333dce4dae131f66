"""Matrices of several buckets that are updated together, where a rank has few of each bucket.

Note: why, and how far
    A batch of matrices of equal shape takes as many launches as one matrix, and of small ones fills
    a device better. A bucket shared out over many ranks leaves one or two of each shape to an
    owner, so that without this every matrix is an update of its own. What is updated ahead makes
    its update's own bucket later, and with it the first gather; so matrices are taken along only
    until those of their shape are as many elements as make a full batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrices:
    """What one parameter gives to updates: one matrix, a batch of them, or parts of different
    shapes.
    """

    name: str
    alike: Hashable
    """Equal for parameters that one update may have."""
    numels: Sequence[tuple[tuple[int, int], int]] = ()
    """By (rows, cols), sorted, the elements of all its matrices of that shape."""
    most: int = 0
    """Elements of one shape up to which others are taken along; 0: it takes none along, and none
    takes it.
    """


def together(buckets: Sequence[Sequence[Matrices]]) -> list[list[tuple[Matrices, ...]]]:
    """By bucket, the updates that are made when it is its turn, last bucket first: parameters of
    its own that are alike first, then those of lower buckets that are taken along.

    Args:
        buckets: what one rank has of each.
    """
    # Those that may be taken along, by what they are alike in and the shapes they have, next turn
    # first.
    waiting: dict[Hashable, dict[tuple[tuple[int, int], ...], deque[tuple[int, Matrices]]]] = {}
    for index in reversed(range(len(buckets))):
        for each in buckets[index]:
            if each.most:
                shapes = tuple(shape for shape, _ in each.numels)
                waiting.setdefault(each.alike, {}).setdefault(shapes, deque()).append((index, each))
    updates: list[list[tuple[Matrices, ...]]] = [[] for _ in buckets]
    taken: set[str] = set()
    for index in reversed(range(len(buckets))):
        own: dict[Hashable, list[Matrices]] = {}
        for each in buckets[index]:
            if each.name not in taken:
                own.setdefault(each.alike, []).append(each)
        for alike, members in own.items():
            along = _take_along(members, list(waiting.get(alike, {}).values()), index)
            taken.update(each.name for each in along)
            updates[index].append((*members, *along))
    return updates


def _take_along(
    own: Sequence[Matrices], queues: Sequence[deque[tuple[int, Matrices]]], index: int
) -> list[Matrices]:
    """Take out of ``queues`` those of buckets below ``index`` that fill the batches of ``own``, all
    of that bucket.
    """
    filled: Counter[tuple[int, int]] = Counter()
    for each in own:
        filled.update(dict(each.numels))
    for queue in queues:
        while queue and queue[0][0] >= index:
            queue.popleft()
    taken: list[Matrices] = []
    while fitting := [
        queue
        for queue in queues
        if queue
        and all(
            shape in filled and filled[shape] + numel <= own[0].most
            for shape, numel in queue[0][1].numels
        )
    ]:
        # Those whose turn comes next.
        each = max(fitting, key=lambda queue: queue[0][0]).popleft()[1]
        taken.append(each)
        filled.update(dict(each.numels))
    return taken
