"""Steps that are skipped, because a gradient is not finite or their norm too great: a run that
skips for ever must not look healthy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_layerwise.errors import StepError, few
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.zero.step.clip import Decision

#: Steps skipped in a row before the first warning; the next ones come after twice as many each.
_FIRST_WARNING = 10


class SkippedSteps:
    """Counts steps that are skipped in a row, and says which gradient is to blame.

    A dynamic loss scale that comes down skips as it should: such steps do not count, until it can
    come down no more.

    Averages say which gradient it is, and not whose. So after a step that was skipped each rank
    looks at its own, too, as backward passes leave them, until a step is not.

    Args:
        names: the parameters in the order of the model.
        most: this many in a row are an error; None for no end.
        threshold: the greatest norm of gradients that an update is made with; None for any.
        pipeline_stage: which of the model's this is; 0 without a pipeline.
    """

    def __init__(
        self,
        names: Sequence[str],
        owned: Owned,
        *,
        most: int | None,
        threshold: float | None,
        pipeline_stage: int,
    ) -> None:
        self._names, self._owned, self._most, self._pipeline_stage = (
            names,
            owned,
            most,
            pipeline_stage,
        )
        self._threshold, self._in_a_row, self._above = threshold, 0, 0
        self._looks, self._finite = False, torch.ones((), dtype=torch.bool, device=owned.device)

    def see(self, gradient: Tensor | None) -> None:
        """Look at what a backward pass has left of one parameter on this rank. The device is not
        waited for.
        """
        if self._looks and gradient is not None:
            # What isfinite() makes on its way is larger than the gradient.
            self._finite.logical_and_(torch.linalg.vector_norm(gradient, math.inf).isfinite())

    def note(self, decision: Decision, scaler: Any, step: int) -> None:
        """Take note of a step, and let the loss scale follow. Every rank must call this with the
        same arguments.

        Raises:
            StepError: on every rank, where there is no sense in going on; names the first gradient
                that is not finite.
        """
        if decision.above is not None:
            self._in_a_row += 1
            self._judge_norm(decision.above, step)
        elif not decision.overflow:
            self._in_a_row = 0
        elif _is_at_its_end(scaler):
            raise StepError(
                f"step {step} cannot be skipped once more, loss scale already at minimum "
                f"({scaler.cur_scale:g}): {self._blame()}"
            )
        elif not scaler.dynamic:
            self._in_a_row += 1
            self._judge(step)
        # Gradients that are finite say nothing against the scale, however long they are.
        scaler.update_scale(decision.overflow)
        self._look(decision.overflow)

    def forget(self) -> None:
        """Count anew what is skipped in a row: other weights are trained now."""
        self._in_a_row = 0
        self._look(False)

    def begin_step(self) -> None:
        """Forget what :meth:`see` has seen: gradients begin anew."""
        if self._looks:
            self._finite.fill_(True)

    def _look(self, looks: bool) -> None:
        self.begin_step()
        self._looks = looks

    def _judge_norm(self, norm: float, step: int) -> None:
        """Say it of every first, second, fourth, ... step, and end a run that does nothing else."""
        self._above += 1
        why = (
            f"the norm of its gradients, {norm:g}, is above layerwise.grad_norm_skip_threshold, "
            f"which is {self._threshold:g}"
        )
        if self._most is not None and self._in_a_row >= self._most:
            raise StepError(
                f"step {step} was skipped {self._in_a_row} times in a row: {why}; raise the "
                "threshold, look for what makes it, or allow more (layerwise.max_skipped_steps)"
            )
        if self._above.bit_count() == 1 and comm.rank_of(None) == 0:
            logger.warning(
                f"ds_layerwise: step {step} was skipped: {why}; that was number {self._above} of "
                f"such steps in this process, and number {self._in_a_row} of skipped ones in a row"
            )

    def _judge(self, step: int) -> None:
        count = self._in_a_row
        if self._most is not None and count >= self._most:
            raise StepError(
                f"step {step} was skipped {count} times in a row: {self._blame()}; look for what "
                "makes it, or allow more (layerwise.max_skipped_steps)"
            )
        if count % _FIRST_WARNING == 0 and (count // _FIRST_WARNING).bit_count() == 1:
            message = (
                f"ds_layerwise: step {step} was skipped {count} times in a row: {self._blame()}"
            )
            if comm.rank_of(None) == 0:
                logger.warning(message)

    def _blame(self) -> str:
        """The first parameter, in the order of the model, whose averaged gradient is not finite,
        who found it, and which ranks have made it so."""
        held = {piece.name for pieces in self._owned.pieces for piece in pieces}
        mine = next(
            (
                (self._pipeline_stage, index, name)
                for index, name in enumerate(self._names)
                if name in held and not torch.isfinite(self._owned.reduced.piece(name)).all()
            ),
            None,
        )
        everyone = comm.gather_objects((mine, bool(self._finite)), group=None)
        first = [(*place, rank) for rank, (place, _) in enumerate(everyone) if place is not None]
        if not first:
            return "the sum of all gradients is not finite, and each of them is"
        *_, name, rank = min(first)
        return (
            f"the gradient of {name} is not finite, found by rank {rank}, which owns "
            f"it{self._told(everyone)}"
        )

    def _told(self, everyone: Sequence[tuple[object, bool]]) -> str:
        if not self._looks:
            return ""
        makers = [str(rank) for rank, (_, is_finite) in enumerate(everyone) if not is_finite]
        if not makers:
            return "; backward passes left finite gradients on every rank"
        return (
            "; backward passes left gradients that are not finite on "
            f"rank{'s' * (len(makers) > 1)} {few(makers)}"
        )


def _is_at_its_end(scaler: Any) -> bool:
    """Whether DeepSpeed's scaler would end the run instead of coming down."""
    return bool(
        scaler.dynamic
        and scaler.raise_error_at_min_scale
        and scaler.cur_scale == scaler.min_scale
        and (scaler.delayed_shift == 1 or scaler.cur_hysteresis == 1)
    )
