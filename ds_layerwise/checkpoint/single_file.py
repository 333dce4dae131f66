"""The masters and states of all parameters, whole, in one safetensors file. It is no checkpoint of
the engine.

``master.NAME`` has the float32 weights of a parameter, in its shape, and ``state.NAME.KEY`` a
state. A state with one element per element of the parameter has its shape. ``ds_layerwise`` has the
header and the checksums, as in a sharded checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.plain_values import load_bytes_safely, naming
from ds_layerwise.checkpoint.record import Header, Pieces, in_one_piece
from ds_layerwise.checkpoint.regular import describe, header_of, ours_of
from ds_layerwise.errors import LayerWiseError

#: The end and the checksum of blocks, by the block's first element; and by the name of a tensor in
#: the file.
Blocks = dict[int, tuple[int, int]]
Sums = Mapping[str, Blocks]

#: The number of elements of a block; the last block of a rank may be shorter.
_BLOCK = 1 << 20

_SUMS = "checksums"
_DIGEST = hashlib.sha256().digest_size

#: The key of the save's identifier, with which ranks notice that they read different saves.
_SAVE = "save"


def sums_of(values: Tensor, start: int = 0) -> Blocks:
    """Return an entry of :data:`Sums`, for the elements of a tensor from ``start`` on."""
    flat = values.reshape(-1)
    found = {}
    for offset in range(0, flat.numel(), _BLOCK):
        block = flat[offset : offset + _BLOCK]
        found[start + offset] = (start + offset + block.numel(), _crc32(block))
    return found


def write_beside(header: Header, sums: Sums) -> Tensor:
    """Return a tensor of bytes with the header, the loss scaler and the checksums."""
    content = io.BytesIO()
    torch.save({**describe(header), _SUMS: sums, _SAVE: uuid4().hex}, content)
    body = content.getvalue()
    return torch.frombuffer(bytearray(body + hashlib.sha256(body).digest()), dtype=torch.uint8)


class Beside:
    """The header and the checksums in ``content``, the result of :func:`write_beside`, of the file
    or folder ``path``.

    Raises:
        LayerWiseError: it is damaged, or in a newer format.
    """

    def __init__(self, content: Tensor, path: Path) -> None:
        self._path, raw = path, content.numpy().tobytes()
        body = raw[:-_DIGEST]
        with naming(path):
            if hashlib.sha256(body).digest() != raw[-_DIGEST:]:
                raise ValueError("its header or its checksums differ from the saved ones")
            found = load_bytes_safely(body, path)
            ours_of(found, path)
            self.header = header_of(found)
            self.save_id = found[_SAVE]
            self.sums: Sums = found[_SUMS]

    def around(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Return the range of the blocks of ``name`` that contain any of ``[start, stop)``."""
        begin = start
        end = stop
        with naming(self._path):
            for first, (last, _) in self.sums.get(name, {}).items():
                if first < stop and start < last:
                    begin = min(begin, first)
                    end = max(end, last)
        return begin, end

    def check(self, name: str, values: Tensor, start: int = 0) -> None:
        """Compare ``values``, the elements of the tensor ``name`` from ``start`` on, with the
        checksums.

        Raises:
            LayerWiseError: the values or their number differ.
        """
        flat = values.reshape(-1)
        stop = start + values.numel()
        checked = 0
        with naming(self._path):
            for first, (last, crc32) in self.sums.get(name, {}).items():
                if start <= first < last <= stop:
                    checked += last - first
                    if _crc32(flat[first - start : last - start]) != crc32:
                        raise ValueError(
                            f"elements {first} to {last} of {name} do not match their checksum"
                        )
            if checked != flat.numel():
                raise ValueError(
                    f"it has {flat.numel()} elements of {name}, but checksums for {checked}"
                )


def raw_bytes(values: Tensor) -> Any:
    """Return the elements of ``values`` as bytes, in a numpy array."""
    return values.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()


def _crc32(values: Tensor) -> int:
    return zlib.crc32(raw_bytes(values), zlib.crc32(str(values.dtype).encode()))


#: The name of the tensor of :func:`write_beside`.
HEADER = "ds_layerwise"


def name_in_file(name: str, key: str) -> str:
    """Return the name of the state ``key`` of the parameter ``name``, or of its master if ``key``
    is empty.
    """
    if key:
        return f"state.{name}.{key}"
    return f"master.{name}"


def write(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], values: Iterable[Tensor]
) -> None:
    """Write a file, tensor by tensor. It replaces ``path`` atomically.

    Args:
        tensors: the dtype and shape of each, the longest dtypes first, so that tensors are aligned
            in the file.
        values: all elements in the order of ``tensors``, in parts of any size.

    Raises:
        LayerWiseError: the file cannot be written; an earlier file is unchanged.
    """
    entries = {}
    stop = 0
    for name, (dtype, shape) in tensors.items():
        start = stop
        stop = stop + dtype.itemsize * math.prod(shape)
        entries[name] = {"dtype": _code(dtype), "shape": shape, "data_offsets": (start, stop)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write_to(new: Path) -> None:
        with new.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for value in values:
                file.write(raw_bytes(value))

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_whole(path, write_to)
    except OSError as e:
        raise LayerWiseError(f"{path} cannot be written: {e}") from e


def _code(dtype: torch.dtype) -> str:
    """Return safetensors' name of ``dtype``, such as BF16."""
    if dtype is torch.complex64:
        return "C64"
    name = str(dtype).removeprefix("torch.").removesuffix("fn")
    for long, short in (("uint", "u"), ("int", "i"), ("float", "f")):
        name = name.replace(long, short)
    return name.upper()


class OneFile:
    """A single file of whole parameters, open for reading; see :class:`.record.Saved`. Tensors are
    mapped from it.

    Raises:
        LayerWiseError: the file is missing, damaged, or of another kind.
    """

    _file: Any

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise LayerWiseError(
                f"{path} is not a file; every rank reads it, so it must be on a disk that all share"
            )
        try:
            self._file = safe_open(path, framework="pt")
            names = set(self._file.keys())
        except (SafetensorError, OSError) as e:
            raise LayerWiseError(
                f"{path} is not a complete safetensors file ({e}); write it again with "
                "save_state_dict_to_file()"
            ) from e
        if HEADER not in names:
            raise LayerWiseError(
                f"{path} was not written by save_state_dict_to_file(): it has no {HEADER}"
            )
        self.beside = Beside(self._file.get_tensor(HEADER), path)
        self.header = self.beside.header
        self.save_id = self.beside.save_id
        for name in self.header.rules:
            for key in self.header.keys(name):
                if name_in_file(name, key) not in names:
                    raise LayerWiseError(
                        f"{path} lacks {name_in_file(name, key)}, so it is not complete; write it "
                        "again with save_state_dict_to_file()"
                    )

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """Return one piece, the whole parameter. The elements ``[start, stop)`` are compared with
        their checksums.
        """
        shape = tuple(self.header.shapes[name])
        tensors = {}
        for key in self.header.keys(name):
            path = name_in_file(name, key)
            value = self._file.get_tensor(path)
            tensors[key] = value
            first = 0
            last = value.numel()
            if not key or tuple(value.shape) == shape:
                first, last = self.beside.around(path, start, stop)
            self.beside.check(path, value.reshape(-1)[first:last], first)
        return in_one_piece(name, tensors, shape)
