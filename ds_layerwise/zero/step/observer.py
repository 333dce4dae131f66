"""The interface of options that observe steps, such as reports or QK-clip.

The path of a gradient and the update have a list of observers, and know none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from ds_layerwise.ranks.owned.owned import unwatched
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.zero.step.clip import Decision


@dataclass(eq=False)
class Step:
    """A step that all ranks have decided on. Observers read it and add to it."""

    number: int
    """The number of its update. A skipped step is tried again under the same number."""
    decision: Decision
    scaled: dict[str, Factors] = field(default_factory=dict)
    """The factors by which parameters are multiplied after their update, by name."""
    values: dict[str, float] = field(default_factory=dict)
    """The values reported for this step, the same on every rank."""
    around: Callable[..., AbstractContextManager[None]] = unwatched
    """Encloses each call of a rule in the update; see :func:`.owned.unwatched`."""
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
