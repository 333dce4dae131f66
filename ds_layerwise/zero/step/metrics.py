"""What is told of steps: to DeepSpeed's monitor, and to who asks for
``engine.optimizer.report()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.ranks.owned.update_stats import Watch
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.step.clip import Decision

#: What DeepSpeed's engine puts in front of its own, such as ``Train/Samples/lr``.
_LABEL = "Train/Samples/"

#: By what a recipe takes for its learning rate, the key of ``optimizer.params`` that says it.
_RATES = {"matrix_lr_ratio": "muon_lr", "scalar_lr_ratio": "adam_lr"}


class Reports:
    """Keeps what the last step was like, the same on every rank, and hands it to the monitor of
    rank 0.

    Args:
        sum_over_ranks: adds up a tensor over all ranks of a model, in place.
    """

    def __init__(
        self,
        planned: Planned,
        optimizer: LayerWiseOptimizer,
        config: LayerWiseConfig,
        *,
        sum_over_ranks: Callable[[Tensor], object],
        device: torch.device,
    ) -> None:
        self._optimizer, self._every = optimizer, config.monitor.every
        routes = {**planned.routes_elsewhere, **planned.routes}.values()
        self._groups = {
            _RATES[key]: min(route.group for route in routes if route.recipe.lr_ratio == key)
            for key in _RATES
            if any(route.recipe.lr_ratio == key for route in routes)
        }
        self._watch = (
            Watch(
                {route.recipe.rule for route in routes},
                update_rms=config.monitor.update_rms,
                momentum_norm=config.monitor.momentum_norm,
                counted_elsewhere=planned.counted_elsewhere,
                sum_over_ranks=sum_over_ranks,
                device=device,
            )
            if config.monitor.asks
            else None
        )
        self._last: dict[str, float] = {}
        self._fresh: dict[str, float] = {}

    def watch(self, step: int) -> Watch | None:
        """What looks on at the update number ``step``, if anybody wants to know of it."""
        if self._watch is None or step % self._every:
            return None
        # An update that ended half-way may have left something.
        self._watch.restart()
        return self._watch

    def begin(self, decision: Decision) -> None:
        """Take note of what the ranks have decided on a step."""
        self._fresh = {}
        told = {
            "grad_norm": decision.norm,
            **{f"grad_norm_{key}": norm for key, norm in decision.norms.items()},
            "num_zeros_in_grad": decision.zeros,
        }
        self.add({key: value for key, value in told.items() if value is not None})

    def add(self, told: dict[str, float]) -> None:
        """Take note of what is known of the step at hand besides, the same on every rank."""
        self._fresh.update(told)
        self._last.update(told)

    def last(self, engine: Any) -> dict[str, float]:
        """The last value of everything that is told, by name; learning rates are those of the next
        step.
        """
        return {**self._now(engine), **self._last}

    def write(self, engine: Any) -> None:
        """Give the monitor what the step that is just over was like. Called when the engine has
        counted it.
        """
        if engine.monitor.enabled and engine.global_rank == 0:
            engine.monitor.write_events(
                [
                    (f"{_LABEL}{key}", value, engine.global_samples)
                    for key, value in {**self._now(engine), **self._fresh}.items()
                ]
            )

    def _now(self, engine: Any) -> dict[str, float]:
        groups = self._optimizer.param_groups
        # Groups of an optimizer that the script has made have one rate, which the engine tells.
        rates = {
            name: float(groups[index]["lr"]) * float(groups[index][key])
            for key, name in _RATES.items()
            if (index := self._groups.get(name)) is not None and key in groups[index]
        }
        return {**rates, "skipped_steps": engine.skipped_steps}
