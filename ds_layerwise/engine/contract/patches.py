"""Patches of DeepSpeed: those of a registered backend, and those that stay as long as an engine
needs them.

Note: who changes patches
    One thread at a time, inside :func:`changing`. When Python collects an engine, it calls from
    within whatever code is running, in any thread, and inside a change, too. What is then to be put
    back waits for the end of the change: the one who collects must not wait for a lock that it may
    hold itself.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ds_layerwise.config.sections import OPTIMIZER_TYPES
from ds_layerwise.engine.contract import contract
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.param_owner import is_trained

#: Engines of this backend.
engines: weakref.WeakSet[Any] = weakref.WeakSet()

#: Additions to lists of DeepSpeed, by their names in the contract.
_ADDED: dict[str, tuple[object, ...]] = {
    "DEEPSPEED_OPTIMIZERS": OPTIMIZER_TYPES,
    "ZERO_SUPPORTED_OPTIMIZERS": (LayerWiseOptimizer,),
}

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class _Patch:
    """An attribute of a class or module of DeepSpeed that was replaced."""

    owner: Any
    name: str
    original: Any
    """The attribute that the owner had itself; ``_NOTHING`` if that was inherited, or nowhere."""
    ours: Any
    for_life: bool
    """True if it stays as long as there is an engine that was not destroyed."""

    def now(self) -> Any:
        """Return the present attribute of the owner itself."""
        return vars(self.owner).get(self.name, _NOTHING)

    def put(self) -> None:
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> bool:
        """Put back what was there, unless somebody has replaced it since; tell whether it is
        there.
        """
        if self.now() is self.ours:
            if self.original is _NOTHING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
        return self.now() is self.original

    def is_called(self) -> bool:
        """Tell whether the present attribute is ours, or says that it goes around ours."""
        within = self.now()
        while within is not self.ours and hasattr(within, "__wrapped__"):
            within = within.__wrapped__
        return within is self.ours


#: All patches, by key of the contract.
_patches: dict[str, _Patch] = {}


class _Changes:
    """The state of changes: who makes one now, and whether an engine was collected meanwhile."""

    # The thread that imports DeepSpeed to look names up may run code that registers, too.
    lock = threading.RLock()
    depth = 0
    """The number of changes within each other, all of one thread."""
    is_due = False
    """True if there may be something to put back."""


@contextmanager
def changing() -> Iterator[None]:
    """Let other threads wait during a change of patches, and during what decides on one."""
    with _Changes.lock:
        _Changes.depth += 1
        try:
            yield
        finally:
            _Changes.depth -= 1
    if _Changes.is_due:
        _put_back_soon()


def _put_back_soon() -> None:
    """Put back what no engine needs: now, or once those who change patches have done so."""
    _Changes.is_due = True
    while _Changes.is_due and _Changes.lock.acquire(blocking=False):
        try:
            if _Changes.depth:
                return
            _Changes.is_due = False
            _Changes.depth += 1
            try:
                _put_back()
            finally:
                _Changes.depth -= 1
        finally:
            _Changes.lock.release()


def is_registered() -> bool:
    """Tell whether DeepSpeed is to know this backend now."""
    return any(not patch.for_life for patch in _patches.values())


def wrap(wraps: Mapping[str, Callable[..., Any]], *, for_life: Container[str]) -> None:
    """Let DeepSpeed's methods and functions go through ``wraps``, by their keys in the contract.

    Inside :func:`changing`.

    Args:
        for_life: keys of what stays until no engine is left that was not destroyed.

    Raises:
        ConfigError: they went through them before, and somebody has replaced one since.
    """
    # What an engine still needs has stayed.
    targets = {key: contract.resolve(key) for key in wraps if key not in _patches}
    for patch in _patches.values():
        if patch.now() is patch.original:
            patch.put()
    _refuse_replaced(
        [patch for patch in _patches.values() if not patch.is_called()],
        ", by what does not say that it calls what was there; undo that, or write it with "
        "functools.wraps",
    )
    for key, values in _ADDED.items():
        entries: list[object] = getattr(*contract.resolve(key))
        entries.extend(value for value in values if value not in entries)
    for key, (owner, name) in targets.items():
        patch = _patches[key] = _Patch(
            owner,
            name,
            vars(owner).get(name, _NOTHING),
            _wrapped(getattr(owner, name), wraps[key], is_method=inspect.isclass(owner)),
            key in for_life,
        )
        patch.put()


def unwrap() -> None:
    """Undo :func:`wrap`, except for what is ``for_life``. Inside :func:`changing`.

    Raises:
        ConfigError: somebody else has wrapped the engine since.
    """
    if not is_registered():
        return
    _refuse_replaced(
        [patch for patch in _patches.values() if patch.now() not in (patch.ours, patch.original)],
        "; undo that first",
    )
    for key, values in _ADDED.items():
        entries: list[object] = getattr(*contract.resolve(key))
        entries[:] = [value for value in entries if value not in values]
    for key, patch in list(_patches.items()):
        if not patch.for_life:
            _patches.pop(key).undo()
    _put_back()
    for engine in engines:
        weakref.finalize(engine, _put_back_soon).atexit = False


def _refuse_replaced(lost: Sequence[_Patch], way_out: str) -> None:
    if lost:
        names = ", ".join(f"{patch.owner.__name__}.{patch.name}" for patch in lost)
        if len(lost) > 1:
            verb = "were"
        else:
            verb = "was"
        raise ConfigError(f"{names} {verb} replaced after ds_layerwise.register(){way_out}")


def _put_back() -> None:
    """Put back what no engine needs, unless somebody has registered again, or wrapped it since."""
    if is_registered():
        return
    for engine in engines:
        for param in engine.module.parameters():
            if is_trained(param):
                return
    for key, patch in list(_patches.items()):
        if patch.undo():
            del _patches[key]


def _wrapped(
    original: Callable[..., Any], wrapper: Callable[..., Any], *, is_method: bool
) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(original, args[0]) if is_method else original
        return wrapper(bound, *args, **kwargs)

    return wrapped
