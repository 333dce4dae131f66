"""The route of a parameter, and the changes of ``layerwise.overrides`` to it, by name and shape
alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, Recipes
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.any_torch import ClientTorch, is_path
from ds_layerwise.optimizers.fields import build
from ds_layerwise.optimizers.recipe import Recipe, Shape, State, StateSpec
from ds_layerwise.optimizers.registry import REGISTRY, recipe_at
from ds_layerwise.orthogonalize.tensor_shards import Axis, whole_shape
from ds_layerwise.routing.module_of import QK_NORM
from ds_layerwise.routing.part_views import Parts, Seen

#: The keys of a group for a script's own scheduler, or for torch's in addition to "max_lr". Here
#: only overrides have them.
OF_OTHER_SCHEDULES = ("lr_scale", "min_lr")

#: The end of the reason of a route whose parameter has the name of a fused projection, but unknown
#: parts.
NOT_SPLIT = "fused, not split"

#: The keys for embeddings and output heads, each with the value that it sets for them.
OF_TABLES = {"decoupled_lr": "lr", "decoupled_min_lr": "min_lr"}


@dataclass(frozen=True, kw_only=True)
class Route:
    """The route of one parameter.

    ``matrix_shape`` is the shape in which its rule sees a whole parameter: (rows, cols) or (batch,
    rows, cols), with as many elements as the parameter; None for a parameter that is split. With
    ``parts``, the rule sees each part as a parameter of its own.
    """

    name: str
    recipe: Recipe
    """The rule that updates it, with its settings."""
    reason: str
    group: int
    """The index into the user's ``param_groups``."""
    matrix_shape: Shape | None = None
    weight_decay: float | None = None
    """Replaces the group's value if it is set; so do the next three."""
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    lr_scale: float = 1.0
    eps_scale: float = 1.0
    """The factor of the group's ``eps``, unless ``eps`` of the route replaces that."""
    lr: float | None = None
    """The rate while ``lr`` of its group has its configured value; None for the group's own."""
    min_lr: float | None = None
    """The lowest rate that a scheduler can set."""
    is_cut: bool = False
    """True if tensor-parallel peers have other parts of the parameter, and not copies."""
    by_user: bool = False
    """True if the user chose its recipe; False if a routing rule did."""
    sent_away: bool = False
    """True if the user, not a routing rule, sent a parameter with two axes or more to the scalar
    optimizer.
    """
    tp_axis: Axis | None = None
    """The axis along which tensor parallelism cuts the matrix. ``matrix_shape`` is then that of
    this rank's tensor shard.
    """
    tp_lengths: tuple[int, ...] = ()
    """The lengths of that axis on all tensor-parallel ranks; empty if they are equal."""
    transposed: bool = False
    """True if a linear layer stores (inputs, outputs): its heads are blocks of columns."""
    parts: Parts | None = None
    """The parts that its rule sees instead of the whole matrix."""
    bare: bool = False
    """True if a routing rule chose its recipe from name and shape alone, because its layer is
    unknown.
    """

    @property
    def told(self) -> str:
        """The reason, and whether it is ``bare``."""
        return f"{self.reason}, bare" if self.bare else self.reason

    @property
    def whole(self) -> bool:
        """True if one rank owns it."""
        return self.recipe.whole

    @property
    def matrices(self) -> Shape | None:
        """``matrix_shape`` if its rule sees matrices; None if it sees anything else."""
        return None if self.recipe.own_shapes else self.matrix_shape

    def described(self) -> str:
        """Return everything that determines its update, except its group. The ranks that hold it
        must agree on it.
        """
        own = ", ".join(f"{key} {getattr(self, key)}" for key in (*_OF_ROUTES, "eps_scale"))
        kind = "matrix" if self.recipe.for_matrices else "scalar"
        seen = ""
        if parts := self.parts:
            seen = f", as {self.seen(0)} in {parts.groups} groups of axis {parts.axis}"
        rule = self.recipe.rule
        if settings := self.recipe.settings():
            rule = f"{rule} with {settings}"
        return f"the {kind} optimizer, {rule}, {own}{seen}"

    def because(self, more: str) -> Route:
        """Return this route with ``more`` added to its reason."""
        return replace(self, reason=f"{self.reason}, {more}")

    def seen(self, numel: int) -> dict[str, Shape]:
        """Return the shapes in which its rule sees ``numel`` elements, by part; "" without
        parts.
        """
        shape = self.matrix_shape or (numel,)
        if self.parts is None:
            return {"": shape}
        return self.parts.shapes(shape)

    def states(self, numel: int) -> Mapping[str, StateSpec]:
        """Return the states that its recipe keeps for ``numel`` elements of it."""
        return _states(self.recipe, self.parts, self.matrix_shape or (numel,))

    def multiplied(self, shape: Shape, tp_size: int) -> Shape:
        """Return the shape in matrix products of a matrix that its rule sees as ``shape``.

        That is the shape of the whole matrix if tensor parallelism has cut it into ``tp_size``
        parts, unless the rule treats a part as a matrix. It is then that of the largest part.
        """
        if self.recipe.sees_tensor_shards:
            return whole_shape(shape, self.tp_axis, 1, sorted(self.tp_lengths)[-1:])
        return self.whole_shape(shape, tp_size)

    def whole_shape(self, shape: Shape, tp_size: int) -> Shape:
        """Return the shape, before tensor parallelism has cut it, of what its rule sees as
        ``shape``.
        """
        return whole_shape(shape, self.tp_axis, tp_size, self.tp_lengths)

    @property
    def meaning(self) -> str:
        """The meaning of its states beyond names and shapes. A run may only continue from equal
        ones.

        It is empty if there is nothing to add, or if this rank's tensor-parallel part does not
        determine it.
        """
        own = ""
        if self.parts is not None and not self.is_cut:
            own = self.parts.meaning(self.recipe)
        return ", ".join(filter(None, (self.recipe.meaning, own)))

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of an update: those of its parameter group, or its own.

        Numbers are Python's own, whatever type a scheduler has put into the group.

        Args:
            group: with ``configured_lr``, its ``lr`` before any scheduler.
        """
        betas = group["betas"] if self.betas is None else self.betas
        lr = self._rate(group, group["lr"])
        found: dict[str, Any] = {"lr": lr if self.min_lr is None else max(lr, self.min_lr)}
        for key in ("weight_decay", "momentum", "eps"):
            own = getattr(self, key)
            found[key] = float(group[key] if own is None else own)
        if self.recipe.own_weight_decay is not None:
            found["weight_decay"] = float(self.recipe.own_weight_decay)
        if self.eps is None:
            found["eps"] *= self.eps_scale
        found["betas"] = tuple(map(float, betas))
        if "of_client" in group:
            found["of_client"] = group["of_client"]
        return found

    @property
    def copied(self) -> int:
        """The bytes of parts that its update copies; see
        :meth:`.routing.part_views.Parts.copied`.
        """
        if self.parts is None or self.matrix_shape is None:
            return 0
        return self.parts.copied(self.recipe, self.matrix_shape)

    def _rate(self, group: Mapping[str, Any], lr: Any) -> float:
        """Return its rate where ``lr`` of its group has that value, without its bound."""
        if self.lr is not None:
            return self.lr * (float(lr) / float(group["configured_lr"]))
        return float(lr) * float(group[self.recipe.lr_ratio]) * self.lr_scale

    def configured_lr(self, group: Mapping[str, Any]) -> float:
        """Return its rate while ``lr`` of ``group``, its own group, has the configured value."""
        return self._rate(group, group["configured_lr"])

    def lr_ratio(self, group: Mapping[str, Any]) -> float:
        """Return its rate divided by ``lr`` of ``group``, its parameter group."""
        return self._rate(group, 1.0)

    def views(self, param: Tensor, grad: Tensor, state: State) -> list[Seen]:
        """Return the master, gradient and state of the parameter, or of each of its parts, in the
        shapes that its rule sees.

        Args:
            param, grad, state: in the memory order of the parameter.
        """
        if self.parts is None:
            return [Seen(param, grad, state)]
        return self.parts.views(self.recipe, param, grad, state)


#: Routes by name of the parameter.
Routes = Mapping[str, Route]
#: The user's parameter groups, or the values in them.
ParamGroups = Sequence[Mapping[str, Any]]


@lru_cache(maxsize=1024)
def _states(recipe: Recipe, parts: Parts | None, shape: Shape) -> Mapping[str, StateSpec]:
    """Cached: it is the same for all layers of a model, and a plan needs each several times."""
    return MappingProxyType(recipe.states(shape) if parts is None else parts.states(recipe, shape))


def recipe_named(name: str, recipes: Recipes, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe that an override names: one of the run's, or of the registry.

    The config's kind of weight decay applies to all optimizers, as far as the config sets it.

    Args:
        changes: the values that overrides set for the parameter, see :func:`with_changes`.

    Raises:
        ConfigError: this optimizer does not support that kind of decay.
    """
    if name in ("matrix", "scalar"):
        found: Recipe = getattr(recipes, name)
        return found
    for recipe in recipes:
        if recipe.rule == name:
            return recipe
    if is_path(name):
        # The changes themselves set the kind of its weight decay.
        kind = recipe_at(name, for_matrices=True)
        params = {key: value for key, value in changes.items() if key == "matrix_params"}
        return build(kind, f"an override to {name}", params)
    said: dict[str, Any] = {}
    for key in Recipe.keys():
        for recipe in recipes:
            if key in recipe.model_fields_set:
                said[key] = getattr(recipe, key)
        if key in changes:
            said[key] = changes[key]
    return build(REGISTRY[name], f"an override to {name}", said)


