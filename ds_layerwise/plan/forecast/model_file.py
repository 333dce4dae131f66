"""The parameters of real models, from files with names and shapes: ``models/*.yaml`` of the plan
folder.

Such a file has the keys

* ``model``: its name;
* ``numel``: the total number of elements, which is checked;
* ``hidden_size``, optional: a Trainer makes buckets of its square;
* ``params``: a list, in model order.

An entry of ``params`` is a parameter or a block. A parameter is ``{name, shape, optimizer: matrix |
scalar}``. It has ``transposed: true`` if a linear layer stores (inputs, outputs), and ``split`` and
``split_groups``, with the same meaning as in an override, if it is fused. A block is ``{block:
{layer: [0, 32]}, params: [...]}``; its entries are repeated for each value. Values run from the
first number up to, not including, the second, and replace ``{layer}`` in names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from ds_layerwise.config.sections import Recipes
from ds_layerwise.config.targets.conditions import Facts
from ds_layerwise.config.targets.fused_parts import Split, as_one_change, checked_split
from ds_layerwise.config.targets.overrides import Override
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.base.fields import OR_NULL, Count, Name, Section, build
from ds_layerwise.optimizers.base.recipe import Shape
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

Placement = Literal["matrix", "scalar"]

#: A bound that is larger than the number of layers or experts of any model.
_MAX_REPEATS = 1_000_000

_Size = Annotated[int, Field(ge=1)]


_LIKE_SPLIT = 'an object like {"q": 64, "k": 16}'


class _File(Section):
    example = '{"model": "name", "numel": 8, "params": [...]}'
    model: Annotated[Any, OR_NULL]
    numel: _Size | Annotated[float, Field(ge=1)]
    hidden_size: Count | None = None
    params: tuple[Any, ...]


class _Entry(Section):
    example = '{"name": "w", "shape": [2, 4], "optimizer": "matrix"}'
    name: Name
    shape: tuple[_Size, ...]
    optimizer: Placement
    transposed: bool = False
    split: Annotated[Any, Field(json_schema_extra={"expects": _LIKE_SPLIT})] = None
    split_groups: Count = 1


class _Block(Section):
    block: Annotated[Any, Field(json_schema_extra={"expects": "like {layer: [0, 32]}"})]
    params: tuple[Any, ...]


@dataclass(frozen=True)
class ModelParam:
    """A parameter of a model file."""

    name: str
    shape: Shape
    optimizer: Placement
    """The recipe of the run that it gets: matrix or scalar."""
    transposed: bool = False
    """True if a linear layer stores (inputs, outputs)."""
    split: Split | None = None
    """The parts of a fused parameter."""

    @property
    def num_outputs(self) -> int:
        """The length of the axis of outputs; 0 if there is none."""
        if len(self.shape) > 1:
            return self.shape[-1 if self.transposed else -2]
        return 0


@dataclass(frozen=True)
class Model:
    """The content of a model file."""

    params: list[ModelParam]
    """In model order."""
    hidden_size: int | None
    """The hidden size; None if the file has none."""


#: The models that come with the package.
_MODELS = Path(__file__).resolve().parents[1] / "models"

#: The name of an expert in a list of experts: the list, the number, and the rest.
_EXPERT = re.compile(r"((?:.*\.)?(?:deepspeed_)?experts)\.(\d+)\.(.+)")

#: The keys of which every Hugging Face config has one.
_HF_KEYS = ("model_type", "architectures")


def find_model(model: str) -> Path:
    """Find a model file: ``model`` is its path, a folder with ``config.json``, or a name in the
    package.

    Raises:
        ConfigError: none of these.
    """
    for path in (Path(model), Path(model) / "config.json", _MODELS / f"{model}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(file.stem for file in _MODELS.glob("*.yaml")))
    raise ConfigError(
        f"{model} is no file, no folder with a config.json, and no model that comes with this "
        f"package (known: {known})"
    )


def is_hf_config(path: Path) -> bool:
    """Tell whether a file is a Hugging Face ``config.json``.

    Raises:
        ConfigError: its name ends in .json and it is not JSON.
    """
    if path.suffix != ".json":
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path.name} is no JSON: {e}") from e
    return isinstance(content, Mapping) and any(key in content for key in _HF_KEYS)


def read_model(path: str | PathLike[str]) -> Model:
    """Read a model file.

    Raises:
        ConfigError: the file is not YAML, a key is unknown or missing, or the parameters do not add
            up to ``numel``.
    """
    where = Path(path).name
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        raise ConfigError(f"{where} is no YAML: {e}") from e
    file = build(_File, where, content)
    params = list(_expand(_parsed(f"{where}.params", file.params), {}))
    names = set()
    for param in params:
        if param.optimizer == "matrix" and len(param.shape) != 2:
            raise ConfigError(
                f"{where}: {param.name} is a matrix of shape {param.shape}; give it two axes or "
                "make it scalar"
            )
        if param.split and param.num_outputs != param.split.length:
            raise ConfigError(
                f"{where}: {param.name} {param.shape} is split into {param.split!r}, "
                f"{param.split.length} in all, and has {param.num_outputs} outputs; correct the "
                "sizes or split_groups"
            )
        if param.name in names:
            raise ConfigError(
                f"{where}: {param.name} is there twice; every parameter needs a name of its own"
            )
        names.add(param.name)
    total = sum(math.prod(param.shape) for param in params)
    if total != file.numel:
        raise ConfigError(f"{where}: the parameters have {total} elements, numel says {file.numel}")
    return Model(params, file.hidden_size)


def route_model(
    params: Sequence[ModelParam],
    overrides: Sequence[Override] = (),
    *,
    per_head: bool = False,
    auto_split: bool = True,
    recipes: Recipes = Recipes(),
    by_kind: ByKind = ByKind(),
) -> dict[str, Route]:
    """Route ``params`` as their file says, unless an override names an optimizer.

    Args:
        auto_split: False to leave fused parameters whole.

    Raises:
        RoutingError: an override matches nothing, contradicts another one or requires something
            that a shape does not allow; no parameter goes to the matrix optimizer; or ``per_head``
            is set and no override gives the number of heads, which a file does not have.
        ConfigError: names and shapes do not show which parameters a key is for.
    """
    why = "names and shapes alone do not say which parameters"
    refuse_conditions(overrides, Override.OF_THE_MODEL, why=f"{why} those are")
    if key := by_kind.asks_for_tables():
        value = str(getattr(by_kind.layerwise, key)).removesuffix(".0")
        raise ConfigError(
            f"layerwise.{key} is {value}, and {why} are embeddings and output heads; plan without "
            "it, or name them in layerwise.overrides"
        )
    if per_head and not any(each.num_heads or each.split for each in overrides):
        raise RoutingError(
            "optimizer.params.per_head_muon is true, but a model file does not have the number of "
            "heads; name the projections in layerwise.overrides with num_heads"
        )
    merged = overrides_by_name(
        {p.name: [Facts(name=p.name, shape=p.shape)] for p in params}, overrides
    )
    routes = {}
    for param in params:
        mine = merged[param.name].values
        wanted = mine.get("optimizer", param.optimizer)
        by_user = "optimizer" in mine
        recipe = recipe_named(wanted, recipes, mine)
        reason = "layerwise.overrides" if by_user else "model file"
        shape = None
        sent_away = False
        if recipe.whole:
            shape = forced_matrix_shape(param.name, param.shape, reason)
        elif len(param.shape) > 1:
            sent_away = wanted != "scalar"
        route = Route(
            name=param.name,
            recipe=recipe,
            reason=reason,
            group=0,
            matrix_shape=shape,
            by_user=by_user,
            transposed=param.transposed,
            sent_away=sent_away,
        )
        route, mine = with_effect(route, mine, recipes)
        route = with_changes(route, mine, recipes)
        route = by_kind.decayed(route, param.shape, vector=is_vector(param.name))
        route = with_heads(route, mine.get("num_heads"), explicit=True)
        known = None
        if auto_split and route.whole and "num_heads" not in mine:
            known = param.split
        if (split := mine.get("split", known)) is not None:
            parts = parts_of(route, split, outputs=-1 if param.transposed else -2)
            route = with_parts(route, parts)
        routes[param.name] = route
    require_a_matrix(routes.values())
    return routes


def refuse_conditions(overrides: Sequence[Override], keys: Collection[str], *, why: str) -> None:
    """Refuse conditions that cannot be evaluated without a run.

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


