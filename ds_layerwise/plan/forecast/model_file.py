"""The parameters of real models, from files that give names and shapes: ``models/*.yaml`` in this
package.

Such a file holds ``model`` (its name), ``numel`` (the sum, checked), optionally ``hidden_size``, of
whose square a Trainer makes buckets, and ``params``, in model order. An entry is a parameter,
``{name, shape, optimizer: matrix | scalar}``, optionally with ``repeat: {layer: [0, 32]}``, with
``transposed: true`` where a linear layer holds (inputs, outputs), and with ``split`` and
``split_groups``, as an override has them, where it is a fused one; or a block, ``{block: {layer:
[0, 32]}, params: [...]}``, whose entries are walked once for each value. Values run from the first
number up to, not including, the second, and stand for ``{layer}`` in names.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from ds_layerwise.config.sections import Recipes
from ds_layerwise.errors import ConfigError, RoutingError, unknown_key
from ds_layerwise.plan.routes.group_defaults import ByKind, is_vector
from ds_layerwise.plan.routes.override_matching import overrides_by_name
from ds_layerwise.plan.routes.routes import (
    Route,
    forced_matrix_shape,
    parts_of,
    recipe_named,
    require_a_matrix,
    with_changes,
    with_effect,
    with_heads,
    with_parts,
)
from ds_layerwise.recipes.base.fields import Count, check
from ds_layerwise.recipes.targets.conditions import Facts
from ds_layerwise.recipes.targets.fused_parts import Split, as_one_change, checked_split
from ds_layerwise.recipes.targets.overrides import Override

Placement = Literal["matrix", "scalar"]

#: More layers or experts than any model has.
_MAX_REPEATS = 1_000_000

_FILE_KEYS = ("model", "numel", "hidden_size", "params")
_OPTIONAL = ("repeat", "transposed", "split", "split_groups")
_PARAM_KEYS = ("name", "shape", "optimizer", *_OPTIONAL)
_BLOCK_KEYS = ("block", "params")


@dataclass(frozen=True, slots=True)
class ModelParam:
    """One parameter of a model file."""

    name: str
    shape: tuple[int, ...]
    optimizer: Placement
    """Which of a run's two recipes it gets."""
    transposed: bool = False
    """Whether it is a linear layer that holds (inputs, outputs)."""
    split: Split | None = None
    """The parts of a fused one."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a model file holds."""

    params: list[ModelParam]
    """In model order."""
    hidden_size: int | None
    """None where the file says nothing."""


#: The models that come with the package.
_MODELS = Path(__file__).resolve().parents[1] / "models"

#: An expert in a list of them: the list, the number, and what comes after.
_EXPERT = re.compile(r"((?:.*\.)?(?:deepspeed_)?experts)\.(\d+)\.(.+)")

#: Of Hugging Face's configs, keys that every one has.
_HF_KEYS = ("model_type", "architectures")


def find_model(model: str) -> Path:
    """The file that ``model`` is, holds under Hugging Face's name for it, or names among those of
    the package.

    Raises:
        ConfigError: none of these.
    """
    path, named = Path(model), _MODELS / f"{model}.yaml"
    for each in (path, path / "config.json", named):
        if each.is_file():
            return each
    known = ", ".join(sorted(file.stem for file in _MODELS.glob("*.yaml")))
    raise ConfigError(
        f"{model} is no file, no folder with a config.json, and no model that comes with this "
        f"package (known: {known})"
    )


def is_hf_config(path: Path) -> bool:
    """Whether a file is a ``config.json`` of Hugging Face's.

    Raises:
        ConfigError: it ends in .json and is not JSON.
    """
    if path.suffix != ".json":
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path.name} is no JSON: {e}") from e
    return isinstance(content, Mapping) and any(key in content for key in _HF_KEYS)


def read_model(path: str | PathLike[str]) -> Model:
    """What a model file holds.

    Raises:
        ConfigError: the file is no YAML, a key is unknown or missing, or the parameters don't add
            up to ``numel``.
    """
    where = Path(path).name
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as e:
        raise ConfigError(f"{where} is no YAML: {e}") from e
    _check_keys(where, content, _FILE_KEYS, optional=("hidden_size",))
    hidden_size = (
        check(Count, f"{where}.hidden_size", content["hidden_size"])
        if "hidden_size" in content
        else None
    )
    params = list(_expand(f"{where}.params", content["params"], {}))
    for param in params:
        if param.optimizer == "matrix" and len(param.shape) != 2:
            raise ConfigError(
                f"{where}: {param.name} is a matrix of shape {param.shape}; give it two axes or "
                "make it scalar"
            )
        if param.split and (its := _outputs(param)) != param.split.length:
            raise ConfigError(
                f"{where}: {param.name} {param.shape} is split into {param.split!r}, "
                f"{param.split.length} in all, and has {its} outputs; correct the sizes or "
                "split_groups"
            )
    if len({param.name for param in params}) < len(params):
        names = [param.name for param in params]
        raise ConfigError(
            f"{where}: {next(name for name in names if names.count(name) > 1)} is there twice; "
            "every parameter needs a name of its own"
        )
    total = sum(math.prod(param.shape) for param in params)
    if total != content["numel"]:
        raise ConfigError(
            f"{where}: the parameters have {total} elements, numel says {content['numel']}"
        )
    return Model(params, hidden_size)


