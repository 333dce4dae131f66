"""Masters and states of all parameters, whole, in one file of safetensors: outside of the engine's
checkpoints.

By name of a parameter, ``master.NAME`` is its float32 weights, in its shape, and ``state.NAME.KEY``
a state; those that have one element for each of the parameter have its shape. ``ds_layerwise`` is
what a regular checkpoint says beside its tensors, as ``torch.save`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.formats.headers import Beside, sums_of, write_beside
from ds_layerwise.checkpoint.record import Header, PieceRecord, flat
from ds_layerwise.errors import LayerWiseError

_HEADER = "ds_layerwise"


def name_in_file(name: str, key: str | None) -> str:
    """What the state ``key`` of ``name`` is called, or its master for None."""
    return f"master.{name}" if key is None else f"state.{name}.{key}"


def write(
    path: Path, tensors: Mapping[str, Tensor], header: Header, scaler: tuple[str, Any]
) -> None:
    """Write ``tensors``, by their names in the file, and what is beside them. ``path`` is replaced
    in one go.

    Args:
        scaler: the loss scaler, and the key that DeepSpeed has it under.

    Raises:
        LayerWiseError: it cannot be written; what was there is as before.
    """
    sums = {name: sums_of(value) for name, value in tensors.items()}
    beside = write_beside(header, scaler, sums)
    try:
        atomic.write_whole(path, lambda new: save_file({**tensors, _HEADER: beside}, new))
    except (SafetensorError, OSError) as e:
        raise LayerWiseError(f"{path} cannot be written: {e}") from e


class OneFile:
    """Such a file, open for reading; see :class:`.record.Saved`. Tensors are mapped from it.

    Raises:
        LayerWiseError: it is missing, damaged, or none of these.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise LayerWiseError(
                f"{path} is no file; every rank reads it, so it must be on a disk that all share"
            )
        self._path = path
        try:
            opened: Any = safe_open(path, framework="pt")
            names = set(opened.keys())
        except (SafetensorError, OSError) as e:
            raise LayerWiseError(f"{path} is no whole file of safetensors: {e}") from e
        self._file = opened
        if _HEADER not in names:
            raise LayerWiseError(
                f"{path} was not written by save_state_dict_to_file(): it has no {_HEADER}"
            )
        self.beside = Beside(self._file.get_tensor(_HEADER), path)
        self.header = self.beside.header
        wanted = {
            name_in_file(name, key)
            for name, rule in self.header.rules.items()
            for key in (None, *rule.state_keys)
        }
        if missing := wanted - names:
            raise LayerWiseError(f"{path} lacks {min(missing)}, and is not whole")

    def identity(self) -> list[str]:
        """What is the same for all ranks that read the same save."""
        return [f"save {self.beside.save}"]

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """One piece, the whole parameter, of which the elements ``[start, stop)`` are compared with
        their checksums.
        """
        shape, state = self.header.shapes[name], dict[str, Tensor]()
        for key in (None, *self.header.rules[name].state_keys):
            path = name_in_file(name, key)
            value = self._file.get_tensor(path)
            is_part = key is None or tuple(value.shape) == tuple(shape)
            first, last = self.beside.around(path, start, stop) if is_part else (0, value.numel())
            self.beside.check(path, value.reshape(-1)[first:last], first)
            state[key or ""] = flat(value, shape) if key else value.reshape(-1)
        return [PieceRecord(name, 0, state.pop(""), state)]
