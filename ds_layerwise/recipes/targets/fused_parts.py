"""Named parts of a fused matrix, such as the q, k and v of one projection: what they are, and where
they lie.

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
from ds_layerwise.recipes.base.fields import Count, Section, build, check
from ds_layerwise.recipes.base.recipe import Recipe, StateSpec

SplitAxis = Literal["out", "in"]

#: Names of parts become names of states and of files.
_NAME = "[A-Za-z_][A-Za-z_0-9]*"

_SIZES = 'an object like {"q": 64, "k": 16, "v": {"size": 16, "heads": 4}}'

#: A shape by which states that are like the parameter are told from others: no two of its axes are
#: alike.
_PROBE = (3, 5)


class Part(Section):
    """One named piece of the axis."""

    size: Count
    """Rows, or columns, in one group."""
    heads: Annotated[Count | None, Field(json_schema_extra={"may_be_null": True})] = None
    """How many matrices of their own these are; None for one matrix, with those of all groups."""


#: What a config says: a whole number is a part of that size without heads.
Sizes = Mapping[Annotated[str, Field(pattern=f"^{_NAME}$")], Count | Part]


class Split(NamedTuple):
    """What an override says of the parts of a parameter; none at all leave it whole."""

    parts: tuple[tuple[str, Part], ...]
    axis: SplitAxis = "out"
    groups: int = 1

    @property
    def length(self) -> int:
        """How long the axis is that has exactly these parts."""
        return self.groups * sum(part.size for _, part in self.parts)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name} {part.size}{f' ({part.heads} heads)' if part.heads else ''}"
            for name, part in self.parts
        )
        return (
            (sizes or "nothing")
            + f" x {self.groups}" * (self.groups > 1)
            + ' along "in"' * (self.axis == "in")
        )


def _checked_sizes(where: str, given: object) -> dict[str, Part]:
    """The parts that a config names under ``where``.

    Raises:
        ConfigError: one has no name that a file could have, or a size that cannot be.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be {_SIZES}, got {given!r}")
    found = {}
    for name, size in given.items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise ConfigError(
                f"{where} names a part {name!r}; give it a name of letters, digits and underscores"
            )
        own = f"{where}.{name}"
        part = (
            build(Part, own, {"size": None, **size})
            if isinstance(size, Mapping)
            else Part(size=check(Count, own, size))
        )
        if part.heads and part.size % part.heads:
            raise ConfigError(f"{own} has size {part.size}, which {part.heads} heads do not divide")
        found[name] = part
    return found


