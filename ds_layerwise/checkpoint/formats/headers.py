"""The header and the checksums of a single file and of a sharded checkpoint.

Note: how much is checked
    Neither format has checksums of its own. Tensors are checked in blocks, so that a rank reads
    little more than it loads. The tensor with the checksums ends with a digest of itself.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ds_layerwise.checkpoint.files.safe_load import load_bytes_safely, naming
from ds_layerwise.checkpoint.formats.regular import FORMAT, KEY, check_format, describe, header_of
from ds_layerwise.checkpoint.record import Header

#: The end and the checksum of blocks, by the name of a tensor in the file and the block's first
#: element.
Sums = Mapping[str, Mapping[int, tuple[int, int]]]

#: The number of elements of a block; the last block of a rank may be shorter.
_BLOCK = 1 << 20

_SUMS = "checksums"
_DIGEST = hashlib.sha256().digest_size

#: The key of the save's identifier, with which ranks notice that they read different saves.
_SAVE = "save"


def sums_of(values: Tensor, start: int = 0) -> dict[int, tuple[int, int]]:
    """Return an entry of :data:`Sums`, for the elements of a tensor from ``start`` on."""
    flat = values.reshape(-1)
    found = {}
    for offset in range(0, flat.numel(), _BLOCK):
        block = flat[offset : offset + _BLOCK]
        found[start + offset] = (start + offset + block.numel(), _crc32(block))
    return found


def write_beside(header: Header, scaler: tuple[str, Any], sums: Sums) -> Tensor:
    """Return a tensor of bytes with the header, the loss scaler and the checksums.

    Args:
        scaler: the loss scaler, with DeepSpeed's key for it.
    """
    content = io.BytesIO()
    ours = {"format": FORMAT, **describe(header)}
    torch.save({KEY: ours, scaler[0]: scaler[1], _SUMS: sums, _SAVE: uuid4().hex}, content)
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
            check_format(found[KEY]["format"], path)
            self.header = header_of(found)
            self.save = str(found[_SAVE])
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
