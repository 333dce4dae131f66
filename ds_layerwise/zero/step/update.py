"""The update of a step: the parameters that this rank owns, bucket by bucket. Each bucket is sent
as soon as all of it is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.owned.owned import OneUpdate
from ds_layerwise.ranks.owned.row_scaling import scale_
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.observer import Step, StepObserver


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
    turn = OneUpdate(
        run.optimizer.groups_now(),
        step.number,
        step.decision.rescale_,
        partial(scale_, step.scaled),
        step.decision.frozen,
        step.around,
    )
    left = list(range(len(run.owned.pieces)))
    with timed(timers, "optimizer_step"), run.interrupted.at(step.number), run.owned.updating():
        # Start with the last bucket, whose parameters the forward pass needs first.
        while left:
            with profiled("update"):
                run.owned.update(left[-1], turn)
            run.param_sync.launch(left[-1])
            left.pop()
        run.optimizer.mark_step()
    step.failed = bool(run.interrupted)
    with (sending := Attempt()):
        if step.failed:
            # The other ranks wait for the buckets that are left.
            run.param_sync.send(reversed(left))
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
        if sending.error is not None:
            raise sending.error