class Place(NamedTuple):
    """Where the elements of a part lie in a parameter that lies in one piece, and how its rule sees
    them.
    """

    shape: tuple[int, ...]
    """(rows, cols) or (batch, rows, cols)."""
    sizes: tuple[int, ...]
    """``shape`` itself, or, where no strides make that, its axes in as many runs as they lie in."""
    strides: tuple[int, ...]
    """Of ``sizes``, in elements."""
    start: int
    """The first element, counted from that of the parameter."""

    @property
    def is_view(self) -> bool:
        """Whether a rule can work where the part lies; else on a copy."""
        return self.sizes == self.shape


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of every matrix in a parameter; see the note on their order."""

    axis: Literal[-2, -1]
    """What is split: the rows, or the columns."""
    each: tuple[tuple[str, Part], ...]
    groups: int = 1

    @property
    def length(self) -> int:
        """How long the axis is."""
        return self.groups * sum(part.size for _, part in self.each)

    @property
    def names(self) -> tuple[str, ...]:
        """The parts in their order."""
        return tuple(name for name, _ in self.each)

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """By part of a parameter of ``shape``, (rows, cols) or (batch, rows, cols), what its rule
        sees.
        """
        return {name: place.shape for name, place in self.places(shape).items()}

    def places(self, shape: tuple[int, ...]) -> dict[str, Place]:
        """By part, where it lies in a parameter of ``shape``."""
        step = shape[-1] if self.axis == -2 else 1
        starts = [step * sum(part.size for _, part in self.each[:i]) for i in range(len(self.each))]
        return {
            name: self._place(shape, part, start, step)
            for (name, part), start in zip(self.each, starts, strict=True)
        }

    def _place(self, shape: tuple[int, ...], part: Part, start: int, step: int) -> Place:
        *batch, rows, cols = shape
        heads, of_group = part.heads or 1, self.length // self.groups * step
        groups, one = (self.groups, of_group), (part.size // heads, step)
        # Each axis that the rule sees is one or more runs in memory, (size, stride) from the
        # outside in.
        outer = [(math.prod(batch), rows * cols)]
        along = [one] if part.heads else [groups, one]
        across = [(cols, 1)] if self.axis == -2 else [(rows, cols)]
        if part.heads:
            outer += [groups, (heads, part.size // heads * step)]
        axes = [outer] if batch or part.heads else []
        axes += [along, across] if self.axis == -2 else [across, along]
        seen = tuple(math.prod(size for size, _ in axis) for axis in axes)
        runs = [_joined(axis) for axis in axes]
        if all(len(axis) == 1 for axis in runs):
            return Place(seen, seen, tuple(stride for ((_, stride),) in runs), start)
        flat = [run for axis in runs for run in axis]
        return Place(
            seen, tuple(size for size, _ in flat), tuple(stride for _, stride in flat), start
        )

    def states(self, recipe: Recipe, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """What ``recipe`` keeps of a parameter of ``shape``.

        A state that is like the parameter is one tensor for all parts, as if there were none. Of
        any other each part has its own, under the name of the state, a dot, and that of the part.
        """
        like, found = whole_states(recipe), {}
        for name, seen in self.shapes(shape).items():
            for key, spec in recipe.states(seen).items():
                if key in like:
                    found[key] = replace(spec, shape=shape)
                else:
                    found[f"{key}.{name}"] = spec
        return found

    def meaning(self, recipe: Recipe) -> str:
        """Where the parts lie, in words, if ``recipe`` keeps anything of one that is not like the
        parameter: its name and shape may be the same of other rows. Empty if not."""
        like = whole_states(recipe)
        # What lies on the host counts steps, or follows such a count.
        if all(spec.on_host or key in like for key, spec in recipe.states(_PROBE).items()):
            return ""
        return f"parts {Split(self.each, 'out' if self.axis == -2 else 'in', self.groups)}"

    def copied(self, recipe: Recipe, shape: tuple[int, ...]) -> int:
        """Bytes that an update copies parts into which no strides make a matrix of: of the
        parameter, of its gradient, and of states that are like it."""
        numel = sum(
            math.prod(place.shape) for place in self.places(shape).values() if not place.is_view
        )
        return numel * (
            8
            + sum(
                spec.rule_nbytes
                for key, spec in recipe.states((1, 1)).items()
                if key in whole_states(recipe)
            )
        )


def whole_states(recipe: Recipe) -> frozenset[str]:
    """The states of ``recipe`` that have one element for each of the parameter, whatever its
    shape.
    """
    return frozenset(key for key, spec in recipe.states(_PROBE).items() if spec.shape == _PROBE)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``runs`` of one axis, from the outside in, in as few as their strides allow."""
    found: list[tuple[int, int]] = []
    for size, stride in runs:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found or [(1, 1)]


def checked_split(where: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """``entry``, an override that a config has under ``where``, with its parts checked.

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
    """``changes`` that an override makes, with what it says of parts as one :class:`Split`, as
    which it is compared.
    """
    rest = {
        key: value
        for key, value in changes.items()
        if key not in ("split", "split_axis", "split_groups")
    }
    if "split" not in changes:
        return rest
    return {
        **rest,
        "split": Split(
            tuple(changes["split"].items()),
            changes.get("split_axis", "out"),
            changes.get("split_groups", 1),
        ),
    }
