"""Overrides given in Python, stored until an engine reads its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ds_layerwise.config.targets.overrides import Override


class _Kept:
    """The overrides of ``register``, for every engine of the process, in any thread."""

    overrides: tuple[Override, ...] = ()


#: The overrides of ``initialize``, for the engine that this thread is building.
_beside: ContextVar[tuple[Override, ...]] = ContextVar("ds_layerwise_overrides", default=())


def keep(overrides: tuple[Override, ...]) -> None:
    """Use ``overrides`` for every engine built from now on. They replace earlier ones."""
    _Kept.overrides = overrides


@contextmanager
def beside(overrides: tuple[Override, ...]) -> Iterator[None]:
    """Add ``overrides`` for engines built inside."""
    token = _beside.set(overrides)
    try:
        yield
    finally:
        _beside.reset(token)


def now() -> tuple[Override, ...]:
    """Return the overrides for an engine built now, without those of its config."""
    return (*_Kept.overrides, *_beside.get())
