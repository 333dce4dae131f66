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
from ds_layerwise.zero.unused_calls import warn_once

#: A script that has had so many times the backward passes of a step, and no step, may not mean to.
_PASSES_IN_VAIN = 16


class Progress:
    """The updates that were made, and the backward passes and reductions of the step at hand.

    Args:
        engine: returns the engine, which counts micro-batches, while there is one.
    """

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine
        self.updates = 0
        """Number of updates; a step that is skipped makes none."""
        self.updating = False
        """True while an update is made, and after one that has failed between two steps."""
        # The reductions of the step of that number, and the micro-batch of the last: also of
        # gradients that were dropped since.
        self._step = -1
        self._reductions = 0
        self._last_reduced = -1
        self._first_name = ""
        self._passes_at_start = 0
        self.restart()

    def restart(self) -> None:
        """Forget the step at hand."""
        self.passes = 0
        self.in_pass = False
        """True if a backward pass has left gradients and has not ended, as where an exception has
        ended it.
        """
        self.outside = False
        """True if the engine knew of no backward pass when the last gradient came."""

    def gradient_came(self, name: str, *, inside: bool) -> None:
        """Take note of a gradient, ``inside`` a pass that the engine knows of; warn a script that
        makes passes, and no step.
        """
        engine = self._engine()
        self.in_pass = True
        # A model that is called directly has a pass inside engine.backward(), which tells its
        # optimizer of none.
        self.outside = not (inside or engine and engine._running_engine_backward)
        self._first_name = self._first_name or name
        if name != self._first_name or self.updates:
            return
        self._passes_at_start += 1
        if engine is None or not is_managed(engine) or engine.micro_steps:
            return
        if self._passes_at_start == _PASSES_IN_VAIN * engine.gradient_accumulation_steps():
            warn_once(
                f"{self._passes_at_start} backward passes so far, and no engine.step(): no weight "
                "has moved, and global_steps is 0; if another optimizer steps, it moves nothing: "
                "call engine(inputs), engine.backward(loss) and engine.step()"
            )

    def pass_ended(self) -> None:
        """Take note of the end of a backward pass."""
        self.passes += 1
        self.in_pass = False

    def reduces(self) -> None:
        """Take note of a reduction, in which all ranks have a part."""
        if self._step != self._first_of_step():
            self.forget_reductions()
        self._reductions += 1
        self._last_reduced = self._engine().micro_steps

    def forget_reductions(self) -> None:
        """Take no reduction for one of the step at hand."""
        self._step = self._first_of_step()
        self._reductions = 0
        self._last_reduced = -1

    def missed(self, *, stage: int) -> int:
        """Return in how many reductions of the step at hand, which is to end now, this rank has had
        no part.

        The others count on it in each of their backward passes, and where its own loss reached none
        of the parameters, and engine.backward() was not what was called, there was no pass here
        that anybody could have noticed. At stage 2 they have one a micro-batch.
        """
        micro_steps = int(self._engine().micro_steps)
        if stage == 1:
            return int(self._last_reduced != micro_steps)
        first = self._first_of_step()
        done = self._reductions if self._step == first else 0
        return max(0, micro_steps - first + 1 - done)

    def is_within_step(self, gradients: Gradients) -> bool:
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
        engine = self._engine()
        if self.passes or self.in_pass or engine._running_engine_backward:
            return True
        # Where a script says itself where a step ends, the engine's count says nothing of it.
        counts = is_managed(engine) and engine._is_gradient_accumulation_boundary is None
        some_counted = engine.micro_steps % engine.gradient_accumulation_steps()
        return bool(counts and some_counted) or gradients is not Gradients.NONE

    def resume(self) -> None:
        """Begin the step at hand with its first micro-batch; its gradients have been forgotten
        before.
        """
        engine = self._engine()
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        # The engine's count of passes where it does not say where a step ends.
        engine._unmanaged_backward_count = 0
        self.updating = False
        self.forget_reductions()

    def _first_of_step(self) -> int:
        """Return the number of the first micro-batch of the step at hand."""
        engine = self._engine()
        first = int(engine.micro_steps)
        if is_managed(engine):
            first -= first % engine.gradient_accumulation_steps()
        return first


def is_managed(engine: Any) -> bool:
    """Tell whether the engine says where a step ends; 0.18.9 knows no other way."""
    return bool(getattr(engine, "managed_gradient_accumulation", lambda: True)())
