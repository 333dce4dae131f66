"""How a file of ``torch.save``'s is read without running anything that is in it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from pickletools import genops
from typing import Any
from zipfile import is_zipfile

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from ds_layerwise.checkpoint.plain import stand_ins
from ds_layerwise.errors import LayerWiseError

#: What reading a dict leads to that is not what it should be.
_MALFORMED = (LookupError, TypeError, AttributeError, ValueError, AssertionError)

#: Records of DeepSpeed that have no code to run.
_KNOWN: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name ``path`` where its content is of another kind than what this package writes.

    Raises:
        LayerWiseError: instead of what that led to.
    """
    try:
        yield
    except _MALFORMED as e:
        what = "" if type(e) is ValueError else f"{type(e).__name__}: "
        raise LayerWiseError(f"{path} is damaged: {what}{e}; restore it, or load another checkpoint") from e


def load_safely(path: Path, *, with_objects: bool = False) -> Any:
    """What ``torch.save`` wrote to ``path``: builtins, tensors mapped from the file and DeepSpeed's own records.

    Nothing in the file is executed.

    Args:
        with_objects: whether it may hold other objects. Numbers of numpy are read as builtins, and the rest as
            :class:`.plain.Unreadable`.

    Raises:
        LayerWiseError: the file is missing, damaged, or holds something else.
    """
    if not path.exists():
        raise LayerWiseError(f"{path} is missing; the checkpoint is not whole")
    try:
        try:
            return _load(path, _KNOWN)
        except UnpicklingError:
            if not with_objects or not is_zipfile(path):
                raise
        with torch.serialization.safe_globals(_KNOWN):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        return _load(path, [*_KNOWN, *stand_ins(unknown)])
    except (RuntimeError, EOFError, OSError, UnpicklingError, *_MALFORMED) as e:
        raise LayerWiseError(f"{path} cannot be read: {type(e).__name__}: {str(e).partition(chr(10))[0]}") from e


def load_bytes_safely(content: bytes, path: Path) -> Any:
    """What ``torch.save`` wrote into ``content``, a part of the file ``path``; as :func:`load_safely`."""
    try:
        with torch.serialization.safe_globals(_KNOWN):
            return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, UnpicklingError, *_MALFORMED) as e:
        raise LayerWiseError(f"{path} cannot be read: {type(e).__name__}: {str(e).partition(chr(10))[0]}") from e


class _Restricted(Unpickler):
    """Calls nothing but what ``known`` has, by module and name."""

    def __init__(self, content: bytes, known: Container[str]) -> None:
        super().__init__(BytesIO(content))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """See :class:`pickle.Unpickler`."""
        if f"{module}.{name}" not in self._known:
            raise UnpicklingError(f"it asks for {module}.{name}, which no such file needs")
        return super().find_class(module, name)


def unpickle_known(content: bytes, known: Container[str]) -> Any:
    """What ``pickle`` wrote into ``content``, of objects that ``known`` names; see :class:`_Restricted`.

    Raises:
        Exception: as many kinds as ``pickle`` raises; there is something else in it, or it is damaged.
    """
    for operation, argument, _ in genops(content):
        # Python makes room for as many objects.
        if operation.name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(content):
            raise UnpicklingError(f"it counts {argument} objects, and has {len(content)} bytes")
    return _Restricted(content, known).load()


def _load(path: Path, known: list[Any]) -> Any:
    with torch.serialization.safe_globals(known):
        return torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
