"""The interface of every optimizer: a rule that updates a list of parameters, with no idea of ranks
or buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.recipes.base.recipe import StateSpec

State = dict[str, Tensor]

T = TypeVar("T", bound="UpdateRule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """The settings of a parameter group at this step; a scheduler may change any of it between
    steps.
    """

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    of_client: Mapping[str, Any] = field(default_factory=dict)
    """All that the group of a client optimizer says, with the names of its class; of others
    nothing.
    """


class UpdateError(StepError):
    """An update that a rule cannot make.

    Args:
        index: the place of the parameter in the lists that the rule got, which knows no names.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


@dataclass(frozen=True, slots=True, eq=False)
class UpdateRule:
    """The mathematics of an optimizer.

    Parameters are float32 masters: matrices ``(rows, cols)`` or batches ``(batch, rows, cols)`` for
    a rule that needs whole ones, 1-D pieces cut anywhere for an element-wise one.
    """

    recipe: Any

    @classmethod
    def of(cls: type[T], recipe: Any) -> T:
        """The rule that runs ``recipe``.

        Raises:
            ConfigError: a setting can only be judged with torch at hand, and cannot be.
        """
        return cls(recipe)

    def check(self, device: torch.device) -> None:
        """Refuse a device that cannot do what the settings ask for.

        Raises:
            ConfigError: names the setting.
        """

    def on_device(self: T, fast_dtypes: frozenset[torch.dtype]) -> T:
        """This rule on a device that multiplies matrices in ``fast_dtypes`` much faster than in
        float32.
        """
        return self

    @property
    def products_in(self) -> torch.dtype | None:
        """The dtype in which matrices are multiplied; None if none are, or there is no choice."""
        return None

    def of_shards(self: T, axis: Any, peers: Any) -> T:
        """This rule for matrices of which this rank has a tensor shard, along ``axis``; ``peers``
        have the others.

        Itself, of a rule that updates elements alone, and of one whose recipe refuses tensor
        shards.
        """
        return self

    def init_state(self, param: Tensor) -> State:
        """The state before the first update: names, shapes and dtypes as in
        :meth:`.recipes.base.recipe.Recipe.states`.
        """
        return zeros(self.recipe.states(tuple(param.shape)), param)

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Take a step, in place in ``params`` and ``states``; ``grads`` are read only. Lists are
        not empty.

        Raises:
            UpdateError: it cannot update one of them; some are updated.
        """
        raise NotImplementedError


def zeros(states: Mapping[str, StateSpec], param: Tensor) -> State:
    """``states`` of ``param`` as zeros, on its device or on the host."""
    found = {}
    for name, spec in states.items():
        found[name] = torch.zeros(
            spec.shape,
            dtype=getattr(torch, spec.dtype),
            device="cpu" if spec.on_host else param.device,
        )
    return found
