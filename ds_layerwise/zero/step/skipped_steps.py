"""Skipped steps, where a gradient was not finite or the norm was too large, and the change of the
loss scale after each step. A run that skips for ever must not look healthy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ds_layerwise.errors import StepError, few
from ds_layerwise.parallel import pipeline
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.update import Step, StepObserver

#: The number of consecutive skipped steps before the first warning. Each later warning takes twice
#: as many.
_FIRST_WARNING = 10


class SkippedSteps(StepObserver):
    """Counts consecutive skipped steps, names the gradient that caused them, and updates the loss
    scale.

    A dynamic loss scale skips steps while it comes down. These steps do not count, until the scale
    is at its minimum.

    The averages show which gradient is not finite, but not on which rank. Therefore, after a
    skipped step, each rank also checks its own gradients as backward passes leave them, until a
    step is not skipped.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._in_a_row = 0
        self._above = 0
        self._finite = torch.ones((), dtype=torch.bool, device=run.device)

    def saw_gradient(self, name: str, gradient: Tensor) -> None:
        """Check that the gradient is finite, without waiting for the device."""
        # A norm avoids the temporaries of isfinite(), which are larger than the gradient.
        self._finite.logical_and_(torch.linalg.vector_norm(gradient, math.inf).isfinite())

    def before_update(self, step: Step) -> None:
        """Count a skipped step, and update the loss scale.

        Raises:
            StepError: on every rank, if the run cannot usefully continue; names the first gradient
                that is not finite.
        """
        scaler = self._run.scaling.scaler
        decision = step.decision
        if decision.above is not None:
            self._in_a_row += 1
            self._above += 1
            why = (
                f"the norm of its gradients, {decision.above:g}, is above "
                "layerwise.grad_norm_skip_threshold, which is "
                f"{self._run.config.grad_norm_skip_threshold:g}"
            )
            self._end_if_too_many(step.number, lambda: f"{why}; raise the threshold,")
            # The first, second, fourth, ... such step.
            if self._above.bit_count() == 1:
                comm.warn(
                    f"step {step.number} was skipped: {why} ({self._above} such steps in this "
                    f"process, {self._in_a_row} consecutive skipped steps)"
                )
        elif not decision.overflow:
            self._in_a_row = 0
        elif (
            scaler.dynamic
            and scaler.raise_error_at_min_scale
            and scaler.cur_scale == scaler.min_scale
            and (scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1)
        ):
            # DeepSpeed would end the run instead of coming down.
            raise StepError(
                f"step {step.number} cannot be skipped once more, loss scale already at minimum "
                f"({scaler.cur_scale:g}): {self._blame()}"
            )
        elif not scaler.dynamic:
            self._in_a_row += 1
            self._judge(step.number)
        # A norm above the threshold does not reduce the scale.
        scaler.update_scale(decision.overflow)
        self.forget()
        self.looks = decision.overflow

    def restart(self) -> None:
        """Restart the count of consecutive skipped steps: the weights are new."""
        self._in_a_row = 0
        self.looks = False

    def forget(self) -> None:
        """Forget the gradients of the current step."""
        if self.looks:
            self._finite.fill_(True)

    def _judge(self, step: int) -> None:
        self._end_if_too_many(step, lambda: f"{self._blame()};")
        tens, rest = divmod(self._in_a_row, _FIRST_WARNING)
        if rest == 0 and tens.bit_count() == 1:
            comm.warn(
                f"step {step} was skipped {self._in_a_row} consecutive times: {self._blame()}"
            )

    def _end_if_too_many(self, step: int, why: Callable[[], str]) -> None:
        """Raise an error if too many steps were skipped in a row.

        Args:
            why: returns the reason; it may ask all ranks, and is called only for the error.
        """
        most = self._run.config.max_skipped_steps
        if most is not None and self._in_a_row >= most:
            raise StepError(
                f"step {step} was skipped {self._in_a_row} consecutive times: {why()} look for the "
                "cause, or allow more (layerwise.max_skipped_steps)"
            )

    def _blame(self) -> str:
        """Return the name of the first parameter, in model order, whose averaged gradient is not
        finite, with the rank that found it and the ranks that caused it.
        """
        everyone = comm.gather_objects((self._first_wrong(), bool(self._finite)), group=None)
        wrong = []
        makers = []
        for rank, (place, is_finite) in enumerate(everyone):
            if place is not None:
                wrong.append((*place, rank))
            if not is_finite:
                makers.append(str(rank))
        if not wrong:
            return (
                "all gradients are finite, but float32 does not hold their norm, or its square if "
                "they are not clipped (gradient_clipping)"
            )
        *_, name, rank = min(wrong)
        blame = f"the gradient of {name} is not finite, found by rank {rank}, which owns it"
        if not self.looks:
            return blame
        if not makers:
            return f"{blame}; backward passes left finite gradients on every rank"
        return (
            f"{blame}; backward passes left gradients that are not finite on "
            f"rank{'s' * (len(makers) > 1)} {few(makers)}"
        )

    def _first_wrong(self) -> tuple[int, int, str] | None:
        run = self._run
        pipeline_stage = run.settings.mp_rank if pipeline.is_pipeline(run.model) else 0
        for index, spec in enumerate(run.planned.specs):
            name = spec.name
            if name in run.pieces and not run.owned.reduced.piece(name).isfinite().all():
                return pipeline_stage, index, name
        return None
