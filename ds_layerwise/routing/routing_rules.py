"""The rules that give each parameter its optimizer, group and overrides. Nothing else decides;
:func:`.routing.module_of.shape_in` says what the axes of a parameter make it.

The result is a table of :class:`Route`, one row per parameter, each with its reason. Nothing is
written on tensors.

The rules, of which the first match wins:

1. an override in ``layerwise.overrides`` that names an optimizer, then the user's own
   ``param.use_muon``, then a parameter group's ``use_muon``;
2. fewer than two axes: scalar (norms, biases);
3. a vector of any shape, by the class of a norm or by its own name, see
   :func:`.routing.module_of.is_vector`: scalar, and with the weight decay of vectors;
4. a table or an output head: scalar. Tables are weights shared by layers of a pipeline;
   ``nn.Embedding`` by its type; other modules by a class name that ends in ``Embedding``; tables
   and heads that Megatron marks with ``is_embedding_or_output_parameter``; and bare parameters by
   :data:`EMBEDDING_NAME`. A head is one of these:

   * it shares an embedding's weight, is the result of the model's ``get_output_embeddings()``, or
     is the weight of a loss;
   * it has a name of :data:`.routing.output_heads.HEAD_NAME`, or is the last layer in a module with
     such a name. It is not a head if it is at an input, in a ``ModuleList`` of other things, or
     repeats with the layers of the model, as a router does;
   * if the model has none of these: its last linear layer, if that has an embedding's shape; or if
     it is in no ``ModuleList``, is not the model's only matrix, no later module has parameters, and
     no module around it has a bare matrix; or the last convolution of a model whose first
     convolution has as many channels. Layers of an adapter, such as LoRA's factors, do not count;
5. convolutions: a kernel over two or more axes is an (out, rest) matrix, a grouped one a batch of
   matrices; depthwise kernels, kernels over one axis and those of one row or column are scalar;
6. two axes: a matrix, unless one axis has length 1; three axes: a batch of matrices, unless the
   first has length 1;
7. anything else: scalar.

If tensor parallelism has cut a parameter, the rules apply to the part that a rank has.
:mod:`.routing.tensor_marks` finds which axis of which matrix is cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.config.mup import is_hidden
from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.any_torch import ClientTorch
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.routing.fused_parts import (
    cut_heads,
    is_transposed,
    split_as_told,
    split_known,
)
from ds_layerwise.routing.module_of import (
    QK_NORM,
    is_bare,
    is_norm,
    is_table,
    is_vector,
    own_name,
    shape_in,
)
from ds_layerwise.routing.output_heads import Elsewhere, output_heads
from ds_layerwise.routing.override_matching import facts_of, holders_of, overrides_by_name
from ds_layerwise.routing.routes import (
    OF_TABLES,
    ParamGroups,
    Route,
    forced_matrix_shape,
    recipe_named,
    require_a_matrix,
    with_changes,
    with_effect,
)
from ds_layerwise.routing.tensor_marks import axis_of, is_cut, lengths_of, whole_dims

#: The names of bare parameters that are looked up, or placed beside tokens: positions, latents,
#: queries, prompts.
EMBEDDING_NAME = re.compile(
    r"(?!w_|.*(weight|proj|projection|kernel|mlp|mix|mixing)$)(\w+_)?(embed|embeds|"
    r"embeddings?|emb|wpe|wte|pos|positions?|ape|encoding|tokens?|latents|query|queries|"
    r"prompts?|codebooks?|codevectors)(_\w+)?",
    re.IGNORECASE,
)

#: The name under which peft keeps the rows of an embedding or a head selected by
#: trainable_token_indices.
_ROWS = "token_adapter.trainable_tokens_delta"

#: The keys of overrides about the matrices in a parameter.
_CUTS = ("num_heads", "split")

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Everything that decides routes beside the model and its parameter groups."""

    optimizer: OptimizerConfig = OptimizerConfig()
    layerwise: LayerWiseConfig = LayerWiseConfig()
    own_decay: Collection[int] = ()
    """The indices of the parameter groups that set a weight decay themselves."""
    by_group: Sequence[Recipe] = ()
    """The recipes of the groups of a client optimizer; empty without one."""
    tp_size: int = 1
    """The number of ranks that tensor parallelism has cut parameters for. Its marks count only if
    it is at least 2.
    """
    experts: Mapping[str, Sequence[str]] | None = None
    """See :func:`.routing.override_matching.facts_of`."""
    elsewhere: Elsewhere | None = None
    """The facts about other stages of a pipeline. The caller then calls
    :func:`.routing.routes.require_a_matrix` with the routes of all stages.
    """


