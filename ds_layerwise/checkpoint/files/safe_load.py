"""Reading files of ``torch.save`` without executing anything in them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_layerwise.checkpoint.plain_values import stand_ins
from ds_layerwise.errors import ConfigError, LayerWiseError, RoutingError

#: The errors from reading a dict with unexpected content.
_MALFORMED = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    AssertionError,
    ArithmeticError,
    RecursionError,
)

#: The errors of torch's readers for files that are missing or damaged.
UNREADABLE = (
    RuntimeError,
    EOFError,
    OSError,
    MemoryError,
    UnpicklingError,
    struct.error,
    *_MALFORMED,
)

#: DeepSpeed's classes in checkpoints that have no code to run.
_KNOWN: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` in the error if its content is not what this package writes.

    Raises:
        LayerWiseError: in place of the original error.
    """
    try:
        yield
    except (ConfigError, RoutingError):
        raise
    except _MALFORMED as e:
        if type(e) is ValueError:
            what = ""
        else:
            what = f"{type(e).__name__}: "
        raise LayerWiseError(
            f"{path} is damaged: {what}{e}; restore it, or load another checkpoint"
        ) from e


def load_safely(path: Path, *, with_objects: bool = False) -> Any:
    """Read a file that ``torch.save`` wrote: builtins, tensors mapped from the file, and
    DeepSpeed's own records.

    Nothing in the file is executed.

    Args:
        with_objects: True if it may contain other objects. numpy's numbers are read as builtins,
            and the rest as :class:`.plain_values.Unreadable`.

    Raises:
        LayerWiseError: the file is missing, damaged, or contains something else.
    """
    if not path.is_file():
        raise LayerWiseError(
            f"{path} is {'not a file' if path.exists() else 'missing'}; the checkpoint is not whole"
        )
    try:
        try:
            return _load(path, _KNOWN)
        except UnpicklingError:
            if not with_objects or not is_zipfile(path):
                raise
        with torch.serialization.safe_globals(_KNOWN):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        return _load(path, [*_KNOWN, *stand_ins(unknown)])
    except UNREADABLE as e:
        raise _refused(path, e) from e


def load_bytes_safely(content: bytes, path: Path) -> Any:
    """Read the output of ``torch.save`` in ``content``, a part of the file ``path``, as in
    :func:`load_safely`.
    """
    try:
        return _load(BytesIO(content), _KNOWN)
    except UNREADABLE as e:
        raise _refused(path, e) from e


def _refused(path: Path, error: BaseException) -> LayerWiseError:
    """Return the error for ``path``, without torch's advice to run the code in it."""
    text = str(error)
    if isinstance(error, UnpicklingError):
        found = re.search(r"(?:GLOBAL|class|function) `?([\w.]+)", text)
        if found:
            text = f"it asks for {found[1]}, which only code could restore"
        else:
            text = "torch.save did not write it"
    return LayerWiseError(
        f"{path} cannot be read: {type(error).__name__}: {text.partition(chr(10))[0]}"
    )


def _load(source: Path | BytesIO, known: list[Any]) -> Any:
    with torch.serialization.safe_globals(known):
        return torch.load(
            source,
            map_location="cpu",
            mmap=isinstance(source, Path) and is_zipfile(source),
            weights_only=True,
        )
