"""A copy of what is handed to a process that writes beside the training, which changes what is live."""

from __future__ import annotations

import io
import pickle
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


def snapshot(value: Value) -> Value:
    """Copy ``value`` with all tensors in it, in objects too, to the host; what can be saved can be copied."""
    stream, copies = io.BytesIO(), list[Tensor]()
    # Each is held, so that no other gets its id.
    known: dict[int, tuple[int, Tensor]] = {}

    def number_of(thing: object) -> int | None:
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in known:
            known[id(thing)] = len(copies), thing
            copies.append(_copy(thing.detach()))
        return known[id(thing)][0]

    pickler = pickle.Pickler(stream)
    pickler.persistent_id = number_of  # type: ignore[method-assign]
    pickler.dump(value)
    stream.seek(0)
    unpickler = pickle.Unpickler(stream)
    unpickler.persistent_load = copies.__getitem__  # type: ignore[method-assign]
    copied: Value = unpickler.load()
    return copied


def _copy(tensor: Tensor) -> Tensor:
    if tensor.layout == torch.strided and 0 in tensor.stride():
        # What stands for many elements in the memory of one does so in the copy.
        ones = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
        return ones.to("cpu", copy=True).expand(tensor.shape)
    return tensor.to("cpu", copy=True)
