"""The trace of an update that an exception ended: what had it is a step further than what had not,
and no step leads on from there.

Note: how all ranks end up alike
    The rank that failed still sends what the others wait for, then raises what it met. Whoever
    survives that, and goes on to the next step, tells the others in what all ranks agree on before
    anything is updated, or in the save that comes before. A checkpoint, loaded with its optimizer
    states, makes all of it whole again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_layerwise.errors import StepError


class Interrupted:
    """A note of the exception that ended an update. ``with`` it around what may not end there.

    An ``Exception`` is kept for :meth:`raise_original`, as others wait for what comes behind the
    block; what is none, such as Ctrl-C, goes on at once.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._what = ""
        self._step = 0

    def __bool__(self) -> bool:
        return bool(self._what)

    def at(self, step: int) -> Interrupted:
        """Note the number of the step for the error, and return this."""
        self._step = step
        return self

    def __enter__(self) -> None:
        """Enter; nothing has gone wrong yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Remember ``error``."""
        if error is not None:
            self._what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    def raise_original(self) -> None:
        """Raise what has ended the update, and let go of it: its traceback holds what took the
        memory.
        """
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def check(self) -> None:
        """Refuse to go on from half an update.

        Raises:
            StepError: it was ended.
        """
        if self._what:
            raise StepError(
                f"the update of step {self._step} was ended by {self._what}; some parameters have "
                "it and others not; load a checkpoint with its optimizer states "
                "(engine.load_checkpoint)"
            )

    def forget(self) -> None:
        """Forget the interruption: a checkpoint has replaced all that it left."""
        self._what = ""


@contextmanager
def survivable(engine: Any) -> Iterator[None]:
    """Leave ``engine`` so that an exception in its step can be survived: it would else take the
    step to be still on, and its timers refuse to start again."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done and engine is not None:
            engine._running_engine_step = False
            for name in engine.engine_timers.step_timers:
                engine.timers(name).reset()
