"""Parameters of a rank that one call of a rule updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ds_layerwise.optimizers.rule import UpdateRule
from ds_layerwise.plan.layout.layout import Piece
from ds_layerwise.plan.planner.update_batches import Matrices, together
from ds_layerwise.plan.routes.routes import Route


@dataclass(frozen=True, slots=True)
class UpdateSet:
    """Parameters that one rule updates with the same hyper-parameters."""

    rule: UpdateRule
    route: Route
    """The route of the first; the others' differ in nothing that an update asks for."""
    names: tuple[str, ...]
    buckets: tuple[int, ...]
    """The buckets of these parameters, last first."""


def update_sets(
    pieces: Sequence[Sequence[Piece]],
    routes: Mapping[str, Route],
    rules: Mapping[str, UpdateRule],
    *,
    batch_matrices: bool,
    in_place: Container[str],
    most: int,
    tp_size: int = 1,
) -> list[list[UpdateSet]]:
    """List by bucket what is updated when it is its turn, last bucket first; see
    :mod:`.plan.planner.update_batches`.

    Args:
        pieces: this rank's pieces by bucket.
        rules: the rule that updates a parameter, by its name.
        batch_matrices: whether a rule gets whole parameters together, or one by one.
        in_place: parameters that are updated where they lie. Others take memory during their
            update: a bucket that has one is updated by itself.
        most: elements of matrices of one shape that the device takes together.
        tp_size: the number of parts into which tensor parallelism has cut matrices.
    """
    bucket_of: dict[str, int] = {}
    matrices: list[list[Matrices]] = []
    for index, own in enumerate(pieces):
        together_up_to = most
        if any(piece.name not in in_place for piece in own):
            together_up_to = 0
        matrices.append([])
        for piece in own:
            route = routes[piece.name]
            bucket_of[piece.name] = index
            # Copies are as large as what is copied: one parameter after another.
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
            sets[-1].append(UpdateSet(rules[names[0]], routes[names[0]], names, buckets))
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
    numels: Counter[tuple[int, int]] = Counter()
    if most:
        for seen in route.seen(piece.numel).values():
            shape = route.multiplied(seen, tp_size)
            numels[shape[-2], shape[-1]] += math.prod(shape)
    return Matrices(piece.name, (same, alone), sorted(numels.items()), most)
