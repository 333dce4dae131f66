"""The parameters of a rank that one call of a rule updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from ds_layerwise.plan.layout.layout import Piece
from ds_layerwise.plan.planner.update_batches import Matrices, together
from ds_layerwise.routing.routes import Route, Routes


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
    tp_size: int = 1,
) -> list[list[UpdateSet]]:
    """Return, by bucket, the sets to update at its turn, last bucket first; see
    :mod:`.plan.planner.update_batches`.

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


def first_turns(updates: Sequence[Sequence[UpdateSet]]) -> list[list[int]]:
    """Return, by bucket, the buckets of which something is updated at its turn for the first time,
    itself among them, last bucket first.
    """
    found: list[list[int]] = [[] for _ in updates]
    begun: set[int] = set()
    for index in reversed(range(len(updates))):
        touched = [index]
        for update in updates[index]:
            touched += update.buckets
        found[index] = [bucket for bucket in dict.fromkeys(touched) if bucket not in begun]
        begun.update(touched)
    return found


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
    numels: Counter[tuple[int, int]] = Counter()
    if most:
        for seen in route.seen(piece.numel).values():
            shape = route.multiplied(seen, tp_size)
            numels[shape[-2], shape[-1]] += math.prod(shape)
    return Matrices(piece.name, (same, alone), sorted(numels.items()), most)
