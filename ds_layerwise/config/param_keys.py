"""The keys of overrides in Python: conditions, and functions of a parameter.

Reference: the classes of the same names in Megatron-LM,
``megatron/core/optimizer/optimizer_config.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from ds_layerwise.config.conditions import Conditions, Facts, each_of, has_attribute
from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError, RoutingError
from ds_layerwise.optimizers.fields import build, normalised


@dataclass(frozen=True, slots=True)
class _Predicate:
    """A function that is identified and compared only by its name."""

    name: str
    fn: Callable[..., bool] = field(compare=False, repr=False)
    """The function that tells whether a parameter matches. It must return the same on every
    rank.
    """

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"{kind}.name must be a text, by which it is known and compared, got {self.name!r}"
            )
        if not callable(self.fn):
            raise ConfigError(f"{kind}.fn must be a function, got {self.fn!r}")

    def __call__(self, *args: Any) -> bool:
        """Call the function."""
        return bool(self.fn(*args))


class ParamPredicate(_Predicate):
    """A function of a parameter, identified and compared only by its name."""

    __slots__ = ()


class ParamWithNamePredicate(_Predicate):
    """A function of a parameter and its name, identified and compared only by the
    function's name.
    """

    __slots__ = ()


#: The conditions of which one must match, with the type of their values.
_ANY: dict[str, type] = {
    "name": str,
    "attr": str,
    "predicate": ParamPredicate,
    "with_name_predicate": ParamWithNamePredicate,
}
#: The conditions that must all hold.
_ALL = ("module", "ndim", "shape", "min_elements", "max_elements", "regex")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamKey:
    """A choice of parameters, as a key of overrides in Python. Equal keys choose the same
    parameters.

    ``name``, ``attr``, ``predicate`` and ``with_name_predicate`` have the same meaning as in
    Megatron-LM: each is one or several, and a parameter is chosen if *any* of all these matches.
    The other conditions are those of ``layerwise.overrides`` and narrow the choice: *all* of them
    must hold. At least one condition must be given.

    Raises:
        ConfigError: a condition has the wrong type, or none is given; names it.
    """

    name: str | tuple[str, ...] = ()
    """Globs over full parameter names."""
    attr: str | tuple[str, ...] = ()
    """Attributes of the parameter, of which one must be true."""
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()
    module: str | tuple[str, ...] | None = None
    ndim: int | tuple[int, ...] | None = None
    shape: tuple[Any, ...] | None = None
    min_elements: int | None = None
    max_elements: int | None = None
    regex: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        for name in names:
            # A list cannot be hashed, so it becomes a tuple.
            object.__setattr__(self, name, normalised(getattr(self, name)))
        for key, kind in _ANY.items():
            for value in each_of(getattr(self, key)):
                if not isinstance(value, kind) or value == "":
                    raise ConfigError(
                        f"ParamKey.{key} must be a {kind.__name__} or a tuple of them, got "
                        f"{value!r}"
                    )
        if not (self.choices or self.narrowed):
            raise ConfigError(f"ParamKey has no condition; give it one of {', '.join(names)}")
        self.conditions()

    @property
    def choices(self) -> dict[str, Any]:
        """The given conditions of which one must match."""
        return {key: value for key in _ANY if each_of(value := getattr(self, key))}

    @property
    def narrowed(self) -> dict[str, Any]:
        """The given conditions that must all hold."""
        return {key: value for key in _ALL if (value := getattr(self, key)) is not None}

    def conditions(self) -> Conditions:
        """Return the conditions that must all hold.

        Raises:
            ConfigError: one has the wrong type; names it.
        """
        conditions = build(Conditions, "ParamKey", self.narrowed)
        conditions.check_conditions("ParamKey", required=False)
        return conditions

    def matches(self, param: Any, param_name: str, modules: Sequence[str] | None = None) -> bool:
        """Tell whether a parameter is chosen.

        Args:
            modules: the class names of the modules that hold it, for a key with ``module``.

        Raises:
            RoutingError: the key has ``module``, and ``modules`` is None; or an attribute is
                neither true nor false.
        """
        if modules is not None:
            modules = tuple(modules)
        facts = Facts(name=param_name, shape=tuple(param.shape), param=param, modules=modules)
        return self.conditions().hold(facts) and self.chooses(facts)

    def chooses(self, facts: Facts) -> bool:
        """Tell whether any of the four matches, or none of them is given.

        Raises:
            RoutingError: a function fails, or an attribute is neither true nor false; names the
                parameter.
        """
        name = facts.name
        param = facts.param
        return (
            not self.choices
            or any(fnmatchcase(name, glob) for glob in each_of(self.name))
            or any(has_attribute(facts, attr) for attr in each_of(self.attr))
            or any(_asked(fn, name, param) for fn in each_of(self.predicate))
            or any(_asked(fn, name, param, name) for fn in each_of(self.with_name_predicate))
        )

    def __repr__(self) -> str:
        given = {**self.choices, **self.narrowed}
        return f"ParamKey({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _asked(predicate: Callable[..., bool], param_name: str, *args: Any) -> bool:
    try:
        return predicate(*args)
    except FOREIGN_ERRORS as e:
        first_line = str(e).partition("\n")[0]
        raise RoutingError(
            f"{param_name}: {predicate!r} fails for it: {type(e).__name__}: {first_line}"
        ) from e
