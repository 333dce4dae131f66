"""The parts of a fused matrix as tensors: views if strides allow it, else copies that are written
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.config.fused_parts import Place


def view_of(value: Tensor, place: Place) -> Tensor:
    """Return the elements of ``value`` at ``place``, with the shape ``sizes``. ``value`` is
    contiguous, with the parameter's elements.
    """
    return value.as_strided(place.sizes, place.strides, value.storage_offset() + place.start)


class Seen(NamedTuple):
    """The master, gradient and states of one parameter, or of one part, for a rule to update.

    If ``shape`` is not None, no strides make a matrix of the part. The tensors are then views with
    one axis per run, and a rule gets copies of that shape. States that are not ``like`` the
    parameter are not affected.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    shape: tuple[int, ...] | None = None
    like: Set[str] = frozenset()

    def copy(self) -> Seen:
        """Return the tensors that a rule works on: copies in new memory, or this object itself if
        no copy is needed.
        """
        if self.shape is None:
            return self
        state = dict(self.state)
        for key in self.like & state.keys():
            state[key] = state[key].reshape(self.shape)
        return Seen(self.param.reshape(self.shape), self.grad.reshape(self.shape), state)

    def take_back(self, copy: Seen) -> None:
        """Write the rule's results in :meth:`copy` back in place."""
        if self.shape is None:
            return
        self.param.copy_(copy.param.view_as(self.param))
        for key in self.like & self.state.keys():
            self.state[key].copy_(copy.state[key].view_as(self.state[key]))


def first_state(
    whole: Tensor,
    places: Mapping[str, Place],
    like: Set[str],
    init: Callable[[Tensor], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the states that ``init`` makes for each part of ``whole``, with the names of
    :meth:`.config.fused_parts.Parts.states`.
    """
    found = {}
    for name, place in places.items():
        for key, value in init(view_of(whole, place).reshape(place.shape)).items():
            if key not in like:
                found[f"{key}.{name}"] = value
                continue
            if key not in found:
                found[key] = torch.empty_like(whole, dtype=value.dtype, device=value.device)
            into = view_of(found[key], place)
            into.copy_(value.reshape(into.shape))
    return found


def seen_parts(
    param: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    places: Mapping[str, Place],
    like: Set[str],
) -> list[Seen]:
    """Return each part of a parameter, in order.

    Args:
        param, grad, state: of the whole parameter, contiguous. For states that are not ``like`` it,
            those of each part, see :meth:`.config.fused_parts.Parts.states`.
        places: the place of each part.
    """
    found = []
    for name, place in places.items():
        own = {}
        for key, value in state.items():
            if key in like:
                own[key] = view_of(value, place)
            elif key.endswith(f".{name}"):
                own[key.removesuffix(f".{name}")] = value
        seen = Seen(view_of(param, place), view_of(grad, place), own)
        if not place.is_view:
            seen = seen._replace(shape=place.shape, like=like)
        found.append(seen)
    return found
