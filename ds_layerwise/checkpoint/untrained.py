"""Frozen parameters and buffers out of files of which DeepSpeed's engine loads nothing: a universal
checkpoint, and the one file of whole parameters, which has what was trained where it was saved."""

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
    """Return all of the ``state_dict`` of ``model`` but the parameters ``trained``, by name.

    Args:
        saved: the checkpoint in ``folder``, or the file that this is, by new names.
        strict: whether all of it must be there.

    Raises:
        LayerWiseError: it is not, or has another shape.
    """
    restored = {id(param) for name, param in model.named_parameters() if name in trained}
    exact = _in_model_file(folder, rename)
    others: dict[str, Tensor] = {}
    held = model.state_dict(keep_vars=True)
    # A parameter may have several names, and a module that recomputes is in those of parameters,
    # and not in these.
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
        # Its other names, if it is tied, stand for it.
        restored.add(id(value))
    return others


def _in_model_file(folder: Path, rename: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the whole tensors of the model's file, by new names: DeepSpeed's converter rounds
    buffers to float32, and leaves out those of ZeRO-3.
    """
    try:
        model = ModelFile.read(folder, trust=False)
    except LayerWiseError:
        # A client may have put anything into it. The engine loads it next, and that is the user's
        # decision.
        return {}
    if model:
        module = model.module
    else:
        module = {}
    renamed = new_names(module, rename)
    return {renamed[name]: value for name, value in module.items()}
