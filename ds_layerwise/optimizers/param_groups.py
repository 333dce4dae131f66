"""The ``torch.optim.Optimizer`` that users, schedulers and monitors see.

It carries ``param_groups`` and nothing else: as many groups as the user gave, in the same order, the same dict
objects for the whole run. Which half of a group is a matrix is decided inside the backend, so a scheduler that
writes one ``lr`` into every group keeps the ratio of ``muon_lr`` to ``adam_lr``: it is a factor beside ``lr``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.config import OptimizerConfig, check_hyper
from ds_layerwise.errors import ConfigError, StepError

#: What every group says once it is built.
HYPER_KEYS = ("lr", "momentum", "weight_decay", "betas", "eps", "matrix_lr_ratio", "scalar_lr_ratio")

#: What a user's group may say. ``muon_lr`` and ``adam_lr`` become the two ratios.
GROUP_KEYS = ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps")


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Parameter groups with ``lr``, ``momentum``, ``weight_decay``, ``betas``, ``eps`` and the two ratios.

    Args:
        params: parameters, or groups of them; a group's own ``lr`` replaces ``muon_lr`` and ``adam_lr`` for it, as
            in stock DeepSpeed, unless the group gives those too. Keys that mean nothing here are carried along.

    Raises:
        ConfigError: a group's value is out of bounds, or a key is nearly one that is known.
    """

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        self.config = config
        self._stepping = False
        items = list(params)
        loose = [item for item in items if not isinstance(item, dict)]
        groups = [_with_ratios(f"param_groups[{i}]", item, config)
                  for i, item in enumerate(item for item in items if isinstance(item, dict))]
        if loose or not groups:
            groups.append(_with_ratios("param_groups", {"params": loose}, config))
        super().__init__(groups, {
            "lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay, "betas": config.betas,
            "eps": config.eps, "matrix_lr_ratio": config.matrix_lr_ratio, "scalar_lr_ratio": config.scalar_lr_ratio,
        })
        self._built = tuple(self.param_groups)

    def restore_groups(self) -> None:
        """Put back the groups without parameters, which DeepSpeed takes out: users and schedulers count on theirs."""
        self.param_groups[:] = self._built

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Part of the construction.

        Raises:
            StepError: afterwards, when every parameter has its place already.
        """
        if hasattr(self, "_built"):
            raise StepError("parameter groups cannot be added to an engine; give all of them to initialize(), frozen "
                            "parameters too, or save, unfreeze and resume in a new engine")
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not for users: the update runs in the engine.

        Raises:
            StepError: always, unless called by the backend, which calls it once per update so that torch's
                schedulers see that the optimizer stepped.
        """
        if not self._stepping:
            raise StepError("this optimizer only holds the parameter groups; call engine.step()")

    def mark_step(self) -> None:
        """Tell torch's schedulers that an update took place."""
        self._stepping = True
        try:
            self.step()
        finally:
            self._stepping = False


def _with_ratios(where: str, group: Mapping[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    checked = dict(group)
    for key in group:
        if key in GROUP_KEYS:
            checked[key] = check_hyper(f"{where}.{key}", key, group[key])
        elif close := difflib.get_close_matches(key, GROUP_KEYS, n=1, cutoff=0.8):
            raise ConfigError(f"{where}.{key} is not an option; did you mean '{close[0]}'?")
    lr = checked.get("lr")
    if lr == 0:
        raise ConfigError(f"{where}.lr must be greater than 0, got 0: the learning rates of both optimizers are kept "
                          "in ratio to it; freeze parameters that shall not move")
    base = config.lr if lr is None else lr
    muon_lr = checked.pop("muon_lr", config.muon_lr if lr is None else lr)
    adam_lr = checked.pop("adam_lr", config.adam_lr if lr is None else lr)
    checked["matrix_lr_ratio"], checked["scalar_lr_ratio"] = muon_lr / base, adam_lr / base
    return checked