def with_changes(route: Route, changes: Mapping[str, Any], recipes: Recipes) -> Route:
    """Return ``route`` with the changes of overrides to its recipe and its hyper-parameters.

    Args:
        recipes: the run's two, whose learning rates a group has.

    Raises:
        RoutingError: a key is no setting of its recipe, or the recipe would get a learning rate of
            another magnitude.
    """
    if not changes:
        return route
    if "split" in changes and "num_heads" in changes:
        raise RoutingError(
            f"{route.name}: layerwise.overrides sets split to {changes['split']!r} and num_heads "
            f"to {changes['num_heads']}; count the heads of each part in split, or narrow a pattern"
        )
    own = {}
    settings = {}
    for key, value in changes.items():
        if key in _OF_ROUTES:
            own[key] = value
        elif key not in ("optimizer", "num_heads", "split"):
            settings[key] = value
    recipe = route.recipe
    takes = _taken_by(recipe)
    for key in (*settings, *own):
        if key not in takes:
            raise RoutingError(
                f"layerwise.overrides sets {key} for {route.name}, which goes to {recipe.rule} "
                f"({route.reason}) and accepts {', '.join(takes)}; narrow the pattern, or give the "
                "entry an optimizer"
            )
    if settings:
        where = f"layerwise.overrides for {route.name}"
        recipe = build(type(recipe), where, {**recipe.settings(), **settings})
        if recipe.whole is not route.whole:
            raise RoutingError(
                f"{where} change split of {recipe.rule}; give the entry the optimizer, too"
            )
    if settings or "optimizer" in changes:
        _check_rate(
            recipe, recipes, changes, f"{', '.join(settings) or 'optimizer'} for {route.name}"
        )
    _check_decay(route.name, recipe, own.get("weight_decay"))
    return replace(route, recipe=recipe, **own)


