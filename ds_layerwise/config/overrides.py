"""The entries of ``layerwise.overrides``, and overrides in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ds_layerwise.config.conditions import Conditions, Facts
from ds_layerwise.config.param_keys import ParamKey
from ds_layerwise.errors import ConfigError, unknown_key
from ds_layerwise.optimizers.fields import (
    Betas,
    Count,
    Decay,
    NonNegative,
    OrNull,
    Section,
    build,
    check,
    merged_keys,
)
from ds_layerwise.optimizers.registry import REGISTRY, any_of, recipes_of_settings

SplitAxis = Literal["out", "in"]

#: The names of parts, which become names of states and of files.
_NAME = "[A-Za-z_][A-Za-z_0-9]*"

_SIZES = 'an object like {"q": 64, "k": 16, "v": {"size": 16, "heads": 4}}'

#: The fields that are neither a condition nor a change.
_ABOUT = ("optional", "settings", "key")


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


class Override(Conditions):
    """The changes for the parameters that meet the conditions of an entry."""

    optimizer: str | None = None
    """A recipe of the registry with its defaults, or one of the run's two recipes."""
    weight_decay: NonNegative | None = None
    lr: NonNegative | None = None
    """The learning rate while ``lr`` of the parameter group has its configured value."""
    lr_scale: NonNegative | None = None
    """A factor for the learning rate, whichever optimizer the parameter has."""
    min_lr: NonNegative | None = None
    """The lowest learning rate under any scheduler."""
    num_heads: Count | None = None
    """Orthogonalise this many equal blocks of rows separately."""
    split: Sizes | None = None
    """The parts of a fused matrix by their sizes, each a separate matrix; see
    the note of :mod:`.routing.part_views`.
    """
    split_axis: SplitAxis | None = None
    split_groups: Count | None = None
    momentum: Decay | None = None
    betas: Betas | None = None
    eps: NonNegative | None = None
    optional: bool = False
    """True if it may match no parameter."""
    settings: tuple[tuple[str, Any], ...] = ()
    """The settings of the parameters' recipe, by their names in ``optimizer.params``."""
    key: Annotated[Any, Field(exclude=True)] = None
    """The :class:`~ds_layerwise.config.param_keys.ParamKey` that must match in addition;
    None in a config.
    """

    @classmethod
    def from_entry(cls, where: str, entry: object, *, key: ParamKey | None = None) -> Override:
        """Parse one entry.

        Args:
            where: the name of the entry in errors.
            key: the parameters that it is for, in addition to its own conditions.

        Raises:
            ConfigError: it has a key or value that is not valid, has no condition, or changes
                nothing.
        """
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f'{where} must be an object like {{"name": "*.bias", ...}}, got {entry!r}'
            )
        own_keys = {*cls.keys()} - {"settings", "key"}
        of_recipes = merged_keys(recipes_of_settings())
        for name in entry:
            if name not in own_keys and name not in of_recipes:
                raise unknown_key(where, name, {*own_keys, *of_recipes})
        own = {}
        settings = []
        for name, value in entry.items():
            if name in own_keys:
                own[name] = value
            else:
                recipe = build(of_recipes[name], where, {name: value})
                settings.append((name, getattr(recipe, name)))
        if "optimizer" in own:
            check(any_of("matrix", "scalar", *REGISTRY), f"{where}.optimizer", own["optimizer"])
        override = build(cls, where, checked_split(where, own))
        override.check_conditions(where, required=key is None)
        override = override.model_copy(update={"settings": tuple(settings), "key": key})
        if not override.changes():
            raise ConfigError(
                f"{where} ({override.conditions_told()}) overrides nothing; add one of "
                f"{', '.join(cls.change_keys())}, or a setting of the optimizer: "
                f"{', '.join(of_recipes)}"
            )
        _check_rates(where, override)
        return override

    @classmethod
    def change_keys(cls) -> tuple[str, ...]:
        """Return the keys that an entry may change, without settings of recipes."""
        return tuple(key for key in cls.keys() if key not in (*cls.condition_keys(), *_ABOUT))

    def changes(self) -> dict[str, Any]:
        """Return the changes of the override, by key."""
        changes = {
            key: value for key in self.change_keys() if (value := getattr(self, key)) is not None
        }
        return as_one_change({**changes, **dict(self.settings)})

    def matches(self, facts: Facts) -> bool:
        """Tell whether the override matches a parameter.

        Raises:
            RoutingError: ``facts`` lack something that a condition needs, or a function fails.
        """
        return self.hold(facts) and (self.key is None or self.key.chooses(facts))

    def label(self, index: int) -> str:
        """Return the name of the override in errors; ``index`` is its number."""
        if self.key is None:
            return f"layerwise.overrides[{index}]"
        return f"overrides[{self.key!r}]"


def overrides_of(given: object) -> tuple[Override, ...]:
    """Return the overrides of a Python mapping. Its keys are :class:`ParamKey`, its values the
    changes with the names of an entry in a config.

    Raises:
        ConfigError: it is not such a mapping; names the key.
    """
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise ConfigError(f"overrides must be a mapping of ParamKey to what differs, got {given!r}")
    for key in given:
        if not isinstance(key, ParamKey):
            glob = f"; ParamKey(name={key!r}) is a glob over names" * isinstance(key, str)
            raise ConfigError(f"overrides must have ParamKey for keys, got {key!r}{glob}")
    return tuple(
        Override.from_entry(f"overrides[{key!r}]", _joined(key, entry), key=key)
        for key, entry in given.items()
    )


def _joined(key: ParamKey, entry: object) -> object:
    """Return ``entry`` with the conditions of ``key`` that must also hold."""
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"overrides[{key!r}] must be a mapping like {{'weight_decay': 0.0}}, got {entry!r}"
        )
    for name in key.narrowed:
        if name in entry:
            raise ConfigError(
                f"overrides[{key!r}] has {name} once more, {entry[name]!r}; keep one of the two"
            )
    return {**key.narrowed, **entry}


def _check_rates(where: str, override: Override) -> None:
    lr = override.lr
    scale = override.lr_scale
    least = override.min_lr
    if lr is None:
        return
    if scale is not None:
        raise ConfigError(
            f"{where}.lr is {lr:g} and {where}.lr_scale {scale:g}: the first is the learning rate "
            "itself, the second multiplies another; keep one of the two"
        )
    if least is not None and least > lr:
        raise ConfigError(
            f"{where}.min_lr is {least:g}, above {where}.lr, which is {lr:g}; lower it"
        )


#: The overrides of ``register``, for every engine of the process, in any thread; and those of
#: ``initialize``, for the engine that this thread is building.
_kept: list[Override] = []
_beside: ContextVar[tuple[Override, ...]] = ContextVar("ds_layerwise_overrides", default=())


def keep(overrides: tuple[Override, ...]) -> None:
    """Use ``overrides`` for every engine built from now on. They replace earlier ones."""
    _kept[:] = overrides


@contextmanager
def beside(overrides: tuple[Override, ...]) -> Iterator[None]:
    """Add ``overrides`` for engines built inside."""
    token = _beside.set(overrides)
    try:
        yield
    finally:
        _beside.reset(token)


def given_in_python() -> tuple[Override, ...]:
    """Return the overrides for an engine built now, without those of its config."""
    return (*_kept, *_beside.get())


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
