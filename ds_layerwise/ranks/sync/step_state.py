"""The state of a step: the place of its gradients, the outcome of ``step()``, and the errors of
gradients that are not where a step needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from ds_layerwise.errors import StepError


class Gradients(Enum):
    """The place of the gradients of a step."""

    NONE = auto()
    """No backward pass has left a gradient."""
    SUMS = auto()
    """Gradients are being summed: at stage 1 those of each rank, at stages 2 and 3 those of all
    ranks after every backward pass.
    """
    UNDER_WAY = auto()
    """Some buckets are being reduced, or have been reduced in a backward pass that has not ended.
    There are neither sums nor averages.
    """
    AVERAGES = auto()
    """The averages over all ranks are at their owners, at stages 2 and 3 as sums."""


#: The states that may follow a state. All gradients are dropped from any of them.
_FOLLOWING = {
    Gradients.NONE: (Gradients.SUMS, Gradients.UNDER_WAY),
    # At stages 2 and 3, a step makes averages of the sums of its passes.
    Gradients.SUMS: (Gradients.UNDER_WAY, Gradients.AVERAGES),
    # At stage 1 a pass ends with averages, at stages 2 and 3 with sums.
    Gradients.UNDER_WAY: (Gradients.SUMS, Gradients.AVERAGES),
    # At stages 2 and 3, another pass may follow a refused step. At stage 1, no gradient may come
    # before the step.
    Gradients.AVERAGES: (Gradients.UNDER_WAY,),
}


class Call(Enum):
    """The last call of ``step()`` that has not made a whole step."""

    NONE = auto()
    """There was none: the step before has ended, and this one has not been tried."""
    RUNS = auto()
    """It runs now."""
    REFUSED = auto()
    """An error ended it before the update: nothing that a checkpoint contains has changed."""
    BROKEN = auto()
    """An error ended it when the update had begun: not all parameters need be updated."""


class StepState:
    """The state of the current step, and the number of updates.

    Every transition is here: gradients go through :meth:`move` and :meth:`drop`, a call of
    ``step()`` through :meth:`engine_steps`, :meth:`steps` and :meth:`restart`.
    """

    def __init__(self) -> None:
        self.gradients = Gradients.NONE
        self.call = Call.NONE
        self.updates = 0
        """The number of updates; a skipped step makes none."""

    def move(self, to: Gradients) -> None:
        """Let the gradients of the step be in state ``to``."""
        if to is not self.gradients:
            if to not in _FOLLOWING[self.gradients]:
                raise RuntimeError(f"gradients in {self.gradients} cannot come to {to}")
            self.gradients = to

    def drop(self) -> None:
        """Drop all gradients: the next one starts a new step."""
        self.gradients = Gradients.NONE

    @contextmanager
    def engine_steps(self) -> Iterator[None]:
        """Run the part of ``engine.step()`` that calls the optimizer. It is broken, too, if an
        error follows the update, before the engine has counted it.
        """
        before = self.call
        updates = self.updates
        self.call = Call.RUNS
        try:
            yield
            before = Call.NONE
            updates = self.updates
        finally:
            if self.updates != updates:
                self.call = Call.BROKEN
            elif self.call is Call.RUNS:
                self.call = before

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Run the optimizer's ``step()``."""
        outside = Call.RUNS if self.call is Call.RUNS else Call.NONE
        updates = self.updates
        self.call = Call.RUNS
        done = False
        try:
            yield
            done = True
        finally:
            if done:
                self.call = outside
            else:
                self.call = Call.REFUSED if self.updates == updates else Call.BROKEN

    def restart(self) -> None:
        """Forget the calls of ``step()``: a checkpoint has replaced all that they left, or the step
        begins again.
        """
        self.call = Call.NONE


def late_gradient(name: str, bucket: int) -> StepError:
    """Return the error for a gradient that comes after the reduction of its bucket."""
    return StepError(
        f"{name} got a gradient after its bucket {bucket} was reduced, so it would be lost; call "
        "engine.step() after every micro-batch, also of those that accumulate. Where the loss of "
        "another engine goes through this model, as a generator's through its discriminator, "
        "freeze this model for that pass, or call this engine's zero_grad() after it and before "
        "its own. With several backward passes in one step, or reentrant activation "
        "checkpointing, set zero_optimization.overlap_comm to false and mark only the last "
        "backward pass as the boundary (engine.set_gradient_accumulation_boundary)"
    )


def nothing_reduced() -> StepError:
    """Return the error for a step without gradients."""
    return StepError(
        "step() before the gradients were reduced: no backward pass reached the boundary of "
        "gradient accumulation; call engine.backward(loss) first, and engine.step() after every "
        "micro-batch, also of those that accumulate: it counts them, and updates after the last"
    )


def half_a_pass(*, outside: bool) -> StepError:
    """Return the error for a step with a backward pass that was not reduced.

    Args:
        outside: True if the engine did not know of the pass.
    """
    if outside:
        return StepError(
            "step() before the gradients were reduced: their backward pass did not go through the "
            "engine; call engine(inputs) in place of the model, then engine.backward(loss) and "
            "engine.step(). engine.zero_grad() on all ranks drops what there is"
        )
    return StepError(
        "step() before the gradients were reduced: an exception has ended a backward pass of this "
        "step, and not all of its gradients are there; call engine.zero_grad() on all ranks, and "
        "begin the step again with its first micro-batch"
    )
