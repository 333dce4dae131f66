"""Registration of this backend with DeepSpeed, and its removal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from ds_layerwise.config.overrides import beside, keep, overrides_of
from ds_layerwise.config.param_keys import ParamKey
from ds_layerwise.engine import final_error
from ds_layerwise.engine.contract import contract, patches
from ds_layerwise.zero.step.attention_hook import MEASURED


def register(*, overrides: Mapping[ParamKey, Mapping[str, Any]] | None = None) -> None:
    """Make ``"type": "LayerWiseMuon"`` and ``"LayerWise"`` known to DeepSpeed.

    Call it in every process before ``deepspeed.initialize``, from any thread. :func:`unregister`
    undoes it. A second call restores patches that were undone in between, and otherwise does
    nothing. Code that wraps the same functions must use ``functools.wraps``, so that the wrapped
    function can be found.

    Args:
        overrides: settings for some parameters in every engine built from now on, in addition to
            ``layerwise.overrides`` of its config; None to keep those of an earlier call.

    Raises:
        ConfigError: the installed DeepSpeed lacks or has changed some names of
            :data:`.contract.CONTRACT` (the error lists them, and nothing was patched); other code
            has replaced a function that an earlier call had wrapped; or ``overrides`` are not
            valid.
    """
    final_error.begin()
    given = None if overrides is None else overrides_of(overrides)
    with patches.changing():
        if not patches.is_registered() and (problems := contract.missing()):
            raise contract.unknown_release(problems)
        try:
            # engine_hooks imports names that another DeepSpeed may lack.
            from ds_layerwise.engine import engine_hooks
        except ImportError as error:
            if not (error.name or "").startswith("deepspeed"):
                raise
            raise contract.unknown_release([str(error)]) from error
        patches.wrap(engine_hooks.WRAPS, for_life=engine_hooks.FOR_LIFE)
        if given is not None:
            keep(given)


def unregister() -> None:
    """Restore DeepSpeed as it was before :func:`register`.

    Existing engines keep working: the patches that they need act only on engines of this backend,
    and are removed with the last one.

    Raises:
        ConfigError: other code has wrapped the engine since; undo that first.
    """
    with patches.changing():
        patches.unwrap()
        MEASURED.forget_asked()
        final_error.end()
        keep(())


def initialize(
    *args: Any, overrides: Mapping[ParamKey, Mapping[str, Any]] | None = None, **kwargs: Any
) -> Any:
    """Call :func:`register`, then ``deepspeed.initialize``, with the same arguments and results.

    Args:
        overrides: settings for some parameters of this model, in addition to
            ``layerwise.overrides`` of its config and those passed to :func:`register`.

    Raises:
        ConfigError: ``overrides`` are not valid; also the errors of :func:`register` and the
            engine.
    """
    final_error.begin()
    given = overrides_of(overrides)
    register()
    with beside(given):
        return deepspeed.initialize(*args, **kwargs)
