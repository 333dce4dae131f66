"""The update of a step: the parameters that this rank owns, bucket by bucket. Each bucket is sent
as soon as all of it is new.

Options that observe steps, such as reports or QK-clip, have one interface, :class:`StepObserver`.
The path of a gradient and the update have a list of observers, and know none of them by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.owned.owned import OneUpdate
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.clip import Decision


@dataclass(eq=False, kw_only=True)
class Step(OneUpdate):
    """A step that all ranks have decided on. Observers read it and add to it."""

    decision: Decision
    values: dict[str, float] = field(default_factory=dict)
    """The values reported for this step, the same on every rank."""
    failed: bool = False
    """True if an exception has ended the update on this rank."""


class StepObserver:
    """The base class of observers of steps. Each method does nothing unless a subclass overrides
    it.

    Every rank calls its observers in the same order, so that their collectives match.
    """

    looks = False
    """True while the observer wants to see gradients."""

    def saw_gradient(self, name: str, gradient: Tensor) -> None:
        """Called with the gradient that a backward pass has left on the parameter ``name``."""

    def before_update(self, step: Step) -> None:
        """Called before the update of ``step``. There is no update if the decision skips it."""

    def after_update(self, step: Step) -> None:
        """Called after the update of ``step``, also if the update failed."""

    def forget(self) -> None:
        """Forget the gradients of the current step, which are dropped."""

    def restart(self) -> None:
        """Forget what belongs to the weights before a load. The gradients are forgotten already."""


@contextmanager
def timed(timers: Any, name: str) -> Iterator[None]:
    """Run a phase under one of DeepSpeed's named timers."""
    timers(name).start()
    try:
        yield
    finally:
        timers(name).stop()


def update(run: RunState, step: Step, observers: Sequence[StepObserver]) -> None:
    """Update all parameters with the averaged gradients as the ranks have decided, send them, and
    call ``observers``.

    Every rank must call this at the same point. If parameters are waited for at their first use,
    some may still be pending when it returns.

    Raises:
        Exception: the exception that ended the update of this rank, after the other ranks have got
            everything that they wait for.
    """
    timers = run.settings.timers
    left = list(range(len(run.owned.pieces)))
    with timed(timers, "optimizer_step"), run.interrupted.at(step.number), run.owned.updating():
        # Start with the last bucket, whose parameters the forward pass needs first.
        while left:
            with profiled("update"):
                run.owned.update(left[-1], step)
            run.param_sync.launch(left[-1])
            left.pop()
        run.optimizer.mark_step()
    step.failed = bool(run.interrupted)
    with (sending := Attempt()):
        if step.failed:
            # The other ranks wait for the buckets that are left.
            run.send(reversed(left))
        else:
            with timed(timers, "optimizer_allgather"):
                run.param_sync.leave_pending()
    step.failed |= sending.error is not None
    try:
        # Also after a failure: the other ranks enter the same collectives.
        for observer in observers:
            observer.after_update(step)
    finally:
        # If the other ranks have stopped by now, that is only a consequence of this error.
        run.interrupted.raise_original()
        sending.raise_original()
