"""The interface of an option that listens to steps, such as reports or QK-clip.

The path of a gradient and the update know a list of observers, and none of them by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.ranks.owned.update_stats import UpdateStats
from ds_layerwise.zero.step.clip import Decision


@dataclass(eq=False)
class Step:
    """A step that all ranks have decided on; observers read it and add to it."""

    number: int
    """The number of its update; a step that is skipped is tried again under the same number."""
    decision: Decision
    scaled: dict[str, Factors] = field(default_factory=dict)
    """The factors that parameters, by name, are multiplied with after their update."""
    values: dict[str, float] = field(default_factory=dict)
    """The values that are reported of this step, the same on every rank."""
    watch: UpdateStats | None = None
    """The statistics of the update; None where nobody asks for them."""
    failed: bool = False
    """True if an exception has ended the update on this rank."""


class StepObserver:
    """A listener to steps. Each method does nothing unless an observer needs it.

    Observers are called in one order on every rank, so that their collectives meet.
    """

    looks = False
    """True while it wants to see gradients."""

    def saw_gradient(self, name: str, gradient: Tensor) -> None:
        """Look at the gradient that a backward pass has left on the parameter ``name``."""

    def before_update(self, step: Step) -> None:
        """Look at ``step`` before anything is updated; nothing is if its decision skips it."""

    def after_update(self, step: Step) -> None:
        """Look at what the update of ``step`` has left, also where it failed."""

    def forget(self) -> None:
        """Forget the gradients of the step at hand: they are dropped."""
