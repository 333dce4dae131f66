"""Names that this package replaces on single objects of DeepSpeed and torch.

Those of classes and modules are replaced by :mod:`.engine.contract.patches`. Every name of both
kinds is on a list that tests compare with the code; see :mod:`.engine.contract.contract`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

from ds_layerwise.errors import ConfigError, StepError


def patch(target: Any, **ours: Any) -> ExitStack:
    """Replace attributes of one object, by their names, until the returned stack is closed.

    Raises:
        ConfigError: ``target`` lacks one of them; nothing is replaced then.
    """
    own = vars(target)
    undo = ExitStack()
    for name in ours:
        if not hasattr(target, name):
            kind = type(target)
            raise ConfigError(
                f"{kind.__module__}.{kind.__qualname__}.{name} is not there, and ds_layerwise "
                "replaces it; install releases that docs/versions.md lists, or report this name"
            )
        if name in own:
            undo.callback(own.update, {name: own[name]})
        else:
            undo.callback(own.pop, name)
    own.update(ours)
    return undo


def refusing(why: str) -> Callable[..., NoReturn]:
    """Return a function that takes anything, and raises a :class:`StepError` with that text."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise StepError(why)

    return refuse
