"""The conditions of overrides and norm groups on names, shapes, modules and attributes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field

from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.fields import Name, NonNegative, OrNull, Section, build
from ds_layerwise.optimizers.recipe import Shape

#: One text, or several of which one must match.
Texts = Name | Annotated[tuple[Name, ...], Field(min_length=1)]
_Whole = Annotated[int, Field(ge=0)]
#: The sizes of all axes, None for any size.
_Size = Annotated[_Whole | None, Field(json_schema_extra={"expects": "a size, or null for any"})]
Sizes = tuple[_Size, ...]


def _told_as(what: str) -> Any:
    return Field(json_schema_extra={"expects": what})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one parameter that conditions need."""

    name: str
    shape: Shape
    """The sizes of the whole parameter, also if tensor parallelism has cut it."""
    modules: tuple[str, ...] | None = None
    """The class names of the modules that hold it, short and qualified; None if unknown."""
    param: Any = None
    """The parameter itself."""


class Conditions(Section):
    """Conditions on a parameter. All that are given must hold; of a list, one element must
    match.
    """

    name: Annotated[Texts | None, _told_as("a glob over parameter names, or a list of them")] = None
    """A glob over full parameter names; ``*`` crosses dots."""
    regex: Annotated[
        Texts | None, _told_as("a regular expression over parameter names, or a list of them")
    ] = None
    """A regular expression that matches a full parameter name from its start to its end."""
    module: Annotated[
        Texts | None, _told_as("a glob over class names of modules, or a list of them")
    ] = None
    """A glob over the class name, or the qualified class name, of the module that holds the
    parameter.
    """
    ndim: Annotated[
        _Whole | Annotated[tuple[_Whole, ...], Field(min_length=1)] | None,
        _told_as("a number of axes, or a list of them"),
    ] = None
    """The number of axes."""
    shape: Annotated[
        Sizes | Annotated[tuple[Sizes, ...], Field(min_length=1)] | None,
        _told_as("a list of sizes, null for any, or a list of such lists"),
    ] = None
    """The sizes of its axes, None for any size."""
    min_elements: Annotated[_Whole | None, _told_as("a whole number of at least 0")] = None
    """The least number of elements."""
    max_elements: Annotated[_Whole | None, _told_as("a whole number of at least 0")] = None
    """The largest number of elements."""
    attr: Annotated[Texts | None, _told_as("the name of an attribute, or a list of them")] = None
    """The name of an attribute of the parameter that exists and is true."""

    @classmethod
    def condition_keys(cls) -> tuple[str, ...]:
        """Return the names of the conditions in a config."""
        return tuple(Conditions.model_fields)

    def given(self) -> dict[str, Any]:
        """Return the conditions that are given, by key."""
        return {
            key: value for key in self.condition_keys() if (value := getattr(self, key)) is not None
        }

    def check_conditions(self, where: str, *, required: bool = True) -> None:
        """Refuse conditions that nothing can meet, and, with ``required``, an empty set of
        conditions.

        Raises:
            ConfigError: names the key; ``where`` is the name of the conditions in a config.
        """
        for pattern in each_of(self.regex):
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(
                    f"{where}.regex must be a regular expression, got {pattern!r}: {e}"
                ) from e
        least = self.min_elements
        most = self.max_elements
        if least is not None and most is not None and least > most:
            raise ConfigError(
                f"{where}.min_elements is {least}, more than max_elements, which is {most}: no "
                "parameter is between them; lower it"
            )
        if required and not self.given():
            raise ConfigError(
                f"{where} has no condition; give it one of {', '.join(self.condition_keys())}"
            )

    def hold(self, facts: Facts) -> bool:
        """Tell whether all given conditions hold for a parameter.

        Raises:
            RoutingError: ``facts`` lack something that a condition needs, or an attribute is
                neither true nor false.
        """
        numel = math.prod(facts.shape)
        return (
            _meets(self.name, lambda glob: fnmatchcase(facts.name, glob))
            and _meets(self.regex, lambda pattern: re.fullmatch(pattern, facts.name))
            and _meets(self.ndim, lambda ndim: len(facts.shape) == ndim)
            and _meets(self._shapes(), lambda sizes: _fits(facts.shape, sizes))
            and _meets(self.min_elements, lambda least: numel >= least)
            and _meets(self.max_elements, lambda most: numel <= most)
            and _meets(self.module, lambda glob: _in_module(facts, glob, self.module))
            and _meets(self.attr, lambda attr: has_attribute(facts, attr))
        )

    @property
    def ask_for_sizes(self) -> bool:
        """True if a condition depends on the lengths of axes."""
        return not {"shape", "min_elements", "max_elements"}.isdisjoint(self.given())

    def conditions_told(self) -> str:
        """Return the conditions as text for an error; only the pattern if there is a single
        name.
        """
        given = self.given()
        if given == {"name": self.name} and isinstance(self.name, str):
            return repr(self.name)
        return ", ".join(f"{key} {_as_config(value)!r}" for key, value in given.items())

    def _shapes(self) -> Any:
        # One shape contains numbers, a list of shapes contains shapes.
        if self.shape is None or any(isinstance(size, tuple) for size in self.shape):
            return self.shape
        return (self.shape,)


def _meets(wanted: Any, test: Callable[[Any], object]) -> bool:
    """Tell whether any of ``wanted`` passes the test; True for None."""
    return wanted is None or any(map(test, each_of(wanted)))


def _in_module(facts: Facts, glob: str, wanted: Any) -> bool:
    if facts.modules is None:
        raise RoutingError(
            f"{facts.name}: the condition module {wanted!r} needs the class names of the modules "
            "that hold the parameter; pass them as modules"
        )
    return any(fnmatchcase(module, glob) for module in facts.modules)


def has_attribute(facts: Facts, attr: str) -> bool:
    """Tell whether a parameter has an attribute of that name with a true value.

    Raises:
        RoutingError: the attribute is neither true nor false.
    """
    try:
        return bool(getattr(facts.param, attr, False))
    except (RuntimeError, ValueError) as e:
        raise RoutingError(
            f"{facts.name}.{attr} is neither true nor false: {e}; a condition attr needs one"
        ) from e


def _fits(shape: Shape, wanted: Sizes) -> bool:
    return len(shape) == len(wanted) and all(
        size in (None, actual) for actual, size in zip(shape, wanted, strict=True)
    )


def each_of(value: Any) -> tuple[Any, ...]:
    """Return the values of a key that has one value or several; empty for None."""
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    return (value,)


def _as_config(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_as_config, value))
    return value


#: The names of groups. A monitor may use them in file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class NormGroup(Conditions):
    """The parameters that meet all of the given conditions."""

    example = '{"name": "mtp.*"}'

    gradient_clipping: OrNull[NonNegative] = None
    """The bound of the norm of their gradients. The norm of all others then does not include them.
    0: they are not clipped. None: they are counted and clipped with all others.
    """
    optional: bool = False
    """True if it may match no parameter."""


def norm_groups_of(where: str, given: object) -> dict[str, NormGroup]:
    """Return the groups that a config has under the name ``where``.

    Raises:
        ConfigError: a name or an entry is not valid.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{where} must be an object of names of groups to conditions like {{"mtp": {{"name": '
            f'"mtp.*"}}}}, got {given!r}'
        )
    found = {}
    for name, entry in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where} names a group {name!r}; give it a name of letters, digits, dots, dashes "
                "and underscores, for the monitor"
            )
        found[name] = build(NormGroup, f"{where}.{name}", entry)
        found[name].check_conditions(f"{where}.{name}")
    return found
