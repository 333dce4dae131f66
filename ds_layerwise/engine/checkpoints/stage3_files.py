"""The model's file at ZeRO stage 3. It has the name of stages 1 and 2 and contains no trained
weights: these are the masters in the optimizer's files, rounded.

So a checkpoint can be loaded at any stage, and no rank needs the memory of the whole model. Frozen
parameters and buffers are in the file; the rank that writes it gathers them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.checkpoint.constants import AUTOEP_LAYERS_KEY
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_layerwise.checkpoint.reshard import named_values
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.instance_patches import patch
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.param_cuts import write_cut


def is_cut(engine: DeepSpeedEngine) -> bool:
    """Tell whether the parameters of ``engine`` are cut over the ranks."""
    return engine.optimizer.parameter_offload is not None


def as_at_stage_2(engine: DeepSpeedEngine) -> ExitStack:
    """Make the engine name, write and read the model's file as at stage 2, and no files of experts,
    until the returned stack is closed.
    """
    if not is_cut(engine):
        return ExitStack()
    return patch(engine, zero_optimization_partition_weights=lambda: False, has_moe_layers=False)


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
    for name, (value, param) in named.items():
        if param is None or id(param) in whole:
            rest[name] = whole.get(id(param), value)

    return patch(
        engine,
        _get_shared_params=lambda: shared,
        _get_param_fragment_func=lambda param: whole.get(id(param), param.detach()),
        module_state_dict=lambda exclude_frozen_parameters: rest,
    )


def expert_layers(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the entry of the model's file that names stacks of which ranks have a part each. At
    stages 1 and 2 DeepSpeed writes it, with their files.
    """
    layers: dict[str, Any] = {}
    optimizer = engine.optimizer
    for param, names in optimizer.expert_names.items():
        if is_cut(engine) and len(names) > 1:
            prefix = param.rpartition(".")[0]
            count = optimizer.saved_shapes[names[0]][0]
            layers[prefix] = {"expert_key_prefix": prefix, "num_experts": count}
    return {AUTOEP_LAYERS_KEY: list(layers.values())} if layers else {}


def _named(engine: DeepSpeedEngine) -> dict[str, tuple[Any, nn.Parameter | None]]:
    """Return the state of the module, detached; see :func:`.reshard.named_values`.

    Raises:
        LayerWiseError: a value without elements is of no parameter that can be told.
    """
    buffers = {id(buffer) for buffer in engine.module.buffers()}
    found = {}
    for name, (value, param) in named_values(engine.module).items():
        if isinstance(value, Tensor):
            if not (param is not None or value.numel() or id(value) in buffers):
                raise LayerWiseError(
                    f"state_dict() of the module gives {name} without elements, as ZeRO stage 3 "
                    "has cut it, and not as a parameter, or by the name of one, so that it is not "
                    "known what to save; let its hooks keep either"
                )
            value = value.detach()
        found[name] = (value, param)
    return found


def _gathered(engine: DeepSpeedEngine) -> dict[int, Tensor]:
    """Return the untrained tensors, whole, by id, in host memory of the rank that writes."""
    trained = {id(param) for param in engine.optimizer._params.values()}
    found: dict[int, Tensor] = {}
    attempt = Attempt()
    for param in engine.module.parameters():
        if id(param) in trained:
            continue
        param.all_gather()
        # After an error, the others are on their way to the next one.
        if engine.save_non_zero_checkpoint and attempt.error is None:
            with attempt:
                found[id(param)] = nn.Parameter(
                    param.detach().cpu().clone(), requires_grad=param.requires_grad
                )
        param.partition()
    comm.raise_on_all_ranks(attempt.error)
    return found


@torch.no_grad()
def load_cuts(
    engine: DeepSpeedEngine, given: Mapping[str, Any], module: Mapping[str, Any]
) -> dict[str, Any]:
    """Write this rank's cuts of the parameters in ``given``. Return ``module`` with the model's own
    tensors in place of all parameters, so that the engine loads only buffers.
    """
    left = dict(module)
    for name, (value, param) in _named(engine).items():
        if param is not None and name in module:
            if name in given:
                write_cut(param, given[name].reshape(-1))
            left[name] = value
    return left
