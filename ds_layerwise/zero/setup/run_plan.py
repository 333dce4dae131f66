"""The routes, layout and names of all parameters, and which copy of one is counted and saved: one
value that all ranks agree on first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.torch_autocast import get_comm_dtype
from torch import nn

from ds_layerwise.checkpoint.new_names import expert_names
from ds_layerwise.config.conditions import NormGroup
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import ConfigError, few
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.parallel import pipeline
from ds_layerwise.parallel.tensor import agree_on_parts, check_copies
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.plan.layout.transport import Reduction, reduction_of_run
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.ranks.owned.buffers import dtype_name
from ds_layerwise.routing.output_heads import Elsewhere
from ds_layerwise.routing.override_matching import facts_of, grouped, require_members
from ds_layerwise.routing.routes import Route
from ds_layerwise.routing.routing_rules import RouteSettings, route_parameters
from ds_layerwise.routing.tensor_marks import PART_SHAPES, is_expert_stack, whole_shape
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.rate_checks import check_captured, check_kept
from ds_layerwise.zero.setup.run_settings import Settings


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The routes of a model, and what placing its parameters needs to know."""

    routes: dict[str, Route]
    specs: list[ParamSpec]
    trained: dict[str, nn.Parameter]
    """The parameters with a route, by name in model order."""
    names: dict[str, tuple[str, ...]]
    """The names of experts in a checkpoint, by parameter; see
    :func:`.checkpoint.new_names.expert_names`.
    """


@dataclass(frozen=True, kw_only=True)
class Planned(Routed):
    """The plan of a model that the ranks have agreed on."""

    layout: Layout
    reduction: Reduction
    """The method by which sums over ranks are made."""
    where: tuple[int, ...]
    """The number of each rank's node, by rank of the world."""
    copied: frozenset[str]
    """The parameters that are the same on all tensor-parallel ranks."""
    routes_elsewhere: dict[str, Route]
    """The routes of parameters on other pipeline stages. DeepSpeed's converter keeps one stage's
    information about all parameters.
    """
    counted_elsewhere: frozenset[str]
    """The parameters that another rank of the same model also holds and counts in the norm."""
    saved_elsewhere: frozenset[str]
    """The parameters that the files of another stage contain."""
    norm_groups: dict[str, str]
    """The norm group of each parameter that is in one."""
    left_out: tuple[str, ...]
    """The parameters that require a gradient but are in none of the user's groups."""

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The distinct recipes of the parameters."""
        return tuple(dict.fromkeys(self.routes[spec.name].recipe for spec in self.specs))

    @property
    def saved_routes(self) -> dict[str, Route]:
        """The routes by checkpoint name, of the parameters of all ranks and pipeline stages."""
        routes = dict(self.routes_elsewhere)
        for name, names in self.names.items():
            routes.update(dict.fromkeys(names, self.routes[name]))
        return routes

    @property
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by checkpoint name, of the parameters of all ranks."""
        shapes = {}
        for spec in self.specs:
            names = self.names[spec.name]
            for saved in names:
                shapes[saved] = whole_shape(names, spec.shape)
        return shapes


