"""The door: make DeepSpeed build this backend, and undo it."""

from __future__ import annotations

from typing import Any

import deepspeed

from ds_layerwise.engine import contract, patches


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` and ``"LayerWise"`` known to DeepSpeed.

    Call it in every process before ``deepspeed.initialize``, from any thread. :func:`unregister` undoes it. A second
    call puts back what somebody has undone since, and else does nothing. Who wraps what this has wrapped does so by
    ``functools.wraps``, which shows what is called inside.

    Raises:
        ConfigError: the installed DeepSpeed lacks some of :data:`.contract.CONTRACT`, or has changed it; names all of
            that, and nothing was patched. Or somebody has replaced since what an earlier call has wrapped.
    """
    with patches.changing():
        if not patches.is_registered():
            contract.check()
            patches.alias_renamed()
        # It imports names that are only known to be there now.
        from ds_layerwise.engine import wraps
        patches.wrap(wraps.WRAPS, for_life=wraps.FOR_LIFE)


def unregister() -> None:
    """Leave DeepSpeed as it was before :func:`register`.

    Engines that exist keep working: what they need of it, which asks first whose engine it is, goes with the last one.

    Raises:
        ConfigError: somebody else has wrapped the engine since; undo that first.
    """
    with patches.changing():
        patches.unwrap()


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, same arguments and results, after :func:`register`."""
    register()
    return deepspeed.initialize(*args, **kwargs)
