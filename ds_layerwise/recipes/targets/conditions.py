"""Which parameters an entry of ``layerwise.overrides`` is for: conditions on names, shapes, modules
and attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.recipes.base.fields import Section

Text = Annotated[str, Field(min_length=1)]
#: One text, or several of which any will do.
Texts = Text | Annotated[tuple[Text, ...], Field(min_length=1)]
_Whole = Annotated[int, Field(ge=0)]
#: Sizes of all axes, None for any.
_Size = Annotated[_Whole | None, Field(json_schema_extra={"expects": "a size, or null for any"})]
Shape = tuple[_Size, ...]


def _told_as(what: str) -> Any:
    return Field(json_schema_extra={"expects": what})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What conditions ask of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter, however many tensor-parallel ranks have cut it."""
    modules: tuple[str, ...] | None = None
    """The class names of the modules that hold it, short and qualified; None where there is no
    model to ask.
    """
    param: Any = None
    """The parameter itself; None where there is none to ask."""


class Conditions(Section):
    """Conditions on a parameter, of which all that are given must hold. Of a list any element will
    do.
    """

    #: Conditions that names and shapes alone do not answer.
    OF_THE_MODEL: ClassVar[tuple[str, ...]] = ("module", "attr")

    name: Annotated[Texts | None, _told_as("a glob over parameter names, or a list of them")] = None
    """A glob over full parameter names; ``*`` crosses dots."""
    regex: Annotated[
        Texts | None, _told_as("a regular expression over parameter names, or a list of them")
    ] = None
    """A regular expression that matches a full parameter name from its start to its end."""
    module: Annotated[
        Texts | None, _told_as("a glob over class names of modules, or a list of them")
    ] = None
    """A glob over the class name of the module that holds the parameter, or over its qualified
    one.
    """
    ndim: Annotated[
        _Whole | Annotated[tuple[_Whole, ...], Field(min_length=1)] | None,
        _told_as("a number of axes, or a list of them"),
    ] = None
    """How many axes it has."""
    shape: Annotated[
        Shape | Annotated[tuple[Shape, ...], Field(min_length=1)] | None,
        _told_as("a list of sizes, null for any, or a list of such lists"),
    ] = None
    """The sizes of its axes, None for any."""
    min_elements: Annotated[_Whole | None, _told_as("a whole number of at least 0")] = None
    """It has this many elements at least."""
    max_elements: Annotated[_Whole | None, _told_as("a whole number of at least 0")] = None
    """It has this many elements at most."""
    attr: Annotated[Texts | None, _told_as("the name of an attribute, or a list of them")] = None
    """An attribute of the parameter that is there and true."""

    @classmethod
    def condition_keys(cls) -> tuple[str, ...]:
        """What a config calls the conditions."""
        return tuple(Conditions.model_fields)

    def given(self) -> dict[str, Any]:
        """The conditions that are given, by key."""
        return {
            key: value for key in self.condition_keys() if (value := getattr(self, key)) is not None
        }

    def check_conditions(self, where: str) -> None:
        """Refuse conditions that nothing can meet, or that are none.

        Raises:
            ConfigError: names the key; ``where`` is what a config calls the conditions.
        """
        for pattern in each_of(self.regex):
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(
                    f"{where}.regex must be a regular expression, got {pattern!r}: {e}"
                ) from e
        if (
            self.min_elements is not None
            and self.max_elements is not None
            and self.min_elements > self.max_elements
        ):
            raise ConfigError(
                f"{where}.min_elements is {self.min_elements}, more than max_elements, which is "
                f"{self.max_elements}: no parameter is between them; lower it"
            )

    def hold(self, facts: Facts) -> bool:
        """Whether all conditions that are given hold for a parameter.

        Raises:
            RoutingError: a condition asks what ``facts`` do not know, or an attribute is neither
                true nor false.
        """
        numel = 1
        for size in facts.shape:
            numel *= size
        return (
            (self.name is None or any(fnmatchcase(facts.name, glob) for glob in each_of(self.name)))
            and (
                self.regex is None
                or any(re.fullmatch(each, facts.name) for each in each_of(self.regex))
            )
            and (self.ndim is None or len(facts.shape) in each_of(self.ndim))
            and (self.shape is None or any(_fits(facts.shape, each) for each in self._shapes()))
            and (self.min_elements is None or numel >= self.min_elements)
            and (self.max_elements is None or numel <= self.max_elements)
            and (
                self.module is None
                or any(
                    fnmatchcase(known, glob)
                    for known in self._modules(facts)
                    for glob in each_of(self.module)
                )
            )
            and (
                self.attr is None or any(has_attribute(facts, each) for each in each_of(self.attr))
            )
        )

    @property
    def ask_for_sizes(self) -> bool:
        """Whether they ask how long axes are."""
        return any(each is not None for each in (self.shape, self.min_elements, self.max_elements))

    def conditions_told(self) -> str:
        """The conditions as an error has them: the pattern alone where there is but one name."""
        given = self.given()
        if given.keys() == {"name"} and isinstance(self.name, str):
            return repr(self.name)
        return ", ".join(f"{key} {_as_config(value)!r}" for key, value in given.items())

    def _shapes(self) -> Iterable[Shape]:
        # One shape has numbers in it, a list of shapes has shapes.
        one = not self.shape or not isinstance(self.shape[0], tuple)
        return (self.shape,) if one else self.shape  # type: ignore[return-value]

    def _modules(self, facts: Facts) -> tuple[str, ...]:
        if facts.modules is None:
            raise RoutingError(
                f"{facts.name}: a condition asks for module {self.module!r}, and nobody has said "
                "which modules hold the parameter; pass their class names"
            )
        return facts.modules


def has_attribute(facts: Facts, attr: str) -> bool:
    """Whether a parameter has an attribute of that name that is true.

    Raises:
        RoutingError: there is no parameter to ask, or the attribute is neither true nor false.
    """
    if facts.param is None:
        raise RoutingError(
            f"{facts.name}: a condition asks for attr {attr!r}, and there is no parameter to ask"
        )
    try:
        return bool(getattr(facts.param, attr, False))
    except (RuntimeError, ValueError) as e:
        raise RoutingError(
            f"{facts.name}.{attr} is neither true nor false: {e}; a condition attr needs one"
        ) from e


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        each in (None, size) for size, each in zip(shape, wanted, strict=True)
    )


def each_of(value: Any) -> tuple[Any, ...]:
    """What a key has that takes one or several, or None for none."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def _as_config(value: Any) -> Any:
    return [_as_config(each) for each in value] if isinstance(value, tuple) else value
