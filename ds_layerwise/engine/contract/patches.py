"""What of DeepSpeed is wrapped while this backend is registered, and what stays as long as an
engine needs it.

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

#: What is added to lists of DeepSpeed, by their names in the contract.
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
    """What the owner had under that name itself; ``_NOTHING`` if that was inherited, or nowhere."""
    ours: Any
    for_life: bool
    """Whether it stays as long as there is an engine that was not destroyed."""

    @property
    def path(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    def now(self) -> Any:
        """What is there now."""
        return vars(self.owner).get(self.name, _NOTHING)

    def put(self) -> None:
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> bool:
        """Put back what was there, unless somebody has replaced it since; returns whether it is
        there.
        """
        if self.now() is self.ours:
            if self.original is _NOTHING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
        return self.now() is self.original

    def is_called(self) -> bool:
        """Whether what is there now is ours, or says that it goes around it."""
        within = self.now()
        while within is not self.ours and hasattr(within, "__wrapped__"):
            within = within.__wrapped__
        return within is self.ours


#: By key of the contract.
_patches: dict[str, _Patch] = {}


class _Changes:
    """Who changes patches now, and whether an engine was collected meanwhile."""

    def __init__(self) -> None:
        # The thread that imports DeepSpeed to look names up may run code of somebody who registers,
        # too.
        self.lock = threading.RLock()
        self.depth = 0
        """How many changes are within each other, all of one thread."""
        self.is_due = False
        """Whether there may be something to put back."""


_changes = _Changes()


@contextmanager
def changing() -> Iterator[None]:
    """Around every change of patches, and around what decides on one: other threads wait."""
    with _changes.lock:
        _changes.depth += 1
        try:
            yield
        finally:
            _changes.depth -= 1
    if _changes.is_due:
        _put_back_soon()


def _put_back_soon() -> None:
    """Put back what no engine needs: now, or once those who change patches have done so."""
    _changes.is_due = True
    while _changes.is_due and _changes.lock.acquire(blocking=False):
        try:
            if _changes.depth:
                return
            _changes.is_due = False
            _changes.depth += 1
            try:
                _put_back()
            finally:
                _changes.depth -= 1
        finally:
            _changes.lock.release()


def is_registered() -> bool:
    """Whether DeepSpeed is to know this backend now."""
    return any(not patch.for_life for patch in _patches.values())


def wrap(wraps: Mapping[str, Callable[..., Any]], *, for_life: Container[str]) -> None:
    """Let DeepSpeed's methods and functions go through ``wraps``, by their keys in the contract.

    Inside :func:`changing`.

    Args:
        for_life: what stays until no engine is left that was not destroyed.

    Raises:
        ConfigError: they went through them before, and somebody has replaced one since.
    """
    targets = {key: contract.resolve(key) for key in wraps}
    for patch in _patches.values():
        if patch.now() is patch.original:
            patch.put()
    if lost := [patch.path for patch in _patches.values() if not patch.is_called()]:
        raise ConfigError(
            f"{_were_replaced(lost)}, by what does not say that it calls what was there; undo "
            "that, or write it with functools.wraps"
        )
    for key, values in _ADDED.items():
        there = _list(key)
        there.extend(value for value in values if value not in there)
    for key, wrapper in wraps.items():
        # What an engine still needs has stayed.
        if key not in _patches:
            owner, name = targets[key]
            original = getattr(owner, name)
            _replace(
                key,
                owner,
                name,
                _wrapped(original, wrapper, is_method=inspect.isclass(owner)),
                for_life=key in for_life,
            )


def unwrap() -> None:
    """Undo :func:`wrap`, except for what is ``for_life``. Inside :func:`changing`.

    Raises:
        ConfigError: somebody else has wrapped the engine since.
    """
    if not is_registered():
        return
    if lost := [
        patch.path for patch in _patches.values() if patch.now() not in (patch.ours, patch.original)
    ]:
        raise ConfigError(f"{_were_replaced(lost)}; undo that first")
    for key, values in _ADDED.items():
        there = _list(key)
        there[:] = [value for value in there if value not in values]
    for key, patch in list(_patches.items()):
        if not patch.for_life:
            _patches.pop(key).undo()
    _put_back()
    for engine in engines:
        weakref.finalize(engine, _put_back_soon).atexit = False


def _were_replaced(paths: Sequence[str]) -> str:
    verb = "were" if len(paths) > 1 else "was"
    return f"{', '.join(paths)} {verb} replaced after ds_layerwise.register()"


def _list(key: str) -> list[Any]:
    found: list[Any] = getattr(*contract.resolve(key))
    return found


def _put_back() -> None:
    """Put back what no engine needs, unless somebody has registered again, or wrapped it since."""
    if is_registered() or any(
        is_trained(param) for engine in engines for param in engine.module.parameters()
    ):
        return
    for key, patch in list(_patches.items()):
        if patch.undo():
            del _patches[key]


def _replace(key: str, owner: Any, name: str, ours: Any, *, for_life: bool) -> None:
    _patches[key] = _Patch(owner, name, vars(owner).get(name, _NOTHING), ours, for_life)
    _patches[key].put()


def _wrapped(
    original: Callable[..., Any], wrapper: Callable[..., Any], *, is_method: bool
) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, owner), owner, *args, **kwargs)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return method if is_method else function
