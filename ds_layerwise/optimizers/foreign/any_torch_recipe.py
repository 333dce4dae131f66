"""Classes of ``torch.optim.Optimizer`` as recipes: named in a config by their path, or taken from
an object that a script passes to ``deepspeed.initialize``.

Note: what a class keeps
    A class makes its states at its first step. So it makes two on a tensor of the device "meta",
    which has a shape and no memory. If that fails, because the class reads computed values, it
    makes them on a small parameter whose sides are all different: a side of a state that equals one
    of them, or the product of all, stands for the same of the real shape; any other side is a
    constant. Real steps raise an error if this was wrong.

    A number in a state that the second step changes is a 0-d float64 state here. A number named
    :data:`COUNT` counts steps. 0-d tensors are on the host.

Note: what nobody checks
    A class updates whole parameters unless the user says that it is element-wise. Each parameter
    has an instance of its own, which goes on from ``optimizer.state[param]`` alone after a load.
"""

from __future__ import annotations

import math
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import numpy
import torch
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError, few
from ds_layerwise.optimizers.base.dtypes import DTYPE_BYTES
from ds_layerwise.optimizers.base.fields import Section, T, normalised
from ds_layerwise.optimizers.base.recipe import HyperText, Recipe, Shape, States, StateSpec

#: The path of a class: its module, a colon, its name.
PATH = r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*$"

#: The unit of ownership: whole parameters, or an equal share of the elements of each.
UnitOfClass = Literal["whole", "element"]

#: The key with it, beside the arguments of a class, in a parameter group, and in the section below.
SPLIT = "split"

#: The name of the state that counts steps.
COUNT = "step"

#: Up to this number of elements, a class that reads values steps on the real shape.
_SMALL = 4096

#: The sides of the small parameter. None is another one, a product of others, or a likely constant
#: in a class.
_SIDES = (5, 7, 11, 13, 17, 19)

#: The number of steps that a class is asked for: two show which numbers change.
_STEPS = 2

#: The place of a count of steps in a parameter group.
_COUNT_OF_GROUP = f"optimizer.param_groups[0].{COUNT}"

StatePath = tuple[str | int, ...]


class ClientOptimizerConfig(Section):
    """``layerwise.client_optimizer``: settings for an optimizer object, in addition to its own."""

    example = "{'split': 'whole'}"

    split: UnitOfClass = "whole"
    """The unit of ownership: whole parameters, or "element" for evenly cut pieces, which an
    element-wise class can update. A ``split`` in a parameter group replaces it for that group.
    """


def _arguments(value: object) -> object:
    if isinstance(value, tuple):
        # The value is already a result of this function.
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("dict_type", "no keyword arguments")
    arguments = tuple((key, normalised(value[key])) for key in sorted(value))
    for key, argument in arguments:
        if key == SPLIT and argument not in ("whole", "element"):
            raise ValueError(f"split of a class must be 'whole' or 'element', got {argument!r}")
        if not _is_plain(argument):
            raise ValueError(
                f"the argument {key} of a class is {argument!r}; arguments are numbers, texts, "
                "true, false, null, and lists of them, so that ranks can compare them"
            )
    return arguments


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))


#: Keyword arguments, as pairs in the order of their names, with tuples for lists.
Arguments = Annotated[
    tuple[tuple[str, Any], ...], BeforeValidator(_arguments), WithJsonSchema({"type": "object"})
]