def route_model(
    params: Sequence[ModelParam],
    overrides: Sequence[Override] = (),
    *,
    per_head: bool = False,
    auto_split: bool = True,
    recipes: Recipes = Recipes(),
    by_kind: ByKind = ByKind(),
) -> dict[str, Route]:
    """Where each of ``params`` goes: where its file says, unless an override names an optimizer.

    Args:
        auto_split: whether the parts that the file knows count.

    Raises:
        RoutingError: an override matches nothing, contradicts another one or asks for what a shape
            does not allow, no parameter at all goes to the matrix optimizer, or ``per_head``
            without an override that names a number of heads, which a file does not have.
        ConfigError: names and shapes do not say for which parameters a key is.
    """
    _refuse_what_a_file_does_not_say(overrides, by_kind)
    if per_head and not any(override.num_heads or override.split for override in overrides):
        raise RoutingError(
            "optimizer.params.per_head_muon is true, but a model file does not have the number of "
            "heads; name the projections in layerwise.overrides with num_heads"
        )
    merged = overrides_by_name(
        {p.name: [Facts(name=p.name, shape=p.shape)] for p in params}, overrides
    )
    routes: dict[str, Route] = {}
    for param in params:
        mine = merged[param.name].values
        wanted = mine.get("optimizer")
        recipe = recipe_named(wanted or param.optimizer, recipes, mine)
        reason = "layerwise.overrides" if wanted else "model file"
        shape = forced_matrix_shape(param.name, param.shape, reason) if recipe.whole else None
        route = Route(
            name=param.name,
            recipe=recipe,
            reason=reason,
            group=0,
            matrix_shape=shape,
            by_user=wanted is not None,
            transposed=param.transposed,
            sent_away=(wanted or param.optimizer) != "scalar"
            and not recipe.whole
            and len(param.shape) > 1,
        )
        route, mine = with_effect(route, mine, recipes)
        route = by_kind.decayed(
            with_changes(route, mine, recipes), param.shape, vector=is_vector(param.name)
        )
        route = with_heads(route, mine.get("num_heads"), explicit=True)
        known = param.split if auto_split and route.whole and "num_heads" not in mine else None
        if (split := mine.get("split", known)) is not None:
            route = with_parts(
                route, parts_of(route, split, outputs=-1 if param.transposed else -2)
            )
        routes[param.name] = route
    require_a_matrix(routes.values())
    return routes


def refuse_conditions(overrides: Sequence[Override], keys: Collection[str], *, why: str) -> None:
    """Refuse conditions that cannot be answered before there is a run.

    Raises:
        ConfigError: an override has one of ``keys``; names it, its value and ``why``.
    """
    for index, override in enumerate(overrides):
        for key, value in override.given().items():
            if key in keys:
                raise ConfigError(
                    f"{override.label(index)}.{key} is {value!r}, and {why}; plan without the "
                    "entry, or name the parameters"
                )


def _refuse_what_a_file_does_not_say(overrides: Sequence[Override], by_kind: ByKind) -> None:
    refuse_conditions(
        overrides,
        Override.OF_THE_MODEL,
        why="names and shapes alone do not say which parameters those are",
    )
    if key := by_kind.asks_for_tables():
        value = getattr(by_kind, key)
        raise ConfigError(
            f"layerwise.{key} is {f'{value:g}' if isinstance(value, float) else value}, and names "
            "and shapes alone do not say which parameters are embeddings and output heads; plan "
            "without it, or name them in layerwise.overrides"
        )


