"""Graphs of operations on a CPU, as CUDA has them on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: They hand a number to the host, which a capture refuses.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory behind a tensor."""
    return tensor.untyped_storage().data_ptr()


class PlayedGraph(TorchDispatchMode):
    """Keeps operations with their tensors, whose memory stays; what they have written is undone at the end."""

    refuses = WAITING
    """The operations that a capture refuses."""
    made: list[PlayedGraph] = []
    """All graphs, in the order in which they were made."""

    def __init__(self, beside: PlayedGraph | None = None) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0
        self.outside: set[int] = set()
        """The addresses of all that operations read or write and that was there before."""
        self._own: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        PlayedGraph.made.append(self)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the operations inside, and undo them."""
        with self:
            yield
        for memory, before in self._before.values():
            memory.copy_(before)

    def replay(self) -> None:
        """Run the operations again, on the same memory."""
        self.replays += 1
        for func, args, kwargs, kept in self.operations:
            for place, value in zip(tensors_in(kept), tensors_in(func(*args, **kwargs)), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name.startswith(self.refuses):
            raise RuntimeError(f"{name} in a capture")
        self._note_writes(func, args, kwargs)
        out = func(*args, **kwargs)
        read = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
        self.outside |= {tensor.data_ptr() for tensor in tensors_in((args, kwargs))
                         if storage_of(tensor) not in self._own}
        new = [tensor for tensor in tensors_in(out) if storage_of(tensor) not in read]
        self._own.update(map(storage_of, new))
        is_view = not new and not any(argument.alias_info is not None and argument.alias_info.is_write
                                      for argument in func._schema.arguments)
        if not (is_view or name.startswith(("empty", "new_empty"))):
            self.operations.append((func, args, kwargs, out))
        else:
            # Its memory must not become that of another tensor.
            self.operations.append((lambda *_, kept=out, **__: kept, (), {}, out))
        return out

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tensors_in(given.get(argument.name)):
                address = storage_of(tensor)
                if address not in self._own and address not in self._before:
                    memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
                    self._before[address] = (memory, memory.clone())
