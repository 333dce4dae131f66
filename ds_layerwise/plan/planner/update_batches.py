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
    """The matrices of one parameter: one, a batch of them, or parts of different shapes."""

    name: str
    alike: Hashable
    """Equal for parameters that one update may have."""
    numels: Sequence[tuple[tuple[int, int], int]] = ()
    """The elements of all its matrices of a shape, by (rows, cols), sorted."""
    most: int = 0
    """Elements of one shape up to which others are taken along; 0: it takes none along, and none
    takes it.
    """


def together(buckets: Sequence[Sequence[Matrices]]) -> list[list[tuple[Matrices, ...]]]:
    """Return the updates of each bucket at its turn, last bucket first.

    Parameters of the bucket that are alike come first, then those of lower buckets that are taken
    along.

    Args:
        buckets: what one rank has of each.
    """
    # Parameters that may be taken along, by kind and shapes, next turn first.
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
    """Take what fills the batches of ``own``, all of one bucket, from ``queues`` of lower ones."""
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

    taken: list[Matrices] = []
    while fitting := [queue for queue in queues if queue and fits(queue[0][1])]:
        # Those whose turn comes next.
        matrices = max(fitting, key=lambda queue: queue[0][0]).popleft()[1]
        taken.append(matrices)
        filled.update(dict(matrices.numels))
    return taken
