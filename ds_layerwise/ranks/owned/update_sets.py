"""The parameters of a rank that one call of a rule updates."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_layerwise.plan.layout.layout import Piece
from ds_layerwise.routing.routes import Route, Routes

#: Rows and columns of a matrix.
_Sides = tuple[int, int]


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter: one, a batch of them, or parts of different shapes."""

    name: str
    alike: Hashable
    """A key, equal for parameters that one update may combine."""
    numels: Mapping[_Sides, int]
    """The number of elements in all its matrices of a shape, by (rows, cols), sorted."""
    most: int
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
    waiting: dict[Hashable, dict[tuple[_Sides, ...], deque[tuple[int, Matrices]]]] = {}
    for index in reversed(range(len(buckets))):
        for matrices in buckets[index]:
            if matrices.most:
                shapes = tuple(matrices.numels)
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
    filled: Counter[_Sides] = Counter()
    for matrices in own:
        filled.update(matrices.numels)
    for queue in queues:
        while queue and queue[0][0] >= index:
            queue.popleft()

    def fits(matrices: Matrices) -> bool:
        most = own[0].most
        for shape, numel in matrices.numels.items():
            if not (shape in filled and filled[shape] + numel <= most):
                return False
        return True

    taken = []
    while fitting := [queue for queue in queues if queue and fits(queue[0][1])]:
        # Those with the next turn.
        matrices = max(fitting, key=lambda queue: queue[0][0]).popleft()[1]
        taken.append(matrices)
        filled.update(matrices.numels)
    return taken


@dataclass(frozen=True)
class UpdateSet:
    """Parameters that one rule updates with the same hyper-parameters."""

    route: Route
    """The route of the first parameter. The other routes are equal in everything that an update
    uses.
    """
    names: tuple[str, ...]
    buckets: tuple[int, ...]
    """The buckets of these parameters, last first."""


def update_sets(
    pieces: Sequence[Sequence[Piece]],
    routes: Routes,
    *,
    batch_matrices: bool,
    in_place: Container[str],
    most: int,
    tp_size: int,
) -> list[list[UpdateSet]]:
    """Return, by bucket, the sets to update at its turn, last bucket first; see
    :mod:`.ranks.owned.update_sets`.

    Args:
        pieces: this rank's pieces, by bucket.
        batch_matrices: True if a rule gets whole parameters together, False if one by one.
        in_place: the parameters that are updated in their stored memory. Others need temporary
            memory; a bucket with one of these is updated by itself.
        most: the largest number of elements in a batch of matrices of one shape on the device.
        tp_size: the number of tensor-parallel parts of a matrix.
    """
    bucket_of = {}
    matrices: list[list[Matrices]] = []
    for index, own in enumerate(pieces):
        together_up_to = most
        if any(piece.name not in in_place for piece in own):
            together_up_to = 0
        matrices.append([])
        for piece in own:
            route = routes[piece.name]
            bucket_of[piece.name] = index
            # Copies take as much memory as their originals, so these go one parameter at a time.
            alone = ""
            if route.copied or (route.whole and not batch_matrices):
                alone = piece.name
            matrices[-1].append(_matrices(piece, route, alone, together_up_to, tp_size))
    sets: list[list[UpdateSet]] = []
    for updates in together(matrices):
        sets.append([])
        for update in updates:
            names = tuple(member.name for member in update)
            buckets = tuple(sorted({bucket_of[name] for name in names}, reverse=True))
            sets[-1].append(UpdateSet(routes[names[0]], names, buckets))
    return sets


def _matrices(piece: Piece, route: Route, alone: str, most: int, tp_size: int) -> Matrices:
    same = replace(
        route,
        name="",
        reason="",
        matrix_shape=None,
        transposed=False,
        parts=None,
        is_cut=False,
        by_user=False,
        sent_away=False,
    )
    if alone:
        most = 0
    most = min(most, route.recipe.full_batch_numel)
    numels: Counter[_Sides] = Counter()
    if most:
        for seen in route.seen(piece.numel).values():
            shape = route.multiplied(seen, tp_size)
            numels[shape[-2], shape[-1]] += math.prod(shape)
    return Matrices(piece.name, (same, alone), dict(sorted(numels.items())), most)
