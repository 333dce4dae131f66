"""The values reported for each step, to DeepSpeed's monitor and by
``engine.optimizer.report()``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.recipe import State
from ds_layerwise.ranks.comm.step_agreement import Agreement
from ds_layerwise.ranks.owned.reductions import sum_of_squares
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.setup.param_groups import RATIOS
from ds_layerwise.zero.step.update import Step, StepObserver

#: The prefix of the engine's own values, such as ``Train/Samples/lr``.
_LABEL = "Train/Samples/"

#: The states that may hold a rule's momentum. The first one that the rule has is used.
_MOMENTA = ("momentum_buffer", "exp_avg")


class Reports(StepObserver):
    """Keeps the values of the last step, the same on every rank, and passes them to the monitor of
    rank 0.

    Statistics of an update are sums of squares, by rule, over the ranks of a model.
    """

    def __init__(self, run: RunState, agreement: Agreement) -> None:
        self._run = run
        self._monitor = run.config.monitor
        self._agreement = agreement
        # The first group with a recipe that reads a ratio, by the ratio's key.
        self._groups: dict[str, int] = {}
        rules = set()
        for route in run.planned.saved_routes.values():
            rules.add(route.recipe.rule)
            key = route.recipe.lr_ratio
            self._groups[key] = min(route.group, self._groups.get(key, route.group))
        # The sums of squares and the numbers of elements, the same keys on every rank.
        self._keys = list(product(("update", "momentum"), sorted(rules)))
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
            self._squares: dict[tuple[str, str], list[Tensor]] = {}
            self._numels: Counter[tuple[str, str]] = Counter()
            step.around = self._around

    def after_update(self, step: Step) -> None:
        """Add the statistics of the update. No rank gets any if the update failed on one."""
        if not self._watches(step):
            return
        none = torch.zeros((), dtype=widest_float(), device=self._run.device)
        # Fill on the device: a copy would make the host wait for it.
        sums = [torch.full_like(none, step.failed)]
        for key in self._keys:
            squares = self._squares.get(key)
            sums.append(torch.stack(squares).sum() if squares else none)
            sums.append(torch.full_like(none, self._numels[key]))
        any_failed, *rest = self._agreement.sum_over_everyone(torch.stack(sums)).tolist()
        for (kind, rule), square, numel in zip(self._keys, rest[::2], rest[1::2], strict=True):
            if numel and not any_failed:
                is_update = kind == "update"
                name = f"update_rms_{rule}" if is_update else f"momentum_norm_{rule}"
                step.values[name] = math.sqrt(square / numel if is_update else square)

    def _watches(self, step: Step) -> bool:
        return self._monitor.asks and step.number % self._monitor.every == 0

    @contextmanager
    def _around(
        self, rule: str, names: Sequence[str], params: Sequence[Tensor], states: Sequence[State]
    ) -> Iterator[None]:
        """Enclose an update by the rule of that name, and add it to the sums."""
        elsewhere = self._run.planned.counted_elsewhere
        counted = [i for i, name in enumerate(names) if name not in elsewhere]
        masters = [params[i] for i in counted]
        changes = [master.clone() for master in masters] if self._monitor.update_rms else []
        yield
        if changes:
            torch._foreach_sub_(changes, masters)
            self._add("update", rule, changes)
        if self._monitor.momentum_norm:
            momenta = []
            for i in counted:
                for key in _MOMENTA:
                    if key in states[i]:
                        momenta.append(states[i][key])
                        break
            self._add("momentum", rule, momenta)

    def _add(self, kind: str, rule: str, values: list[Tensor]) -> None:
        flat = [value.reshape(-1) for value in values]
        squares = sum_of_squares(flat, self._run.device)
        self._squares.setdefault((kind, rule), []).append(squares)
        self._numels[kind, rule] += sum(value.numel() for value in flat)

    def last(self) -> dict[str, float]:
        """Return the last value of everything that is reported, by name. Learning rates are those
        of the next step.
        """
        return {**self._now(), **self._earlier, **self._fresh}

    def write(self) -> None:
        """Write the values of the step that has just ended to the monitor. Called after the engine
        has counted the step.
        """
        engine = self._run.engine()
        if engine.monitor.enabled and engine.global_rank == 0:
            values = {**self._now(), **self._fresh}
            engine.monitor.write_events(
                [(f"{_LABEL}{key}", value, engine.global_samples) for key, value in values.items()]
            )

    def _now(self) -> dict[str, float]:
        values = {}
        for name, key in RATIOS.items():
            if key in self._groups:
                group = self._run.optimizer.param_groups[self._groups[key]]
                # The groups of a script's own optimizer have one rate, which the engine reports.
                if key in group:
                    values[name] = float(group["lr"]) * float(group[key])
        values["skipped_steps"] = self._run.engine().skipped_steps
        return values
