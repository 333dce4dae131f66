"""The reports of an engine's optimizer: its start-up table, the file of its parameters, warnings
about weights, and the values of each step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_layerwise.checkpoint.atomic import write_whole
from ds_layerwise.errors import ConfigError, few
from ds_layerwise.optimizers.rules.update_hooks import keeps_zeros
from ds_layerwise.orthogonalize.symmetric import KERNEL_FROM
from ds_layerwise.plan.forecast.forecast import Forecast
from ds_layerwise.plan.forecast.report import as_json, listed, plan_table, summary
from ds_layerwise.plan.forecast.text_tables import GLUE, size_text
from ds_layerwise.ranks.comm import comm
from ds_layerwise.routing.routes import idle_keys
from ds_layerwise.zero.engine_protocol import EngineOptimizer
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.attention_logits import AttentionLogits
from ds_layerwise.zero.step.metrics import Reports


class ReportingOptimizer(EngineOptimizer):
    """The part of the engine's optimizer that reports: its routes and their cost at the start, and
    the values of each step.

    Subclasses set the attributes that have no value here.
    """

    attention: AttentionLogits
    reports: Reports
    _run: RunState

    def note_attention_logits(self, attention: nn.Module | str, largest: Any) -> None:
        """Record the largest attention logits of each head in a forward pass; see
        :meth:`.AttentionLogits.note`.
        """
        self.attention.note(attention, largest)

    @property
    def max_attention_logits(self) -> dict[str, float]:
        """The largest logits over all ranks in the last step that was not skipped, by attention
        module.
        """
        return dict(self.attention.largest)

    def report(self) -> dict[str, float]:
        """Return the last value of everything that DeepSpeed's monitor gets, by name, on every
        rank; see docs/reports.md.
        """
        return self.reports.last()

    def _warn_of_zeros(self) -> None:
        """Warn of all-zero matrices under a hook that keeps each matrix at its own norm. Every rank
        of the group must call this.

        It is no error, because a checkpoint may be loaded next.
        """
        run = self._run
        kept = set()
        for name, route in run.planned.routes.items():
            if keeps_zeros(route.recipe):
                kept.add(name)
        if not kept:
            return
        mine = [name for name in kept & run.pieces.keys() if not run.owned.value(name).any()]
        zeros = set[str]().union(*comm.gather_objects(mine, group=run.settings.group))
        if zeros and run.rank == 0:
            logger.warning(
                f"ds_layerwise: {few(sorted(zeros))}: all weights are 0, and relative_update or "
                "hyperball 'own' will keep them at 0; initialise them differently, give hyperball "
                "a norm, or turn the hook off for them in layerwise.overrides"
            )

    def forecast(self) -> Forecast:
        """Return the cost of this layout for each rank."""
        run = self._run
        planned = run.planned
        return Forecast.of(
            planned.layout,
            planned.specs,
            planned.routes,
            run.settings,
            tp_size=run.settings.tp_size,
            reduction=planned.reduction,
            tied={name: comm.size_of(group) for name, group in run.tied},
        )

    def listed(self) -> list[dict[str, Any]]:
        """Return every parameter's route; see :func:`.plan.forecast.report.listed`."""
        planned = self._run.planned
        return listed(planned.routes, planned.specs, planned.layout, self.optimizer.groups_now())

    def write_param_map(self) -> None:
        """Write the file of ``layerwise.dump_param_map``, if the config names one: the list that
        ``ds-layerwise plan --list --json`` prints, without times, for each pipeline stage. A reader
        finds the old file or the whole new one.

        Raises:
            ConfigError: on every rank, if rank 0 cannot write.
        """
        run = self._run
        path = run.config.dump_param_map
        if path is None:
            return
        plans = [{**as_json(self.forecast()), "parameters": self.listed()}]
        if run.settings.stage_group is not None:
            plans = comm.gather_objects(plans[0], group=run.settings.stage_group)
        text = json.dumps(plans) + "\n"
        with comm.errors_on_all_ranks():
            if comm.rank_of(None) == 0:
                try:
                    write_whole(Path(path), lambda new: new.write_text(text, encoding="utf-8"))
                except OSError as e:
                    raise ConfigError(
                        f"layerwise.dump_param_map is {str(path)!r}, which cannot be written: "
                        f"{e.strerror or e}; name a file in a folder that rank 0 can write to"
                    ) from e

    def describe(self) -> str:
        """Return the start-up table, or the line of ``layerwise.table`` "short"."""
        run = self._run
        planned = run.planned
        optimizer = self.optimizer
        clip_grad = run.settings.clip_grad
        if run.config.table == "short":
            forecast = self.forecast()
            told = summary(planned.routes, planned.specs, optimizer.config)
            held = size_text(forecast.memory[forecast.fullest].total)
            held += f" a rank; gradient_clipping: {clip_grad:g}"
            return f"{told}; {forecast.layout.world_size} ranks, {held}".replace(GLUE, " ")
        products = {}
        for recipe in planned.recipes:
            text = run.products.told(recipe)
            if text is not None:
                products[recipe] = text
        routes = planned.saved_routes.values()
        idle = idle_keys(optimizer.config, run.config, routes, optimizer.own_keys)
        parts = [
            plan_table(
                planned.routes,
                planned.specs,
                [self.forecast()],
                optimizer.config,
                groups=optimizer.groups_now(),
                without_effect=[*run.settings.without_effect, *idle],
                products=products,
                clip_grad=clip_grad,
            )
        ]
        if products and run.products.has_kernel:
            parts.append(
                f"symmetric products in half precision from {KERNEL_FROM:,} rows on: one half, by "
                "quack-kernels"
            )
        if planned.left_out:
            parts.append(f"in no parameter group, so not trained here: {few(planned.left_out)}")
        parts.append(self.attention.summary())
        if run.config.overlap_param_gather:
            parts.append(timer_told(run.engine().tput_timer.config, run.device))
        return "\n".join(part for part in parts if part)


def timer_told(timer: Any, device: torch.device) -> str:
    """Return a line for the start-up table if DeepSpeed's throughput timer leaves little to hide
    for ``overlap_param_gather``; else an empty one.

    Args:
        timer: its config, ``timers.throughput``.
    """
    if device.type == "cpu" or not (timer.enabled and timer.synchronized):
        return ""
    return (
        "overlap_param_gather: DeepSpeed's throughput timer waits for the device twice a "
        "micro-batch, so that no transfer is left for the next forward pass; set "
        "timers.throughput.synchronized to false"
    )