@dataclass(frozen=True)
class Subject:
    """A parameter that gets its route. Steps read it, and none changes it."""

    name: str
    param: nn.Parameter
    modules: Sequence[tuple[str, nn.Module]]
    """The modules that hold it, with their paths."""
    vector: str | None
    """The reason why it is a vector although it has two axes or more; else None."""
    table: str | None
    """The reason why it is an embedding or an output head; else None."""
    group: int
    use_muon: bool | None
    """The choice of its parameter group."""
    changes: Mapping[str, Any]
    """The changes of overrides and of the keys for tables, by key."""
    settings: RouteSettings

    @property
    def module(self) -> nn.Module:
        """The first module that holds it."""
        return self.modules[0][1]


def route_parameters(
    model: nn.Module, param_groups: ParamGroups, settings: RouteSettings
) -> dict[str, Route]:
    """Return the routes of the trainable parameters of ``param_groups``, in the order of
    ``model.named_parameters()``.

    Frozen parameters, parameters without elements and parameters outside ``param_groups`` get no
    route.

    Raises:
        RoutingError: a parameter of a group is not in the model, has a dtype that cannot be
            trained, or gets sparse gradients; an override matches nothing or contradicts another;
            no parameter goes to the matrix optimizer, although the user neither moved one away nor
            chose for all; or it is unclear how a matrix is cut.
    """
    layerwise, elsewhere, tp_size = settings.layerwise, settings.elsewhere, settings.tp_size
    names = {param: name for name, param in model.named_parameters()}
    group_of = {}
    for index, param_group in enumerate(param_groups):
        for param in param_group["params"]:
            if param not in names:
                raise RoutingError(
                    f"param_groups[{index}] holds a parameter of shape {tuple(param.shape)} that "
                    "the model does not have; pass parameters of the model given to initialize()"
                )
            group_of[names[param]] = index
    holders = holders_of(model)
    heads = output_heads(model, elsewhere)
    trained = _trained(names, group_of, is_part=elsewhere is not None)
    merged = overrides_by_name(
        facts_of(model, trained, layerwise.overrides, tp_size=tp_size, experts=settings.experts),
        layerwise.overrides,
        elsewhere=elsewhere.matched if elsewhere else (),
    )
    routes = {}
    for name, param in trained.items():
        changes = merged[name]
        vector, table = _kinds(name, param, holders[param], heads.get(param))
        for key, sets in OF_TABLES.items():
            if table is not None and (value := getattr(layerwise, key)) is not None:
                changes = changes.joined(f"layerwise.{key}", {sets: value})
        group = group_of[name]
        use_muon = param_groups[group].get("use_muon")
        subject = Subject(
            name, param, holders[param], vector, table, group, use_muon, changes.values, settings
        )
        routes[name] = _route_of(subject)
    named = {name for name in trained if not merged[name].values.keys().isdisjoint(_CUTS)}
    routes = split_known(
        model,
        routes,
        trained,
        tp_size,
        named=named,
        auto_split=layerwise.auto_split,
        per_head=settings.optimizer.per_head_muon,
    )
    if elsewhere is None:
        require_a_matrix(routes.values())
    return routes


