"""Frozen parameters and buffers from files of which DeepSpeed's engine loads nothing: a universal
checkpoint, and the single file of whole parameters, which has the parameters that were trained at
its save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from ds_layerwise.checkpoint.files.safe_load import load_safely
from ds_layerwise.checkpoint.formats.checkpoint_folder import MODEL_FILE, ModelFile
from ds_layerwise.checkpoint.new_names import Renamed, new_names
from ds_layerwise.checkpoint.record import fits, weights_in
from ds_layerwise.checkpoint.reshard import check_shapes
from ds_layerwise.errors import LayerWiseError


def find_others(
    saved: Renamed,
    model: nn.Module,
    *,
    trained: Collection[str],
    in_file: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], set[str]]:
    """Return everything in the ``state_dict`` of ``model`` except the parameters ``trained``, by
    name; and the names of what the checkpoint lacks.

    Args:
        saved: the checkpoint, or the file of whole parameters, by new names.
        in_file: the tensors of its model's file, by new names.

    Raises:
        LayerWiseError: something has another shape.
    """
    restored = {id(param) for name, param in model.named_parameters() if name in trained}
    others = {}
    lacking = set()
    params = dict(model.named_parameters(remove_duplicate=False))
    # A hook of the module may have copied parameters.
    held = {
        name: params.get(name, value) for name, value in model.state_dict(keep_vars=True).items()
    }
    # A parameter may have several names. Activation checkpointing adds its wrapper to the names of
    # parameters, but not to those in state_dict.
    names: dict[int, list[str]] = {}
    for name, value in (*held.items(), *model.named_parameters(remove_duplicate=False)):
        names.setdefault(id(value), []).append(name)
    for name, value in held.items():
        if id(value) in restored or not isinstance(value, Tensor):
            continue
        if name in in_file and fits(in_file[name].shape, value.shape):
            others[name] = in_file[name]
        elif known := saved.header.shapes.keys() & names[id(value)]:
            first = min(known, key=names[id(value)].index)
            check_shapes({first: tuple(value.shape)}, saved.header.shapes)
            others[name] = weights_in(saved, first, tuple(value.shape))
        else:
            lacking.add(name)
        # Its other names, if it is tied, stand for it.
        restored.add(id(value))
    return others, lacking


def in_model_file(folder: Path, rename: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the whole tensors of the model's file of a universal checkpoint, by new names:
    DeepSpeed's converter rounds buffers to float32, and leaves out those of ZeRO-3.
    """
    try:
        model = ModelFile.read(folder, trust=False)
    except LayerWiseError:
        # A client may have stored anything in it. The engine loads it next, at the user's risk.
        return {}
    if model is None:
        return {}
    renamed = new_names(model.module, rename)
    return {renamed[name]: value for name, value in model.module.items()}


def beside_masters(
    folder: Path, trained: Iterable[str], rename: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read the tensors of the model's file of a regular checkpoint that has trained weights as
    masters alone, by new names.

    Args:
        trained: the names of those masters in the checkpoint.

    Raises:
        LayerWiseError: the file is missing or damaged; or a glob of ``rename`` matches no name of
            the file or of ``trained``, or two names become one.
    """
    module = load_safely(folder / MODEL_FILE.format(mp_rank=0), with_objects=True)["module"]
    renamed = new_names({**dict.fromkeys(trained), **module}, rename, use_all=True)
    return {renamed[name]: each for name, each in module.items() if isinstance(each, Tensor)}
