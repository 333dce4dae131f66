"""The named parts of a fused matrix, such as q, k and v of one projection, and their places.

Note: the order along the axis
    The axis consists of ``groups`` repetitions of the named sizes, one after the other. A part
    without ``heads`` is one matrix, made of its pieces in all groups; a part with ``heads`` is that
    many matrices in each group. For example, a projection may have the queries, keys and values of
    head 0, then those of head 1. It has as many groups as heads, and its queries are one matrix, or
    one matrix per head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.fields import Count, OrNull, Section, build, check
from ds_layerwise.optimizers.recipe import Recipe, Shape, States
from ds_layerwise.orthogonalize.tensor_shards import Axis

SplitAxis = Literal["out", "in"]

#: The names of parts, which become names of states and of files.
_NAME = "[A-Za-z_][A-Za-z_0-9]*"

_SIZES = 'an object like {"q": 64, "k": 16, "v": {"size": 16, "heads": 4}}'

#: A shape with axes of different lengths. A state that has this shape for it is like the parameter.
_PROBE = (3, 5)


class Part(Section):
    """A named piece of the axis."""

    size: Count
    """The number of rows, or columns, in one group."""
    heads: OrNull[Count] = None
    """The number of matrices in each group; None for one matrix, with the pieces of all groups."""


#: The parts in a config: an integer is a part of that size without heads.
Sizes = Mapping[Annotated[str, Field(pattern=f"^{_NAME}$")], Count | Part]


class Split(NamedTuple):
    """The parts of a parameter as named in an override. Without parts the parameter stays whole."""

    parts: tuple[tuple[str, Part], ...]
    axis: SplitAxis = "out"
    groups: int = 1

    @property
    def length(self) -> int:
        """The length of an axis that consists of these parts."""
        return self.groups * sum(part.size for _, part in self.parts)

    def __repr__(self) -> str:
        sizes = []
        for name, part in self.parts:
            heads = f" ({part.heads} heads)" if part.heads else ""
            sizes.append(f"{name} {part.size}{heads}")
        groups = f" x {self.groups}" * (self.groups > 1)
        return (", ".join(sizes) or "nothing") + groups + ' along "in"' * (self.axis == "in")


def _checked_sizes(where: str, given: object) -> dict[str, Part]:
    """Return the parts that a config has under ``where``.

    Raises:
        ConfigError: a part has a name that is not valid in a file name, or a size that is not
            valid.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be {_SIZES}, got {given!r}")
    parts = {}
    for name, size in given.items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise ConfigError(
                f"{where} names a part {name!r}; give it a name of letters, digits and underscores"
            )
        own = f"{where}.{name}"
        if isinstance(size, Mapping):
            part = build(Part, own, size)
        else:
            part = Part(size=check(Count, own, size))
        if part.heads and part.size % part.heads:
            raise ConfigError(f"{own} has size {part.size}, which {part.heads} heads do not divide")
        parts[name] = part
    return parts


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
                    states[f"{key}.{name}"] = spec
        return states

    def meaning(self, recipe: Recipe) -> str:
        """Return the places of the parts, in words, if ``recipe`` keeps a state that is not like
        the parameter. Such a state could have the same name and shape for other rows. Empty if it
        keeps none.
        """
        like = whole_states(recipe)
        # A state on the host counts steps, or follows from such a count.
        if all(spec.on_host or key in like for key, spec in recipe.states(_PROBE).items()):
            return ""
        return f"parts {Split(self.each, 'out' if self.axis == -2 else 'in', self.groups)}"

    def copied(self, recipe: Recipe, shape: Shape) -> int:
        """Return the bytes of copies for the parts that no strides make a matrix of: of the
        parameter, its gradient, and the states that are like it.
        """
        copied = 0
        for place in self.places(shape).values():
            if not place.is_view:
                copied += math.prod(place.shape)
        like = whole_states(recipe)
        states = recipe.states((1, 1)).items()
        return copied * (8 + sum(spec.rule_nbytes for key, spec in states if key in like))


def whole_states(recipe: Recipe) -> frozenset[str]:
    """Return the states of ``recipe`` that have one element per element of the parameter."""
    return frozenset(key for key, spec in recipe.states(_PROBE).items() if spec.shape == _PROBE)


def _size_of(runs: list[tuple[int, int]]) -> int:
    return math.prod(size for size, _ in runs)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``runs`` of one axis, from the outside in, merged as far as their strides allow."""
    joined: list[tuple[int, int]] = []
    for size, stride in runs:
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            size *= joined.pop()[0]
        joined.append((size, stride))
    return joined or [(1, 1)]


def checked_split(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entry``, an override that a config has under ``where``, with its parts checked.

    Raises:
        ConfigError: a size or a name is not valid; or it sets the layout of parts without naming
            them, or a number of heads in addition.
    """
    if "split" in entry and "num_heads" in entry:
        raise ConfigError(
            f"{where} has split and num_heads; count the heads of each part, like "
            '{"q": {"size": 64, "heads": 4}}, in place of num_heads'
        )
    if "split" in entry:
        return {**entry, "split": _checked_sizes(f"{where}.split", entry["split"])}
    for key in ("split_axis", "split_groups"):
        if key in entry:
            raise ConfigError(
                f"{where}.{key} sets the layout of parts, but {where} has no split; add one, like "
                '{"q": 64, "k": 16, "v": 16}'
            )
    return dict(entry)


def as_one_change(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``changes`` of an override, with its parts as one :class:`Split`, for comparisons."""
    rest = dict(changes)
    parts = rest.pop("split", None)
    axis = rest.pop("split_axis", "out")
    groups = rest.pop("split_groups", 1)
    if parts is not None:
        rest["split"] = Split(tuple(parts.items()), axis, groups)
    return rest
