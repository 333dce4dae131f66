"""Overrides in Python, from where a script says them to where an engine reads its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ds_layerwise.recipes.targets.overrides import Override


class _Kept:
    """Overrides of ``register``: for every engine of the process, whichever thread makes it."""

    overrides: tuple[Override, ...] = ()


#: Overrides of ``initialize``: for the engine that this thread is making.
_beside: ContextVar[tuple[Override, ...]] = ContextVar("ds_layerwise_overrides", default=())


def keep(overrides: tuple[Override, ...]) -> None:
    """Let every engine that is made from now on have ``overrides``, in place of what was kept."""
    _Kept.overrides = overrides


@contextmanager
def beside(overrides: tuple[Override, ...]) -> Iterator[None]:
    """Let engines that are made inside have ``overrides``, too."""
    token = _beside.set(overrides)
    try:
        yield
    finally:
        _beside.reset(token)


def now() -> tuple[Override, ...]:
    """Return the overrides of an engine that is made now, beside those of its config."""
    return (*_Kept.overrides, *_beside.get())
