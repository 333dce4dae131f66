"""The values of parameter groups as builtins, which can be read back without running code."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import Tensor

from ds_layerwise.errors import LayerWiseError

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

    def __new__(cls, *args: object, **kwargs: object) -> Unreadable:
        """Accept and drop a part of a pickle."""
        return super().__new__(cls)

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
        items = []
        for index, item in enumerate(value):
            items.append(_plain(item, f"{where}[{index}]"))
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


def stand_ins(names: Iterable[str]) -> list[Any]:
    """Return stand-ins, for torch's ``safe_globals``, of the classes and functions ``names`` of a
    pickle.
    """
    return [(Unreadable, name) for name in names]
