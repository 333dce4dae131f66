"""Parameters whose new value has not arrived: whoever uses one waits for it."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap

#: What says nothing of a value, and what hands a gradient over.
_PROPERTIES = ("_backward_hooks", "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_fn",
               "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_quantized", "is_sparse", "is_xla",
               "itemsize", "layout", "name", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape")
_METHODS = ("__hash__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
            "is_signed", "ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
            "requires_grad_", "size", "storage_offset", "stride")
_HARMLESS = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS} | {
    getattr(Tensor, name).__set__ for name in ("_backward_hooks", "grad", "requires_grad")}


#: Where transforms of torch.func begin. They unpack what they are given, and ask nobody.
_BEGINNINGS = ((eager_transforms, "_grad_increment_nesting"), (eager_transforms, "enter_jvp_nesting"),
               (eager_transforms, "_func_increment_nesting"), (vmap, "_vmap_increment_nesting"))


class UnderWay(nn.Parameter):
    """A parameter between :func:`mark` and :func:`unmark`. It is the same object, so that every reader has it."""

    _arrive: Callable[[], None]

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Who makes another parameter of the same class makes one that has arrived."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever torch is asked to do with such a parameter, it does once the value is there."""
        kwargs = kwargs or {}
        if function in _HARMLESS and not torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        for param in _found_in((args, kwargs)):
            param._arrive()
        return function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled or copied is what arrives, and is nothing but a parameter."""
        self._arrive()
        return self.__reduce_ex__(protocol)


def can_mark(param: Tensor) -> bool:
    """Whether ``param`` is of the one class that :func:`mark` knows."""
    return type(param) is nn.Parameter


def mark(params: Iterable[nn.Parameter], arrive: Callable[[], None]) -> None:
    """Let ``arrive`` be called by whoever uses one of ``params``; it must call :func:`unmark` before it returns."""
    for param in params:
        param.__dict__["_arrive"] = arrive
        param.__class__ = UnderWay


def unmark(params: Iterable[nn.Parameter]) -> None:
    """Undo :func:`mark`, if there was one."""
    for param in params:
        if param.__dict__.pop("_arrive", None) is not None:
            param.__class__ = nn.Parameter


class Transforms:
    """Whoever must hear of a transform of torch.func before it begins, while there is anybody.

    There is nothing in torch that says so: the functions that begin one are replaced, and put back when the last has
    heard enough, so that a compiler meets those that it knows.
    """

    def __init__(self) -> None:
        # Who is not needed any more does not live on for this.
        self._listeners: weakref.WeakKeyDictionary[object, weakref.WeakMethod[Callable[[], None]]] = (
            weakref.WeakKeyDictionary())
        self._own: list[Any] = []
        self._lock = threading.Lock()

    @property
    def can_be_noticed(self) -> bool:
        """Whether this torch has those functions."""
        return all(hasattr(module, name) for module, name in _BEGINNINGS)

    def listen(self, who: object, arrive: Callable[[], None]) -> None:
        """Let ``arrive``, a method of ``who``, be called before each transform that begins, until ``who`` leaves.

        It may be called on any thread.
        """
        with self._lock:
            self._listeners[who] = weakref.WeakMethod(arrive)
            if not self._own:
                self._own = [getattr(module, name) for module, name in _BEGINNINGS]
                for (module, name), begin in zip(_BEGINNINGS, self._own, strict=True):
                    setattr(module, name, functools.partial(self._begin, begin))

    def leave(self, who: object) -> None:
        """Undo :meth:`listen`, if there was one."""
        with self._lock:
            self._listeners.pop(who, None)
            self._put_back_if_nobody_listens()

    def forget(self) -> None:
        """Leave for all: in a forked process nobody can arrive, and the lock may be another thread's for ever."""
        self._lock = threading.Lock()
        self._listeners.clear()
        self._put_back_if_nobody_listens()

    def _put_back_if_nobody_listens(self) -> None:
        if self._own and not self._listeners:
            for (module, name), begin in zip(_BEGINNINGS, self._own, strict=True):
                setattr(module, name, begin)
            self._own = []

    def _begin(self, begin: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            self._put_back_if_nobody_listens()
            found = [method() for method in self._listeners.values()]
        try:
            for arrive in found:
                if arrive is not None:
                    arrive()
        finally:
            # After an error, too: torch ends what it takes to have begun, and would fail at that instead.
            begun = begin(*args)
        return begun


#: Those of this process.
transforms = Transforms()
os.register_at_fork(after_in_child=transforms.forget)


def _found_in(value: Any) -> Iterator[UnderWay]:
    if type(value) is UnderWay:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _found_in(each)
    elif isinstance(value, dict):
        yield from _found_in(list(value.values()))


def references(memory: Tensor) -> int:
    """How many tensors and storages look into the memory of ``memory``, itself included."""
    return int(torch._C._storage_Use_Count(memory.untyped_storage()._cdata))
