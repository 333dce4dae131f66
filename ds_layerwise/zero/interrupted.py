"""The record of an update that an exception ended. Some parameters are then one step ahead of the
others, and the run cannot continue from that.

Note: how all ranks reach the same state
    The rank that failed still sends what the other ranks wait for, then raises its exception. If it
    survives and goes on to the next step, it tells the other ranks when they agree on that step,
    before any update, or in a save before that. Loading a checkpoint with its optimizer states
    repairs everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_layerwise.errors import StepError


class Interrupted:
    """A record of the exception that ended an update. Use it as a context manager around the
    update.

    It keeps an ``Exception`` for :meth:`raise_original`, because other ranks wait for the code
    after the block. Any other ``BaseException``, such as Ctrl-C, propagates at once.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._what = ""
        self._step = 0

    def __bool__(self) -> bool:
        return bool(self._what)

    def at(self, step: int) -> Interrupted:
        """Record the number of the step for the error message, and return self."""
        self._step = step
        return self

    def __enter__(self) -> None:
        """Enter; nothing has failed yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Record ``error``."""
        if error is not None:
            self._what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    def raise_original(self) -> None:
        """Raise the exception that ended the update, and drop the reference to it: its traceback
        keeps tensors alive.
        """
        error = self._error
        self._error = None
        if error is not None:
            raise error

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
        if not done and engine is not None:
            engine._running_engine_step = False
            for name in engine.engine_timers.step_timers:
                engine.timers(name).reset()