def deal_out_experts(
    params: Sequence[tuple[str, Shape]], ep_size: int
) -> tuple[list[tuple[str, Shape]], dict[str, int]]:
    """Return the names and shapes on one rank if ``ep_size`` consecutive ranks share a layer's
    experts.

    Args:
        params: the name and shape of each parameter of the whole model, in model order. Experts are
            the parameters that are numbered in a list, like ``mlp.experts.7.up_proj.weight``.

    Returns:
        The remaining parameters in model order, with each rank's own experts under the lowest
        numbers; and ``ep_size`` by the name of these experts, for
        :func:`.plan.forecast.forecast.specs_of`.

    Raises:
        ConfigError: ``ep_size`` is more than 1 and no parameter is an expert, the experts of a
            layer cannot be shared evenly, or they differ in shape.
    """
    if ep_size == 1:
        return list(params), {}
    matches = {}
    shapes: dict[str, dict[int, dict[str, Shape]]] = {}
    for name, shape in params:
        if match := _EXPERT.fullmatch(name):
            matches[name] = match
            experts = shapes.setdefault(match[1], {})
            experts.setdefault(int(match[2]), {})[match[3]] = shape
    if not matches:
        raise ConfigError(
            f"ep_size is {ep_size}, and no parameter of the model is an expert with a number in "
            "its name, like mlp.experts.7.up_proj.weight; plan it with ep_size 1"
        )
    own = {where: _own_experts(where, experts, ep_size) for where, experts in shapes.items()}
    left = []
    for name, shape in params:
        match = matches.get(name)
        if match is None or int(match[2]) in own[match[1]]:
            left.append((name, shape))
    return left, {name: ep_size for name, _ in left if name in matches}


