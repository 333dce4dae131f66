"""What every optimizer here is: a rule that updates a list of parameters, with no idea of ranks or buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """What a parameter group says at this step; a scheduler may change any of it between steps."""

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float


class UpdateRule(Protocol):
    """One optimizer's mathematics.

    Parameters are float32 masters: matrices ``(rows, cols)`` or batches ``(batch, rows, cols)`` for a rule that needs
    whole ones, 1-D pieces cut anywhere for an element-wise one.
    """

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of the states that have one element for each of the parameter."""

    @property
    def family(self) -> str:
        """Equal for rules that go on from each other's states."""

    @property
    def gradient_average(self) -> str | None:
        """The state that is an exponential moving average of the gradient: other families may go on from it."""

    def init_state(self, param: Tensor) -> State:
        """The state before the first update."""

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """One step, in place in ``params`` and ``states``; ``grads`` are read only. Lists are not empty."""
