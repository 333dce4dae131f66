"""Values that are read back without running code: those of parameter groups, as builtins, and files
of ``torch.save``.
"""

from __future__ import annotations

import numbers
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from decimal import Decimal
from enum import Enum
from io import BytesIO
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import numpy
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from ds_layerwise.errors import ConfigError, LayerWiseError, RoutingError

#: The types that torch's own reader accepts and that need no conversion.
_BUILTINS = (type(None), bool, int, float, complex, str, bytes)
_OF_TORCH = (torch.dtype, torch.device, torch.Size)

#: The types of single values, each with the function that converts them to a builtin.
_SINGLE: tuple[tuple[type, Any], ...] = (
    (PurePath, str),
    (str, "".join),
    (bytes, bytes),
    (numbers.Integral, int),
    (numbers.Real, float),
    (Decimal, float),
    (numbers.Complex, complex),
)

#: The numpy kinds with a matching builtin: bool, int, unsigned, float, complex, bytes and str.
_NUMPY_KINDS = "biufcSU"


class Unreadable:
    """The stand-in for an object in a file whose class is not called. It accepts and drops
    everything that a pickle passes to it.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Accept and drop a part of a pickle."""

    def __setstate__(self, state: Any) -> None:
        """Accept and drop a part of a pickle."""

    def __setitem__(self, key: object, value: object) -> None:
        """Accept and drop a part of a pickle."""


