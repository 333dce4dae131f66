"""Checks of a model's file before the engine loads any of it: names, shapes, tied values, layers,
scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from ds_layerwise.checkpoint.files.safe_load import load_safely, naming
from ds_layerwise.checkpoint.new_names import check_names
from ds_layerwise.checkpoint.record import fits
from ds_layerwise.engine.loading.scheduler_state import check_scheduler as check_state
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import announce
from ds_layerwise.parallel.pipeline import is_pipeline
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.checkpoint.load_request import Load


def check_model(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Check for errors that loading the module would find only half-way.

    Raises:
        LayerWiseError: names or shapes differ, or there are two values for one parameter.
    """
    values = engine.module.state_dict(keep_vars=True)
    _check_names_and_shapes(engine, "the checkpoint", checkpoint["module"], values, strict=strict)
    load: Load | None = engine.optimizer.checkpointing.load
    if load is not None and load.found is not None:
        _check_tied(checkpoint["module"], values)


def _check_names_and_shapes(
    engine: DeepSpeedEngine,
    what: str,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    loaded = {id(wanted[name]) for name in wanted.keys() & saved.keys()}
    # The layers of a pipeline have numbers, not names.
    rename = None if is_pipeline(engine.module) else engine.optimizer.config.rename
    check_names(
        what,
        saved.keys(),
        # A tied parameter may be loaded by another name.
        {name for name, value in wanted.items() if strict or id(value) not in loaded},
        wanted.keys(),
        rename=rename,
        strict=strict,
        quiet=engine.optimizer.rank != 0,
    )
    for name in wanted.keys() & saved.keys():
        own = wanted[name]
        if not isinstance(own, Tensor) or own.shape == saved[name].shape:
            continue
        # torch loads 1-D values as 0-d ones, and cuts have no shape.
        if not fits(saved[name].shape, own.shape) or own.dim() and not hasattr(own, "ds_tensor"):
            raise LayerWiseError(
                f"{name} is {tuple(saved[name].shape)} in {what}, {tuple(own.shape)} in the model"
            )


def _check_tied(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse two different values for one parameter. The last one would become the weights, while
    the master of the other would be trained.
    """
    names: dict[int, str] = {}
    for name, value in wanted.items():
        if isinstance(value, Tensor) and name in found:
            first = names.setdefault(id(value), name)
            if first != name and not torch.equal(found[first], found[name]):
                raise LayerWiseError(
                    f"{first} and {name} are one parameter here, but differ in the checkpoint; "
                    "load it into a model that does not tie them"
                )


def check_layers(engine: DeepSpeedEngine, folder: Path, *, strict: bool) -> None:
    """Check for errors that loading the layers of this stage would find only half-way.

    Raises:
        LayerWiseError: a layer has no file, the checkpoint has more layers than the model, or names
            or shapes differ.
    """
    module = engine.module
    for index, layer in enumerate(module.forward_funcs):
        if not hasattr(layer, "load_state_dict"):
            continue
        number = module._local_start + index
        paths = module.ckpt_layer_path_list(escape(str(folder)), index)
        if len(paths) != 1:
            raise LayerWiseError(
                f"{folder} has {len(paths)} files of layer {number}, and needs one; it was saved "
                "by a model of other layers, or not by a pipeline"
            )
        _check_names_and_shapes(
            engine,
            f"layer {number} of the checkpoint",
            load_safely(Path(paths[0])),
            layer.state_dict(keep_vars=True),
            strict=strict,
        )
    saved = set()
    for path in folder.glob("layer_*-model_states.pt"):
        saved.add(int(path.name.split("-")[0].removeprefix("layer_")))
    if strict and max(saved, default=0) >= module._num_layers:
        raise LayerWiseError(
            f"{folder} has a layer {max(saved)}, and the model {module._num_layers} layers; load "
            "what fits with load_module_strict=False"
        )


#: The keys of the model's file that the engine reads after it has loaded the model.
_COUNTS = "dp_world_size", "mp_world_size", "global_steps", "skipped_steps"


def check_scheduler(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any]) -> None:
    """Refuse counts that are not numbers, and a scheduler state that the engine's scheduler cannot
    load, if it is requested.

    Raises:
        ValueError: a count is not a number.
        LayerWiseError: as in :func:`.scheduler_state.check_scheduler`.
    """
    # A direct call of load_module_state_dict loads no scheduler.
    load: Load | None = engine.optimizer.checkpointing.load
    if load is None:
        return
    for key in _COUNTS:
        if not isinstance(checkpoint.get(key), int):
            raise ValueError(f"{key} is {checkpoint.get(key)!r:.100}, expected a whole number")
    if engine.lr_scheduler is not None and load.wants_scheduler:
        more = check_state(engine.lr_scheduler, checkpoint.get("lr_scheduler"))
        if more and comm.rank_of(None) == 0:
            announce(
                f"ds_layerwise: the checkpoint's learning rate scheduler has {', '.join(more)}, "
                f"which this run's {type(engine.lr_scheduler).__name__} does not have yet and "
                "will load"
            )


def check_model_file(engine: DeepSpeedEngine, load_dir: str, tag: str) -> None:
    """Check the model's file, from which the engine loads no weights of a universal checkpoint.

    Raises:
        LayerWiseError: there is none, or it lacks the state that the scheduler needs to continue.
    """
    names = engine._get_all_ckpt_names(load_dir, tag)
    if not names:
        raise LayerWiseError(
            f"{Path(load_dir, tag)} has no mp_rank_00_model_states.pt, from which the number of "
            "steps is read; restore it, or copy it from the checkpoint that was converted"
        )
    try:
        checkpoint = load_safely(Path(names[0]), with_objects=True)
    except LayerWiseError:
        # A client may have stored anything in it. The engine loads it next, at the user's risk.
        return
    with naming(Path(names[0])):
        check_scheduler(engine, checkpoint)
