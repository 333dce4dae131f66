"""The models of plans: built on the meta device, without memory."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.routing.module_of import config_value

#: The folder of the models that come with the package, each a ``config.json`` of transformers.
_SHIPPED = Path(__file__).resolve().parent / "models"


@dataclass(frozen=True)
class MetaModel:
    """A model whose parameters have shapes and dtypes, but no values."""

    module: nn.Module

    @classmethod
    def build(cls, said: str) -> MetaModel:
        """Build the model that ``--model`` names.

        Args:
            said: the path of a ``config.json`` of transformers or of a folder with one, the name of
                one that comes with the package, or ``module:function``.

        Raises:
            ConfigError: it is none of these, or building the model fails.
        """
        for path in (Path(said), Path(said) / "config.json", _SHIPPED / f"{said}.json"):
            if path.is_file():
                with _without_warnings():
                    return cls(_of_transformers(said, path))
        module_name, colon, function_name = said.partition(":")
        if not colon:
            known = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.json")))
            raise ConfigError(
                "--model must be a config.json of transformers, a folder with one, "
                "module:function that returns a model, or the name of a model that comes with "
                f"this package ({known}), got {said!r}"
            )
        return cls(_of_function(said, module_name, function_name))

    def cast(self, dtype: str) -> None:
        """Convert its parameters to ``dtype``, as an engine does; float32 changes nothing."""
        if dtype != "float32":
            self.module.to(DTYPES[dtype])

    @property
    def hidden_size(self) -> int | None:
        """The hidden size that a Trainer would use: the largest of several; None if there is
        none.
        """
        config = getattr(self.module, "config", None)
        return _hidden_size(config) or _hidden_size(getattr(config, "text_config", None))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence what libraries log of each other while a model is built."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _hidden_size(config: Any) -> int | None:
    sizes = config_value(config, "hidden_size") or config_value(config, "hidden_sizes")
    if not isinstance(sizes, list | tuple):
        sizes = [sizes]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _of_transformers(said: str, path: Path) -> nn.Module:
    # A plan must not download anything, whatever the file names.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers = import_module("transformers")
    except ImportError as e:
        raise ConfigError(
            f"--model {said} is built by transformers, which cannot be imported ({e}): pip install "
            "'ds_layerwise[hf]'"
        ) from e
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        kind = None
        for name in config.architectures or ():
            kind = kind or getattr(transformers, name, None)
        # The class itself, because from_config cuts parameters over the ranks of DeepSpeed where
        # a script has a config with ZeRO stage 3.
        kind = kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model: nn.Module = kind(config)
        model.tie_weights()  # type: ignore[operator]
    except (OSError, *FOREIGN_ERRORS, _validation_error()) as e:
        raise _cannot_build(f"{said} by transformers {transformers.__version__}", e) from e
    return model


def _validation_error() -> type[Exception]:
    hub_errors = import_module("huggingface_hub.errors")
    found: type[Exception] = getattr(hub_errors, "StrictDataclassError", ValueError)
    return found


def _of_function(said: str, module_name: str, function_name: str) -> nn.Module:
    if "" not in sys.path:
        # As `python -m` does: a script for plans lies where it is started.
        sys.path.insert(0, "")
    try:
        with torch.device("meta"):
            model = getattr(import_module(module_name), function_name)()
    except (OSError, *FOREIGN_ERRORS) as e:
        raise _cannot_build(said, e) from e
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"--model {said} must return a torch.nn.Module, got {type(model).__name__}"
        )
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ConfigError(
                f"--model {said} returns a model with a lazy {name}, which has no shape before a "
                "forward pass; build it with layers that know their sizes"
            )
    return model


def _cannot_build(said: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()[:40]) or "no reason given"
    return ConfigError(
        f"--model {said} cannot be built on the meta device: {type(error).__name__}: {reason}; "
        "name a module:function that builds it there"
    )
