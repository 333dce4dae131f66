"""Hooks that act only on engines of this backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

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
