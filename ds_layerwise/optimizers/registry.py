"""The names that a config may use for optimizers, and the rules behind them. Configs are checked before."""

from __future__ import annotations

import torch

from ds_layerwise.config import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.elementwise import Adam, Lion, Sgd
from ds_layerwise.optimizers.muon import Muon
from ds_layerwise.optimizers.rule import UpdateRule
from ds_layerwise.orthogonalize.newton_schulz import NEED_FLOAT32, coefficients

_SCALAR: dict[str, UpdateRule] = {"adamw": Adam(), "adam": Adam(decoupled=False), "lion": Lion(), "sgd": Sgd()}


def matrix_rule(config: OptimizerConfig) -> Muon:
    """The rule that ``matrix_optimizer`` names.

    Raises:
        ConfigError: ``ns_coefficients`` is not a known name, or diverges in the ``ns_dtype`` asked for.
    """
    rows, ns_dtype = coefficients(config.ns_coefficients, config.ns_steps), config.ns_dtype
    if config.ns_coefficients in NEED_FLOAT32:
        if ns_dtype in ("bf16", "fp16"):
            raise ConfigError(f"ns_coefficients {config.ns_coefficients!r} diverges in half precision, got ns_dtype "
                              f"{ns_dtype!r}; set ns_dtype to 'fp32', or use 'polar_express'")
        ns_dtype = "fp32"
    return Muon(ns_coefficients=rows, ns_method=config.ns_method, ns_dtype=ns_dtype, nesterov=config.nesterov,
                scale_mode=config.scale_mode, extra_scale_factor=config.extra_scale_factor,
                tp_mode=config.muon_tp_mode)


def check_device(config: OptimizerConfig, device: torch.device) -> None:
    """Refuse a device that cannot do what ``config`` asks for.

    Raises:
        ConfigError: it has no products in ``ns_dtype``.
    """
    matrix_rule(config).check(device)


def scalar_rule(config: OptimizerConfig) -> UpdateRule:
    """The rule that ``scalar_optimizer`` names."""
    return _SCALAR[config.scalar_optimizer]