def _route_of(subject: Subject) -> Route:
    """Return the route of one parameter: the chosen recipe, then what changes it, in this order."""
    module, param, settings = subject.module, subject.param, subject.settings
    if param.dtype not in _FLOATS:
        raise RoutingError(
            f"{subject.name} is {param.dtype}, which cannot be trained here (known: float32, "
            "bfloat16, float16); freeze it or convert it"
        )
    for _, holder in subject.modules:
        if getattr(holder, "sparse", False) is True:
            raise RoutingError(
                f"{subject.name} belongs to a module with sparse=True, and sparse gradients cannot "
                "be cut into shards; build it with sparse=False"
            )
    recipes = settings.optimizer.recipes
    route, changes = with_effect(_chosen(subject), subject.changes, recipes)
    # Heads and parts ask for the axis along which tensor parallelism cuts the matrix.
    route = _with_cut(route, subject)
    # The defaults below leave settings, rates and weight decay of overrides as they are.
    route = with_changes(route, changes, recipes)
    # Heads lie along the axis of outputs.
    route = replace(route, transposed=is_transposed(module, param))
    route = _decayed(route, subject)
    # It scales the rate that overrides have set as a factor.
    route = _by_width(route, subject)
    # An override has one of the two.
    route = cut_heads(route, changes.get("num_heads"), param, settings.tp_size, explicit=True)
    return split_as_told(route, changes.get("split"), module, param, settings.tp_size)


def _chosen(subject: Subject) -> Route:
    """Return the route with the recipe that the user, or else a rule, has chosen."""
    param, recipes = subject.param, subject.settings.optimizer.recipes
    wanted = _wanted(subject)
    shape = None
    if wanted is not None:
        recipe, reason = wanted
        has_axes = param.dim() > 1
        if recipe.whole and not recipe.own_shapes:
            shape = shape_in(subject.module, param)[0]
            shape = shape or forced_matrix_shape(subject.name, tuple(param.shape), reason)
    else:
        reason = subject.vector or subject.table or ""
        if not reason:
            shape, reason = shape_in(subject.module, param)
        has_axes = shape is not None
        recipe = recipes.matrix if has_axes else recipes.scalar
    if recipe.own_shapes:
        shape = tuple(param.shape) or (1,)
    return Route(
        name=subject.name,
        recipe=recipe,
        reason=reason,
        group=subject.group,
        matrix_shape=shape if recipe.whole else None,
        by_user=wanted is not None,
        sent_away=has_axes and not recipe.for_matrices,
        bare=wanted is None and param.dim() > 1 and is_bare(subject.module),
    )


def _wanted(subject: Subject) -> tuple[Recipe, str] | None:
    """Return the recipe that the user has chosen, and the source of the choice; None if there is
    none.
    """
    settings, changes = subject.settings, subject.changes
    recipes = settings.optimizer.recipes
    group = f"param_groups[{subject.group}]"
    if settings.by_group:
        ClientTorch.check_override(subject.name, changes)
        return settings.by_group[subject.group], f"{group} of the optimizer given"
    if "optimizer" in changes:
        return recipe_named(changes["optimizer"], recipes, changes), "layerwise.overrides"
    use_muon = subject.use_muon
    by = group
    if hasattr(subject.param, "use_muon"):
        use_muon = subject.param.use_muon
        by = "param"
    if use_muon is None and by == group:
        return None
    return recipes.matrix if use_muon else recipes.scalar, f"{by}.use_muon = {use_muon}"


def _with_cut(route: Route, subject: Subject) -> Route:
    param, tp_size = subject.param, subject.settings.tp_size
    if tp_size == 1 or not is_cut(param):
        return route
    axis = None
    if route.whole and route.recipe.own_shapes:
        raise RoutingError(
            f"{route.name} {tuple(param.shape)} is cut by tensor parallelism, and "
            f'{route.recipe.rule} knows nothing of the other parts; say "split": "element" of it '
            "(beside its arguments, or in the group of an optimizer object) if it updates each "
            "element alone, or use another optimizer"
        )
    if route.matrix_shape is not None:
        axis = axis_of(route.name, param, route.matrix_shape, tp_size)
    cut = replace(route, is_cut=True, tp_axis=axis)
    if axis is None or route.matrix_shape is None:
        return cut
    cut = replace(cut, tp_lengths=lengths_of(param, route.matrix_shape[axis]))
    return cut.because(f"{'rows' if axis == -2 else 'columns'} over {tp_size} ranks")