def _taken_by(recipe: Recipe) -> list[str]:
    """Return the keys of overrides for a parameter with ``recipe``, beside those that choose it."""
    of_all = Recipe.keys()
    of_rule = [key for key in recipe.keys() if key not in of_all]
    return [*of_rule, *recipe.hyper, "weight_decay", *of_all, "lr", "lr_scale", "min_lr"]


def _check_decay(name: str, recipe: Recipe, wanted: float | None) -> None:
    decay = recipe.own_weight_decay
    if decay is not None and wanted not in (None, decay):
        raise RoutingError(
            f"layerwise.overrides sets weight_decay to {wanted:g} for {name}, but "
            f"{'constrained' if decay else 'hyperball'} of {recipe.rule} is set, with which it is "
            f"{decay:g}; leave weight_decay out, or that"
        )


def _check_rate(recipe: Recipe, recipes: Recipes, changes: Mapping[str, Any], what: str) -> None:
    of_the_run = recipes.matrix if recipe.for_matrices else recipes.scalar
    has_other_size = recipe.takes_rate_of_adamw != of_the_run.takes_rate_of_adamw
    if has_other_size and not {"lr", "lr_scale"} & changes.keys():
        raise RoutingError(
            f"layerwise.overrides sets {what}: {recipe.rule} needs a learning rate of another size "
            f"than the run's {of_the_run.rule}, that of "
            f"{'AdamW' if recipe.takes_rate_of_adamw else 'Muon'}; give the entry lr_scale, too, "
            "which multiplies the rate that it has, or lr"
        )


def with_effect(
    route: Route, changes: Mapping[str, Any], recipes: Recipes
) -> tuple[Route, Mapping[str, Any]]:
    """Return the route with those of ``changes`` that have an effect on it, and these changes. The
    route mentions the others.

    In a run with one recipe for everything, settings that only the replaced recipe has are without
    effect.
    """
    if not recipes.are_one or route.recipe.for_matrices:
        return route, changes
    counts = dict(changes)
    idle = [key for key in changes if key not in ("optimizer", *_taken_by(route.recipe))]
    for key in idle:
        del counts[key]
    return route.because(f"{', '.join(idle)} without effect") if idle else route, counts


