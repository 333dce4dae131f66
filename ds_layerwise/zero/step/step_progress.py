"""The step at hand: how many of its backward passes are over, and which reductions of gradients it
has had.

Note: a save within a step
    A checkpoint holds what the last update has left, and no gradient. A run resumed from one that
    was saved within a step repeats that step from its first micro-batch, which is number
    ``global_steps * gas`` of the whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.sync.bucket_scheduler import Gradients
from ds_layerwise.zero.step.unused_calls import warn_once

#: A script that has had so many times the backward passes of a step, and no step, may not mean to.
_PASSES_IN_VAIN = 16


class Progress:
    """How far training is: the updates that were made, and the backward passes of the step at
    hand.
    """

    def __init__(self) -> None:
        self.updates = 0
        """How many updates there were; a step that is skipped makes none."""
        self.updating = False
        """Whether an update is under way, or has failed and left the engine between two steps."""
        # In which step there were reductions, how many, and in which micro-batch the last: also of
        # gradients that were dropped since.
        self._step, self._reductions, self._last_reduced = -1, 0, -1
        self._first, self._passes_at_start = "", 0
        self.restart()

    def restart(self) -> None:
        """Forget the step at hand."""
        self.passes = 0
        self.in_pass = False
        """Whether a backward pass has left gradients and has not ended, as where an exception has
        ended it.
        """
        self.outside = False
        """Whether the engine knew of no backward pass when the last gradient came."""

    def gradient_came(self, name: str, engine: Callable[[], Any], *, inside: bool) -> None:
        """Take note of a gradient, ``inside`` a pass that the engine knows of; tell who makes
        passes, and no step.
        """
        its = engine()
        # A model that is called directly has a pass inside engine.backward(), which tells its
        # optimizer of none.
        self.in_pass, self.outside = True, not (inside or its and its._running_engine_backward)
        self._first = self._first or name
        if name != self._first or self.updates:
            return
        self._passes_at_start += 1
        if (
            its
            and is_managed(its)
            and not its.micro_steps
            and (self._passes_at_start == _PASSES_IN_VAIN * its.gradient_accumulation_steps())
        ):
            warn_once(
                f"{self._passes_at_start} backward passes so far, and no engine.step(): no weight "
                "has moved, and global_steps is 0; if another optimizer steps, it moves nothing: "
                "call engine(inputs), engine.backward(loss) and engine.step()"
            )

    def pass_ended(self) -> None:
        """Take note of the end of a backward pass."""
        self.passes += 1
        self.in_pass = False

    def reduces(self, engine: Any) -> None:
        """Take note of a reduction, in which all ranks have a part."""
        step = _first_of_step(engine)
        self._step, self._reductions = step, 1 + (self._reductions if self._step == step else 0)
        self._last_reduced = engine.micro_steps

    def forget_reductions(self, engine: Any) -> None:
        """Take no reduction for one of the step at hand."""
        self._step, self._reductions, self._last_reduced = _first_of_step(engine), 0, -1

    def missed(self, engine: Any, *, stage: int) -> int:
        """In how many reductions of the step at hand, which is to end now, this rank has had no
        part.

        The others count on it in each of their backward passes, and where its own loss reached none
        of the parameters, and engine.backward() was not what was called, there was no pass here
        that anybody could have noticed. At stage 2 they have one a micro-batch.
        """
        if stage == 1:
            return int(self._last_reduced != engine.micro_steps)
        first = _first_of_step(engine)
        return max(
            0,
            int(engine.micro_steps) - first + 1 - (self._reductions if self._step == first else 0),
        )

    def is_within_step(self, engine: Any, gradients: Gradients) -> bool:
        """Tell whether some of the step at hand is done, and its update is not.

        Args:
            gradients: what there is of them.

        Raises:
            StepError: inside an update.
        """
        if self.updating:
            raise StepError(
                "a checkpoint cannot be saved inside engine.step(), or after one that failed on "
                "the way, when not all parameters have moved; let a signal handler set a flag and "
                "save after step(), and after an error load a checkpoint"
            )
        # Where a script says itself where a step ends, the engine's count says nothing of it.
        some_counted = (
            is_managed(engine)
            and engine._is_gradient_accumulation_boundary is None
            and (engine.micro_steps % engine.gradient_accumulation_steps())
        )
        in_pass = self.in_pass or engine._running_engine_backward
        return bool(self.passes or in_pass or some_counted or gradients is not Gradients.NONE)

    def resume(self, engine: Any) -> None:
        """Begin the step at hand with its first micro-batch; its gradients have been forgotten
        before.
        """
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        # The engine's count of passes where it does not say where a step ends.
        engine._unmanaged_backward_count = 0
        self.updating = False
        self.forget_reductions(engine)


def _first_of_step(engine: Any) -> int:
    """The number of the first micro-batch of the step at hand."""
    return int(
        engine.micro_steps
        - (engine.micro_steps % engine.gradient_accumulation_steps() if is_managed(engine) else 0)
    )


def is_managed(engine: Any) -> bool:
    """Whether the engine says where a step ends; 0.18.9 knows no other way."""
    return bool(getattr(engine, "managed_gradient_accumulation", lambda: True)())
