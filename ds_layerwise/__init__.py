"""Shard-aligned Muon for DeepSpeed: every matrix has one owner, everything else is cut evenly.

Importing the package patches nothing and loads neither torch nor deepspeed; ``register()`` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.3.0rc1"

#: The public names and their modules, loaded on first use.
_PUBLIC = {
    "register": "engine.register",
    "unregister": "engine.register",
    "initialize": "engine.register",
    "measure_attention": "zero.step.attention_hook",
    "ParamKey": "config.param_keys",
    "ParamPredicate": "config.param_keys",
    "ParamWithNamePredicate": "config.param_keys",
    "LayerWiseZeroOptimizer": "zero.optimizer",
    "LayerWiseError": "errors",
    "ConfigError": "errors",
    "RoutingError": "errors",
    "LayoutError": "errors",
    "StepError": "errors",
}

__all__ = ["__version__", *_PUBLIC]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
