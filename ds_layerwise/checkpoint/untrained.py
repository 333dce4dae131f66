"""Frozen parameters and buffers from files of which DeepSpeed's engine loads nothing: a universal
checkpoint, and the single file of whole parameters, which has the parameters that were trained at
its save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from ds_layerwise.checkpoint.formats.checkpoint_folder import ModelFile
from ds_layerwise.checkpoint.new_names import Renamed, new_names
from ds_layerwise.checkpoint.reshard import check_shapes
from ds_layerwise.errors import LayerWiseError


def find_others(
    saved: Renamed,
    folder: Path,
    model: nn.Module,
    *,
    trained: Collection[str],
    rename: Mapping[str, str],
    strict: bool,
) -> dict[str, Tensor]:
    """Return everything in the ``state_dict`` of ``model`` except the parameters ``trained``, by
    name.

    Args:
        saved: the checkpoint in ``folder``, or the single file with that path, by new names.
        strict: True if all of it must be there.

    Raises:
        LayerWiseError: something is missing, or has another shape.
    """
    restored = {id(param) for name, param in model.named_parameters() if name in trained}
    exact = _in_model_file(folder, rename)
    others: dict[str, Tensor] = {}
    held = model.state_dict(keep_vars=True)
    # A parameter may have several names. Activation checkpointing adds its wrapper to the names of
    # parameters, but not to those in state_dict.
    names: dict[int, list[str]] = {}
    for name, value in (*held.items(), *model.named_parameters(remove_duplicate=False)):
        names.setdefault(id(value), []).append(name)
    for name, value in held.items():
        if id(value) in restored or not isinstance(value, Tensor):
            continue
        if name in exact and exact[name].shape == value.shape:
            others[name] = exact[name]
        elif known := saved.header.shapes.keys() & names[id(value)]:
            first = min(known, key=names[id(value)].index)
            check_shapes({first: tuple(value.shape)}, saved.header.shapes)
            others[name] = saved.pieces(first, 0, value.numel())[0].master
        elif strict:
            raise LayerWiseError(
                f"{folder / 'zero' / name / 'fp32.pt'} is missing, so {name}, which is not "
                "trained, cannot be restored; with load_module_strict=False it keeps its value"
            )
        # A tied tensor is listed under one of its names.
        restored.add(id(value))
    return others


def _in_model_file(folder: Path, rename: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the whole tensors in the model's file, by new names. They are needed because DeepSpeed's
    converter rounds buffers to float32 and leaves out those of ZeRO-3.
    """
    try:
        model = ModelFile.read(folder, trust=False)
    except LayerWiseError:
        # A client may have stored anything in it. The engine loads it next, at the user's risk.
        return {}
    if model:
        module = model.module
    else:
        module = {}
    renamed = new_names(module, rename)
    return {renamed[name]: value for name, value in module.items()}
