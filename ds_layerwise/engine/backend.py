"""The backend for a DeepSpeed with the registry of docs/proposal_backend_hook.md, which finds it by
its entry points. Any other needs :func:`.register.register`.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from ds_layerwise.config.ds_config import retell
from ds_layerwise.engine.engine_hooks import WRAPS
from ds_layerwise.engine.register import register
from ds_layerwise.optimizers.foreign.client_groups import ClientOptimizer


def _nothing(*_: Any) -> None:
    """Stand for the wrapped function, which DeepSpeed calls itself."""


class Backend:
    """The interface of the registry, which calls the hooks that are wraps for any other
    DeepSpeed.
    """

    def check(self, config: Any, engine: DeepSpeedEngine | None) -> None:
        """Check ``config`` before DeepSpeed reads it, and again before ``engine`` does anything.

        The first check of a process also wraps what no registry asks for.
        """
        if engine is None:
            register()
            WRAPS["_initialize_params"](_nothing, config, config._param_dict)
            WRAPS["_configure_train_batch_size"](_nothing, config)
        else:
            WRAPS["_do_sanity_check"](_nothing, engine)

    def explain(self, config: Any, engine: DeepSpeedEngine | None, error: Exception) -> None:
        """Raise the error of this package, if there is one, in place of DeepSpeed's ``error``."""

        def failed(_: Any) -> None:
            raise error

        if engine is None:
            WRAPS["_initialize_params"](failed, config, config._param_dict)
        elif isinstance(error, AssertionError):
            retell(error)

    def basic_optimizer(
        self, engine: DeepSpeedEngine, client_optimizer: Any, model_parameters: Any
    ) -> Any:
        """Return the optimizer that the config names, or the script's in a form that takes part."""
        if client_optimizer is None:
            return WRAPS["_configure_basic_optimizer"](_nothing, engine, model_parameters)
        return WRAPS["_configure_optimizer"](
            lambda ours, _: ours, engine, client_optimizer, model_parameters
        )

    def final_optimizer(self, engine: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        """Return the engine's optimizer."""
        final = WRAPS["_configure_zero_optimizer"](_nothing, engine, basic_optimizer)
        if isinstance(basic_optimizer, ClientOptimizer):
            # DeepSpeed passes this attribute to schedulers.
            engine.basic_optimizer = basic_optimizer.client
        return final

    def check_scheduler(self, engine: DeepSpeedEngine) -> None:
        """Check the script's scheduler, which the engine has from now on."""
        WRAPS["_configure_lr_scheduler"](_nothing, engine)


#: The object of the entry points.
BACKEND = Backend()
