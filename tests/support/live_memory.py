"""A counter of the memory that tensors hold at a time."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Count the bytes of all storages that operations make while it is on, as long as somebody holds them, each with
    the size that it has.

    Args:
        held: tensors that are there already.
    """

    def __init__(self, held=()):
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self._note(held)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, then note the storages of its results."""
        out = func(*args, **(kwargs or {}))
        self._note(tree_leaves(out))
        return out

    def now(self):
        """Return the bytes held at the moment."""
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in self._storages.values())

    def _note(self, values):
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())


def uncounted(function):
    """Return ``function``, whose tensors no :class:`LiveMemory` notes."""
    @functools.wraps(function)
    def called(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called


def bytes_of(tensors):
    """Return the bytes of the storages behind ``tensors``, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def most_beside(rule, shapes, hyper, updates=1):
    """The most bytes that an update takes beside parameters of ``shapes``, their gradients and states, all on meta."""
    params, grads = ([torch.empty(shape, device="meta") for shape in shapes] for _ in range(2))
    states = [rule.init_state(param) for param in params]
    most = 0
    for _ in range(updates):
        with LiveMemory([*params, *grads, *(value for state in states for value in state.values())]) as memory:
            held = memory.now()
            rule.update_(params, grads, states, hyper)
        most = max(most, memory.peak - held)
        assert memory.now() == held
    return most
