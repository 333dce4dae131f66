"""A copy of the values for a process that writes them in the background, while training changes the
originals.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


def snapshot(value: Value) -> Value:
    """Copy ``value`` to the host, with all tensors in it, also inside of objects. Everything that
    can be saved can be copied.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    stream.seek(0)
    copied: Value = _Unpickler(stream, pickler.copies).load()
    return copied


class _Pickler(pickle.Pickler):
    """Writes the number of a copy in place of each tensor."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.copies = list[Tensor]()
        # Keep each tensor alive, so that no other tensor gets its address.
        self._known: dict[Hashable, tuple[int, Tensor]] = {}

    def persistent_id(self, thing: object) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        key = _identity(thing)
        if key not in self._known:
            self._known[key] = len(self.copies), thing
            self.copies.append(_copy(thing))
        return self._known[key][0]


class _Unpickler(pickle.Unpickler):
    """Reads the copies in place of their numbers."""

    def __init__(self, stream: io.BytesIO, copies: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._copies = copies

    def persistent_load(self, number: int) -> Tensor:
        return self._copies[number]


def _identity(tensor: Tensor) -> Hashable:
    """Return the key under which a tensor is copied once. Two tensors that share their values, such
    as tied weights, have the same key.

    A tensor without an address has a key of its own: one without elements, on no device, or a
    wrapper around others, as in torchao.
    """
    if tensor.layout != torch.strided or not tensor.data_ptr():
        return id(tensor)
    return (
        type(tensor),
        tensor.requires_grad,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.data_ptr(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _copy(tensor: Tensor) -> Tensor:
    copied = _values(tensor.detach())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _values(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    if tensor.layout == torch.strided and 0 in tensor.stride():
        # A tensor with stride 0 uses the memory of one element for many, and so does its copy.
        ones = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        return ones.to("cpu", copy=True).expand(tensor.shape)
    return tensor.to("cpu", copy=True)
