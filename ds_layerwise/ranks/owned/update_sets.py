"""Which of a rank's parameters one call of a rule updates."""

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
    """Those that they are in, last first."""


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
    """By bucket, what is updated when it is its turn, last bucket first; see
    :mod:`.plan.planner.update_batches`.

    Args:
        pieces: by bucket, what the rank holds.
        rules: by parameter, what updates it.
        batch_matrices: whether a rule gets whole parameters together, or one by one.
        in_place: parameters that are updated where they lie. What is brought, or opened, for its
            update takes memory meanwhile: a bucket that has such parameters is updated by itself.
        most: elements of matrices of one shape that the device takes together.
        tp_size: how many parts tensor parallelism has cut matrices into.
    """
    bucket_of = {piece.name: index for index, held in enumerate(pieces) for piece in held}
    limits = [most if all(piece.name in in_place for piece in held) else 0 for held in pieces]
    found = together(
        [
            [
                _matrices(
                    piece,
                    routes[piece.name],
                    batch_matrices=batch_matrices,
                    most=limit,
                    tp_size=tp_size,
                )
                for piece in held
            ]
            for held, limit in zip(pieces, limits, strict=True)
        ]
    )
    named = [[tuple(each.name for each in update) for update in updates] for updates in found]
    return [
        [
            UpdateSet(
                rules[names[0]],
                routes[names[0]],
                names,
                tuple(sorted({bucket_of[name] for name in names}, reverse=True)),
            )
            for names in updates
        ]
        for updates in named
    ]


def _matrices(
    piece: Piece, route: Route, *, batch_matrices: bool, most: int, tp_size: int
) -> Matrices:
    # Copies are as large as what is copied: one parameter after another.
    alone = piece.name if route.copied or (route.whole and not batch_matrices) else None
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
    most = 0 if alone else min(most, route.recipe.full_batch_numel)
    numels: Counter[tuple[int, int]] = Counter()
    for seen in route.seen(piece.numel).values() if most else ():
        shape = route.multiplied(seen, tp_size)
        numels[shape[-2], shape[-1]] += math.prod(shape)
    return Matrices(piece.name, (same, alone), sorted(numels.items()), most)
