"""The parameters of real models, from files that give names and shapes: ``ds_configs/models/*.yaml``.

Such a file holds ``model`` (its name), ``numel`` (the sum, checked) and ``params``, in model order. An entry is a
parameter, ``{name, shape, optimizer: matrix | scalar}``, optionally with ``repeat: {layer: [0, 32]}``, or a block,
``{block: {layer: [0, 32]}, params: [...]}``, whose entries are walked once for each value. Values run from the first
number up to, not including, the second, and stand for ``{layer}`` in names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from ds_layerwise.config import NsMethod, OptimizerConfig, Override, Placement
from ds_layerwise.errors import ConfigError, RoutingError, unknown_key
from ds_layerwise.forecast import specs_of
from ds_layerwise.layout import ParamSpec
from ds_layerwise.placement import Route, forced_matrix_shape, overrides_by_name, require_a_matrix, with_heads

_FILE_KEYS = ("model", "numel", "params")
_PARAM_KEYS = ("name", "shape", "optimizer", "repeat")
_BLOCK_KEYS = ("block", "params")


@dataclass(frozen=True, slots=True)
class ModelParam:
    """One parameter of a model file."""

    name: str
    shape: tuple[int, ...]
    optimizer: Placement


#: Where the models that come with a checkout lie.
_MODELS = Path(__file__).resolve().parents[1] / "ds_configs" / "models"


def find_model(model: str) -> Path:
    """The file that ``model`` is, or names in ``ds_configs/models``.

    Raises:
        ConfigError: neither.
    """
    path, named = Path(model), _MODELS / f"{model}.yaml"
    if not path.is_file() and not named.is_file():
        known = ", ".join(sorted(file.stem for file in _MODELS.glob("*.yaml"))) or "none here"
        raise ConfigError(f"{model} is no file, and no model of ds_configs/models (known: {known})")
    return path if path.is_file() else named


def load_model(path: str | PathLike[str]) -> list[ModelParam]:
    """The parameters of a model file, in model order.

    Raises:
        ConfigError: the file is no YAML, a key is unknown or missing, or the parameters don't add up to ``numel``.
    """
    where = Path(path).name
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{where} is no YAML: {e}") from e
    _check_keys(where, content, _FILE_KEYS)
    params = list(_expand(f"{where}.params", content["params"], {}))
    for param in params:
        if param.optimizer == "matrix" and len(param.shape) != 2:
            raise ConfigError(f"{where}: {param.name} is a matrix of shape {param.shape}; give it two axes or make it "
                              "scalar")
    total = sum(math.prod(param.shape) for param in params)
    if total != content["numel"]:
        raise ConfigError(f"{where}: the parameters have {total} elements, numel says {content['numel']}")
    return params


def load_model_specs(path: str | PathLike[str], *, dtype: str = "bfloat16", method: str = "gram",
                     steps: int = 5) -> list[ParamSpec]:
    """The parameters of a model file as the planner takes them, in model order.

    Args:
        dtype: of all parameters.
        method, steps: of the Newton-Schulz iteration that a matrix costs; see :func:`.cost.newton_schulz_flops`.

    Raises:
        ConfigError: as :func:`load_model` does.
    """
    params = load_model(path)
    return specs_of(((p.name, p.shape, dtype) for p in params), route_model(params),
                    OptimizerConfig(ns_method=cast(NsMethod, method), ns_steps=steps))


def route_model(params: Sequence[ModelParam], overrides: Sequence[Override] = (), *,
                per_head: bool = False) -> dict[str, Route]:
    """Where each of ``params`` goes: where its file says, unless an override names an optimizer.

    Raises:
        RoutingError: an override matches nothing, contradicts another one or asks for what a shape does not allow,
            no parameter at all goes to the matrix optimizer, or ``per_head``, for which a file has no number of heads.
    """
    if per_head:
        raise RoutingError("optimizer.params.per_head_muon is true, but a model file does not have the number of "
                           "heads; name the projections in layerwise.overrides with num_heads instead")
    merged = overrides_by_name([param.name for param in params], overrides)
    routes: dict[str, Route] = {}
    for param in params:
        wanted = merged[param.name].get("optimizer")
        placed, reason = wanted or param.optimizer, "layerwise.overrides" if wanted else "model file"
        shape = forced_matrix_shape(param.name, param.shape, reason) if placed == "matrix" else None
        routes[param.name] = with_heads(Route(name=param.name, optimizer=placed, reason=reason, group=0,
                                              matrix_shape=shape), merged[param.name].get("num_heads"), explicit=True)
    require_a_matrix(routes.values())
    return routes


def _expand(where: str, entries: object, values: Mapping[str, int]) -> Iterator[ModelParam]:
    """Every parameter below ``entries``; ``values`` are those of the blocks around."""
    if not isinstance(entries, list):
        raise ConfigError(f"{where} must be a list, got {entries!r}")
    for i, entry in enumerate(entries):
        here = f"{where}[{i}]"
        if isinstance(entry, Mapping) and "block" in entry:
            _check_keys(here, entry, _BLOCK_KEYS)
            for inner in _repeated(f"{here}.block", entry["block"]):
                yield from _expand(f"{here}.params", entry["params"], {**values, **inner})
            continue
        _check_keys(here, entry, _PARAM_KEYS, optional=("repeat",))
        if entry["optimizer"] not in get_args(Placement):
            raise ConfigError(f"{here}.optimizer must be one of {', '.join(get_args(Placement))}, "
                              f"got {entry['optimizer']!r}")
        shape = entry["shape"]
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise ConfigError(f"{here}.shape must be a list of whole numbers of at least 1, got {shape!r}")
        for inner in _repeated(f"{here}.repeat", entry.get("repeat", {})):
            name = _named(f"{here}.name", entry["name"], {**values, **inner})
            yield ModelParam(name, tuple(entry["shape"]), entry["optimizer"])


def _named(where: str, template: str, values: Mapping[str, int]) -> str:
    try:
        return template.format_map(values)
    except KeyError as e:
        raise ConfigError(f"{where} {template!r} needs {e}, but only {', '.join(values) or 'nothing'} is "
                          "repeated here") from e


def _repeated(where: str, ranges: object) -> Iterator[dict[str, int]]:
    """One mapping for each combination; the last key runs fastest. One empty mapping where nothing is repeated."""
    if not isinstance(ranges, Mapping):
        raise ConfigError(f"{where} must be like {{layer: [0, 32]}}, got {ranges!r}")
    for key, bounds in ranges.items():
        if not (isinstance(bounds, list) and len(bounds) == 2 and bounds[0] < bounds[1]):
            raise ConfigError(f"{where}.{key} must be [first, one past the last], got {bounds!r}")
    for numbers in product(*(range(*bounds) for bounds in ranges.values())):
        yield dict(zip(ranges, numbers, strict=True))


def _check_keys(where: str, entry: Any, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be a mapping with {', '.join(keys)}, got {entry!r}")
    for key in entry:
        if key not in keys:
            raise unknown_key(where, str(key), keys)
    for key in keys:
        if key not in entry and key not in optional:
            raise ConfigError(f"{where}.{key} is missing")