def route(
    model: nn.Module,
    optimizer: LayerWiseOptimizer,
    run: RunConfig,
    ep_size: Callable[[str, str], int],
    *,
    tp_size: int = 1,
    lanes: int = 1,
    elsewhere: Elsewhere | None = None,
) -> Routed:
    """Route the parameters of ``model``, for training and for plans.

    Args:
        optimizer: the optimizer with the parameter groups.
        ep_size: a function that returns the number of ranks that hold different experts under one
            name, from this name and DeepSpeed's name of their group.
        tp_size: the number of tensor-parallel parts of the model.
        lanes: the number of them among which experts are dealt out.
        elsewhere: the facts about other pipeline stages; None without a pipeline.

    Raises:
        RoutingError: as in :func:`.routing.routing_rules.route_parameters`.
        ConfigError: a setting does not go together with the routes.
    """
    config = run.layerwise
    given = set()
    for param_group in optimizer.param_groups:
        given.update(param_group["params"])
    stacks = set()
    # The number of consecutive ranks that hold different experts under a name.
    ep_sizes = {}
    for name, param in _wants_training(model):
        if is_expert_stack(param):
            stacks.add(name)
        if param in given:
            ep_sizes[name] = 1
            if is_moe_param(param):
                ep_sizes[name] = ep_size(name, param.group_name)  # type: ignore[attr-defined]
    names = expert_names(ep_sizes, stacks)
    settings = RouteSettings(
        optimizer=optimizer.config,
        layerwise=config,
        own_decay=optimizer.own_decay,
        by_group=optimizer.recipes_by_group,
        tp_size=tp_size,
        experts=names,
        elsewhere=elsewhere,
    )
    routes = route_parameters(model, optimizer.param_groups, settings)
    _check_experts(model, routes, names, run, lanes)
    optimizer.require_chosen_rates(routes)
    trained = {name: param for name, param in model.named_parameters() if name in routes}
    params = []
    wires = {}
    apart = {}
    for name, param in trained.items():
        dtype = dtype_name(param.dtype)
        wires[name] = run.sent_as(dtype)
        apart[name] = max(1, ep_sizes[name] // lanes)
        if run.autocast:
            wires[name] = dtype_name(get_comm_dtype(param))
        params.append((name, tuple(param.shape), dtype))
    specs = specs_of(params, routes, tp_size=tp_size, ep_size=apart, wires=wires)
    if config.cuda_graph:
        check_captured(routes, config, tp_size=tp_size, host_ratio=run.host_ratio)
    check_kept(routes, specs, optimizer.groups_now(), config, host_ratio=run.host_ratio)
    return Routed(routes=routes, specs=specs, trained=trained, names=names)


def _largest(routed: Routed) -> list[ParamSpec]:
    """Return the specs of the largest tensor-parallel parts, the same on all ranks with others."""
    specs = []
    for spec in routed.specs:
        shapes = getattr(routed.trained[spec.name], PART_SHAPES, [spec.shape])
        # They differ along one axis.
        largest = max(shapes)
        work = spec.work
        if not routed.routes[spec.name].tp_lengths:
            # It is for the matrices of this part, and else for whole ones.
            work = work * math.prod(largest) // spec.numel
        specs.append(replace(spec, shape=largest, work=work))
    return specs


def _check_experts(
    model: nn.Module,
    routes: Mapping[str, Route],
    names: Mapping[str, Sequence[str]],
    run: RunConfig,
    lanes: int,
) -> None:
    """Refuse experts that differ by rank and that a checkpoint could not hold.

    Raises:
        ConfigError: a stack has states that are not one number an element; or experts are frozen
            at ZeRO stage 3, or where universal checkpoints are saved.
    """
    for name, param in model.named_parameters():
        if name in routes:
            route = routes[name]
            if lanes > 1 and route.is_cut and is_moe_param(param):
                raise ConfigError(
                    f"{name} belongs to an expert, and is marked as cut by tensor parallelism, but "
                    "experts are whole; set enable_expert_tensor_parallelism of "
                    "deepspeed.moe.layer.MoE, or do not mark or cut it"
                )
            if len(names[name]) == len(set(names[name])):
                continue
            for key, spec in route.states(1).items():
                if spec.shape != (route.matrix_shape or (1,)) and key != "step":
                    raise ConfigError(
                        f"{name} is a stack of experts, of which {len(names[name])} ranks have a "
                        f"part each, and {route.recipe.rule} has a state {key} that is not one "
                        "number an element, of which a checkpoint cannot join the parts; use muon, "
                        "send it to the scalar optimizer with layerwise.overrides, or set "
                        "expert_parallel.autoep_size to 1"
                    )
        elif is_moe_param(param):
            if run.stage == 3:
                setting, way_out = "zero_optimization.stage is 3", "set stage to 2"
            elif run.layerwise.save_universal:
                setting = "layerwise.save_universal is true"
                way_out = "remove save_universal, and convert with `ds-layerwise to-universal`"
            elif lanes > 1:
                setting = "tensor-parallel ranks have different experts"
                way_out = "set enable_expert_tensor_parallelism of deepspeed.moe.layer.MoE"
            else:
                continue
            raise ConfigError(
                f"{setting}, and {name} belongs to an expert and is not trained, so that no rank "
                f"knows all of them; train it, or {way_out}"
            )


def norm_groups_of(
    model: nn.Module, routed: Routed, groups: Mapping[str, NormGroup], *, tp_size: int
) -> dict[str, str]:
    """Return the norm group of each trained parameter that is in one of ``groups``.

    Raises:
        RoutingError: as in :func:`.routing.override_matching.grouped`.
    """
    asked = groups.values()
    facts = facts_of(model, routed.trained, asked, tp_size=tp_size, experts=routed.names)
    return grouped(facts, groups)


def plan(model: nn.Module, optimizer: LayerWiseOptimizer, settings: Settings) -> Planned:
    """Route and place every parameter of ``model``. The ranks compare the result before anything
    else.

    Raises:
        RoutingError, ConfigError, LayoutError: on every rank.
    """
    if optimizer.recipes_by_group and pipeline.is_pipeline(model):
        raise ConfigError(
            "an optimizer given to initialize() cannot train a PipelineModule: stages tell each "
            "other what they train with, by names; name its class in the config, as "
            "optimizer.params.matrix_optimizer"
        )
    config = settings.layerwise
    elsewhere = pipeline.elsewhere(model, settings.stage_group, config.overrides)
    where = nodes.node_of_each_rank()
    agree_on_parts(model, group=settings.tensor_group)
    with comm.errors_on_all_ranks():
        routed = route(
            model,
            optimizer,
            settings,
            settings.ep_size,
            tp_size=settings.tp_size,
            lanes=settings.lanes,
            elsewhere=elsewhere,
        )
        routes = routed.routes
        trained = routed.trained
        on_host = next(iter(trained.values())).device.type == "cpu"
        reduction = reduction_of_run(config.reduction, on_host=on_host)
        of_all = replace(routed, specs=_largest(routed))
        layout_of_all = plan_layout(
            of_all.specs,
            comm.size_of(settings.group),
            bucket_numel=settings.bucket_numel,
            policy=config.layout,
            alignment=config.alignment,
            stage=settings.stage,
            param_wire=config.param_wire,
        )
    routes_elsewhere = {}
    if elsewhere is not None:
        routes_elsewhere = pipeline.routes_of_all_stages(
            routes, optimizer.built_with, settings.stage_group
        )
    _compare(of_all, layout_of_all, optimizer, settings)
    if reduction == "ordered":
        _tell_of_nodes(where)
    copied = {}
    for name, param in trained.items():
        if not (routes[name].is_cut or settings.lanes > 1 and len(routed.names[name]) > 1):
            copied[name] = param
    if settings.tensor_group is not None:
        with comm.errors_on_all_ranks():
            check_copies(copied, group=settings.tensor_group)
    norm_groups = _norm_groups(model, routed, settings)
    saved_elsewhere = []
    for name, param in trained.items():
        if getattr(param, "ds_pipe_replicated", False):
            saved_elsewhere.append(name)
    counted_elsewhere = set(saved_elsewhere)
    if settings.tp_rank > 0:
        counted_elsewhere.update(copied)
    return Planned(
        **vars(routed),
        layout=layout_of_all.with_sizes({spec.name: spec.numel for spec in routed.specs}),
        reduction=reduction,
        where=tuple(where),
        copied=frozenset(copied),
        routes_elsewhere=routes_elsewhere,
        counted_elsewhere=frozenset(counted_elsewhere),
        saved_elsewhere=frozenset(saved_elsewhere),
        norm_groups=norm_groups,
        left_out=tuple(name for name, _ in _wants_training(model) if name not in routes),
    )


def _wants_training(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that require a gradient and have elements, with their names."""
    for name, param in model.named_parameters():
        if param.requires_grad and param.numel():
            yield name, param


def _norm_groups(model: nn.Module, routed: Routed, settings: Settings) -> dict[str, str]:
    """Return the norm group of each trained parameter that is in one.

    Raises:
        RoutingError: on every rank, if on any rank a parameter is in two groups, or a group has no
            parameter on any pipeline stage.
        LayoutError: stages that share a parameter put it in different groups.
    """
    groups = settings.layerwise.norm_groups
    if not groups:
        return {}
    with comm.errors_on_all_ranks():
        mine = norm_groups_of(model, routed, groups, tp_size=settings.tp_size)
    stages = [{name: mine.get(name) for name in routed.trained}]
    if pipeline.is_pipeline(model):
        stages = comm.gather_objects(stages[0], group=settings.stage_group)
    with comm.errors_on_all_ranks():
        members: set[Any] = set()
        for stage in stages:
            members.update(stage.values())
        require_members(groups, members)
        pipeline.check_norm_groups(stages)
    return mine


def _tell_of_nodes(where: Sequence[int]) -> None:
    """Report on rank 0 that sums are not made inside nodes first, if nodes have different numbers
    of ranks.

    Args:
        where: the node of each rank of the world.
    """
    counts = nodes.counts_on_nodes(range(len(where)), where)
    if len(set(counts)) == 1:
        return
    comm.report(
        f"nodes have different numbers of ranks ({few([*map(str, counts)])}), so sums are not made "
        "inside nodes first; start the same number on each node"
    )


def _compare(
    routed: Routed, layout: Layout, optimizer: LayerWiseOptimizer, settings: Settings
) -> None:
    """Compare the plan over ranks.

    Raises:
        LayerWiseError: on every rank, if it differs.
    """
    described = []
    for spec in routed.specs:
        route = routed.routes[spec.name]
        cut = f", cut (axis {route.tp_axis})" * route.is_cut
        described.append(
            f"{spec.name} {spec.shape} {spec.dtype} by {route.described()}, group {route.group}, "
            f"ep_size {spec.ep_size}, gradient sent in {spec.wire}{cut}"
        )
    for i, group in enumerate(optimizer.built_with):
        described.append(f"param_groups[{i}] with {group}")
    compared = [("the layout", settings.group)]
    if settings.tensor_group is not None:
        # The owners of parts of the same matrices update them in the same order, so that their
        # collectives match.
        compared.append(("the layout of tensor-parallel parts", settings.tensor_group))
    for what, group in compared:
        with comm.errors_on_all_ranks():
            comm.same_on_all_ranks(what, described, group=group, placement=layout.digest())
