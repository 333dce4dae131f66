"""The named parts of a fused matrix, such as q, k and v of one projection: their places, and
tensors of them, which are views if strides allow it, else copies that are written back.

Note: the order along the axis
    The axis consists of ``groups`` repetitions of the named sizes, one after the other. A part
    without ``heads`` is one matrix, made of its pieces in all groups; a part with ``heads`` is that
    many matrices in each group. For example, a projection may have the queries, keys and values of
    head 0, then those of head 1. It has as many groups as heads, and its queries are one matrix, or
    one matrix per head. A single part may have no name: the heads of a layer that stores (inputs,
    outputs) are blocks of columns.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.config.overrides import Part, Split
from ds_layerwise.optimizers.dtypes import DTYPE_BYTES
from ds_layerwise.optimizers.recipe import Recipe, Shape, State, States
from ds_layerwise.orthogonalize.tensor_shards import Axis

#: A shape with axes of different lengths. A state that has this shape for it is like the parameter.
_PROBE = (3, 5)


class Place(NamedTuple):
    """The place of a part's elements in a parameter that is contiguous."""

    shape: Shape
    """The shape in which the rule sees the part: (rows, cols) or (batch, rows, cols)."""
    sizes: Shape
    """``shape`` itself; or, if no strides make that shape, one axis per run in memory."""
    strides: tuple[int, ...]
    """The strides of ``sizes``, in elements."""
    start: int
    """The offset of the first element in the parameter."""

    @property
    def is_view(self) -> bool:
        """True if a rule can work on the part in place; False if it needs a copy."""
        return self.sizes == self.shape


@dataclass(frozen=True)
class Parts:
    """The parts of every matrix in a parameter; see the note on their order."""

    axis: Axis
    """The axis that is split: rows or columns."""
    each: tuple[tuple[str, Part], ...]
    groups: int = 1

    @property
    def length(self) -> int:
        """The length of the axis."""
        return self.groups * sum(part.size for _, part in self.each)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in order."""
        return tuple(name for name, _ in self.each)

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return the shape in which the rule sees each part of a parameter of ``shape``."""
        return {name: place.shape for name, place in self.places(shape).items()}

    def places(self, shape: Shape) -> dict[str, Place]:
        """Return the place of each part in a parameter of ``shape``."""
        step = shape[-1] if self.axis == -2 else 1
        start = 0
        places = {}
        for name, part in self.each:
            places[name] = self._place(shape, part, start, step)
            start += step * part.size
        return places

    def _place(self, shape: Shape, part: Part, start: int, step: int) -> Place:
        *batch, rows, cols = shape
        # Each axis that the rule sees consists of one or more runs in memory, (size, stride), from
        # the outside in.
        outer = [(math.prod(batch), rows * cols)]
        groups = (self.groups, self.length // self.groups * step)
        across = [(cols, 1)] if self.axis == -2 else [(rows, cols)]
        if part.heads:
            rows_of_head = part.size // part.heads
            outer += [groups, (part.heads, rows_of_head * step)]
            along = [(rows_of_head, step)]
        else:
            along = [groups, (part.size, step)]
        axes = [outer] if batch or part.heads else []
        axes += [along, across] if self.axis == -2 else [across, along]
        seen = tuple(map(_size_of, axes))
        # If each axis is one run, the sizes of runs are those of the axes.
        sizes, strides = zip(*chain.from_iterable(map(_joined, axes)), strict=True)
        return Place(seen, sizes, strides, start)

    def states(self, recipe: Recipe, shape: Shape) -> States:
        """Return the states of a parameter of ``shape`` under ``recipe``.

        A state that is like the parameter is one tensor for all parts, as for an unsplit parameter.
        Of any other state each part has its own, with the name of the state, a dot, and the name of
        the part.
        """
        like = whole_states(recipe)
        states = {}
        for name, seen in self.shapes(shape).items():
            for key, spec in recipe.states(seen).items():
                if key in like:
                    states[key] = replace(spec, shape=shape)
                else:
                    states[key + _suffix(name)] = spec
        return states

    def meaning(self, recipe: Recipe) -> str:
        """Return the places of the parts, in words, if ``recipe`` keeps a state that is not like
        the parameter. Such a state could have the same name and shape for other rows. Empty if it
        keeps none, or if heads are all of the matrix.
        """
        like = whole_states(recipe)
        # A state on the host counts steps, or follows from such a count.
        states = recipe.states(_PROBE).items()
        if self.names == ("",) or all(spec.on_host or key in like for key, spec in states):
            return ""
        return f"parts {Split(self.each, 'out' if self.axis == -2 else 'in', self.groups)}"

    def first_state(self, recipe: Recipe, whole: Tensor) -> State:
        """Return the states that ``recipe`` begins with for each part of ``whole``, with the names
        of :meth:`states`.
        """
        like = whole_states(recipe)
        state: State = {}
        for name, place in self.places(tuple(whole.shape)).items():
            of_part = recipe.init_state(view_of(whole, place).reshape(place.shape))
            for key, value in of_part.items():
                if key not in like:
                    state[key + _suffix(name)] = value
                    continue
                if key not in state:
                    state[key] = torch.empty_like(whole, dtype=value.dtype, device=value.device)
                into = view_of(state[key], place)
                into.copy_(value.reshape(into.shape))
        return state

    def views(self, recipe: Recipe, param: Tensor, grad: Tensor, state: State) -> list[Seen]:
        """Return each part of a parameter, in order, for ``recipe`` to update.

        Args:
            param, grad, state: of the whole parameter, contiguous. Of states that are not like it,
                those of each part, see :meth:`states`.
        """
        like = whole_states(recipe)
        views = []
        for name, place in self.places(tuple(param.shape)).items():
            own = {}
            suffix = _suffix(name)
            for key, value in state.items():
                if key in like:
                    own[key] = view_of(value, place)
                elif key.endswith(suffix):
                    own[key.removesuffix(suffix)] = value
            shape = None if place.is_view else place.shape
            views.append(Seen(view_of(param, place), view_of(grad, place), own, shape, like))
        return views

    def copied(self, recipe: Recipe, shape: Shape) -> int:
        """Return the bytes of copies for the parts that no strides make a matrix of: of the
        parameter, its gradient, and the states that are like it.
        """
        copied = 0
        for place in self.places(shape).values():
            if not place.is_view:
                copied += math.prod(place.shape)
        like = whole_states(recipe)
        states = recipe.states(_PROBE).items()
        return copied * (8 + sum(DTYPE_BYTES[spec.dtype] for key, spec in states if key in like))


def whole_states(recipe: Recipe) -> frozenset[str]:
    """Return the states of ``recipe`` that have one element per element of the parameter."""
    return frozenset(key for key, spec in recipe.states(_PROBE).items() if spec.shape == _PROBE)


def _suffix(name: str) -> str:
    """Return the end of the names of states that the part ``name`` has for itself."""
    return f".{name}" if name else ""


#: The sizes and strides of runs that make up an axis.
_Runs = list[tuple[int, int]]


def _size_of(runs: _Runs) -> int:
    return math.prod(size for size, _ in runs)


def _joined(runs: _Runs) -> _Runs:
    """Return ``runs`` of one axis, from the outside in, merged as far as their strides allow."""
    joined: _Runs = []
    for size, stride in runs:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            size *= joined.pop()[0]
        joined.append((size, stride))
    return joined or [(1, 1)]


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
    state: State
    shape: Shape | None = None
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
