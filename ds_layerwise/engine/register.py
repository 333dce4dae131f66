"""Registration, which makes DeepSpeed build this backend, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from ds_layerwise.engine import final_error, python_overrides
from ds_layerwise.engine.contract import contract, patches
from ds_layerwise.recipes.targets.overrides import overrides_of
from ds_layerwise.recipes.targets.param_keys import ParamKey


def register(*, overrides: Mapping[ParamKey, Mapping[str, Any]] | None = None) -> None:
    """Make ``"type": "LayerWiseMuon"`` and ``"LayerWise"`` known to DeepSpeed.

    Call it in every process before ``deepspeed.initialize``, from any thread. :func:`unregister`
    undoes it. A second call puts back what somebody has undone since, and else does nothing. Who
    wraps what this has wrapped does so by ``functools.wraps``, which shows what is called inside.

    Args:
        overrides: what differs for which parameters in every engine that is made from now on,
            beside ``layerwise.overrides`` of its config; None for what an earlier call has said.

    Raises:
        ConfigError: the installed DeepSpeed lacks some of :data:`.contract.CONTRACT`, or has
            changed it; names all of that, and nothing was patched. Or somebody has replaced since
            what an earlier call has wrapped. Or ``overrides`` say what no override can say.
    """
    final_error.begin()
    if overrides is None:
        given = None
    else:
        given = overrides_of(overrides)
    with patches.changing():
        if not patches.is_registered():
            contract.check()
        try:
            # It imports names that another DeepSpeed may lack.
            from ds_layerwise.engine import engine_hooks
        except ImportError as error:
            if not (error.name or "").startswith("deepspeed"):
                raise
            raise contract.unknown_release([str(error)]) from error
        patches.wrap(engine_hooks.WRAPS, for_life=engine_hooks.FOR_LIFE)
        if given is not None:
            python_overrides.keep(given)


def unregister() -> None:
    """Leave DeepSpeed as it was before :func:`register`.

    Engines that exist keep working: what they need of it, which asks first whose engine it is, goes
    with the last one.

    Raises:
        ConfigError: somebody else has wrapped the engine since; undo that first.
    """
    with patches.changing():
        patches.unwrap()
        final_error.end()
        python_overrides.keep(())


def initialize(
    *args: Any, overrides: Mapping[ParamKey, Mapping[str, Any]] | None = None, **kwargs: Any
) -> Any:
    """``deepspeed.initialize``, same arguments and results, after :func:`register`.

    Args:
        overrides: what differs for which parameters of this model, beside ``layerwise.overrides``
            of its config and what :func:`register` was given.

    Raises:
        ConfigError: ``overrides`` say what no override can say; and all that :func:`register` and
            the engine raise.
    """
    final_error.begin()
    given = overrides_of(overrides)
    register()
    with python_overrides.beside(given):
        return deepspeed.initialize(*args, **kwargs)
