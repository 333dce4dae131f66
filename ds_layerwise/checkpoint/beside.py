"""What one file and a sharded checkpoint say beside their tensors, and the checksums of those: their formats have none.

Note: how much is checked
    Tensors are checked in blocks, so that a rank reads little more than what it loads. What holds the checksums ends
    with a digest of itself.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from ds_layerwise.checkpoint.record import Header
from ds_layerwise.checkpoint.regular import KEY, describe, header_of
from ds_layerwise.checkpoint.safe_load import load_bytes_safely, naming

#: By the name of a tensor in the file, the parts that it was handed over in: the first element, how many, and the
#: checksums of their blocks.
Sums = Mapping[str, Sequence[tuple[int, int, Sequence[int]]]]

#: In elements; the last block of a part may be shorter.
_BLOCK = 1 << 18

_SUMS, _MARK = "checksums", b"sha256:"

#: Under which it is said which save this is, so that ranks notice if theirs are of several.
_SAVE = "save"


def sums_of(values: Tensor, start: int = 0) -> tuple[int, int, list[int]]:
    """An entry of :data:`Sums`, of the elements of a tensor from ``start`` on."""
    flat = values.detach().reshape(-1)
    return start, flat.numel(), [_crc32(flat[first:first + _BLOCK]) for first in range(0, flat.numel(), _BLOCK)]


def write_beside(header: Header, scaler: tuple[str, Any], sums: Sums) -> Tensor:
    """What is beside the tensors, as bytes.

    Args:
        scaler: the loss scaler, and the key that DeepSpeed has it under.
    """
    content = io.BytesIO()
    torch.save({KEY: describe(header), scaler[0]: scaler[1], _SUMS: dict(sums), _SAVE: uuid4().hex}, content)
    body = content.getvalue()
    return torch.frombuffer(bytearray(body + _MARK + hashlib.sha256(body).digest()), dtype=torch.uint8)


class Beside:
    """What :func:`write_beside` made, read from ``path``.

    Raises:
        LayerWiseError: it is damaged.
    """

    def __init__(self, content: Tensor, path: Path) -> None:
        self._path, raw = path, content.numpy().tobytes()
        size = len(raw) - hashlib.sha256().digest_size
        body = raw[:size - len(_MARK)]
        is_sealed = raw[len(body):size] == _MARK
        with naming(path):
            if is_sealed and hashlib.sha256(body).digest() != raw[size:]:
                raise ValueError("what is beside its tensors is not what was saved")
            found = load_bytes_safely(body if is_sealed else raw, path)
            self.header = header_of(found)
            self.save = str(found.get(_SAVE, ""))
            self.sums: Sums | None = found.get(_SUMS)
            """None in what an earlier version wrote."""
            if self.sums is not None and not is_sealed:
                raise ValueError("the digest of what is beside its tensors is gone")

    def around(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """The elements of the tensor ``name`` in the blocks that hold any of ``[start, stop)``."""
        first, last = start, stop
        for begin, numel, _ in self._parts(name) if self.sums is not None and start < stop else ():
            if begin < stop and start < begin + numel:
                first = min(first, start - (start - begin) % _BLOCK if start > begin else begin)
                last = max(last, min(begin + numel, stop + (begin - stop) % _BLOCK))
        return first, last

    def check(self, name: str, values: Tensor, start: int = 0) -> None:
        """Compare ``values``, the elements of the tensor ``name`` from ``start`` on, with what was saved.

        Raises:
            LayerWiseError: they are others, or more or fewer.
        """
        if self.sums is None:
            return
        flat, stop, checked = values.reshape(-1), start + values.numel(), 0
        with naming(self._path):
            for begin, numel, sums in self._parts(name):
                for first, crc32 in zip(range(begin, begin + numel, _BLOCK), sums, strict=True):
                    last = min(first + _BLOCK, begin + numel)
                    if start <= first and last <= stop:
                        checked += last - first
                        if _crc32(flat[first - start:last - start]) != crc32:
                            raise ValueError(f"the elements {first} to {last} of {name} are not those that were saved")
            if checked != flat.numel():
                raise ValueError(f"it has {flat.numel()} elements of {name}, and checksums of {checked}")

    def _parts(self, name: str) -> Sequence[tuple[int, int, Sequence[int]]]:
        return (self.sums or {}).get(name, ())


def _crc32(values: Tensor) -> int:
    raw: Any = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    return zlib.crc32(raw, zlib.crc32(str(values.dtype).encode()))
