"""What is decided for one parameter, and what ``layerwise.overrides`` change about it: by name and shape alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from ds_layerwise.config import Override, Recipes
from ds_layerwise.errors import RoutingError
from ds_layerwise.recipes.recipe import Recipe
from ds_layerwise.recipes.registry import REGISTRY
from ds_layerwise.recipes.settings import build

#: How the axis of a matrix that is cut is called: rows or columns, whatever axes are in front of them.
Axis = Literal[-2, -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one parameter goes.

    ``matrix_shape`` is how its rule sees a whole parameter: (rows, cols) or (batch, rows, cols), with as many elements
    as the parameter; None for one that is split.
    """

    name: str
    recipe: Recipe
    """What is computed for it."""
    reason: str
    group: int
    """Index into the user's ``param_groups``."""
    matrix_shape: tuple[int, ...] | None = None
    weight_decay: float | None = None
    """Replaces the group's, if set; so do the next three."""
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    lr_scale: float = 1.0
    is_cut: bool = False
    """Whether tensor-parallel peers have other parts of the parameter, and not copies."""
    by_user: bool = False
    """Whether the user chose its recipe, and not a rule."""
    sent_away: bool = False
    """Whether the user sent something with two axes or more to the scalar optimizer, and not a rule."""
    tp_axis: Axis | None = None
    """The axis along which tensor parallelism cuts the matrix; ``matrix_shape`` is that of this rank's tensor shard."""
    transposed: bool = False
    """Whether it is a linear layer that holds (inputs, outputs), whose heads are therefore blocks of columns."""

    @property
    def whole(self) -> bool:
        """Whether one rank owns it."""
        return self.recipe.whole

    def described(self) -> str:
        """All that is computed for it, as far as its group does not say: ranks that hold it must agree."""
        own = ", ".join(f"{key} {getattr(self, key)}" for key in _OF_ROUTES)
        kind, settings = "matrix" if self.whole else "scalar", self.recipe.settings()
        return f"the {kind} optimizer, {self.recipe.rule}{f' with {settings}' * bool(settings)}, {own}"

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What an update takes of ``group``, its parameter group, as far as nothing of its own replaces that."""
        own = {key: getattr(self, key) for key in ("weight_decay", "momentum", "betas", "eps")}
        return {"lr": float(group["lr"]) * float(group[self.recipe.lr_ratio]) * self.lr_scale,
                **{key: group[key] if value is None else value for key, value in own.items()}}

    @property
    def by_columns(self) -> bool:
        """Whether its matrices are blocks of columns, which lie in memory as (rows, batch, cols)."""
        return self.transposed and self.matrix_shape is not None and len(self.matrix_shape) == 3

    @property
    def stored_shape(self) -> tuple[int, ...] | None:
        """``matrix_shape`` with its axes in the order of memory."""
        if not self.by_columns or self.matrix_shape is None:
            return self.matrix_shape
        batch, rows, cols = self.matrix_shape
        return rows, batch, cols


def whole_shape(shape: tuple[int, ...], axis: Axis | None, size: int) -> tuple[int, ...]:
    """The shape of matrices of which each of ``size`` ranks has a part of ``shape``; None: ``shape`` itself."""
    return tuple(n * size if axis is not None and i == len(shape) + axis else n for i, n in enumerate(shape))


def overrides_by_name(names: Collection[str], overrides: Sequence[Override], *, elsewhere: Collection[str] = (),
                      experts: Mapping[str, Sequence[str]] | None = None) -> dict[str, dict[str, Any]]:
    """For each of ``names``, the keys that overrides set for it.

    Args:
        elsewhere: more names that an override may be for.
        experts: by name, what the experts are called that go by it on one rank or another, counted over all ranks;
            overrides are for those names, so that they mean the same experts however many ranks share them.

    Raises:
        RoutingError: an override that is not optional matches no name, one contradicts another, or they are for some of
            the experts that go by one name.
    """
    called = {name: (experts or {}).get(name, (name,)) for name in names}
    known = {each for own in called.values() for each in own}.union(elsewhere)
    for index, override in enumerate(overrides):
        if not override.optional and not any(fnmatchcase(name, override.name) for name in known):
            raise RoutingError(f"layerwise.overrides[{index}] ({override.name!r}) matches no trainable parameter; is "
                               "the pattern misspelled? With \"optional\": true it may match none")
    return {name: _alike({each: _merge(each, [(i, o) for i, o in enumerate(overrides) if fnmatchcase(each, o.name)])
                          for each in own}) for name, own in called.items()}


def _alike(merged: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What is set for all of ``merged``, experts that go by one name."""
    (first, wanted), *others = merged.items()
    for name, mine in others:
        for key in wanted.keys() | mine.keys():
            if wanted.get(key) != mine.get(key):
                one, other = (first, name) if key in wanted else (name, first)
                raise RoutingError(f"{one}: layerwise.overrides sets {key} to {merged[one][key]!r}, and for {other} to "
                                   f"{merged[other].get(key, 'nothing')!r}; the two are experts that go by one name, "
                                   "on different ranks, and are trained alike: give both the same")
    return wanted


