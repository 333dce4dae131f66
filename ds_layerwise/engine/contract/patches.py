"""Patches of DeepSpeed: those of a registered backend, and those that stay as long as an engine
needs them.

Note: how patches change
    One thread at a time changes patches, inside :func:`changing`. When Python collects an engine,
    the finalizer runs inside any code and any thread, also inside a change. Patches that can then
    be removed wait for the end of the change: the finalizer must not wait for a lock that its own
    thread may hold.
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

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_layerwise.config.sections import OPTIMIZER_TYPES
from ds_layerwise.engine.contract import contract
from ds_layerwise.errors import ConfigError
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.param_owner import is_trained

#: The engines of this backend.
engines: weakref.WeakSet[Any] = weakref.WeakSet()

#: The additions to lists of DeepSpeed, by their keys in the contract.
_ADDED: dict[str, tuple[object, ...]] = {
    "DEEPSPEED_OPTIMIZERS": OPTIMIZER_TYPES,
    "ZERO_SUPPORTED_OPTIMIZERS": (LayerWiseOptimizer,),
}

_NOTHING = object()


@dataclass(frozen=True)
class _Patch:
    """A replaced attribute of a class or module of DeepSpeed."""

    owner: Any
    name: str
    original: Any
    """The owner's own attribute before the patch; ``_NOTHING`` if it had none, or inherited it."""
    ours: Any
    for_life: bool
    """True if the patch stays as long as there is an engine that is not destroyed."""

    def now(self) -> Any:
        """Return the present attribute of the owner itself."""
        return vars(self.owner).get(self.name, _NOTHING)

    def put(self) -> None:
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> bool:
        """Restore the original, unless other code has replaced the attribute since. Return True if
        the original is in place.
        """
        if self.now() is self.ours:
            if self.original is _NOTHING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)
        return self.now() is self.original

    def is_called(self) -> bool:
        """Tell whether the present attribute is ours, or is marked as a wrapper of ours."""
        within = self.now()
        while within is not self.ours and hasattr(within, "__wrapped__"):
            within = within.__wrapped__
        return within is self.ours


#: All patches, by key of the contract.
_patches: dict[str, _Patch] = {}


class _Changes:
    """The state of changes: whether one is in progress, and whether an engine was collected
    meanwhile.
    """

    # Reentrant: a thread that imports DeepSpeed to look up names may run code that registers.
    lock = threading.RLock()
    depth = 0
    """The number of nested changes, all of one thread."""
    is_due = False
    """True if a patch may have to be removed."""


@contextmanager
def changing() -> Iterator[None]:
    """Block other threads during a change of patches and the checks before it."""
    with _Changes.lock:
        _Changes.depth += 1
        try:
            yield
        finally:
            _Changes.depth -= 1
    if _Changes.is_due:
        _put_back_soon()


def _put_back_soon() -> None:
    """Remove the patches that no engine needs: now, or at the end of a change in progress."""
    _Changes.is_due = True
    while _Changes.is_due and _Changes.lock.acquire(blocking=False):
        try:
            if _Changes.depth:
                return
            _Changes.is_due = False
            with changing():
                _put_back()
        finally:
            _Changes.lock.release()


def is_registered() -> bool:
    """Tell whether this backend is registered with DeepSpeed now."""
    return any(not patch.for_life for patch in _patches.values())


def wrap(wraps: Mapping[str, Callable[..., Any]], *, for_life: Container[str]) -> None:
    """Wrap DeepSpeed's methods and functions with ``wraps``, by their keys in the contract.

    Call it inside :func:`changing`.

    Args:
        for_life: the keys of patches that stay until every engine is destroyed.

    Raises:
        ConfigError: other code has replaced one of them since an earlier call.
    """
    # Patches that an engine still needs are in place already.
    targets = {key: contract.resolve(key) for key in wraps if key not in _patches}
    for patch in _patches.values():
        if patch.now() is patch.original:
            patch.put()
    _refuse_replaced(
        [patch for patch in _patches.values() if not patch.is_called()],
        ", by code that does not show what it wraps; undo that, or use functools.wraps in it",
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
    """Undo :func:`wrap`, except for patches that are ``for_life``. Call it inside :func:`changing`.

    Raises:
        ConfigError: other code has wrapped the engine since.
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
        verb = "were" if len(lost) > 1 else "was"
        raise ConfigError(f"{names} {verb} replaced after ds_layerwise.register(){way_out}")


def _put_back() -> None:
    """Remove the patches that no engine needs, unless this backend was registered again or other
    code has wrapped them since.
    """
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


#: A hook takes the wrapped method, the engine, and the method's arguments. The wrapped method is
#: bound.
Method = Callable[..., Any]


def only_ours(
    is_ours: Callable[[DeepSpeedEngine], bool], hooks: Mapping[str, Method]
) -> dict[str, Method]:
    """Return ``hooks``, by keys of the contract, restricted to our engines: for others, the
    original method is called. Compilers do not trace them.
    """
    return {key: _only_ours(is_ours, hook) for key, hook in hooks.items()}


def _only_ours(is_ours: Callable[[DeepSpeedEngine], bool], hook: Method) -> Method:
    hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def ask(original: Method, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        if is_ours(engine):
            return hook(original, engine, *args, **options)
        return original(*args, **options)

    return ask
