"""What of DeepSpeed is wrapped while this backend is registered, and what stays as long as an engine needs it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any

from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.config import get_zero_config

from ds_layerwise.config import OPTIMIZER_TYPES
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.takeover import is_trained

#: Engines of this backend.
engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()

_originals: dict[tuple[type, str], Callable[..., Any]] = {}


def is_registered() -> bool:
    """Whether DeepSpeed knows this backend now."""
    return LayerWiseOptimizer in zero_utils.ZERO_SUPPORTED_OPTIMIZERS


def wrap(wraps: Mapping[tuple[type, str], Callable[..., Any]], read_zero_config: Callable[[Any], Any]) -> None:
    """Let DeepSpeed's methods go through ``wraps``, unless they do."""
    if is_registered():
        return
    ds_config_module.DEEPSPEED_OPTIMIZERS.extend(OPTIMIZER_TYPES)
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(LayerWiseOptimizer)
    for (owner, name), wrapper in wraps.items():
        # What an engine still needs has stayed.
        if (owner, name) not in _originals:
            original = getattr(owner, name)
            _originals[owner, name] = original
            setattr(owner, name, _wrapped(original, wrapper))
    ds_config_module.get_zero_config = read_zero_config


def unwrap(read_zero_config: Callable[[Any], Any], *, for_life: Container[str]) -> None:
    """Undo :func:`wrap`; methods ``for_life`` stay until no engine is left that was not destroyed.

    Raises:
        ConfigError: somebody else has wrapped the engine since.
    """
    if not is_registered():
        return
    for owner, name in _originals:
        if not hasattr(getattr(owner, name), "_ds_layerwise"):
            raise ConfigError(f"{owner.__name__}.{name} was replaced after ds_layerwise.register(); undo that first")
    if ds_config_module.get_zero_config is not read_zero_config:
        raise ConfigError("deepspeed.runtime.config.get_zero_config was replaced after ds_layerwise.register(); undo "
                          "that first")
    ds_config_module.get_zero_config = get_zero_config
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.remove(LayerWiseOptimizer)
    for optimizer_type in OPTIMIZER_TYPES:
        ds_config_module.DEEPSPEED_OPTIMIZERS.remove(optimizer_type)
    _put_back(for_life)
    for engine in engines:
        weakref.finalize(engine, _put_back, for_life).atexit = False


def _put_back(for_life: Container[str]) -> None:
    """Put back what no engine needs, unless somebody has registered again, or wrapped it since."""
    if is_registered():
        return
    needed = any(is_trained(param) for engine in engines for param in engine.module.parameters())
    for (owner, name), original in list(_originals.items()):
        if not (needed and name in for_life) and hasattr(getattr(owner, name), "_ds_layerwise"):
            setattr(owner, name, original)
            del _originals[owner, name]


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, owner), owner, *args, **kwargs)

    method._ds_layerwise = True  # type: ignore[attr-defined]
    return method
