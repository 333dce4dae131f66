"""A copy of the values for a process that writes them in the background, while training changes the
originals.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable
from typing import TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


def snapshot(value: Value) -> Value:
    """Copy ``value`` to the host, with all tensors in it, also inside of objects. Everything that
    can be saved can be copied.
    """
    stream = io.BytesIO()
    copies = list[Tensor]()
    # Keep each tensor alive, so that no other tensor gets its address.
    known: dict[Hashable, tuple[int, Tensor]] = {}

    def number_of(thing: object) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        key = _identity(thing)
        if key not in known:
            known[key] = len(copies), thing
            copies.append(_copy(thing))
        return known[key][0]

    pickler = pickle.Pickler(stream)
    pickler.persistent_id = number_of  # type: ignore[method-assign]
    pickler.dump(value)
    stream.seek(0)
    unpickler = pickle.Unpickler(stream)
    unpickler.persistent_load = copies.__getitem__  # type: ignore[method-assign]
    copied: Value = unpickler.load()
    return copied


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
