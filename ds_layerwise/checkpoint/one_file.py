"""Masters and states of all parameters, whole, in one file of safetensors: outside of the engine's checkpoints.

By name of a parameter, ``master.NAME`` is its float32 weights, in its shape, and ``state.NAME.KEY`` a state; those that
have one element for each of the parameter have its shape. ``ds_layerwise`` is what a regular checkpoint says beside its
tensors, as ``torch.save`` writes it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ds_layerwise.checkpoint.record import Header, PieceRecord, flat
from ds_layerwise.checkpoint.regular import KEY, describe, header_of
from ds_layerwise.checkpoint.safe_load import load_bytes_safely, naming
from ds_layerwise.errors import LayerWiseError

_HEADER = "ds_layerwise"

#: Under which a file says which save it is of, so that ranks notice if theirs are of several.
_SAVE = "save"


def name_in_file(name: str, key: str | None) -> str:
    """What the state ``key`` of ``name`` is called, or its master for None."""
    return f"master.{name}" if key is None else f"state.{name}.{key}"


def write(path: Path, tensors: Mapping[str, Tensor], header: Header, scaler: tuple[str, Any]) -> None:
    """Write ``tensors``, by their names in the file, and what is beside them. ``path`` is replaced in one go.

    Args:
        scaler: the loss scaler, and the key that DeepSpeed has it under.

    Raises:
        LayerWiseError: it cannot be written; what was there is as before.
    """
    beside = io.BytesIO()
    torch.save({KEY: describe(header), scaler[0]: scaler[1], _SAVE: uuid4().hex}, beside)
    incomplete = path.with_name(f"{path.name}.incomplete")
    try:
        save_file({**tensors, _HEADER: torch.frombuffer(beside.getbuffer(), dtype=torch.uint8)}, incomplete)
        descriptor = os.open(incomplete, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        incomplete.replace(path)
    except (SafetensorError, OSError) as e:
        incomplete.unlink(missing_ok=True)
        raise LayerWiseError(f"{path} cannot be written: {e}") from e


class OneFile:
    """Such a file, open for reading; see :class:`.record.Saved`. Tensors are mapped from it.

    Raises:
        LayerWiseError: it is missing, damaged, or none of these.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise LayerWiseError(f"{path} is no file; every rank reads it, so it must be on a disk that all share")
        self._path = path
        try:
            opened: Any = safe_open(path, framework="pt")
            names = set(opened.keys())
        except (SafetensorError, OSError) as e:
            raise LayerWiseError(f"{path} is no whole file of safetensors: {e}") from e
        self._file = opened
        if _HEADER not in names:
            raise LayerWiseError(f"{path} was not written by save_state_dict_to_file(): it has no {_HEADER}")
        with naming(path):
            content = self._file.get_tensor(_HEADER).numpy().tobytes()
            beside = load_bytes_safely(content, path)
            self.header = header_of(beside)
            self._save = str(beside[_SAVE])
        wanted = {name_in_file(name, key) for name, rule in self.header.rules.items()
                  for key in (None, *rule.state_keys)}
        if missing := wanted - names:
            raise LayerWiseError(f"{path} lacks {min(missing)}, and is not whole")

    def identity(self) -> list[str]:
        """What is the same for all ranks that read the same save."""
        return [f"save {self._save}"]

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """One piece, the whole parameter."""
        rule, master = self.header.rules[name], self._file.get_tensor(name_in_file(name, None)).view(-1)
        state = {}
        for key in rule.state_keys:
            state[key] = flat(self._file.get_tensor(name_in_file(name, key)), self.header.shapes[name])
        return [PieceRecord(name, 0, master, state)]
