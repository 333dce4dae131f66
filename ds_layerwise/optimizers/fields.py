"""The base of all sections of settings: types declare the bounds of values. Unknown keys are found
in :mod:`ds_layerwise.config.sections`.

A section of a config, and a recipe, is a :class:`Section`: pydantic checks it, and :func:`build`
turns pydantic's errors into one :class:`~ds_layerwise.errors.ConfigError` that names the key, its
value and its bounds. The bounds come from the JSON schema of the type, so they are written only
once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ds_layerwise.errors import ConfigError, unknown_key

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
#: The fraction of an exponential moving average that is kept at a step.
Decay = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Decay, Decay]
#: A fraction of something.
Share = Annotated[float, Field(ge=0, le=1)]
#: A text that is not empty.
Name = Annotated[str, Field(min_length=1)]
#: An integer of at least 1 that fits 32 bits.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]

_V = TypeVar("_V")
#: Marks a key that may be null, which means the same as a missing key, unless its description says
#: otherwise.
OR_NULL: Any = Field(json_schema_extra={"may_be_null": True})
OrNull = Annotated[_V | None, OR_NULL]

_COUNTED = {2: "two", 3: "three"}
_KINDS = {
    "boolean": "true or false",
    "number": "a number",
    "array": "a list",
    "object": "an object",
    "string": "a text",
}
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)

T = TypeVar("T", bound="Section")


class Section(BaseModel):
    """Settings that are checked once and cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", **_STRICT)
    example: ClassVar[str] = "{}"
    """A valid object, shown in errors."""

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Return the names of the settings in a config."""
        return tuple(cls.model_fields)


def build(section: type[T], where: str, values: Any) -> T:
    """Return a ``section`` with ``values``, which a config has under the name ``where``.

    Raises:
        ConfigError: ``values`` is not an object; a key is unknown or missing; or a value is not
            valid. Names the first unknown key, else the first missing one, else the first invalid
            value.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object like {section.example}, got {values!r}")
    for key in values:
        if key not in section.keys():
            raise unknown_key(where, key, section.keys())
    required = [key for key, field in section.model_fields.items() if field.is_required()]
    for key in required:
        if key not in values:
            raise ConfigError(f"{where}.{key} is missing; it needs {', '.join(required)}")
    schema = _schema_of(section)
    for key, value in values.items():
        of_key = schema["properties"][key]
        choices = (of_key.get("default"), *of_key.get("enum", ()))
        if isinstance(value, str) and value == "auto" and "auto" not in choices:
            raise ConfigError(
                f"{where}.{key} is 'auto', which only Hugging Face's Trainer and Accelerate "
                "replace; give it a value"
            )
        if value is None and not of_key.get("may_be_null"):
            # A field's type may allow None for a key that is not set, but the config must not set
            # it to null.
            wanted = _expected(of_key, "float_type")
            raise ConfigError(f"{where}.{key} must be {wanted}, got None")
    try:
        return section.model_validate({key: normalised(value) for key, value in values.items()})
    except ValidationError as e:
        raise _translated(where, values, list(values), e, schema) from None


def entries_of(parse: Callable[[str, object], Any], where: str, entries: object) -> tuple[Any, ...]:
    """Parse each of the ``entries`` that a config has under the name ``where``.

    Raises:
        ConfigError: ``entries`` is not a list.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConfigError(f"{where} must be a list, got {entries!r}")
    return tuple(parse(f"{where}[{i}]", entry) for i, entry in enumerate(entries))


def check(kind: Any, where: str, value: object) -> Any:
    """Return ``value`` converted to the type ``kind``; ``where`` is its name in a config.

    Raises:
        ConfigError: ``value`` does not fit the type, or is out of its bounds.
    """
    adapter, schema = _adapter_of(kind)
    try:
        return adapter.validate_python(normalised(value))
    except ValidationError as e:
        raise _translated(where, value, [], e, schema) from None


def plain(value: object) -> object:
    """Return a Python number for a numpy number or a 0-d tensor."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return item()
    return value


