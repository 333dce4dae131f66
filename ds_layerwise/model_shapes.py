"""The parameters of real models, from files that give names and shapes: ``ds_configs/models/*.yaml``.

Such a file holds ``model`` (its name), ``numel`` (the sum, checked) and ``params``, in model order. An entry is a
parameter, ``{name, shape, optimizer: matrix | scalar}``, optionally with ``repeat: {layer: [0, 32]}``, or a block,
``{block: {layer: [0, 32]}, params: [...]}``, whose entries are walked once for each value. Values run from the first
number up to, not including, the second, and stand for ``{layer}`` in names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import yaml

from ds_layerwise.config import Placement
from ds_layerwise.cost import newton_schulz_flops
from ds_layerwise.errors import ConfigError, unknown_key
from ds_layerwise.layout import ParamSpec

_FILE_KEYS = ("model", "numel", "params")
_PARAM_KEYS = ("name", "shape", "optimizer", "repeat")
_BLOCK_KEYS = ("block", "params")


def load_model_specs(path: str | PathLike[str], *, dtype: str = "bfloat16", method: str = "gram",
                     steps: int = 5) -> list[ParamSpec]:
    """The parameters of a model file, in model order.

    Args:
        dtype: of all parameters.
        method, steps: of the Newton-Schulz iteration that a matrix costs; see :func:`.cost.newton_schulz_flops`.

    Raises:
        ConfigError: a key is unknown or missing, or the parameters don't add up to ``numel``.
    """
    where = Path(path).name
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    _check_keys(where, content, _FILE_KEYS)
    work_of: dict[tuple[int, ...], int] = {}
    specs: list[ParamSpec] = []
    for name, shape, whole in _expand(f"{where}.params", content["params"], {}):
        if whole and shape not in work_of:
            if len(shape) != 2:
                raise ConfigError(f"{where}: {name} is a matrix of shape {shape}; give it two axes or make it scalar")
            work_of[shape] = newton_schulz_flops(*shape, steps=steps, method=method)
        specs.append(ParamSpec(name, shape, dtype, whole, work_of[shape] if whole else 0))
    total = sum(spec.numel for spec in specs)
    if total != content["numel"]:
        raise ConfigError(f"{where}: the parameters have {total} elements, numel says {content['numel']}")
    return specs


def _expand(where: str, entries: object, values: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """``(name, shape, whole)`` of every parameter below ``entries``; ``values`` are those of the blocks around."""
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
        for inner in _repeated(f"{here}.repeat", entry.get("repeat", {})):
            name = _named(f"{here}.name", entry["name"], {**values, **inner})
            yield name, tuple(entry["shape"]), entry["optimizer"] == "matrix"


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
