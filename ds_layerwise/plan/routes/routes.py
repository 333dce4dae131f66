"""What is decided for one parameter, and what ``layerwise.overrides`` change about it: by name and
shape alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from ds_layerwise.config.sections import Recipes
from ds_layerwise.errors import RoutingError
from ds_layerwise.recipes.base.fields import build
from ds_layerwise.recipes.base.recipe import Recipe, StateSpec
from ds_layerwise.recipes.recipe_registry import REGISTRY, entry_of
from ds_layerwise.recipes.rules.any_torch_recipe import is_path
from ds_layerwise.recipes.targets.fused_parts import Parts, Split

#: How the axis of a matrix that is cut is called: rows or columns, whatever axes are in front of
#: them.
Axis = Literal[-2, -1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where one parameter goes.

    ``matrix_shape`` is how its rule sees a whole parameter: (rows, cols) or (batch, rows, cols),
    with as many elements as the parameter; None for one that is split. With ``parts`` the rule sees
    those, each as a parameter of its own.
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
    eps_scale: float = 1.0
    """Multiplies the group's ``eps``, if nothing of its own replaces that."""
    lr: float | None = None
    """Replaces the rate that it would have while its group's ``lr`` stands at its configured value,
    if set.
    """
    min_lr: float | None = None
    """What no schedule takes its rate below."""
    is_cut: bool = False
    """Whether tensor-parallel peers have other parts of the parameter, and not copies."""
    by_user: bool = False
    """Whether the user chose its recipe, and not a rule."""
    sent_away: bool = False
    """Whether the user sent something with two axes or more to the scalar optimizer, and not a
    rule.
    """
    tp_axis: Axis | None = None
    """The axis along which tensor parallelism cuts the matrix; ``matrix_shape`` is that of this
    rank's tensor shard.
    """
    transposed: bool = False
    """Whether it is a linear layer that holds (inputs, outputs), whose heads are therefore blocks
    of columns.
    """
    parts: Parts | None = None
    """What its rule sees in place of the whole matrix."""
    bare: bool = False
    """Whether a rule chose its recipe, and it is in no layer that is known, so that its name and
    shape were all.
    """

    @property
    def whole(self) -> bool:
        """Whether one rank owns it."""
        return self.recipe.whole

    def described(self) -> str:
        """All that is computed for it, as far as its group does not say: ranks that hold it must
        agree.
        """
        own = ", ".join(f"{key} {getattr(self, key)}" for key in (*_OF_ROUTES, "eps_scale"))
        kind, settings = "matrix" if self.whole else "scalar", self.recipe.settings()
        parts = self.parts
        seen = f", as {self.seen(0)} in {parts.groups} groups of axis {parts.axis}" if parts else ""
        rule = f"{self.recipe.rule} with {settings}" if settings else self.recipe.rule
        return f"the {kind} optimizer, {rule}, {own}{seen}"

    def because(self, more: str) -> Route:
        """This route with one more reason."""
        return replace(self, reason=f"{self.reason}, {more}")

    def seen(self, numel: int) -> dict[str, tuple[int, ...]]:
        """By part, the shapes that its rule sees of ``numel`` elements; of a parameter without
        parts, under "".
        """
        if self.parts is None or self.matrix_shape is None:
            return {"": self.matrix_shape or (numel,)}
        return self.parts.shapes(self.matrix_shape)

    def states(self, numel: int) -> Mapping[str, StateSpec]:
        """What its recipe keeps of ``numel`` elements of it; see
        :meth:`.recipes.targets.fused_parts.Parts.states`.
        """
        return _states(
            self.recipe, self.parts, self.matrix_shape, numel if self.matrix_shape is None else 0
        )

    def multiplied(self, shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
        """What goes through matrix products of what its rule sees as ``shape``: of matrices that
        tensor parallelism has cut into ``tp_size`` parts the whole, unless the rule takes a part
        for a matrix."""
        return whole_shape(shape, None if self.recipe.sees_tensor_shards else self.tp_axis, tp_size)

    @property
    def meaning(self) -> str:
        """What its states mean beyond their names and shapes, in words: equal if a run may go on
        from them; empty if there is nothing to say, or what tensor parallelism leaves here of a
        parameter does not say it."""
        own = "" if self.parts is None or self.is_cut else self.parts.meaning(self.recipe)
        return ", ".join(filter(None, (self.recipe.meaning, own)))

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What an update takes of ``group``, its parameter group, as far as nothing of its own
        replaces that.

        Numbers are Python's own, whatever a schedule has put into the group.

        Args:
            group: with ``configured_lr``, where its ``lr`` stood before any schedule.
        """
        own = {key: getattr(self, key) for key in ("weight_decay", "momentum", "eps")}
        betas = group["betas"] if self.betas is None else self.betas
        if self.recipe.own_weight_decay is not None:
            own["weight_decay"] = self.recipe.own_weight_decay
        if self.lr is None:
            lr = float(group["lr"]) * float(group[self.recipe.lr_ratio]) * self.lr_scale
        else:
            lr = self.lr * (float(group["lr"]) / float(group["configured_lr"]))
        found = {key: float(group[key] if value is None else value) for key, value in own.items()}
        if self.eps is None:
            found["eps"] *= self.eps_scale
        return {
            "lr": lr if self.min_lr is None else max(lr, self.min_lr),
            **found,
            "betas": tuple(float(beta) for beta in betas),
            **{key: group[key] for key in ("of_client",) if key in group},
        }

    @property
    def copied(self) -> int:
        """Bytes that its update copies parts of it into; see
        :meth:`.recipes.targets.fused_parts.Parts.copied`.
        """
        parts, shape = self.parts, self.matrix_shape
        return 0 if parts is None or shape is None else parts.copied(self.recipe, shape)

    def configured_lr(self, group: Mapping[str, Any]) -> float:
        """Its rate while ``lr`` of ``group``, its parameter group, stands at its configured
        value.
        """
        if self.lr is not None:
            return self.lr
        return float(group["configured_lr"]) * float(group[self.recipe.lr_ratio]) * self.lr_scale

    def lr_ratio(self, group: Mapping[str, Any]) -> float:
        """What ``lr`` of ``group``, its parameter group, is multiplied with."""
        if self.lr is not None:
            return self.lr / float(group["configured_lr"])
        return float(group[self.recipe.lr_ratio]) * self.lr_scale

    @property
    def by_columns(self) -> bool:
        """Whether its matrices are blocks of columns, which lie in memory as (rows, batch,
        cols).
        """
        return self.transposed and self.matrix_shape is not None and len(self.matrix_shape) == 3

    @property
    def stored_shape(self) -> tuple[int, ...] | None:
        """``matrix_shape`` with its axes in the order of memory."""
        if not self.by_columns or self.matrix_shape is None:
            return self.matrix_shape
        batch, rows, cols = self.matrix_shape
        return rows, batch, cols


@lru_cache(maxsize=1024)
def _states(
    recipe: Recipe, parts: Parts | None, matrix_shape: tuple[int, ...] | None, numel: int
) -> Mapping[str, StateSpec]:
    """The same for all layers of a model; a plan asks for each several times."""
    if parts is None or matrix_shape is None:
        return MappingProxyType(recipe.states(matrix_shape or (numel,)))
    return MappingProxyType(parts.states(recipe, matrix_shape))


def whole_shape(shape: tuple[int, ...], axis: Axis | None, size: int) -> tuple[int, ...]:
    """The shape of matrices of which each of ``size`` ranks has a part of ``shape``; None:
    ``shape`` itself.
    """
    return tuple(
        n * size if axis is not None and i == len(shape) + axis else n for i, n in enumerate(shape)
    )


def recipe_named(name: str, recipes: Recipes, changes: Mapping[str, Any]) -> Recipe:
    """What an override calls ``name``: one of a run's two by its place, or else one of the
    registry, which is the run's where that has it. How weights decay holds for all optimizers, as
    far as the config of the run says it.

    Args:
        changes: what overrides set for the parameter, see :func:`with_changes`.

    Raises:
        ConfigError: this optimizer cannot decay so.
    """
    if name in ("matrix", "scalar"):
        found: Recipe = getattr(recipes, name)
        return found
    for recipe in recipes:
        if recipe.rule == name:
            return recipe
    if is_path(name):
        # Its weights decay as it says.
        return entry_of(name, whole=True).recipe()
    said = {
        key: getattr(recipe, key)
        for recipe in recipes
        for key in Recipe.keys()
        if key in recipe.model_fields_set
    }
    said.update({key: changes[key] for key in Recipe.keys() if key in changes})
    return build(REGISTRY[name].recipe, f"an override to {name}", said)


def with_changes(route: Route, changes: Mapping[str, Any], recipes: Recipes) -> Route:
    """``route`` with what overrides change of its recipe and its hyper-parameters.

    Args:
        recipes: the run's two, whose learning rates a group has.

    Raises:
        RoutingError: one is no setting of its recipe, or it would take a learning rate of another
            size.
    """
    if not changes:
        return route
    if "split" in changes and "num_heads" in changes:
        raise RoutingError(
            f"{route.name}: layerwise.overrides sets split to {changes['split']!r} and num_heads "
            f"to {changes['num_heads']}; count the heads of each part in split, or narrow a pattern"
        )
    own = {key: value for key, value in changes.items() if key in _OF_ROUTES}
    settings = {
        key: value
        for key, value in changes.items()
        if key not in (*_OF_ROUTES, "optimizer", "num_heads", "split")
    }
    recipe = route.recipe
    takes = (
        *(key for key in recipe.keys() if key not in Recipe.keys()),
        *recipe.hyper,
        "weight_decay",
        *Recipe.keys(),
        "lr",
        "lr_scale",
        "min_lr",
    )
    for key in (*settings, *own):
        if key not in takes:
            raise RoutingError(
                f"layerwise.overrides sets {key} for {route.name}, which goes to {recipe.rule} "
                f"({route.reason}) and takes {', '.join(takes)}; narrow the pattern, or give the "
                "entry an optimizer"
            )
    if settings:
        recipe = build(
            type(recipe), f"layerwise.overrides for {route.name}", {**recipe.settings(), **settings}
        )
    of_the_run = recipes.matrix if recipe.lr_ratio == "matrix_lr_ratio" else recipes.scalar
    if (
        recipe.takes_rate_of_adamw != of_the_run.takes_rate_of_adamw
        and not {"lr", "lr_scale"} & changes.keys()
        and (settings or "optimizer" in changes)
    ):
        raise RoutingError(
            f"layerwise.overrides sets {', '.join(settings) or 'optimizer'} for {route.name}, "
            f"which takes a learning rate of another size than the run's {of_the_run.rule}: "
            f"{'AdamW' if recipe.takes_rate_of_adamw else 'Muon'}'s; give the entry lr_scale, too, "
            "which multiplies the rate that it has, or lr"
        )
    decay = recipe.own_weight_decay
    if decay is not None and own.get("weight_decay", decay) != decay:
        raise RoutingError(
            f"layerwise.overrides sets weight_decay to {own['weight_decay']:g} for {route.name}, "
            f"but {'constrained' if decay else 'hyperball'} of {recipe.rule} is set, with which it "
            f"is {decay:g}; leave weight_decay out, or that"
        )
    return replace(route, recipe=recipe, **own)


def with_effect(
    route: Route, changes: dict[str, Any], recipes: Recipes
) -> tuple[Route, dict[str, Any]]:
    """What of ``changes`` counts for ``route``, which says what does not: of a run with one recipe
    for everything, what only the one that it stands in for would take."""
    if recipes.matrix.whole or route.whole:
        return route, changes
    takes = {
        "optimizer",
        "weight_decay",
        "lr",
        "lr_scale",
        "min_lr",
        *route.recipe.keys(),
        *route.recipe.hyper,
    }
    counts = {key: value for key, value in changes.items() if key in takes}
    idle = ", ".join(key for key in changes if key not in counts)
    return route.because(f"{idle} without effect") if idle else route, counts


#: What overrides change of a route itself.
_OF_ROUTES = ("weight_decay", "lr", "lr_scale", "min_lr", "momentum", "betas", "eps")


def forced_matrix_shape(name: str, shape: tuple[int, ...], reason: str) -> tuple[int, ...]:
    """How the matrix optimizer sees a parameter that somebody sent to it: as it is, or everything
    but rows as columns.

    Raises:
        RoutingError: it has fewer than two axes.
    """
    if len(shape) < 2:
        raise RoutingError(
            f"{name} {shape} was sent to the matrix optimizer by {reason}, but has fewer than two "
            "axes"
        )
    return shape if len(shape) < 4 else (shape[0], math.prod(shape[1:]))


def with_heads(route: Route, num_heads: int | None, *, explicit: bool) -> Route:
    """``route`` with its outputs cut into ``num_heads`` matrices; as it is where that is None.

    Raises:
        RoutingError: ``explicit``, and ``num_heads`` does not divide the outputs. Else such a route
            stays as it is.
    """
    if num_heads is None:
        return route
    shape, axis = route.matrix_shape, 1 if route.transposed else 0
    if shape is None or len(shape) != 2 or shape[axis] % num_heads:
        if explicit:
            raise RoutingError(
                f"{route.name}: num_heads {num_heads} needs a matrix whose "
                f"{'columns' if route.transposed else 'rows'} it divides, got "
                f"{shape or 'a parameter of the scalar optimizer'}"
            )
        return route
    rows, cols = shape
    cut = (rows, cols // num_heads) if route.transposed else (rows // num_heads, cols)
    return replace(
        route, matrix_shape=(num_heads, *cut), reason=f"{route.reason}, {num_heads} heads"
    )


def parts_of(route: Route, split: Split, *, outputs: Axis, tp_size: int = 1) -> Parts | None:
    """The parts that ``split`` makes of the matrix of ``route``, as long as all its tensor shards
    are; None for none.

    Args:
        outputs: which axis of it the outputs of its layer are.
        tp_size: how many tensor shards there are along ``route.tp_axis``.

    Raises:
        RoutingError: ``route`` has no matrix, or one of another size than the parts have together.
    """
    if not split.parts:
        return None
    axis: Axis = outputs if split.axis == "out" else -3 - outputs  # type: ignore[assignment]
    parts = Parts(axis, split.parts, split.groups)
    if route.matrix_shape is None:
        raise RoutingError(
            f"{route.name}: layerwise.overrides splits it into {split!r}, and it goes to "
            f"{route.recipe.rule} ({route.reason}), which takes no matrices; narrow the pattern"
        )
    length = route.matrix_shape[axis] * (tp_size if route.tp_axis == axis else 1)
    if parts.length != length:
        raise RoutingError(
            f"{route.name} {route.matrix_shape}: layerwise.overrides splits it into {split!r}, "
            "which is "
            f"{parts.length} in all, and it has {length} {'rows' if axis == -2 else 'columns'}"
            f"{' over all tensor-parallel ranks' * (length != route.matrix_shape[axis])}; correct "
            "the "
            "sizes, or split_axis, or split_groups, or leave split out"
        )
    return parts


def with_parts(route: Route, parts: Parts | None) -> Route:
    """``route`` of which the rule sees ``parts``, those that are here."""
    if parts is None:
        return route
    groups = f" of {parts.groups} groups" if parts.groups > 1 else ""
    return replace(
        route, parts=parts, reason=f"{route.reason}, parts {', '.join(parts.names)}{groups}"
    )


def with_cut(route: Route, axis: Axis | None, tp_size: int) -> Route:
    """``route`` of what ``tp_size`` tensor-parallel ranks have a part of each, of its matrices
    along ``axis``.
    """
    cut = {-2: f", rows over {tp_size} ranks", -1: f", columns over {tp_size} ranks", None: ""}[
        axis
    ]
    return replace(route, is_cut=True, tp_axis=axis, reason=route.reason + cut)


def require_a_matrix(
    routes: Collection[Route], *, why_none: str = "no parameter requires a gradient; unfreeze some"
) -> None:
    """Refuse a model that leaves the matrix optimizer nothing to do, unless the user took it away,
    or chose for all.

    Args:
        why_none: what to say where there is no route at all.

    Raises:
        RoutingError: no route goes to the matrix optimizer, by the rules alone.
    """
    if not routes:
        raise RoutingError(f"there is nothing to train: {why_none}")
    chosen = all(route.by_user for route in routes)
    if not (chosen or any(route.whole or route.sent_away for route in routes)):
        counts = Counter(route.reason for route in routes)
        reasons = ", ".join(f"{n} x {reason}" for reason, n in counts.items())
        raise RoutingError(
            f"no parameter goes to the matrix optimizer, of {len(routes)} trainable ones: "
            f"{reasons}; to train all of them with the scalar optimizer, set "
            'layerwise.overrides to [{"name": "*", "optimizer": "scalar"}], or route some '
            'with "optimizer": "matrix" there, or param.use_muon = True'
        )
