"""The values reported for each step, to DeepSpeed's monitor and by
``engine.optimizer.report()``.
"""

from __future__ import annotations

from typing import Any

from ds_layerwise.ranks.comm.step_agreement import Agreement
from ds_layerwise.ranks.owned.update_stats import UpdateStats
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.update import Step, StepObserver

#: The prefix of the engine's own values, such as ``Train/Samples/lr``.
_LABEL = "Train/Samples/"

#: The ratios that a recipe reads, each with the key of ``optimizer.params`` that sets it.
_RATES = {"matrix_lr_ratio": "muon_lr", "scalar_lr_ratio": "adam_lr"}


class Reports(StepObserver):
    """Keeps the values of the last step, the same on every rank, and passes them to the monitor of
    rank 0.
    """

    def __init__(self, run: RunState, agreement: Agreement) -> None:
        monitor = run.config.monitor
        self._optimizer = run.optimizer
        self._every = monitor.every
        # The first group with a recipe that reads a ratio, by the ratio's key.
        self._groups: dict[str, int] = {}
        rules = set()
        for route in {**run.planned.routes_elsewhere, **run.planned.routes}.values():
            rules.add(route.recipe.rule)
            key = route.recipe.lr_ratio
            self._groups[key] = min(route.group, self._groups.get(key, route.group))
        self._asks = monitor.asks
        self._watch = UpdateStats(
            rules,
            update_rms=monitor.update_rms,
            momentum_norm=monitor.momentum_norm,
            counted_elsewhere=run.planned.counted_elsewhere,
            sum_over_ranks=agreement.sum_over_everyone,
            device=run.device,
        )
        self._earlier: dict[str, float] = {}
        self._fresh: dict[str, float] = {}

    def before_update(self, step: Step) -> None:
        """Record the decision of the ranks. Other observers add to the step's values later."""
        self._earlier |= self._fresh
        self._fresh = step.values
        decision = step.decision
        if decision.norm is not None:
            step.values["grad_norm"] = decision.norm
        for key, norm in decision.norms.items():
            step.values[f"grad_norm_{key}"] = norm
        if decision.zeros is not None:
            step.values["num_zeros_in_grad"] = decision.zeros
        if self._watches(step):
            # Restart: an update that failed half-way may have left values.
            self._watch.restart()
            step.around = self._watch.around

    def after_update(self, step: Step) -> None:
        """Add the statistics of the update."""
        if self._watches(step):
            step.values.update(self._watch.settle(failed=step.failed))

    def _watches(self, step: Step) -> bool:
        return self._asks and step.number % self._every == 0

    def last(self, engine: Any) -> dict[str, float]:
        """Return the last value of everything that is reported, by name. Learning rates are those
        of the next step.
        """
        return {**self._now(engine), **self._earlier, **self._fresh}

    def write(self, engine: Any) -> None:
        """Write the values of the step that has just ended to the monitor. Called after the engine
        has counted the step.
        """
        if engine.monitor.enabled and engine.global_rank == 0:
            values = {**self._now(engine), **self._fresh}
            engine.monitor.write_events(
                [(f"{_LABEL}{key}", value, engine.global_samples) for key, value in values.items()]
            )

    def _now(self, engine: Any) -> dict[str, float]:
        values = {}
        for key, name in _RATES.items():
            if key in self._groups:
                group = self._optimizer.param_groups[self._groups[key]]
                # The groups of a script's own optimizer have one rate, which the engine reports.
                if key in group:
                    values[name] = float(group["lr"]) * float(group[key])
        values["skipped_steps"] = engine.skipped_steps
        return values