def _own_experts(where: str, experts: Mapping[int, Mapping[str, Shape]], ep_size: int) -> list[int]:
    """Return the lowest numbers of ``experts``, as many as each of ``ep_size`` ranks has.

    Raises:
        ConfigError: they cannot be shared evenly, or differ in shape.
    """
    first, *others = numbers = sorted(experts)
    if len(numbers) % ep_size:
        raise ConfigError(
            f"ep_size is {ep_size}, and there are {len(numbers)} experts in {where}, which "
            f"{ep_size} ranks cannot share evenly"
        )
    for number in others:
        if experts[number] != experts[first]:
            raise ConfigError(
                f"ep_size is {ep_size}, and {where} has experts of different shapes: number "
                f"{number} {experts[number]}, number {first} {experts[first]}"
            )
    return numbers[: len(numbers) // ep_size]


@dataclass(frozen=True)
class _Repeated:
    """The entries of a block, and the values of each of its repetitions."""

    values: Sequence[Mapping[str, int]]
    entries: Sequence[tuple[str, ModelParam | _Repeated]]


def _parsed(where: str, entries: Sequence[Any]) -> list[tuple[str, ModelParam | _Repeated]]:
    """Return ``entries``, each checked once, and where each is in the file."""
    parsed: list[tuple[str, ModelParam | _Repeated]] = []
    for i, entry in enumerate(entries):
        here = f"{where}[{i}]"
        if isinstance(entry, Mapping) and "block" in entry:
            block = build(_Block, here, entry)
            values = list(_repeated(f"{here}.block", block.block))
            parsed.append((here, _Repeated(values, _parsed(f"{here}.params", block.params))))
            continue
        param = build(_Entry, here, entry)
        parts = {key: entry[key] for key in ("split", "split_groups") if key in entry}
        split = as_one_change(checked_split(here, parts)).get("split")
        model_param = ModelParam(param.name, param.shape, param.optimizer, param.transposed, split)
        parsed.append((here, model_param))
    return parsed


def _expand(
    parsed: Iterable[tuple[str, ModelParam | _Repeated]], values: Mapping[str, int]
) -> Iterator[ModelParam]:
    """Yield every parameter of ``parsed``. ``values`` are those of the enclosing blocks."""
    for where, item in parsed:
        if isinstance(item, ModelParam):
            yield replace(item, name=_named(f"{where}.name", item.name, values))
            continue
        for inner in item.values:
            yield from _expand(item.entries, {**values, **inner})


def _named(where: str, template: str, values: Mapping[str, int]) -> str:
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
    """Yield a mapping for each combination of values; a single empty one without ranges.

    The last key varies fastest.
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
