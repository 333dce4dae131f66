"""The parameters of a Hugging Face model, built from its ``config.json`` without memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ds_layerwise.config.targets.overrides import Override
from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError, RoutingError
from ds_layerwise.plan.forecast.model_file import refuse_conditions
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.routing.heads import number_of
from ds_layerwise.routing.module_of import config_value
from ds_layerwise.routing.routing_rules import route_parameters


def _hidden_size(config: Any) -> int | None:
    """Return the hidden size that a Trainer would use: the largest of several; None if ``config``
    has none.
    """
    sizes = config_value(config, "hidden_size") or config_value(config, "hidden_sizes")
    if not isinstance(sizes, list | tuple):
        sizes = [sizes]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _validation_error() -> type[Exception]:
    hub_errors = import_module("huggingface_hub.errors")
    found: type[Exception] = getattr(hub_errors, "StrictDataclassError", ValueError)
    return found


class HfShapes:
    """The names and shapes of all parameters of a model from its ``config.json``; tied ones appear
    once.

    Raises:
        ConfigError: transformers is not installed, does not know the model, or cannot build it
            without memory.
    """

    def __init__(self, path: Path) -> None:
        # A plan must not download anything, whatever the file names.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            transformers = import_module("transformers")
        except ImportError as e:
            raise ConfigError(
                f"{path} is a config of Hugging Face's, and its model needs transformers ({e}): "
                "pip install transformers"
            ) from e
        transformers.logging.set_verbosity_error()
        try:
            config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
            auto = transformers.AutoModelForCausalLM.from_config
            make = partial(auto, trust_remote_code=False)
            for name in config.architectures or ():
                if hasattr(transformers, name):
                    make = getattr(transformers, name)
                    break
            with torch.device("meta"):
                self.model = make(config)
            self.model.tie_weights()
        except (OSError, *FOREIGN_ERRORS, _validation_error()) as e:
            reason = " ".join(str(e).split()[:40]) or type(e).__name__
            raise ConfigError(
                f"{path}: transformers {transformers.__version__} cannot build this model without "
                f"memory: {reason}; give a file of names and shapes instead"
            ) from e
        self.params = [(name, tuple(param.shape)) for name, param in self.model.named_parameters()]
        text = getattr(config, "text_config", config)
        self.hidden_size = _hidden_size(config) or _hidden_size(text)
        self._text = text

    def check_heads(self, tp_size: int) -> None:
        """Refuse a ``tp_size`` that would cut or copy attention heads.

        Raises:
            ConfigError: it does not divide a number of heads.
        """
        for key in ("num_attention_heads", "num_key_value_heads"):
            count = number_of([self._text], (key,))
            if isinstance(count, int) and count % tp_size:
                raise ConfigError(
                    f"tensor parallelism over {tp_size} ranks does not divide {key} {count} of the "
                    "model; plan with another tp_size"
                )

    def route(
        self,
        overrides: Sequence[Override],
        **options: Any,
    ) -> dict[str, Route]:
        """Route each parameter, as in training with all of them in one group.

        Args:
            options: further arguments of :func:`.routing.routing_rules.route_parameters`.

        Raises:
            RoutingError: as in :func:`.routing.routing_rules.route_parameters`.
            ConfigError: an override tests an attribute, which only a script sets on parameters.
        """
        refuse_conditions(
            overrides,
            ("attr",),
            why="a config.json does not say which attributes a script gives to parameters",
        )
        if not self.params:
            raise RoutingError("the model has no parameters")
        group = {"params": list(self.model.parameters())}
        return route_parameters(self.model, [group], overrides=overrides, **options)
