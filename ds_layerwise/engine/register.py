"""The door: make DeepSpeed build this backend, and undo it."""

from __future__ import annotations

from typing import Any

import deepspeed

from ds_layerwise.engine import patches, wraps


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` and ``"LayerWise"`` known to DeepSpeed. A second call does nothing.

    Call it in every process before ``deepspeed.initialize``. :func:`unregister` undoes it.
    """
    patches.wrap(wraps.WRAPS, wraps.read_zero_config)


def unregister() -> None:
    """Leave DeepSpeed as it was before :func:`register`.

    Engines that exist keep working: what they need of it, which asks first whose engine it is, goes with the last one.

    Raises:
        ConfigError: somebody else has wrapped the engine since; undo that first.
    """
    patches.unwrap(wraps.read_zero_config, for_life=wraps.FOR_LIFE)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, same arguments and results, after :func:`register`."""
    register()
    return deepspeed.initialize(*args, **kwargs)
