"""The model's file at ZeRO stage 3. It has the name of stages 1 and 2 and contains no trained
weights: these are the masters in the optimizer's files, rounded.

So a checkpoint can be loaded at any stage, and no rank needs the memory of the whole model. Frozen
parameters and buffers are in the file; the rank that writes it gathers them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_layerwise.checkpoint.plain_values import load_safely
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.instance_patches import patch
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.param_cuts import write_cut


def is_cut(engine: DeepSpeedEngine) -> bool:
    """Tell whether the parameters of ``engine`` are cut over the ranks."""
    return engine.optimizer.parameter_offload is not None


def as_at_stage_2(engine: DeepSpeedEngine) -> ExitStack:
    """Make the engine name, write and read the model's file as at stage 2, until the returned stack
    is closed.
    """
    if not is_cut(engine):
        return ExitStack()
    return patch(engine, zero_optimization_partition_weights=lambda: False)


def saving_the_rest(engine: DeepSpeedEngine, *, with_frozen: bool) -> ExitStack:
    """Make the engine save the untrained tensors of the module, whole, until the returned stack is
    closed. Every rank must call this at the same point, while no parameter is whole.

    Args:
        with_frozen: True to include frozen parameters.
    """
    if not is_cut(engine):
        return ExitStack()
    with comm.errors_on_all_ranks():
        shared = engine._get_shared_params()
        named = _named(engine)
    whole = _gathered(engine) if with_frozen else {}
    rest = {}
    trained = {id(param) for param in engine.optimizer._params.values()}
    for name, (value, param) in named.items():
        if id(param) not in trained:
            rest[name] = whole.get(id(param), value)

    def fragment(param: nn.Parameter) -> Tensor:
        return whole.get(id(param), param.detach())

    def module_state_dict(exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        if not exclude_frozen_parameters:
            return rest
        return {name: value for name, value in rest.items() if not isinstance(value, nn.Parameter)}

    return patch(
        engine,
        _get_shared_params=lambda: shared,
        _get_param_fragment_func=fragment,
        module_state_dict=module_state_dict,
    )


def _named(engine: DeepSpeedEngine) -> dict[str, tuple[Any, nn.Parameter | None]]:
    """Return the state of the module, each value with the parameter that it is of; None for others.

    A hook of the module may have copied values, or changed their names.

    Raises:
        LayerWiseError: a value without elements is of no parameter that can be told.
    """
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    buffers = {id(buffer) for buffer in engine.module.buffers()}
    found = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        param = value if isinstance(value, nn.Parameter) else params.get(name)
        if param is None and isinstance(value, Tensor) and not value.numel():
            if id(value) not in buffers:
                raise LayerWiseError(
                    f"state_dict() of the module gives {name} without elements, as ZeRO stage 3 "
                    "has cut it, and not as a parameter, or by the name of one, so that it is not "
                    "known what to save; let its hooks keep either"
                )
        found[name] = (value, param)
    return found


def _gathered(engine: DeepSpeedEngine) -> dict[int, Tensor]:
    """Return the untrained tensors, whole, by id, in host memory of the rank that writes."""
    trained = {id(param) for param in engine.optimizer._params.values()}
    found: dict[int, Tensor] = {}
    error: Exception | None = None
    for param in engine.module.parameters():
        if id(param) in trained:
            continue
        param.all_gather()
        try:
            if engine.save_non_zero_checkpoint and error is None:
                found[id(param)] = nn.Parameter(
                    param.detach().cpu().clone(), requires_grad=param.requires_grad
                )
        except (RuntimeError, MemoryError) as caught:
            # The others are on their way to the next one.
            error = caught
        param.partition()
    comm.raise_on_all_ranks(error)
    return found


def untrained_in(model_file: Path) -> dict[str, Tensor]:
    """Return the frozen parameters and buffers in a model's file of :func:`saving_the_rest`, each
    once.
    """
    found = {}
    seen = set()
    for name, value in load_safely(model_file, with_objects=True)["module"].items():
        if isinstance(value, Tensor) and id(value) not in seen:
            found[name] = value
            seen.add(id(value))
    return found


def with_weights(engine: DeepSpeedEngine, module: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``module`` of a checkpoint that has no trained weights with what the model has in
    their places: what was trained follows from the masters, which are loaded after it.
    """
    filled = dict(module)
    for name, (value, _) in _named(engine).items():
        if name not in filled:
            filled[name] = value.detach() if isinstance(value, Tensor) else value
    return filled


@torch.no_grad()
def load_cuts(
    engine: DeepSpeedEngine, given: Mapping[str, Any], module: Mapping[str, Any]
) -> dict[str, Any]:
    """Write this rank's cuts of the parameters in ``given``. Return ``module`` with the model's own
    tensors in place of all parameters, so that the engine loads only buffers.
    """
    left = dict(module)
    rank = engine.optimizer.rank
    for name, (value, param) in _named(engine).items():
        if param is not None and name in module:
            if name in given:
                write_cut(param, rank, given[name].reshape(-1))
            left[name] = value.detach()
    return left