def deal_out_experts(
    params: Sequence[tuple[str, tuple[int, ...]]], ep_size: int
) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, int]]:
    """Names and shapes as a rank has them when ``ep_size`` ranks in a row share the experts of each
    layer.

    Args:
        params: name and shape of each parameter of the whole model, in model order. Experts are
            those that are numbered in a list, like ``mlp.experts.7.up_proj.weight``.

    Returns:
        What is left, in model order, with each rank's own experts under the lowest numbers; and
        ``ep_size`` by the name of these experts, as :func:`.plan.forecast.forecast.specs_of` takes
        it.

    Raises:
        ConfigError: ``ep_size`` is more than 1 and no parameter is an expert, the experts of a
            layer cannot be dealt out evenly, or they differ in shape.
    """
    if ep_size == 1:
        return list(params), {}
    found = {name: match for name, _ in params if (match := _EXPERT.fullmatch(name))}
    if not found:
        raise ConfigError(
            f"ep_size is {ep_size}, and no parameter of the model is an expert with a number in "
            "its name, like mlp.experts.7.up_proj.weight; plan it with ep_size 1"
        )
    shapes: dict[str, dict[int, dict[str, tuple[int, ...]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for name, shape in params:
        if match := found.get(name):
            shapes[match[1]][int(match[2])][match[3]] = shape
    own: set[tuple[str, int]] = set()
    for where, experts in shapes.items():
        numbers = sorted(experts)
        if len(numbers) % ep_size:
            raise ConfigError(
                f"ep_size is {ep_size}, and there are {len(numbers)} experts in {where}, which "
                f"{ep_size} ranks cannot share evenly"
            )
        for number in numbers:
            if experts[number] != experts[numbers[0]]:
                raise ConfigError(
                    f"ep_size is {ep_size}, and {where} has experts of different shapes: number "
                    f"{number} {experts[number]}, number {numbers[0]} {experts[numbers[0]]}"
                )
        own.update((where, number) for number in numbers[: len(numbers) // ep_size])
    left = [
        (name, shape)
        for name, shape in params
        if not (match := found.get(name)) or (match[1], int(match[2])) in own
    ]
    return left, {name: ep_size for name, _ in left if name in found}


def _outputs(param: ModelParam) -> int:
    return param.shape[-1 if param.transposed else -2] if len(param.shape) > 1 else 0


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
        _check_keys(here, entry, _PARAM_KEYS, optional=_OPTIONAL)
        if entry["optimizer"] not in get_args(Placement):
            raise ConfigError(
                f"{here}.optimizer must be one of {', '.join(get_args(Placement))}, got "
                f"{entry['optimizer']!r}"
            )
        shape = entry["shape"]
        if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
            raise ConfigError(
                f"{here}.shape must be a list of whole numbers of at least 1, got {shape!r}"
            )
        check(bool, f"{here}.transposed", entry.get("transposed", False))
        check(Count, f"{here}.split_groups", entry.get("split_groups", 1))
        split = as_one_change(
            checked_split(here, {key: entry[key] for key in _OPTIONAL[2:] if key in entry})
        )
        for inner in _repeated(f"{here}.repeat", entry.get("repeat", {})):
            name = _named(f"{here}.name", entry["name"], {**values, **inner})
            yield ModelParam(
                name,
                tuple(shape),
                entry["optimizer"],
                entry.get("transposed", False),
                split.get("split"),
            )


def _named(where: str, template: object, values: Mapping[str, int]) -> str:
    if not isinstance(template, str) or not template:
        raise ConfigError(f"{where} must be a name, got {template!r}")
    try:
        return template.format_map(values)
    except (ValueError, AttributeError, IndexError, TypeError) as e:
        raise ConfigError(
            f"{where} {template!r} is no name with {{layer}} or the like in it: {e}"
        ) from e
    except KeyError as e:
        raise ConfigError(
            f"{where} {template!r} needs {e}, but only {', '.join(values) or 'nothing'} is "
            "repeated here"
        ) from e


def _repeated(where: str, ranges: object) -> Iterator[dict[str, int]]:
    """One mapping for each combination; the last key runs fastest. One empty mapping where nothing
    is repeated.
    """
    if not isinstance(ranges, Mapping):
        raise ConfigError(f"{where} must be like {{layer: [0, 32]}}, got {ranges!r}")
    for key, bounds in ranges.items():
        if not (
            isinstance(bounds, list)
            and len(bounds) == 2
            and all(type(bound) is int for bound in bounds)
            and bounds[0] < bounds[1] <= bounds[0] + _MAX_REPEATS
        ):
            raise ConfigError(
                f"{where}.{key} must be [first, one past the last], at most {_MAX_REPEATS} "
                f"numbers, got {bounds!r}"
            )
    for numbers in product(*(range(*bounds) for bounds in ranges.values())):
        yield dict(zip(ranges, numbers, strict=True))


def _check_keys(
    where: str, entry: Any, keys: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{where} must be a mapping with "
            f"{', '.join(key for key in keys if key not in optional)}, got {entry!r}"
        )
    for key in entry:
        if key not in keys:
            raise unknown_key(where, str(key), keys)
    for key in keys:
        if key not in entry and key not in optional:
            raise ConfigError(f"{where}.{key} is missing")
