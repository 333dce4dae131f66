"""The errors about a user's input or script. They have one base class, so that callers can catch
all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class LayerWiseError(Exception):
    """The base of every error that this package raises on purpose."""


class ConfigError(LayerWiseError, ValueError):
    """A key or a value of the configuration is not valid or not supported."""


class RoutingError(LayerWiseError, ValueError):
    """No optimizer can train a parameter, or two rules disagree about it."""


class LayoutError(LayerWiseError, ValueError):
    """A layout breaks an invariant, or differs between ranks."""


class StepError(LayerWiseError, RuntimeError):
    """The engine or the user made a call that is not allowed at the current point of a step."""


#: The errors that code of others raises for input that it does not support.
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def few(names: Sequence[str]) -> str:
    """Return the first five of ``names``, and the number of the others, for a message."""
    more = f" and {len(names) - 5} more" * (len(names) > 5)
    return f"{', '.join(names[:5])}{more}"


def unknown_key(where: str, key: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key, with the nearest known key as a suggestion."""
    known = sorted(known)
    close = difflib.get_close_matches(str(key), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
    return ConfigError(f"{where}.{key} is not an option; {hint}")
