"""Hooks that see engines of this backend alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

#: A hook takes the method that it goes around, the engine, and the arguments of that method. So a
#: method is bound.
Method = Callable[..., Any]


def only_ours(
    is_ours: Callable[[DeepSpeedEngine], bool], hooks: Mapping[str, Method]
) -> dict[str, Method]:
    """Return ``hooks``, by keys of the contract, for engines that are ours: the others go straight
    to the method.
    """
    return {key: _only_ours(is_ours, hook) for key, hook in hooks.items()}


def _only_ours(is_ours: Callable[[DeepSpeedEngine], bool], hook: Method) -> Method:
    def ask(original: Method, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
        if is_ours(engine):
            return hook(original, engine, *args, **options)
        return original(*args, **options)

    return ask
