"""Pipelines: each rank holds a stage of the model, and what concerns all of it is decided over all
stages.

Every stage has its own layout, over the ranks that hold the same stage. Three things reach across
stages: the norm and the skipped step, see :class:`ds_layerwise.zero.setup.run_settings.Settings`;
who is an output head, which one stage alone cannot tell; and tied weights, of which each stage that
uses them has a copy. Copies stay equal because their gradients are added up before they are
reduced, and because everything after that is the same for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from ds_layerwise.config.sections import HYPER_KEYS, LayerWiseConfig
from ds_layerwise.errors import ConfigError, LayoutError, StepError
from ds_layerwise.plan.routes.override_matching import matched
from ds_layerwise.plan.routes.routes import Route, require_a_matrix
from ds_layerwise.ranks.comm import comm
from ds_layerwise.recipes.targets.overrides import Override
from ds_layerwise.routing.output_heads import (
    Elsewhere,
    has_matrices,
    head_names,
    known_heads,
    tables_and_linears,
)
from ds_layerwise.routing.param_facts import facts_of


def is_pipeline(model: nn.Module) -> bool:
    """Whether ``model`` is a stage of a pipeline."""
    return isinstance(model, PipelineModule)


def check(engine: Any, model: nn.Module, layerwise: LayerWiseConfig) -> None:
    """Refuse what does not go with pipelines.

    Raises:
        ConfigError: names it and the way out.
    """
    grid, stage = engine.mpu, engine.zero_optimization_stage()
    if type(engine) is not PipelineEngine:
        raise ConfigError(
            f"{type(model).__name__} is not supported by this optimizer: of pipelines it knows "
            "PipelineModule and its schedule only"
        )
    if grid.get_slice_parallel_world_size() > 1:
        raise ConfigError(
            f"a pipeline with tensor slices ({grid.get_slice_parallel_world_size()} ranks a layer) "
            "is not supported by this optimizer; leave the axis 'model' out of the topology"
        )
    if stage != 1:
        raise ConfigError(
            f"zero_optimization.stage must be 1 with a PipelineModule, got {stage}: gradients of "
            "all micro-batches are reduced at once"
        )
    if layerwise.rename:
        raise ConfigError(
            "layerwise.rename is not supported with a PipelineModule, whose files are named by the "
            "number of the layer; remove it"
        )
    if engine.use_node_local_storage():
        raise ConfigError(
            "checkpoint.use_node_local_storage is not supported with a PipelineModule: a stage "
            "reads what others have saved of tied weights; remove it"
        )
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise ConfigError(
            f"stage {grid.get_stage_id()} of the pipeline has nothing to train; cut it elsewhere "
            "(partition_method), or into fewer stages"
        )


def elsewhere(
    model: nn.Module, group: comm.Group, overrides: Sequence[Override] = ()
) -> Elsewhere | None:
    """What the other stages hold; None where ``model`` is whole.

    Args:
        group: the ranks with the other stages, in the order of the stages.

    Raises:
        RoutingError: on every rank, if on any a condition of an override cannot be answered.
    """
    if not isinstance(model, PipelineModule):
        return None
    tied: frozenset[Tensor] = frozenset(
        model._recursive_getattr(model.tied_modules[key], name)
        for key, names in model.tied_weight_attrs.items()
        for name in names
    )
    tables, linears = tables_and_linears(model, leave_out=tied)
    trained = {
        name: param
        for name, param in model.named_parameters()
        if param.requires_grad and param.numel()
    }
    with comm.Alike(None):
        used = matched(
            (each for called in facts_of(model, trained, overrides).values() for each in called),
            overrides,
        )
    names: Counter[str] = sum(comm.gather_objects(head_names(model), group=group), Counter())
    stages = comm.gather_objects(
        (
            tables,
            bool(linears),
            used,
            any(p.numel() for p in model.parameters()),
            has_matrices(model, leave_out=tied),
            {tuple(weight.shape) for weight, _ in known_heads(model, names)},
        ),
        group=group,
    )
    here = comm.rank_of(group)
    later = stages[here + 1 :]
    return Elsewhere(
        tables=frozenset().union(*(stage[0] for stage in stages)),
        linear_after=any(has_linear for _, has_linear, *_ in later),
        tied=tied,
        followed=any(stage[3] for stage in later) or _tied_after(model, linears),
        has_matrices=any(stage[4] for i, stage in enumerate(stages) if i != here),
        head_names=names,
        head_shapes=frozenset().union(*(stage[5] for stage in stages)),
        matched=frozenset().union(*(stage[2] for stage in stages)),
    )


def _tied_after(model: PipelineModule, linears: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether a layer with tied weights comes after that of the last of ``linears``: modules have
    another order.
    """
    layer = linears[-1][0].partition(".")[0] if linears else ""
    return layer.isdecimal() and any(
        isinstance(spec, TiedLayerSpec) for spec in model._layer_specs[int(layer) + 1 :]
    )


