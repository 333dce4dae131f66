"""The progress of the current step: how many backward passes are over, which reductions were made,
and the exception that has ended its update.

Note: a save within a step
    A checkpoint holds the result of the last update, and no gradient. After a save within a step,
    the resumed run repeats that step from its first micro-batch, which has the number
    ``global_steps * gas`` in the whole run.

Note: a pass that an exception ends
    Autograd calls back at the end of a pass, but not if an exception ends it. So what has begun and
    not ended by the step is broken, however many passes came after it.

Note: how all ranks reach the same state after an exception in an update
    Some parameters are then one step ahead of the others, and the run cannot continue from that.
    The rank that failed still sends what the other ranks wait for, then raises its exception. If it
    survives and goes on to the next step, it tells the other ranks when they agree on that step,
    before any update, or in a save before that. Loading a checkpoint with its optimizer states
    repairs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ds_layerwise.errors import StepError
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.step_state import Call, Gradients, StepState

#: After this many times the backward passes of one step without any step, the script gets a
#: warning.
_PASSES_IN_VAIN = 16


class Progress:
    """The backward passes and reductions of the current step.

    Args:
        engine: returns the engine, which counts micro-batches, or None once it is gone.
        state: the state of the step.
    """

    def __init__(self, engine: Callable[[], Any], state: StepState) -> None:
        self._engine = engine
        self.state = state
        self.forget_reductions()
        self._first_name = ""
        self._passes_at_start = 0
        self.unended: set[int] = set()
        """Autograd's numbers of the backward passes of this step that have begun and not ended, or
        that an exception has ended; -1 stands for a reduction.
        """
        self.restart()

    def restart(self) -> None:
        """Reset the progress of the current step."""
        self.passes = 0
        self.unended.clear()
        self.outside = False
        """True if a gradient came while the engine was in no backward pass, and none has ended
        since.
        """

    def pass_began(self) -> None:
        """Record the backward pass that autograd runs now, until it ends without an exception."""
        number = torch._C._current_graph_task_id()
        if number != -1 and number not in self.unended:
            self.unended.add(number)
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(self.unended.discard, number)
            )

    def gradient_came(self, name: str, *, inside: bool) -> None:
        """Record the gradient of parameter ``name``, and warn if a script makes passes but no step.

        Args:
            inside: True in a pass that the engine knows of.
        """
        engine = self._engine()
        # If the script calls the model directly, the pass runs inside engine.backward(), which does
        # not notify the optimizer.
        self.outside |= not (inside or engine and engine._running_engine_backward)
        self._first_name = self._first_name or name
        if name != self._first_name or self.state.updates:
            return
        self._passes_at_start += 1
        if not engine or not engine.managed_gradient_accumulation() or engine.micro_steps:
            return
        if self._passes_at_start == _PASSES_IN_VAIN * engine.gradient_accumulation_steps():
            comm.warn_once(
                f"{self._passes_at_start} backward passes so far, and no engine.step(): no weight "
                "has moved, and global_steps is 0; if another optimizer steps, it moves nothing: "
                "call engine(inputs), engine.backward(loss) and engine.step()"
            )

    def pass_ended(self) -> None:
        """Record the end of a backward pass."""
        # Compiled autograd calls nothing at the end of a pass. It has the highest number.
        if torch._dynamo.compiled_autograd.compiled_autograd_enabled:
            self.unended.discard(max(self.unended, default=0))
        self.passes += 1
        self.outside = False

    @contextmanager
    def reduction(self) -> Iterator[None]:
        """Make and record a reduction, which all ranks take part in. One that fails is not made."""
        self.unended.add(-1)
        yield
        self.unended.remove(-1)
        if self._step != self._first_of_step():
            self.forget_reductions()
        self._reductions += 1
        self._last_reduced = self._engine().micro_steps

    def forget_reductions(self) -> None:
        """Reset the reductions of the current step."""
        # The number of the step that the reductions belong to, their count, and the micro-batch of
        # the last one. Reductions whose gradients were dropped since also count.
        self._step = self._first_of_step()
        self._reductions = 0
        self._last_reduced = -1

    def missed(self, *, stage: int) -> int:
        """Return the number of reductions of the current step that this rank has missed. Call it at
        the end of the step.

        The other ranks need this rank in the reductions of all their backward passes. If its own
        loss reached no parameter, and the script did not call engine.backward(), there was no pass
        on this rank to notice. At stage 2 there is one reduction per micro-batch.
        """
        micro_steps = int(self._engine().micro_steps)
        if stage == 1:
            return int(self._last_reduced != micro_steps)
        first = self._first_of_step()
        if self._step == first:
            first += self._reductions
        return max(0, micro_steps - first + 1)

    def is_within_step(self) -> bool:
        """Tell whether the current step has begun and its update is not made.

        Raises:
            StepError: inside an update.
        """
        if self.state.call in (Call.RUNS, Call.BROKEN):
            raise StepError(
                "a checkpoint cannot be saved inside engine.step(), or after a failed one, because "
                "not all parameters are updated; in a signal handler, set a flag and save after "
                "step(); after an error, load a checkpoint"
            )
        engine = self._engine()
        return bool(
            self.passes
            or self.unended
            or self.outside
            or engine._running_engine_backward
            or self.state.gradients is not Gradients.NONE
            # If the script itself marks the end of a step, the engine's count does not matter.
            or (
                engine.managed_gradient_accumulation()
                and engine._is_gradient_accumulation_boundary is None
                and engine.micro_steps % engine.gradient_accumulation_steps()
            )
        )

    def rewind(self) -> None:
        """Restart the current step at its first micro-batch. Its gradients must be dropped
        already.
        """
        engine = self._engine()
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        # The engine's count of passes if the script marks the end of a step.
        engine._unmanaged_backward_count = 0
        self.forget_reductions()

    def _first_of_step(self) -> int:
        """Return the number of the first micro-batch of the current step."""
        engine = self._engine()
        first = int(engine.micro_steps)
        if engine.managed_gradient_accumulation():
            first -= first % engine.gradient_accumulation_steps()
        return first


class Interrupted(Attempt):
    """A record of the exception that ended an update. Use it as a context manager around the
    update.

    It keeps an ``Exception`` for :meth:`.Attempt.raise_original`, because other ranks wait for the
    code after the block. Any other ``BaseException``, such as Ctrl-C, propagates at once.
    """

    _what = ""
    _step = 0

    def __bool__(self) -> bool:
        return bool(self._what)

    def at(self, step: int) -> Interrupted:
        """Record the number of the step for the error message, and return self."""
        self._step = step
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        """Record ``error``."""
        if error is not None:
            self._what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        return super().__exit__(kind, error, where)

    def check(self) -> None:
        """Raise an error if an update was interrupted.

        Raises:
            StepError: an exception ended the update, and no checkpoint was loaded since.
        """
        if self._what:
            raise StepError(
                f"the update of step {self._step} was interrupted by {self._what}; some parameters "
                "are updated and others are not; load a checkpoint with its optimizer states "
                "(engine.load_checkpoint)"
            )

    def forget(self) -> None:
        """Forget the interruption: a checkpoint has replaced all that it left."""
        self._what = ""


@contextmanager
def survivable(engine: Any) -> Iterator[None]:
    """Restore ``engine`` if its step raises, so that the script can catch the exception. Otherwise
    the engine believes that it is still inside the step, and its timers refuse to start again.
    """
    done = False
    try:
        yield
        done = True
    finally:
        if not done and engine:
            engine._running_engine_step = False
            for name in engine.engine_timers.step_timers:
                engine.timers(name).reset()
