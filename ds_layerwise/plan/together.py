"""Matrices of several buckets that are updated together, where a rank has few of each bucket.

Note: why, and how far
    A batch of matrices of equal shape takes as many launches as one matrix, and of small ones fills a device better. A
    bucket shared out over many ranks leaves one or two of each shape to an owner, so that without this every matrix is
    an update of its own. What is updated ahead makes its update's own bucket later, and with it the first gather; so
    matrices are taken along only until those of their shape are as many elements as make a full batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrices:
    """What one parameter gives to updates: one matrix, a batch of them, or parts of different shapes."""

    name: str
    alike: Hashable
    """Equal for parameters that one update may have."""
    numels: Sequence[tuple[tuple[int, int], int]] = ()
    """By (rows, cols), sorted, the elements of all its matrices of that shape."""
    most: int = 0
    """Elements of one shape up to which others are taken along; 0: it takes none along, and none takes it."""


def together(buckets: Sequence[Sequence[Matrices]]) -> list[list[tuple[Matrices, ...]]]:
    """By bucket, the updates that are made when it is its turn, last bucket first: parameters of its own that are alike
    first, then those of lower buckets that are taken along.

    Args:
        buckets: what one rank has of each.
    """
    waiting = _Waiting(buckets)
    updates: list[list[tuple[Matrices, ...]]] = [[] for _ in buckets]
    for index in reversed(range(len(buckets))):
        own: dict[Hashable, list[Matrices]] = {}
        for each in buckets[index]:
            if not waiting.is_taken(each):
                own.setdefault(each.alike, []).append(each)
        updates[index] = [(*taken, *waiting.take_along(taken, index)) for taken in own.values()]
    return updates


class _Waiting:
    """Parameters that may be taken along and have not been, by what they are alike in and the shapes they have."""

    def __init__(self, buckets: Sequence[Sequence[Matrices]]) -> None:
        self._queues: dict[Hashable, dict[tuple[tuple[int, int], ...], deque[tuple[int, Matrices]]]] = {}
        self._taken: set[str] = set()
        for index in reversed(range(len(buckets))):
            for each in buckets[index]:
                if each.most:
                    shapes = tuple(shape for shape, _ in each.numels)
                    self._queues.setdefault(each.alike, {}).setdefault(shapes, deque()).append((index, each))

    def is_taken(self, each: Matrices) -> bool:
        """Whether an earlier update has taken it along."""
        return each.name in self._taken

    def take_along(self, own: Sequence[Matrices], index: int) -> list[Matrices]:
        """Those of buckets below ``index`` that fill the batches of ``own``, all of bucket ``index``."""
        filled: dict[tuple[int, int], int] = {}
        for each in own:
            for shape, numel in each.numels:
                filled[shape] = filled.get(shape, 0) + numel
        queues = list(self._queues.get(own[0].alike, {}).values())
        for queue in queues:
            while queue and queue[0][0] >= index:
                queue.popleft()
        taken: list[Matrices] = []
        while fitting := [queue for queue in queues if queue and all(
                shape in filled and filled[shape] + numel <= own[0].most for shape, numel in queue[0][1].numels)]:
            # Those whose turn comes next.
            each = max(fitting, key=lambda queue: queue[0][0]).popleft()[1]
            taken.append(each)
            self._taken.add(each.name)
            for shape, numel in each.numels:
                filled[shape] += numel
        return taken


def most_together(count: int, numel: int, most: int) -> int:
    """How many of ``count`` matrices of ``numel`` elements each, in buckets of their own, are updated together."""
    return min(count, max(1, most // numel))