def _decayed(route: Route, subject: Subject) -> Route:
    """Return ``route`` with its weight decay, unless an override or its group sets that."""
    optimizer = subject.settings.optimizer
    if route.weight_decay is not None or subject.group in subject.settings.own_decay:
        return route
    for_matrices = route.recipe.for_matrices
    is_one = subject.param.dim() < 2 or subject.vector is not None and not for_matrices
    layerwise = subject.settings.layerwise
    as_others = layerwise.apply_wd_to_qk_layernorm and QK_NORM.fullmatch(route.name)
    if is_one and not optimizer.decay_vectors and not as_others:
        return replace(route, weight_decay=0.0)
    if for_matrices:
        return route
    return replace(route, weight_decay=optimizer.scalar_weight_decay)


def _by_width(route: Route, subject: Subject) -> Route:
    """Return ``route`` with its rates scaled by width, but for those that an override sets.

    Raises:
        RoutingError: its rate does not transfer from another width, or it is unknown how.
    """
    mup = subject.settings.layerwise.mup
    if mup is None:
        return route
    shape = tuple(subject.param.shape)
    is_other = subject.table is not None or subject.vector is not None
    if not is_other and route.is_cut:
        shape = whole_dims(route.name, subject.param, subject.settings.tp_size)
    try:
        lr, eps = mup.multipliers(route.recipe, hidden=not is_other and is_hidden(shape))
    except ValueError as error:
        raise RoutingError(f"layerwise.mup: {route.name}: {error}") from None
    found = replace(
        route,
        lr_scale=route.lr_scale * (lr if route.lr is None else 1.0),
        eps_scale=eps if route.eps is None else 1.0,
    )
    if found == route:
        return found
    return found.because(f"rate x {lr:g} by width" if route.lr is None else "eps by width")


def _trained(
    names: Mapping[nn.Parameter, str], given: Collection[str], *, is_part: bool
) -> dict[str, nn.Parameter]:
    """Return the parameters that were passed, require a gradient and have elements.

    Args:
        is_part: True if other stages have more of the model, so that the result may be empty.
    """
    trained = {}
    for param, name in names.items():
        if name in given and param.requires_grad and param.numel():
            trained[name] = param
    if not (trained or is_part):
        why = (
            f"none of the {len(given)} parameters given, of {len(names)} of the model, requires a "
            "gradient and has elements; unfreeze what is to be trained before initialize()"
        )
        if not names:
            why = "the model has no parameters"
        elif not given:
            why = (
                "no parameter was given to initialize(); give model_parameters=model.parameters(), "
                "or None for all (a generator or a filter is empty once it has been gone through)"
            )
        raise RoutingError(f"there is nothing to train: {why}")
    return trained


def _kinds(
    name: str, param: Tensor, modules: Sequence[tuple[str, nn.Module]], head: str | None
) -> tuple[str | None, str | None]:
    """Return the reasons why a parameter is a vector, and why it is an embedding or an output head;
    None for what it is not.
    """
    if param.dim() < 2:
        return None, None
    if any(is_norm(module) for _, module in modules):
        return "of a norm", None
    if is_vector(name):
        return "a vector (by name)", None
    if any(is_table(module) for _, module in modules):
        return None, "embedding" + ", tied" * (len(modules) > 1)
    if any(path.endswith(_ROWS) for path, _ in modules):
        return None, "embedding (rows of one, by peft)"
    if getattr(param, "is_embedding_or_output_parameter", False):
        return None, "embedding or output head (as Megatron marks it)"
    if head is None and is_bare(modules[0][1]) and EMBEDDING_NAME.fullmatch(own_name(name)):
        head = "embedding (by name)"
    return None, head