def plain(value: Any, where: str) -> Any:
    """Return ``value`` as builtins and tensors. It may have numbers of any library, enums, paths,
    named tuples and arrays.

    Raises:
        LayerWiseError: it has something else in it; the error calls it ``where``.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise LayerWiseError(
            f"{where} holds itself, which a checkpoint cannot; take it out of the group"
        ) from None


def check_kind(held: Any, value: Any, where: str) -> None:
    """Refuse a ``value`` of a file if it is of another kind than ``held``, which it would replace.

    If ``held`` is a number, ``value`` must be a number, None or unknown. Groups of values are
    compared item by item, as far as both go; a group must not become a number.

    Raises:
        ValueError: the kinds differ; the error calls it ``where``.
    """
    groups = tuple, list
    if isinstance(held, Mapping) and isinstance(value, Mapping):
        for key in held.keys() & value.keys():
            check_kind(held[key], value[key], f"{where}.{key}")
    elif isinstance(held, groups) and isinstance(value, groups):
        for index, pair in enumerate(zip(held, value, strict=False)):
            check_kind(*pair, f"{where}[{index}]")
    elif not isinstance(value, (type(None), Unreadable)) and (
        isinstance(held, groups)
        if _is_number(value)
        else _is_number(held) and not isinstance(held, bool)
    ):
        raise ValueError(
            f"{where} is {value!r:.100}, which cannot replace this run's {held!r:.100}: the kinds "
            "differ"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or isinstance(value, Tensor) and not value.dim()


def like(held: Any, value: Any) -> Any:
    """Return ``value``, a result of :func:`plain`, converted to the type of ``held``; or ``held``
    itself, if it is equal.

    Only classes of ``held`` are called: those of enums, paths and named tuples. If none of them
    fits, ``value`` is unchanged.
    """
    if isinstance(held, Tensor) or isinstance(value, Tensor):
        return value
    try:
        said = plain(held, "what is held")
        if type(said) is type(value) and said == value:
            return held
    except (LayerWiseError, RuntimeError):
        # ``held`` cannot be stored in a checkpoint, or both contain tensors.
        pass
    if isinstance(held, Enum):
        return _member(type(held), value)
    if isinstance(held, PurePath) and isinstance(value, str):
        return type(held)(value)
    if isinstance(held, Mapping) and isinstance(value, dict):
        return _like_mapping(held, value)
    if isinstance(held, (list, tuple)) and type(value) in (list, tuple):
        items = [like(*pair) for pair in zip(held, value, strict=False)] + list(value[len(held) :])
        if hasattr(held, "_fields") and len(items) == len(held):
            return type(held)(*items)
        return type(value)(items)
    return value


def _like_mapping(held: Mapping[Any, Any], value: Mapping[Any, Any]) -> dict[Any, Any]:
    own = {plain(key, "a key"): key for key in held}
    made = {}
    for key, item in value.items():
        key = own.get(key, key)
        made[key] = like(held.get(key), item)
    return made


def _member(kind: type[Enum], value: Any) -> Any:
    """Return the member of ``kind`` that a checkpoint stores as ``value``; ``value`` itself if
    there is none.
    """
    for member in kind:
        if plain(member.value, "a member") == value:
            return member
    try:
        return kind(value)  # a combination of flags
    except ValueError:
        return value


def _plain(value: Any, where: str) -> Any:
    if type(value) in _BUILTINS or isinstance(value, _OF_TORCH):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if isinstance(value, Tensor):
        return _of_tensor(value, where)
    if isinstance(value, (numpy.generic, numpy.ndarray)):
        return _of_numpy(value, where)
    for kind, make in _SINGLE:
        if isinstance(value, kind):
            return make(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, f"a key of {where}"): _plain(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }
    if isinstance(value, Set):
        return {_plain(item, f"an element of {where}") for item in value}
    if isinstance(value, Sequence):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(items)
        return items
    raise LayerWiseError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold: it is read without running code; keep numbers, text, tensors and containers "
        "of those in a parameter group"
    )


def _of_tensor(value: Tensor, where: str) -> Any:
    if (
        type(value) not in (Tensor, torch.nn.Parameter)
        or value.layout != torch.strided
        or value.is_meta
    ):
        raise LayerWiseError(
            f"{where} is a {type(value).__name__} of layout {value.layout} on {value.device}, "
            "which a checkpoint cannot hold; make it a plain tensor"
        )
    if value.dim():
        return value.detach().cpu().clone()
    return value.item()


def _of_numpy(value: Any, where: str) -> Any:
    if value.dtype.kind not in _NUMPY_KINDS:
        raise LayerWiseError(
            f"{where} is a numpy {value.dtype}, which a checkpoint cannot hold; make it numbers"
        )
    if value.dtype == numpy.longdouble:
        # This type has no builtin.
        value = numpy.asarray(value, dtype=numpy.float64)
    return value.tolist()


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
    ImportError,
    UnpicklingError,
    struct.error,
    *_MALFORMED,
)

#: DeepSpeed's classes in checkpoints that have no code to run.
READABLE: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


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
        what = "" if type(e) is ValueError else f"{type(e).__name__}: "
        raise LayerWiseError(
            f"{path} is damaged: {what}{e}; restore it, or load another checkpoint"
        ) from e


def check_format(number: int, known: int, path: Path) -> None:
    """Compare the format of the file ``path`` with the one that this version reads.

    Raises:
        LayerWiseError: it is another one.
    """
    if number != known:
        way_out = "resume with the version that wrote it"
        if number > known:
            way_out = "upgrade ds_layerwise"
        raise LayerWiseError(
            f"{path} has format {number}, and this version of ds_layerwise reads {known}; {way_out}"
        )


def load_safely(path: Path, *, with_objects: bool = False) -> Any:
    """Read a file that ``torch.save`` wrote: builtins, tensors mapped from the file, and
    DeepSpeed's own records.

    Nothing in the file is executed.

    Args:
        with_objects: True if it may contain other objects. numpy's numbers are read as builtins,
            and the rest as :class:`Unreadable`.

    Raises:
        LayerWiseError: the file is missing, damaged, or contains something else.
    """
    if not path.is_file():
        raise LayerWiseError(
            f"{path} is {'not a file' if path.exists() else 'missing'}; the checkpoint is not whole"
        )
    with _refusing(path):
        try:
            return _load(path, READABLE)
        except UnpicklingError:
            if not with_objects or not is_zipfile(path):
                raise
        with torch.serialization.safe_globals(READABLE):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(Unreadable, name) for name in unknown]
        return _load(path, [*READABLE, *stand_ins])


def load_bytes_safely(content: bytes, path: Path) -> Any:
    """Read the output of ``torch.save`` in ``content``, a part of the file ``path``, as in
    :func:`load_safely`.
    """
    with _refusing(path):
        return _load(BytesIO(content), READABLE)


def load_trusted(path: Path) -> Any:
    """Read a file that ``torch.save`` wrote, and run the code that it names.

    Raises:
        LayerWiseError: the file is missing or damaged.
    """
    with _refusing(path):
        return _load(path, [], weights_only=False)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Name ``path`` in the error if torch cannot read it, without torch's advice to run the code in
    it.

    Raises:
        LayerWiseError: in place of the original error.
    """
    try:
        yield
    except UNREADABLE as e:
        text = str(e)
        if isinstance(e, UnpicklingError):
            asked = re.search(r"(?:GLOBAL|class|function) `?([\w.]+)", text)
            text = "torch.save did not write it"
            if asked:
                text = f"it asks for {asked[1]}, which only code could restore"
        raise LayerWiseError(
            f"{path} cannot be read: {type(e).__name__}: {text.partition(chr(10))[0]}"
        ) from e


def _load(source: Path | BytesIO, known: list[Any], *, weights_only: bool = True) -> Any:
    with torch.serialization.safe_globals(known):
        return torch.load(
            source,
            map_location="cpu",
            mmap=isinstance(source, Path) and is_zipfile(source),
            weights_only=weights_only,
        )
