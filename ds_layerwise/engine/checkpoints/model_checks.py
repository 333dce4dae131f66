"""Checks of a model's file before the engine loads any of it: names, shapes, tied values, layers,
counts, the state of the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from ds_layerwise.checkpoint.new_names import check_names
from ds_layerwise.checkpoint.plain_values import check_kind, load_safely, naming
from ds_layerwise.checkpoint.record import fits
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import announce
from ds_layerwise.parallel.pipeline import is_pipeline
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.checkpoint.checkpointing import Load


def check_model(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Check for errors that loading the module would find only half-way.

    Raises:
        LayerWiseError: names or shapes differ, or there are two values for one parameter.
    """
    values = engine.module.state_dict(keep_vars=True)
    _check_names_and_shapes(engine, "the checkpoint", checkpoint["module"], values, strict=strict)
    if engine.optimizer.checkpointing.load.found is not None:
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

#: The names in schedulers' states that depend on torch's version or on a scheduler's options, and
#: that are not needed to load. Private names also differ between versions.
_EITHER_WAY = frozenset(
    ("verbose", "anneal_func", "default_min_lr", "use_beta1", "base_momentums", "max_momentums")
)


def _check_counts(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any]) -> None:
    """Refuse counts that are not numbers, and decide whether the scheduler continues from its
    state.

    Raises:
        ValueError: a count, or a value of the scheduler's state, is of another kind.
    """
    for key in _COUNTS:
        if not isinstance(checkpoint.get(key), int):
            raise ValueError(f"{key} is {checkpoint.get(key)!r:.100}, expected a whole number")
    load: Load = engine.optimizer.checkpointing.load
    scheduler = engine.lr_scheduler
    if scheduler is None or not load.wants_scheduler:
        return
    load.wants_scheduler = _resumes(scheduler, checkpoint.get("lr_scheduler"))
    if not load.wants_scheduler and comm.rank_of(None) == 0:
        announce(
            f"ds_layerwise: {type(scheduler).__name__} starts afresh, because the checkpoint has "
            "no state of a learning rate scheduler, or that of another one"
        )


def _resumes(scheduler: Any, saved: Any) -> bool:
    """Tell whether ``saved`` is a state of the class of ``scheduler``. torch's schedulers accept
    any, and keep their own values for what is missing.

    A script's scheduler may add an attribute at some event, such as the end of a warm-up. Its state
    then has that attribute in addition to those of this run. One without any state adds none.

    Raises:
        ValueError: a value in it is of another kind than this run's; names it.
    """
    if not hasattr(scheduler, "state_dict"):
        return saved is not None
    own = scheduler.state_dict()
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return isinstance(saved, type(own))
    names = _names(own)
    there = _names(saved)
    adds_none = type(scheduler).__module__.startswith(("torch.", "deepspeed.")) or not names
    if not names <= there or adds_none and names != there:
        return False
    check_kind(own, saved, "the state of the learning rate scheduler")
    return True


def _names(state: Mapping[str, Any]) -> set[str]:
    """Return the names in ``state`` that are compared, including those of inner schedulers."""
    names: set[str] = set()
    for key, value in state.items():
        if key == "_schedulers":
            for index, inner in enumerate(value):
                names.update(f"{index}.{name}" for name in _names(inner))
        elif not key.startswith("_") and key not in _EITHER_WAY:
            names.add(key)
    return names


def check_model_file(engine: DeepSpeedEngine, load_dir: str, tag: str) -> None:
    """Check what the engine reads of the model's file after it has loaded the model.

    Raises:
        LayerWiseError: there is no such file, or it is damaged.
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
        _check_counts(engine, checkpoint)
