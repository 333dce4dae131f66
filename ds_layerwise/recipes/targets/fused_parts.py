"""Named parts of a fused matrix, such as q, k and v of one projection, and their places.

Note: the order along the axis
    The axis is ``groups`` times the named sizes, one after the other. A part without ``heads`` is
    one matrix, of its pieces in all groups; one with ``heads`` is that many matrices in each group.
    So a projection that has the queries, keys and values of head 0, then those of head 1, has as
    many groups as heads, and its queries are one matrix, or a matrix a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import OR_NULL, Count, Section, build, check
from ds_layerwise.recipes.base.recipe import Axis, Recipe, Shape, States

SplitAxis = Literal["out", "in"]

#: Names of parts become names of states and of files.
_NAME = "[A-Za-z_][A-Za-z_0-9]*"

_SIZES = 'an object like {"q": 64, "k": 16, "v": {"size": 16, "heads": 4}}'

#: A shape with axes of different lengths: states of this shape are like the parameter.
_PROBE = (3, 5)


class Part(Section):
    """A named piece of the axis."""

    size: Count
    """Rows, or columns, in one group."""
    heads: Annotated[Count | None, OR_NULL] = None
    """The number of matrices in each group; None for one matrix, with the pieces of all groups."""


#: Parts in a config: a whole number is a part of that size without heads.
Sizes = Mapping[Annotated[str, Field(pattern=f"^{_NAME}$")], Count | Part]


class Split(NamedTuple):
    """Parts of a parameter as an override names them; none at all leave it whole."""

    parts: tuple[tuple[str, Part], ...]
    axis: SplitAxis = "out"
    groups: int = 1

    @property
    def length(self) -> int:
        """The length of an axis that has exactly these parts."""
        return self.groups * sum(part.size for _, part in self.parts)

    def __repr__(self) -> str:
        sizes = []
        for name, part in self.parts:
            heads = f" ({part.heads} heads)" if part.heads else ""
            sizes.append(f"{name} {part.size}{heads}")
        groups = f" x {self.groups}" * (self.groups > 1)
        return (", ".join(sizes) or "nothing") + groups + ' along "in"' * (self.axis == "in")


def _checked_sizes(where: str, given: object) -> dict[str, Part]:
    """Return the parts that a config names under ``where``.

    Raises:
        ConfigError: one has no name that a file could have, or a size that cannot be.
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
            part = build(Part, own, {"size": None, **size})
        else:
            part = Part(size=check(Count, own, size))
        if part.heads and part.size % part.heads:
            raise ConfigError(f"{own} has size {part.size}, which {part.heads} heads do not divide")
        parts[name] = part
    return parts


class Place(NamedTuple):
    """Place of the elements of a part in a parameter that lies in one piece."""

    shape: Shape
    """(rows, cols) or (batch, rows, cols), as the rule sees the part."""
    sizes: Shape
    """``shape`` itself, or, where no strides make that, its axes in as many runs as they lie in."""
    strides: tuple[int, ...]
    """Strides of ``sizes``, in elements."""
    start: int
    """The first element, counted from that of the parameter."""

    @property
    def is_view(self) -> bool:
        """True if a rule can work where the part lies; else it works on a copy."""
        return self.sizes == self.shape


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of every matrix in a parameter; see the note on their order."""

    axis: Axis
    """The axis that is split: the rows, or the columns."""
    each: tuple[tuple[str, Part], ...]
    groups: int = 1

    @property
    def length(self) -> int:
        """The length of the axis."""
        return self.groups * sum(part.size for _, part in self.each)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts in their order."""
        return tuple(name for name, _ in self.each)

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return, by part of a parameter of ``shape``, the shape that its rule sees."""
        found = {}
        for name, place in self.places(shape).items():
            found[name] = place.shape
        return found

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
        # Each axis that the rule sees is one or more runs in memory, (size, stride) from the
        # outside in.
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
        runs = [_joined(axis) for axis in axes]
        flat = sum(runs, [])
        strides = tuple(stride for _, stride in flat)
        if len(flat) == len(runs):
            return Place(seen, seen, strides, start)
        return Place(seen, tuple(size for size, _ in flat), strides, start)

    def states(self, recipe: Recipe, shape: Shape) -> States:
        """Return the states of a parameter of ``shape`` under ``recipe``.

        A state that is like the parameter is one tensor for all parts, as if there were none. Of
        any other each part has its own, under the name of the state, a dot, and that of the part.
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
        the parameter: its name and shape may be the same of other rows. Empty if not.
        """
        like = whole_states(recipe)
        # What lies on the host counts steps, or follows such a count.
        if all(spec.on_host or key in like for key, spec in recipe.states(_PROBE).items()):
            return ""
        return f"parts {Split(self.each, 'out' if self.axis == -2 else 'in', self.groups)}"

    def copied(self, recipe: Recipe, shape: Shape) -> int:
        """Return the bytes of copies of parts of which no strides make a matrix: of the parameter,
        of its gradient, and of states that are like it.
        """
        copies = []
        for place in self.places(shape).values():
            if not place.is_view:
                copies.append(place.shape)
        like = whole_states(recipe)
        states = recipe.states((1, 1)).items()
        of_states = sum(spec.rule_nbytes for key, spec in states if key in like)
        return sum(map(math.prod, copies)) * (8 + of_states)


def whole_states(recipe: Recipe) -> frozenset[str]:
    """Return the states of ``recipe`` that have one element for each of the parameter."""
    return frozenset(key for key, spec in recipe.states(_PROBE).items() if spec.shape == _PROBE)


def _size_of(runs: list[tuple[int, int]]) -> int:
    return math.prod(size for size, _ in runs)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ``runs`` of one axis, from the outside in, in as few as their strides allow."""
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
        ConfigError: a size or a name cannot be, or it says how parts lie without naming them, or
            counts heads beside.
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
                f"{where}.{key} says how parts lie, and {where} names none; give it split, like "
                '{"q": 64, "k": 16, "v": 16}, too'
            )
    return dict(entry)


def as_one_change(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``changes`` of an override, with its parts as one :class:`Split` to compare."""
    rest = dict(changes)
    parts = rest.pop("split", None)
    axis = rest.pop("split_axis", "out")
    groups = rest.pop("split_groups", 1)
    if parts is not None:
        rest["split"] = Split(tuple(parts.items()), axis, groups)
    return rest