def _merge(name: str, overrides: Sequence[tuple[int, Override]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    origin: dict[str, int] = {}
    for index, override in overrides:
        for key, value in override.changes().items():
            if merged.get(key, value) != value:
                raise RoutingError(f"{name}: layerwise.overrides[{origin[key]}] sets {key} to {merged[key]!r} and "
                                   f"layerwise.overrides[{index}] to {value!r}; narrow one of the patterns")
            merged[key], origin[key] = value, index
    return merged


def recipe_named(name: str, recipes: Recipes) -> Recipe:
    """What an override calls ``name``: one of a run's two by its place, or else one of the registry, which is the run's
    where that has it."""
    if name in ("matrix", "scalar"):
        found: Recipe = getattr(recipes, name)
        return found
    return next((recipe for recipe in recipes if recipe.rule == name), REGISTRY[name].recipe())


def with_changes(route: Route, changes: Mapping[str, Any]) -> Route:
    """``route`` with what overrides change of its recipe and its hyper-parameters.

    Raises:
        RoutingError: one is no setting of its recipe.
    """
    own = {key: value for key, value in changes.items() if key in _OF_ROUTES}
    settings = {key: value for key, value in changes.items() if key not in (*_OF_ROUTES, "optimizer", "num_heads")}
    recipe = route.recipe
    takes = (*recipe.keys(), *recipe.hyper, "weight_decay", "lr_scale")
    for key in (*settings, *own):
        if key not in takes:
            raise RoutingError(f"layerwise.overrides sets {key} for {route.name}, which goes to {recipe.rule} "
                               f"({route.reason}) and takes {', '.join(takes)}; narrow the pattern, or give the entry "
                               "an optimizer")
    if settings:
        recipe = build(type(recipe), f"layerwise.overrides for {route.name}", {**recipe.settings(), **settings})
    if recipe.takes_rate_of_adamw != route.recipe.takes_rate_of_adamw and "lr_scale" not in changes:
        raise RoutingError(f"layerwise.overrides sets {', '.join(settings)} for {route.name}, which takes a "
                           "learning rate of another size than the run's: AdamW's with scale_mode 'match_rms_adamw', "
                           "Muon's with every other; give the entry lr_scale, too, which multiplies the rate that it "
                           "has")
    return replace(route, recipe=recipe, **own)


#: What overrides change of a route itself.
_OF_ROUTES = ("weight_decay", "lr_scale", "momentum", "betas", "eps")


def forced_matrix_shape(name: str, shape: tuple[int, ...], reason: str) -> tuple[int, ...]:
    """How the matrix optimizer sees a parameter that somebody sent to it: as it is, or everything but rows as columns.

    Raises:
        RoutingError: it has fewer than two axes.
    """
    if len(shape) < 2:
        raise RoutingError(f"{name} {shape} was sent to the matrix optimizer by {reason}, but has fewer than two axes")
    return shape if len(shape) < 4 else (shape[0], math.prod(shape[1:]))


def with_heads(route: Route, num_heads: int | None, *, explicit: bool) -> Route:
    """``route`` with its outputs cut into ``num_heads`` matrices; as it is where that is None.

    Raises:
        RoutingError: ``explicit``, and ``num_heads`` does not divide the outputs. Else such a route stays as it is.
    """
    if num_heads is None:
        return route
    shape, axis = route.matrix_shape, 1 if route.transposed else 0
    if shape is None or len(shape) != 2 or shape[axis] % num_heads:
        if explicit:
            raise RoutingError(f"{route.name}: num_heads {num_heads} needs a matrix whose "
                               f"{'columns' if route.transposed else 'rows'} it divides, got "
                               f"{shape or 'a parameter of the scalar optimizer'}")
        return route
    rows, cols = shape
    cut = (rows, cols // num_heads) if route.transposed else (rows // num_heads, cols)
    return replace(route, matrix_shape=(num_heads, *cut), reason=f"{route.reason}, {num_heads} heads")


def with_cut(route: Route, axis: Axis | None, tp_size: int) -> Route:
    """``route`` of what ``tp_size`` tensor-parallel ranks have a part of each, of its matrices along ``axis``."""
    cut = {-2: f", rows over {tp_size} ranks", -1: f", columns over {tp_size} ranks", None: ""}[axis]
    return replace(route, is_cut=True, tp_axis=axis, reason=route.reason + cut)


def require_a_matrix(routes: Collection[Route]) -> None:
    """Refuse a model that leaves the matrix optimizer nothing to do, unless the user took it away, or chose for all.

    Raises:
        RoutingError: no route goes to the matrix optimizer, by the rules alone.
    """
    chosen = bool(routes) and all(route.by_user for route in routes)
    if not (chosen or any(route.whole or route.sent_away for route in routes)):
        raise RoutingError(f"no parameter goes to the matrix optimizer, of {len(routes)} trainable ones: "
                           f"{_reasons(routes)}; use a plain optimizer, or route some with "
                           "layerwise.overrides or param.use_muon = True")


def _reasons(routes: Iterable[Route]) -> str:
    counts: dict[str, int] = {}
    for route in routes:
        counts[route.reason] = counts.get(route.reason, 0) + 1
    return ", ".join(f"{n} x {reason}" for reason, n in counts.items()) or "none at all"