def routes_of_all_stages(
    routes: Mapping[str, Route], param_groups: Sequence[Mapping[str, Any]], group: comm.Group
) -> dict[str, Route]:
    """The routes of the parameters of all stages, once they were found to go together.

    Raises:
        RoutingError: no stage has anything for the matrix optimizer.
        LayoutError: stages would train a parameter that they share each in its own way.
    """
    mine = [
        (
            route,
            {key: value for key, value in param_groups[route.group].items() if key in HYPER_KEYS},
        )
        for route in routes.values()
    ]
    stages = comm.gather_objects(mine, group=group)
    require_a_matrix([route for stage in stages for route, _ in stage])
    said: dict[str, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        for route, hyper in stage:
            how = f"{route.described()}, group of {hyper}"
            first, other = said.setdefault(route.name, (index, how))
            if how != other:
                raise LayoutError(
                    f"{route.name} is shared by stages {first} and {index} of the pipeline, which "
                    f"would train it differently: {other}; {how}"
                )
    return {route.name: route for stage in stages for route, _ in stage}


def check_norm_groups(stages: Sequence[Mapping[str, str | None]]) -> None:
    """Refuse a parameter that stages share, and would clip each in its own way.

    Args:
        stages: of each, by the parameters that it trains, the norm group that they are in.

    Raises:
        LayoutError: one is in different groups.
    """
    said: dict[str, tuple[int, str | None]] = {}
    for index, stage in enumerate(stages):
        for name, key in stage.items():
            first, other = said.setdefault(name, (index, key))
            if key != other:
                raise LayoutError(
                    f"{name} is shared by stages {first} and {index} of the pipeline, and is in "
                    f"layerwise.norm_groups.{other or key} on one of them alone; let a condition "
                    "hold for it on both"
                )


def tied_weights(model: nn.Module) -> list[tuple[nn.Parameter, comm.Group]]:
    """The weights that other stages hold, too, with the ranks that do; in the same order on all of
    them.
    """
    return list(model.get_tied_weights_and_groups()) if isinstance(model, PipelineModule) else []


def check_copies(copies: Set[str], trained: Collection[str]) -> None:
    """Before the first step: what another stage saves for this one must follow that one's
    gradients.

    Args:
        copies: parameters of this stage that an earlier one saves, and that are not tied to that
            one's.
        trained: parameters that got a gradient here.

    Raises:
        StepError: on every rank, if on any a copy is trained.
    """
    with comm.Alike(None):
        if used := copies & set(trained):
            raise StepError(
                f"{min(used)} got a gradient on a later stage of the pipeline than its first, and "
                "is not tied: its copies would drift apart; name it in tied_weight_attr of "
                "TiedLayerSpec, or keep it out of the shared module"
            )


def names_of_all_stages(model: nn.Module, group: comm.Group) -> set[str]:
    """The names in the ``state_dict`` of the whole model, of which ``model`` may be a stage, and of
    its parameters.
    """
    names = {
        *model.state_dict(),
        *(name for name, _ in model.named_parameters(remove_duplicate=False)),
    }
    return names.union(*comm.gather_objects(names, group=group)) if is_pipeline(model) else names
