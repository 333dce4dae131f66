"""The update of one whole parameter as a single process would make it: no buffers, no ranks, no
batching.

It shares two things with training: the rule, and the views in which the rule sees the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.recipe import Hyper, Site, State, StateSpec
from ds_layerwise.routing.part_views import Seen, seen_parts, whole_states
from ds_layerwise.routing.routes import Route

#: The tolerance relative to the largest change, if the rule multiplies in float32 or not at all.
_TOLERANCE = 1e-3
#: The same if the rule multiplies in half precision. Newton-Schulz amplifies the rounding of
#: directions near zero to full size.
_TOLERANCE_IN_HALF = 0.25
#: The states that do not depend on a matrix product.
_EXACT = ("momentum_buffer", "step")
#: The tolerance relative to the weights themselves, for updates smaller than their rounding.
_ROUNDING = 8 * 2.0**-24


class PlainStep:
    """The update of the parameter of ``route``.

    Args:
        numel: its elements.
        fast_dtypes: see :attr:`.Site.fast_dtypes`.
    """

    def __init__(self, route: Route, numel: int, *, fast_dtypes: frozenset[torch.dtype]) -> None:
        self._route = route
        self._site = Site(fast_dtypes)
        self._shape = route.stored_shape or (numel,)
        self.states: Mapping[str, StateSpec] = route.states(numel)
        """The states of the whole parameter, by name."""

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of a state in memory."""
        shape = self.states[key].shape
        return self._shape if shape == (self._route.matrix_shape or self._shape) else shape

    def is_like_the_parameter(self, key: str) -> bool:
        """Tell whether a state has one element per element of the parameter, in the same order."""
        return self.shape_of(key) == self._shape

    def update_(
        self, master: Tensor, grad: Tensor, state: State, param_group: Mapping[str, Any]
    ) -> None:
        """Update ``master``, 1-D, and ``state`` in place with ``grad``, which has as many elements
        and is only read.
        """
        hyper = Hyper(**self._route.hyper(param_group))
        for seen in self._seen(master.view(self._shape), grad.view(self._shape), state):
            copy = seen.copy()
            self._route.recipe.update_([copy.param], [copy.grad], [copy.state], hyper, self._site)
            seen.take_back(copy)

    def _seen(self, master: Tensor, grad: Tensor, state: State) -> list[Seen]:
        route = self._route
        if route.parts is not None:
            return seen_parts(
                master, grad, state, route.parts.places(self._shape), whole_states(route.recipe)
            )
        if not route.by_columns:
            return [Seen(master, grad, state)]
        turned = {}
        for key, value in state.items():
            turned[key] = value.transpose(0, 1) if self.is_like_the_parameter(key) else value
        return [Seen(master.transpose(0, 1), grad.transpose(0, 1), turned)]

    def most(self, key: str, before: Tensor, expected: Tensor) -> float:
        """Return the tolerance for an element of the weights, or of the state ``key``, that was
        ``before`` and should be ``expected``.
        """
        if not expected.numel():
            return 0.0
        products = self._route.recipe.products_in(self._site.fast_dtypes)
        in_half = products not in (None, torch.float32) and key not in _EXACT
        wide = widest_float()
        change = float((expected.to(wide) - before.to(wide)).abs().max())
        size = float(expected.abs().max())
        bound = (_TOLERANCE_IN_HALF if in_half else _TOLERANCE) * change + _ROUNDING * size
        return bound if math.isfinite(bound) else math.inf
