"""How settings are declared, with their bounds in their types, and how a wrong one is told.

A section of a config, and a recipe, is a :class:`Section`: pydantic checks it, and :func:`build`
turns what pydantic finds into one :class:`~ds_layerwise.errors.ConfigError` that names the key, its
value and what it may be. What that is is read off the JSON schema of its type, so nothing is said
twice.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ds_layerwise.errors import ConfigError, unknown_key

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
#: Of an exponential moving average, what is kept at a step.
Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Decay, Decay]
#: A whole number from 1 on that fits 32 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]

#: Of a key that may be null, which means the same as leaving it out unless its own words say
#: otherwise.
OR_NULL: Any = Field(json_schema_extra={"may_be_null": True})

_COUNTED = {1: "one", 2: "two", 3: "three"}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)

T = TypeVar("T", bound="Section")


class Section(BaseModel):
    """Settings that are checked once, and cannot change: whoever holds them need not check them
    again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", **_STRICT)
    example: ClassVar[str] = "{}"
    """An object that makes one."""

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """What a config calls the settings."""
        return tuple(cls.model_fields)


def build(section: type[T], where: str, values: Any) -> T:
    """A ``section`` with ``values``, which a config has under the name ``where``.

    Raises:
        ConfigError: they are no object; or names the first key that is not known, or else the first
            whose value cannot be.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object like {section.example}, got {values!r}")
    for key in values:
        if key not in section.keys():
            raise unknown_key(where, key, section.keys())
    schema = _schema_of(section)
    for key, value in values.items():
        _refuse_placeholders(f"{where}.{key}", value, schema["properties"][key])
    try:
        return section.model_validate({key: normalised(value) for key, value in values.items()})
    except ValidationError as e:
        raise _translated(where, values, e, schema) from None


def entries_of(parse: Callable[[str, object], Any], where: str, entries: object) -> tuple[Any, ...]:
    """What ``parse`` makes of each of the ``entries`` that a config has under the name ``where``.

    Raises:
        ConfigError: they are no list.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConfigError(f"{where} must be a list, got {entries!r}")
    return tuple(parse(f"{where}[{i}]", each) for i, each in enumerate(entries))


def check(kind: Any, where: str, value: object) -> Any:
    """``value`` as the type ``kind`` has it; ``where`` is what a config calls it.

    Raises:
        ConfigError: it cannot be of that type, or is out of its bounds.
    """
    adapter, schema = _adapter_of(kind)
    try:
        return adapter.validate_python(normalised(value))
    except ValidationError as e:
        raise _translated(where, value, e, schema, has_keys=False) from None


def plain(value: object) -> object:
    """``value`` as Python's own number, where it is one of numpy's or a tensor without axes."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def normalised(value: object) -> Any:
    """``value`` with Python's own numbers, and with tuples for lists, those of other packages, and
    arrays with axes.
    """
    value = plain(value)
    if getattr(value, "shape", ()) != () and callable(tolist := getattr(value, "tolist", None)):
        # An array of one number is no number.
        value = tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(normalised(each) for each in value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > sys.float_info.max:
        return float("inf") if value > 0 else float("-inf")
    return value


def nearest(key: object, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that somebody most likely meant with ``key``, which in Python need be no
    text.
    """
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=cutoff)
    return close[0] if close else None


@lru_cache(maxsize=None)
def _schema_of(section: type[Section]) -> dict[str, Any]:
    return section.model_json_schema()


@lru_cache(maxsize=None)
def _adapter_of(kind: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=_STRICT)
    return adapter, adapter.json_schema()


def _refuse_placeholders(where: str, value: object, schema: Mapping[str, Any]) -> None:
    if (
        isinstance(value, str)
        and value == "auto"
        and "auto" not in (schema.get("default"), *schema.get("enum", ()))
    ):
        raise ConfigError(f"{where} is 'auto', and nothing filled it in; give it a value")
    if value is None and not schema.get("may_be_null"):
        # None is what some fields are where a config says nothing.
        raise ConfigError(f"{where} must be {_expected(schema, value, 'float_type')}, got None")


def _translated(
    where: str,
    values: Any,
    error: ValidationError,
    schema: Mapping[str, Any],
    *,
    has_keys: bool = True,
) -> ConfigError:
    """What ``error`` says of ``values``: of keys and their values, or of one value if not
    ``has_keys``.
    """
    found = error.errors(include_url=False)
    order = {key: i for i, key in enumerate(values)} if has_keys else {}

    def rank(one: Any) -> tuple[int, int]:
        # In the order that the keys are given in; of the branches of a union, that which came
        # furthest.
        return (
            order.get(one["loc"][0], len(order)) if one["loc"] and order else 0,
            -len(one["loc"]),
        )

    first = min(found, key=rank)
    if first["type"] == "value_error":
        return ConfigError(f"{where}: {first['ctx']['error']}")
    # pydantic names the branch of a union among the keys of the path.
    path = [
        part for i, part in enumerate(first["loc"]) if isinstance(part, int) or (i == 0 and order)
    ]
    if first["type"] == "missing":
        path = path[:-1]
    name = where
    for part in path:
        if (inside := _inside(schema, part)) is None:
            break
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
        values, schema = values[part], inside
    return ConfigError(
        f"{name} must be {_expected(schema, values, first['type'])}, got {plain(values)!r}"
    )


def _inside(schema: Mapping[str, Any], part: int | str) -> Mapping[str, Any] | None:
    """The schema of one part of what ``schema`` is of; None where that is not told."""
    if isinstance(part, str):
        inner: Mapping[str, Any] = schema["properties"][part]
        return inner
    branches = schema.get("anyOf", [schema])
    array = next((branch for branch in branches if branch.get("type") == "array"), None)
    if array is None:
        return None
    prefix = array.get("prefixItems", ())
    if part < len(prefix):
        return prefix[part]  # type: ignore[no-any-return]
    return array.get("items", {})  # type: ignore[no-any-return]


def _expected(schema: Mapping[str, Any], value: object, error_type: str) -> str:
    """What ``schema`` allows, as a phrase; of a number that is out of its bounds, the bounds."""
    if said := schema.get("expects"):
        return str(said)
    if "anyOf" in schema:
        kinds = [branch for branch in schema["anyOf"] if branch.get("type") != "null"]
        return " or ".join(
            [
                _expected(kinds[0], value, error_type),
                *(str(kind["expects"]) for kind in kinds[1:] if "expects" in kind),
            ]
        )
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return f"one of {', '.join(map(repr, choices))}"
    kind = schema.get("type")
    if kind == "boolean":
        return "true or false"
    if kind == "integer":
        too_much = error_type in ("less_than_equal", "less_than")
        return (
            f"a whole number of at most {schema['maximum']}"
            if too_much
            else (f"a whole number of at least {schema['minimum']}")
        )
    if kind == "number":
        return "a number" if error_type == "float_type" else f"in {_interval(schema)}"
    if kind == "array" and "prefixItems" in schema:
        return f"{_COUNTED[len(schema['prefixItems'])]} numbers"
    return {"array": "a list", "object": "an object", "string": "a text"}.get(
        str(kind), "something else"
    )


def _interval(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    left = f"[{low:g}" if low is not None else f"({schema.get('exclusiveMinimum', float('-inf')):g}"
    right = (
        f"{high:g}]" if high is not None else f"{schema.get('exclusiveMaximum', float('inf')):g})"
    )
    return f"{left}, {right}"


def merged_keys(sections: Sequence[type[Section]]) -> dict[str, type[Section]]:
    """By key, the first of ``sections`` that has it."""
    return {key: section for section in reversed(sections) for key in section.keys()}