class AnyTorch(Recipe):
    """A class of ``torch.optim.Optimizer``, with its own arguments.

    Its ``lr`` and, if it has one, its ``weight_decay`` are those of the parameter group, so that
    schedulers move them. If it has none, decoupled weight decay is added. A subclass stands for one
    path.
    """

    params_key: ClassVar[str]
    """The name of the field with its arguments."""

    @model_validator(mode="after")
    def _decays_by_itself(self) -> AnyTorch:
        for key in Recipe.keys():
            if getattr(self, key) != Recipe.model_fields[key].default:
                raise ValueError(
                    f"{key} is {getattr(self, key)!r}, and {self.rule} decays weights in its own "
                    "way; give it arguments in matrix_params or scalar_params, and the key to the "
                    "parameters of other optimizers, in layerwise.overrides"
                )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a call that makes an equal recipe in another process. That process has no module
        with this type, and pipeline stages send each other their routes.
        """
        return _again, (self.rule, self.for_matrices, self.model_dump(exclude_unset=True))

    @property
    def whole(self) -> bool:  # type: ignore[override]
        """True unless the user says that the class updates each element by itself."""
        return dict(getattr(self, self.params_key)).get(SPLIT) != "element"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class, without ``lr`` and ``weight_decay``."""
        found = dict(getattr(self, self.params_key))
        found.pop(SPLIT, None)
        return found

    def make(self, *params: Tensor) -> Optimizer:
        """Return a new optimizer for ``params`` with an ``lr`` of 1e-3.

        Raises:
            ConfigError: there is no such class, it does not accept the arguments, or it has no
                ``lr``.
        """
        of_groups = sorted({"lr", "weight_decay", "params"} & self.arguments.keys())
        if of_groups:
            raise ConfigError(
                f"{self.rule} is given {', '.join(of_groups)}, which parameter groups have; set "
                "optimizer.params.lr (muon_lr for matrices) and optimizer.params.weight_decay"
            )
        kind: Any = class_at(self.rule)
        with _naming(f"{self.rule} cannot be made with {self.arguments or 'no arguments'}"):
            optimizer: Optimizer = kind(list(params), lr=1e-3, **self.arguments)
        if "lr" not in optimizer.param_groups[0]:
            raise ConfigError(
                f"{self.rule} keeps no lr in its parameter groups, so that no schedule could move "
                "it"
            )
        return optimizer

    def wants(self, key: str) -> bool:
        """Tell whether the class has an argument ``key`` that is not set."""
        return key not in self.arguments and key in signature(class_at(self.rule)).parameters

    def states(self, shape: Shape) -> States:
        """Return the states that a step of the class makes."""
        return kept_of(self, shape).specs()

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of the matrix products of a step. Decompositions do not count."""
        return kept_of(self, shape).flops

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of a copy of the gradient, which a class may write to, and of two more
        tensors of its size, as AdamW needs.
        """
        return 3 * super().workspace(shape)

    def refusal(self, shape: Shape, *, cut_axis: Any = None) -> str | None:
        """Return the error of the class for such a matrix; refuse shards of matrices."""
        if cut_axis is None:
            try:
                kept_of(self, shape)
            except ConfigError as e:
                return f"cannot be trained by {self.rule}: {e}"
        return super().refusal(shape, cut_axis=cut_axis)

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True, because nothing is known about the rates of the class."""
        return True

    def summary(self, hyper: HyperText) -> str:
        """Return the arguments as text."""
        return ", ".join(f"{key} {value}" for key, value in self.arguments.items())


class MatrixTorch(AnyTorch):
    """The recipe of a class for matrices."""

    params_key = "matrix_params"
    matrix_params: Arguments = ()
    """The keyword arguments of ``matrix_optimizer``, if that is a class, and ``split``."""


class ScalarTorch(AnyTorch):
    """The recipe of a class for the other parameters, which it sees in their own shapes."""

    lr_ratio = "scalar_lr_ratio"
    own_shapes = True
    params_key = "scalar_params"
    scalar_params: Arguments = ()
    """The keyword arguments of ``scalar_optimizer``, if that is a class, and ``split``."""


class ClientTorch(AnyTorch):
    """The class of an optimizer object, with the settings of one of its parameter groups. A
    subclass stands for one group. It sees parameters in their own shapes.
    """

    own_shapes = True
    maker: ClassVar[Callable[[Sequence[Tensor]], Optimizer]]
    """The function that makes optimizers like the object."""
    told: ClassVar[Mapping[str, str]] = {}
    """The settings of the group by name, as text that is equal on ranks with the same settings."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings of the group."""
        return dict(self.told)

    def make(self, *params: Tensor) -> Optimizer:
        """Return a new optimizer like the object for ``params``."""
        return type(self).maker(params)

    def summary(self, hyper: HyperText) -> str:
        """Return the settings of the group as text, without switches that are off."""
        return ", ".join(
            f"{key} {value}" for key, value in self.told.items() if value not in ("None", "False")
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the group. Overrides cannot change any of them."""
        return self.arguments

    @staticmethod
    def check_override(name: str, changes: Mapping[str, Any]) -> None:
        """Refuse override keys that are not possible for a parameter of a client optimizer.

        Raises:
            ConfigError: names the key.
        """
        takes = ("lr", "lr_scale", "min_lr", "weight_decay")
        for key in changes:
            if key not in takes:
                raise ConfigError(
                    f"layerwise.overrides sets {key} for {name}, which the optimizer given to "
                    f"initialize() trains: they can set {', '.join(takes)}; set the rest in a "
                    "parameter group of its own"
                )


# --- the states of a class ---


class _UnableError(ConfigError):
    """The class cannot be constructed for a parameter, or cannot step on it."""


@dataclass(frozen=True)
class Leaf:
    """A tensor or a number in the states of a class."""

    key: str
    """The name in this package; :data:`COUNT` if it counts steps."""
    kind: type
    """Tensor, or the type of the number."""
    spec: StateSpec
    ahead: int | None
    """The difference of a counter to the number of steps; None for others."""


@dataclass(frozen=True)
class Kept:
    """The states that a class keeps for a parameter of one shape."""

    state: Any
    """The state with a :class:`Leaf` in place of each tensor or number."""
    ahead: int | None
    """The difference to the number of steps of a counter in a parameter group; None without one."""
    flops: int

    def specs(self) -> States:
        """Return the specs of all states by their names in this package."""
        specs = {}
        for leaf in flat(self.state).values():
            if isinstance(leaf, Leaf) and leaf.ahead is None:
                specs[leaf.key] = leaf.spec
        return {**specs, COUNT: StateSpec((), on_host=True)}


@lru_cache(maxsize=None)
def kept_of(recipe: AnyTorch, shape: Shape) -> Kept:
    """Return the states that the class of ``recipe`` keeps for a parameter of ``shape``.

    Raises:
        ConfigError: it cannot step on it, goes on from something that is not in the state of a
            parameter, or keeps something that is neither a tensor nor a number.
    """
    try:
        return _asked(recipe, shape, "meta")
    except _UnableError:
        small = shape
    if math.prod(shape) > _SMALL:
        small = _SIDES[-len(shape) :]
    kept = _asked(recipe, small, "cpu")
    sides = {math.prod(small): math.prod(shape), **dict(zip(small, shape, strict=True))}

    def grown(_: StatePath, leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        of_real = tuple(sides.get(side, side) for side in leaf.spec.shape)
        return replace(leaf, spec=replace(leaf.spec, shape=of_real))

    return replace(kept, state=rebuilt(kept.state, grown))


def _asked(recipe: AnyTorch, shape: Shape, device: str) -> Kept:
    """Return the states that the class makes for a parameter on ``device``."""
    with _aside(), FlopCounterMode(display=False) as counter:
        param = torch.randn(shape, dtype=torch.float32, device="cpu").to(device)
        with _naming(f"{recipe.rule} cannot be made for a parameter"):
            optimizer = recipe.make(param)
        before = _elsewhere(optimizer)
        states = []
        for _ in range(_STEPS):
            param.grad = torch.randn_like(param)
            with _naming(f"{recipe.rule} cannot step on a parameter of {shape}"):
                optimizer.step()
            states.append(rebuilt(optimizer.state.get(param, {}), lambda _, value: value))
    after = _elsewhere(optimizer)
    changed = [where for where in after if after[where] != before.get(where)]
    changed += [f"optimizer.state[{key!r}]" for key in optimizer.state if key is not param]
    if changed and changed != [_COUNT_OF_GROUP]:
        raise ConfigError(
            f"{recipe.rule} goes on from {few(changed)}, and not from optimizer.state[param] "
            "alone: ranks own some parameters each, and a checkpoint has what is kept of each; "
            "this class cannot be used here"
        )
    first, last = states
    seen = flat(first)

    def leaf(path: StatePath, value: Any) -> Any:
        return _leaf(recipe.rule, ".".join(map(str, path)), plain_tensor(value), seen.get(path))

    return Kept(
        state=rebuilt(last, leaf),
        ahead=after[_COUNT_OF_GROUP] - _STEPS if changed else None,
        flops=counter.get_total_flops() // _STEPS,
    )


def _elsewhere(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers that an optimizer has outside of its states, and the versions of its
    tensors there, by place.
    """
    (group,) = optimizer.param_groups
    places = {}
    for key, value in vars(optimizer).items():
        if key not in ("defaults", "state", "param_groups"):
            places[f"optimizer.{key}"] = value
    for key, value in group.items():
        if key not in ("params", "lr", "weight_decay"):
            places[f"optimizer.param_groups[0].{key}"] = value
    found = {}
    for path, value in flat(places).items():
        if isinstance(value, Tensor):
            found[".".join(map(str, path))] = (id(value), value._version)
        elif type(value) in (int, float):
            found[".".join(map(str, path))] = value
    return found


def _leaf(rule: str, key: str, value: Any, first: Any) -> Any:
    """Return a :class:`Leaf` for ``value``, or the value itself if it is a constant.

    Args:
        first: the value in its place one step before.
    """
    if value is None or isinstance(value, (str, torch.dtype, torch.device)):
        return value
    spec = StateSpec((), "float64", on_host=True)
    # A subclass, as for quantised states, would come back from this package's state as a plain
    # tensor.
    if type(value) is Tensor:
        spec = StateSpec(tuple(value.shape), str(value.dtype)[6:], on_host=not value.dim())
    elif not isinstance(value, (int, float)):
        raise ConfigError(
            f"{rule} keeps {key} of a parameter as {type(value).__name__}, which is neither a "
            "plain tensor nor a number; it could not be saved"
        )
    elif value == first:
        return value
    if spec.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"{rule} keeps {key} in {spec.dtype}, which cannot be saved; known: "
            f"{', '.join(DTYPE_BYTES)}"
        )
    ahead = None
    if key == COUNT and not spec.shape:
        ahead = 0
        if not (isinstance(value, Tensor) and value.is_meta):
            ahead = int(value) - _STEPS
    elif key in (COUNT, "fp32"):
        key = f"own.{key}"
    return Leaf(key, type(value), spec, ahead)