def normalised(value: object) -> Any:
    """Return ``value`` with Python's own numbers, and with tuples for lists and arrays."""
    value = plain(value)
    if getattr(value, "shape", ()) != () and callable(tolist := getattr(value, "tolist", None)):
        # An array with one element is not a number.
        value = tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(normalised, value))
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


def merged_keys(sections: Sequence[type[Section]]) -> dict[str, type[Section]]:
    """Return the first of ``sections`` that has each key, by key."""
    merged = {}
    for section in reversed(sections):
        merged.update(dict.fromkeys(section.keys(), section))
    return merged


@cache
def _schema_of(section: type[Section]) -> Any:
    return section.model_json_schema()


@cache
def _adapter_of(kind: Any) -> tuple[TypeAdapter[Any], Any]:
    adapter = TypeAdapter(kind, config=_STRICT)
    return adapter, adapter.json_schema()


def _translated(
    where: str, values: Any, keys: list[Any], error: ValidationError, schema: Any
) -> ConfigError:
    """Return the ConfigError for ``error`` about ``values``, which have ``keys`` unless they are a
    single value.
    """

    def rank(detail: Any) -> tuple[int, int]:
        # Sort by the order of keys; among the branches of a union, the one that got furthest comes
        # first.
        path = detail["loc"]
        return keys.index(path[0]) if path and path[0] in keys else len(keys), -len(path)

    first = min(error.errors(include_url=False), key=rank)
    if first["type"] == "value_error":
        return ConfigError(f"{where}: {first['ctx']['error']}")
    # pydantic puts the branch of a union between the keys of the path.
    indices = [part for part in first["loc"] if isinstance(part, int)]
    path = [*first["loc"][: bool(keys)], *indices]
    if first["type"] == "missing":
        path = path[:-1]
    for part in path:
        if (inside := _inside(schema, part)) is None:
            break
        where += f"[{part}]" if isinstance(part, int) else f".{part}"
        values = values[part]
        schema = inside
    return ConfigError(f"{where} must be {_expected(schema, first['type'])}, got {plain(values)!r}")


def _inside(schema: Any, part: int | str) -> Any:
    """Return the schema of one key or element; None if ``schema`` has none."""
    if isinstance(part, str):
        return schema["properties"][part]
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == "array":
            prefix = branch.get("prefixItems", ())
            if part < len(prefix):
                return prefix[part]
            return branch.get("items", {})
    return None


def _expected(schema: Any, error_type: str) -> Any:
    """Describe the values that ``schema`` allows: the bounds, if a number is out of them."""
    if "expects" in schema:
        return schema["expects"]
    if "anyOf" in schema:
        first, *rest = (branch for branch in schema["anyOf"] if branch.get("type") != "null")
        described = [branch["expects"] for branch in rest if "expects" in branch]
        return " or ".join([_expected(first, error_type), *described])
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return f"one of {', '.join(map(repr, choices))}"
    kind = schema.get("type")
    if kind == "integer":
        if error_type == "less_than_equal":
            return f"a whole number of at most {schema['maximum']}"
        return f"a whole number of at least {schema['minimum']}"
    if kind == "number" and error_type != "float_type":
        return f"in {_interval(schema)}"
    if "prefixItems" in schema:
        return f"{_COUNTED[len(schema['prefixItems'])]} numbers"
    return _KINDS.get(kind, "something else")


def _interval(schema: Any) -> str:
    low = f"({schema.get('exclusiveMinimum', -math.inf):g}"
    high = f"{schema.get('exclusiveMaximum', math.inf):g})"
    if "minimum" in schema:
        low = f"[{schema['minimum']:g}"
    if "maximum" in schema:
        high = f"{schema['maximum']:g}]"
    return f"{low}, {high}"
