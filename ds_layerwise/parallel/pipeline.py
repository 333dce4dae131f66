"""Pipelines: each rank has a stage of the model, and all stages decide together on matters of the
whole model.

Every stage has its own layout, over the ranks with the same stage. Three things involve several
stages: the norm and the skipped step, see :class:`ds_layerwise.zero.setup.run_settings.Settings`;
the choice of output heads, which one stage alone cannot make; and tied weights, of which each stage
that uses them has a copy. Copies stay equal because their gradients are summed over the stages
before the reduction, and all later operations are the same for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import nn

from ds_layerwise.config.ds_config import at
from ds_layerwise.config.overrides import Override
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import ConfigError, LayoutError, StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.routing.output_heads import (
    Elsewhere,
    has_matrices,
    head_names,
    known_heads,
    tables_and_linears,
)
from ds_layerwise.routing.override_matching import facts_of, matched
from ds_layerwise.routing.routes import ParamGroups, Route, Routes, require_a_matrix


def is_pipeline(model: nn.Module) -> bool:
    """Tell whether ``model`` is a stage of a pipeline."""
    return isinstance(model, PipelineModule)


def check(engine: Any, run: RunConfig) -> None:
    """Refuse settings that are not supported with pipelines.

    Raises:
        ConfigError: names the setting and the way out.
    """
    if type(engine) is not PipelineEngine:
        raise ConfigError(
            f"{type(engine.module).__name__} is not supported by this optimizer, which supports "
            "only pipelines of DeepSpeed's PipelineModule and PipelineEngine"
        )
    refuse_settings(engine._config._param_dict, run)
    if engine.use_node_local_storage():
        raise ConfigError(
            "checkpoint.use_node_local_storage is not supported with a PipelineModule: a stage "
            "reads tied weights from the files of other stages; remove it"
        )
    if not any(p.requires_grad and p.numel() for p in engine.module.parameters()):
        raise nothing_to_train(engine.mpu.get_stage_id())


def nothing_to_train(index: int) -> ConfigError:
    """Return the error for a pipeline stage, given by its number, without trained parameters."""
    return ConfigError(
        f"stage {index} of the pipeline has nothing to train; cut it elsewhere (partition_method), "
        "or into fewer stages"
    )


def refuse_settings(ds_config: Mapping[str, Any], run: RunConfig) -> None:
    """Refuse a ZeRO stage and other settings that no pipeline supports.

    Raises:
        ConfigError: names the setting and the way out.
    """
    if at(ds_config, "expert_parallel.enabled"):
        raise ConfigError(
            "expert_parallel.enabled is true, together with a pipeline, which this optimizer "
            "supports with deepspeed.moe layers alone; use only one of the two"
        )
    if run.stage != 1:
        raise ConfigError(
            f"zero_optimization.stage must be 1 with a PipelineModule, got {run.stage}: gradients "
            "of all micro-batches are reduced at once"
        )
    if run.layerwise.rename:
        raise ConfigError(
            "layerwise.rename is not supported with a PipelineModule, whose files are named by the "
            "number of the layer; remove it"
        )


def check_experts(has_experts: bool) -> None:
    """Refuse a pipeline of which only some stages have layers of experts: DeepSpeed saves stages
    with experts in other files than stages without. Every rank must call this at the same point.

    Raises:
        ConfigError: on every rank; says how to cut the model.
    """
    everywhere = comm.gather_objects(has_experts, group=None)
    if any(everywhere) and not all(everywhere):
        raise ConfigError(
            f"the stage of rank {everywhere.index(False)} of the pipeline has no layer of experts, "
            "and others have, which DeepSpeed cannot save in one checkpoint; cut the model so that "
            "each stage has one (partition_method), or into fewer stages"
        )


def elsewhere(
    model: nn.Module, group: comm.Group, overrides: Sequence[Override]
) -> Elsewhere | None:
    """Return the facts about the other stages; None if ``model`` is whole.

    Args:
        group: the ranks with the other stages, in stage order.

    Raises:
        RoutingError: on every rank, if a condition of an override cannot be evaluated on any.
    """
    if not isinstance(model, PipelineModule):
        return None
    tied = set()
    for key, attributes in model.tied_weight_attrs.items():
        for attribute in attributes:
            tied.add(model._recursive_getattr(model.tied_modules[key], attribute))
    tables, linears = tables_and_linears(model, leave_out=tied)
    params = {name: param for name, param in model.named_parameters() if param.numel()}
    trained = {name: param for name, param in params.items() if param.requires_grad}
    with comm.errors_on_all_ranks():
        facts = facts_of(model, trained, overrides)
        used = matched(chain.from_iterable(facts.values()), overrides)
    names: Counter[str] = sum(comm.gather_objects(head_names(model), group=group), Counter())
    heads = {tuple(weight.shape) for weight, _ in known_heads(model, names)}
    matrices = has_matrices(model, leave_out=tied)
    stages = comm.gather_objects(
        (tables, heads, used, bool(linears), bool(params), matrices), group=group
    )
    here = comm.rank_of(group)
    linear_after = matrices_elsewhere = False
    followed = False
    if linears:
        # The order of modules does not tell that a layer with tied weights comes later.
        layer = linears[-1][0].partition(".")[0]
        later = model._layer_specs[int(layer) + 1 :] if layer.isdecimal() else ()
        followed = any(isinstance(spec, TiedLayerSpec) for spec in later)
    for index, stage in enumerate(stages):
        tables |= stage[0]
        heads |= stage[1]
        used |= stage[2]
        if index > here:
            linear_after |= stage[3]
            followed |= stage[4]
        if index != here:
            matrices_elsewhere |= stage[5]
    return Elsewhere(
        tables=frozenset(tables),
        linear_after=linear_after,
        tied=frozenset(tied),
        followed=followed,
        has_matrices=matrices_elsewhere,
        head_names=names,
        head_shapes=frozenset(heads),
        matched=used,
    )


def routes_of_all_stages(
    routes: Routes, param_groups: ParamGroups, group: comm.Group
) -> dict[str, Route]:
    """Return the routes of the parameters of all stages, if they agree.

    Raises:
        RoutingError: no stage has a parameter for the matrix optimizer.
        LayoutError: stages would train a shared parameter in different ways.
    """
    described = {}
    for route in routes.values():
        described[route.name] = f"{route.described()}, group of {param_groups[route.group]}"
    every = {}
    said = []
    for theirs, texts in comm.gather_objects((dict(routes), described), group=group):
        every.update(theirs)
        said.append(texts)
    require_a_matrix(every.values())
    if (found := comm.disagreement(said)) is not None:
        name, first, second = found
        raise LayoutError(
            f"{name} is shared by stages {first} and {second} of the pipeline, which would train "
            f"it differently: {said[first][name]}; {said[second][name]}"
        )
    return every


def check_norm_groups(stages: Sequence[Mapping[str, str | None]]) -> None:
    """Refuse a shared parameter that stages would clip in different ways.

    Args:
        stages: for each stage, the norm group of each parameter that it trains.

    Raises:
        LayoutError: a parameter is in different groups.
    """
    if (found := comm.disagreement(stages)) is not None:
        name, first, second = found
        raise LayoutError(
            f"{name} is shared by stages {first} and {second} of the pipeline, and is in "
            f"layerwise.norm_groups.{stages[first][name] or stages[second][name]} on only one of "
            "them; let a condition hold for it on both"
        )


def shared_modules(model: nn.Module) -> list[TiedLayerSpec]:
    """Return the modules that layers of the pipeline share, by the first layer of each. DeepSpeed
    writes one into the file of each layer that has no function of its own, so maybe into none.
    """
    first: dict[str, TiedLayerSpec] = {}
    specs: Any = model._layer_specs if is_pipeline(model) else ()
    for spec in specs:
        if isinstance(spec, TiedLayerSpec):
            first.setdefault(spec.key, spec)
    return list(first.values())


def lacks_files(model: nn.Module) -> bool:
    """Tell whether DeepSpeed, which lets the first stage send a shared module to the others, has no
    layer's file to load it from there.
    """
    return any(spec.forward_fn for spec in shared_modules(model))


def check_copies(copies: Set[str], trained: Collection[str]) -> None:
    """Check before the first step that parameters which another stage saves for this one are not
    trained here independently.

    Args:
        copies: the parameters of this stage that an earlier one saves, and that are not tied to its
            own.
        trained: the parameters that got a gradient here.

    Raises:
        StepError: on every rank, if a copy is trained on any.
    """
    with comm.errors_on_all_ranks():
        if used := copies & set(trained):
            raise StepError(
                f"{min(used)} got a gradient on a later stage of the pipeline than its first, and "
                "is not tied: its copies would drift apart; name it in tied_weight_attr of "
                "TiedLayerSpec, or keep it out of the shared module"
            )


def names_of_all_stages(model: nn.Module, saved: Iterable[str], group: comm.Group) -> set[str]:
    """Return the names in the ``state_dict`` of the whole model, of which ``model`` may be a stage,
    the names of its parameters, and those under which checkpoints have them.

    Args:
        saved: the names in checkpoints of the parameters of this stage.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    names = {*model.state_dict(), *params, *saved}
    if not is_pipeline(model):
        return names
    return names.union(*comm.gather_objects(names, group=group))