#: The fields of a route that overrides change.
_OF_ROUTES = ("weight_decay", "lr", "lr_scale", "min_lr", "momentum", "betas", "eps")


def forced_matrix_shape(name: str, shape: Shape, reason: str) -> Shape:
    """Return the matrix shape of a parameter that was sent to the matrix optimizer explicitly.

    Raises:
        RoutingError: it has fewer than two axes.
    """
    if len(shape) < 2:
        raise RoutingError(
            f"{name} {shape} was sent to the matrix optimizer by {reason}, but has fewer than two "
            "axes; send it to the scalar optimizer"
        )
    if len(shape) < 4:
        return shape
    return (shape[0], math.prod(shape[1:]))


def with_parts(route: Route, parts: Parts) -> Route:
    """Return ``route`` with a rule that sees ``parts``, as far as they are on this rank."""
    groups = ""
    if parts.groups > 1:
        groups = f" of {parts.groups} groups"
    return replace(route, parts=parts).because(f"parts {', '.join(parts.names)}{groups}")


def require_a_matrix(routes: Collection[Route]) -> None:
    """Refuse a model without any parameter for the matrix optimizer, unless overrides caused that
    or the user chose every recipe.

    Raises:
        RoutingError: the routing rules send no parameter to the matrix optimizer.
    """
    if not routes:
        raise RoutingError(
            "there is nothing to train: no parameter requires a gradient; unfreeze some"
        )
    if all(route.by_user for route in routes):
        return
    for route in routes:
        if route.recipe.for_matrices or route.sent_away:
            return
    counts = Counter(route.reason for route in routes)
    reasons = ", ".join(f"{n} x {reason}" for reason, n in counts.items())
    raise RoutingError(
        f"no parameter goes to the matrix optimizer, of {len(routes)} trainable ones: {reasons}; "
        "to train all of them with the scalar optimizer, set layerwise.overrides to "
        '[{"name": "*", "optimizer": "scalar"}], or route some with "optimizer": "matrix" there, '
        "or param.use_muon = True"
    )


def idle_keys(
    optimizer: OptimizerConfig,
    layerwise: LayerWiseConfig,
    routes: Collection[Route],
    groups: Sequence[Collection[str]] = (),
) -> list[str]:
    """Return the keys of both sections, and of parameter groups, that change nothing.

    Args:
        routes: those of the whole model.
        groups: the keys that the script has set in each parameter group.
    """
    acting = _acting_keys(optimizer, routes)
    idle = [f"optimizer.params.{key}" for key in optimizer.given if key not in acting]
    idle += _idle_in_layerwise(optimizer, layerwise, routes)
    if layerwise.param_wire is not None and not any(route.whole for route in routes):
        idle.append("layerwise.param_wire")
    for i, keys in enumerate(groups):
        if "max_lr" not in keys:
            idle += [f"param_groups[{i}].{key}" for key in OF_OTHER_SCHEDULES if key in keys]
    return idle


def _idle_in_layerwise(
    optimizer: OptimizerConfig, layerwise: LayerWiseConfig, routes: Collection[Route]
) -> Iterator[str]:
    if layerwise.monitor.every > 1 and not layerwise.monitor.asks:
        yield "layerwise.monitor.every"
    has_client = any(isinstance(route.recipe, ClientTorch) for route in routes)
    if layerwise.client_optimizer.split != "whole" and not has_client:
        yield "layerwise.client_optimizer"
    of_scalars = [route.name for route in routes if not route.recipe.for_matrices]
    if layerwise.apply_wd_to_qk_layernorm and (
        optimizer.decay_vectors or not any(map(QK_NORM.fullmatch, of_scalars))
    ):
        yield "layerwise.apply_wd_to_qk_layernorm"
    for key, sets in OF_TABLES.items():
        if getattr(layerwise, key) not in (None, *(getattr(route, sets) for route in routes)):
            yield f"layerwise.{key}"


def _acting_keys(optimizer: OptimizerConfig, routes: Collection[Route]) -> set[str]:
    """Return the keys of the optimizer's section that have an effect on ``routes``."""
    acting = {"lr", "weight_decay", "decay_vectors", "preset", "matrix_optimizer"}
    for recipe in {route.recipe for route in routes}:
        acting.update(recipe.keys(), recipe.hyper)
        acting.add("muon_lr" if recipe.for_matrices else "adam_lr")
    if not optimizer.recipes.are_one:
        acting |= {"scalar_optimizer", "per_head_muon"}
    decay = optimizer.scalar_weight_decay
    if any(not route.recipe.for_matrices and route.weight_decay == decay for route in routes):
        acting.add("scalar_weight_decay")
    return acting