def plain_tensor(value: Any) -> Any:
    """Return the tensor that an ``nn.Parameter`` is, and anything else as it is."""
    return value.detach() if type(value) is torch.nn.Parameter else value


def flat(value: Any) -> dict[StatePath, Any]:
    """Return every leaf of nested dicts, lists and tuples, by its path."""
    found: dict[StatePath, Any] = {}
    rebuilt(value, found.__setitem__)
    return found


def rebuilt(value: Any, change: Callable[[StatePath, Any], Any], path: StatePath = ()) -> Any:
    """Return the same dicts, lists and tuples, with each leaf replaced by the result of
    ``change``.
    """
    if isinstance(value, Mapping):
        found = {}
        for key, each in value.items():
            found[key] = rebuilt(each, change, (*path, key))
        return found
    if isinstance(value, (list, tuple)):
        items = [rebuilt(each, change, (*path, index)) for index, each in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return change(path, value)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Replace an error of foreign code by one that names ``what`` failed.

    Raises:
        _UnableError: that code has raised.
    """
    try:
        yield
    except ConfigError:
        raise
    except FOREIGN_ERRORS as e:
        text = " ".join(str(e).split())
        raise _UnableError(f"{what}: {type(e).__name__}: {text}") from e


@contextmanager
def _aside() -> Iterator[None]:
    """Leave the run's random numbers unchanged, and ignore its default device."""
    state, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    finally:
        random.setstate(state)
        numpy.random.set_state(of_numpy)


# --- the path of a class ---

#: The names of optimizers in a config, in addition to those of the registry.
Path = Annotated[
    str,
    Field(pattern=PATH, json_schema_extra={"expects": "the path of a class, package.module:Class"}),
]


@lru_cache(maxsize=None)
def any_of(*named: str) -> Any:
    """Return the type of a key that allows one of ``named``, or the path of a class."""
    return Literal[named] | Path


def is_path(name: object) -> bool:
    """Tell whether ``name`` is the path of a class."""
    return isinstance(name, str) and re.match(PATH, name) is not None


def class_at(path: str) -> type[Optimizer]:
    """Return the class at ``path``.

    Raises:
        ConfigError: there is none, or it is not a ``torch.optim.Optimizer``.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"{path} cannot be imported ({e}); write the path of a class as "
            "package.module:Class, and install its package on every node"
        ) from e
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{path} is no class of torch.optim.Optimizer, got {found!r}")
    return found


def path_of(kind: type) -> str:
    """Return the path of the class ``kind`` in a config: in the outermost package that
    exports it.
    """
    name = kind.__qualname__.rpartition(".")[2]
    module = ""
    for part in kind.__module__.split("."):
        module = f"{module}.{part}".lstrip(".")
        if getattr(sys.modules.get(module), name, None) is kind:
            break
    return f"{module}:{name}"


def family_at(path: str) -> str:
    """Return the unique name of the class at ``path``, however a config writes it: the result of
    :func:`path_of`; for a class of the script, the name with which other scripts import it. Nothing
    is imported. If there is no class at ``path`` now, it is returned unchanged.
    """
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None) if name else None
    if not isinstance(kind, type):
        return path
    module, _, name = path_of(kind).partition(":")
    return f"{_name_of_script() if module == '__main__' else module}:{name}"


def are_one_family(saved: str, own: str) -> bool:
    """Tell whether the family ``saved`` of a checkpoint is ``own`` of this run. Both are results of
    :func:`family_at`.

    A script may have been renamed since, or be started as a module. So a class of the running
    script matches a class of the same name in a module that is neither loaded nor part of an
    installed package.
    """
    was, _, name = saved.rpartition(":")
    script, _, own_name = own.rpartition(":")
    return saved == own or (
        bool(was)
        and name == own_name
        and script == _name_of_script()
        and was not in sys.modules
        and not _is_installed(was.partition(".")[0])
    )


@lru_cache(maxsize=None)
def _is_installed(module: str) -> bool:
    spec = find_spec(module)
    if spec is None:
        return False
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = tuple(map(sysconfig.get_path, kinds))
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(place.startswith(folders) for place in places)


def _name_of_script() -> str:
    """Return the name with which other scripts import the running one."""
    script = sys.modules["__main__"]
    if spec := getattr(script, "__spec__", None):
        return str(spec.name)
    if file := getattr(script, "__file__", None):
        return PurePath(file).stem
    return "__main__"


@lru_cache(maxsize=None)
def recipe_of(path: str, *, for_matrices: bool) -> type[AnyTorch]:
    """Return the recipe of the class at ``path``. Only that class can use its states."""
    return subclass(MatrixTorch if for_matrices else ScalarTorch, path)


def subclass(base: type[T], path: str, **values: Any) -> type[T]:
    """Return a subclass of ``base`` for a class by its path, with ``values`` as class variables."""
    body = {"rule": path, "family": path, "__module__": __name__, "__doc__": base.__doc__, **values}
    metaclass: Any = type(base)
    made: type[T] = metaclass(path, (base,), body)
    return made


def _again(path: str, for_matrices: bool, settings: dict[str, Any]) -> AnyTorch:
    return recipe_of(path, for_matrices=for_matrices)(**settings)
