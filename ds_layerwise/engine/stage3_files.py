"""The model's file at ZeRO stage 3. It has the name of stages 1 and 2 and contains no trained
weights: these are the masters in the optimizer's files, rounded.

So a checkpoint can be loaded at any stage, and no rank needs the memory of the whole model. Frozen
parameters and buffers are in the file; the rank that writes it gathers them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_layerwise.checkpoint.files.safe_load import load_safely
from ds_layerwise.zero.setup.param_cuts import own_cut


def is_cut(engine: DeepSpeedEngine) -> bool:
    """Tell whether the parameters of ``engine`` are cut over the ranks."""
    return engine.optimizer.parameter_offload is not None


@contextmanager
def as_at_stage_2(engine: DeepSpeedEngine) -> Iterator[None]:
    """Make the engine name, write and read the model's file as at stage 2."""
    if not is_cut(engine):
        yield
        return
    engine.zero_optimization_partition_weights = lambda: False
    try:
        yield
    finally:
        del engine.zero_optimization_partition_weights


@contextmanager
def saving_the_rest(engine: DeepSpeedEngine, *, with_frozen: bool) -> Iterator[None]:
    """Make the engine save the untrained tensors of the module, whole. Every rank must call this at
    the same point.

    Args:
        with_frozen: True to include frozen parameters.
    """
    if not is_cut(engine):
        yield
        return
    shared = engine._get_shared_params()
    engine.optimizer.checkpoint_event_prologue()
    whole = _gathered(engine) if with_frozen else {}
    rest: dict[str, Any] = {}
    trained = {id(param) for param in engine.optimizer._params.values()}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if id(value) not in trained:
            rest[name] = whole.get(id(value), value)

    def fragment(param: nn.Parameter) -> Tensor:
        return whole.get(id(param), param.detach())

    def module_state_dict(exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        if not exclude_frozen_parameters:
            return rest
        return {name: value for name, value in rest.items() if not isinstance(value, nn.Parameter)}

    replaced: dict[str, Any] = {
        "_get_shared_params": lambda: shared,
        "_get_param_fragment_func": fragment,
        "module_state_dict": module_state_dict,
    }
    vars(engine).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(engine)[name]


def _gathered(engine: DeepSpeedEngine) -> dict[int, Tensor]:
    """Return the untrained tensors, whole, by id, in host memory of the rank that writes."""
    trained = {id(param) for param in engine.optimizer._params.values()}
    found: dict[int, Tensor] = {}
    for param in engine.module.parameters():
        if id(param) not in trained:
            param.all_gather()
            if engine.save_non_zero_checkpoint:
                found[id(param)] = nn.Parameter(
                    param.detach().cpu().clone(), requires_grad=param.requires_grad
                )
            param.partition()
    return found


def untrained_in(model_file: Path) -> dict[str, Tensor]:
    """Return the frozen parameters and buffers in a model's file of :func:`saving_the_rest`, each
    once.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in load_safely(model_file, with_objects=True)["module"].items():
        if isinstance(value, Tensor) and id(value) not in seen:
            found[name] = value
            seen.add(id(value))
    return found


def with_weights(engine: DeepSpeedEngine, module: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``module`` of a checkpoint without trained weights, with the current weights of
    the model added. The masters, loaded later, replace them.
    """
    trained = {id(param) for param in engine.optimizer._params.values()}
    filled = dict(module)
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if name not in filled and id(value) in trained:
            filled[name] = value.detach()
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
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and name in module:
            if name in given:
                own_cut(value, rank, given[name].reshape(-1))
            left[name] = value.detach()
    return left
