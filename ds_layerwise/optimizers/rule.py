"""The interface of every optimizer: a rule that updates a list of parameters. It knows neither
ranks nor buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.base.recipe import StateSpec

State = dict[str, Tensor]

T = TypeVar("T", bound="UpdateRule")


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """The settings of a parameter group at this step. A scheduler may change any of them between
    steps.
    """

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    of_client: Mapping[str, Any] = field(default_factory=dict)
    """All settings in the group of a client optimizer, under the names of its class; empty for
    other optimizers.
    """


class UpdateError(StepError):
    """An update that a rule cannot make.

    Args:
        index: the index of the parameter in the rule's lists. A rule does not know names.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """The mathematics of an optimizer.

    Parameters are float32 masters: matrices ``(rows, cols)`` or batches ``(batch, rows, cols)`` for
    a rule that needs whole ones; 1-D pieces, cut anywhere, for an element-wise one.
    """

    recipe: Any

    @classmethod
    def of(cls: type[T], recipe: Any) -> T:
        """Return the rule that runs ``recipe``.

        Raises:
            ConfigError: a setting that can only be checked with torch is invalid.
        """
        return cls(recipe)

    def check(self, device: torch.device) -> None:
        """Refuse a device that does not support the settings.

        Raises:
            ConfigError: names the setting.
        """

    def on_device(self: T, fast_dtypes: frozenset[torch.dtype]) -> T:
        """Return this rule for a device that multiplies matrices in ``fast_dtypes`` much faster
        than in float32.
        """
        return self

    @property
    def products_in(self) -> torch.dtype | None:
        """The dtype of matrix products; None if there are none, or no choice of dtype."""
        return None

    def of_shards(self: T, axis: Any, peers: Any) -> T:
        """Return this rule for matrices of which this rank has a tensor shard along ``axis``;
        ``peers`` have the other shards.

        A rule that only updates elements returns itself, and so does one whose recipe refuses
        tensor shards.
        """
        return self

    def init_state(self, param: Tensor) -> State:
        """Return the state before the first update, with names, shapes and dtypes as in
        :meth:`.optimizers.base.recipe.Recipe.states`.
        """
        return zeros(self.recipe.states(tuple(param.shape)), param)

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Make one step, in place in ``params`` and ``states``; ``grads`` are only read. The lists
        are not empty.

        Raises:
            UpdateError: it cannot update one of them; others may be updated.
        """
        raise NotImplementedError


class OneByOne(UpdateRule):
    """The base of rules that update one parameter after another. Subclasses define the step of
    one.
    """

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Make a step of each parameter.

        Raises:
            UpdateError: :meth:`step_` cannot make it.
        """
        for index, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
            try:
                self.step_(param, grad, state, hyper)
            except StepError as error:
                raise UpdateError(index, str(error)) from error

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Make a step, in place in ``param`` and ``state``; ``grad`` is only read.

        Raises:
            StepError: it cannot be made.
        """
        raise NotImplementedError


def few_at_a_time(
    together: int, param: Tensor, grad: Tensor, state: State
) -> Iterator[tuple[Tensor, Tensor, State]]:
    """Yield views of ``together`` matrices of ``param``, (batch, rows, cols), with those of their
    gradients and of their states, without the step count.
    """
    # None adds an axis to a single matrix.
    places: list[Any] = [None]
    if param.dim() == 3:
        starts = range(0, len(param), together)
        places = [slice(start, start + together) for start in starts]
    for some in places:
        own = {key: value[some] for key, value in state.items() if key != "step"}
        yield param[some], grad[some], own


def zeros(states: Mapping[str, StateSpec], param: Tensor) -> State:
    """Return ``states`` of ``param`` as zeros, on its device or on the host."""
    found = {}
    for name, spec in states.items():
        found[name] = torch.zeros(
            spec.shape,
            dtype=getattr(torch, spec.dtype),
            device="cpu" if spec.on_host else param.device,
        )
    return found
