"""Errors of what a user wrote or ran: one small tree, so that callers can catch all of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class LayerWiseError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(LayerWiseError, ValueError):
    """A key or a value of the configuration cannot be honoured."""


class RoutingError(LayerWiseError, ValueError):
    """A parameter has no optimizer that can train it, or two rules disagree about it."""


class LayoutError(LayerWiseError, ValueError):
    """A placement of parameters that breaks an invariant, or that differs between ranks."""


class StepError(LayerWiseError, RuntimeError):
    """The engine or the user asked for something that the current point of a step does not
    allow.
    """


def few(names: Sequence[str]) -> str:
    """Return the first five of ``names``, and the number of others, for a message."""
    more = f" and {len(names) - 5} more" * (len(names) > 5)
    return f"{', '.join(names[:5])}{more}"


def unknown_key(where: str, key: object, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that nobody reads, with the nearest known key as a suggestion."""
    known = sorted(known)
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
    return ConfigError(f"{where}.{key} is not an option; {hint}")
