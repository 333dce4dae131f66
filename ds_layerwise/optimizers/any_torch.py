"""Classes of ``torch.optim.Optimizer`` as recipes: named in a config by their path, or taken from
an object that a script passes to ``deepspeed.initialize``.

Note: what nobody checks
    A class updates whole parameters unless the user says that it is element-wise. Each parameter
    has an instance of its own, which goes on from ``optimizer.state[param]`` alone after a load.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.fields import Section, T, normalised
from ds_layerwise.optimizers.recipe import Hyper, HyperText, Recipe, Shape, State, States
from ds_layerwise.optimizers.torch_states import (
    COUNT,
    Kept,
    Leaf,
    flat,
    kept_of,
    naming,
    plain_tensor,
    rebuilt,
)

#: The path of a class: its module, a colon, its name.
PATH = r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*$"

#: The names of optimizers in a config, in addition to those of the registry.
Path = Annotated[
    str,
    Field(pattern=PATH, json_schema_extra={"expects": "the path of a class, package.module:Class"}),
]


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


@cache
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


#: The unit of ownership: whole parameters, or an equal share of the elements of each.
UnitOfClass = Literal["whole", "element"]

#: The key with it, beside the arguments of a class, in a parameter group, and in the section below.
SPLIT = "split"

#: The optimizer of each parameter, by the tensor that counts its steps. Recipes are values and keep
#: nothing.
_OPTIMIZERS = WeakTensorKeyDictionary()


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
    """A class of ``torch.optim.Optimizer``, with its own arguments, on float32 masters that are
    shaped as matrices, in their own shapes, or cut into 1-D pieces. A subclass stands for one path.

    Its ``lr`` and, if it has one, its ``weight_decay`` are those of the parameter group, so that
    schedulers move them. If it has none, weight decay is decoupled: ``W -= lr * weight_decay * W``
    before the step.

    State: the states of the class, see :mod:`.optimizers.torch_states`, and ``step``. Every
    parameter has an optimizer of its own for as long as its state exists. It works in the memory of
    the state if the class writes in place; tensors that the class makes anew are copied there.
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
        with naming(f"{self.rule} cannot be made with {self.arguments or 'no arguments'}"):
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
        """Return the arguments as text, without switches of a client's group that are off."""
        said = self.arguments.items()
        return ", ".join(f"{key} {value}" for key, value in said if value not in ("None", "False"))

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Let the parameter's own optimizer make a step.

        Raises:
            StepError: the class keeps other states than in the step that it was asked for.
        """
        step = int(state[COUNT])
        kept = kept_of(self, tuple(param.shape))
        optimizer: Optimizer | None = _OPTIMIZERS.get(  # type: ignore[no-untyped-call]
            state[COUNT]
        )
        if optimizer is None or not step:
            optimizer = _OPTIMIZERS[state[COUNT]] = self.make(param)
        (group,) = optimizer.param_groups
        group.update(hyper.of_client)
        group["params"] = [param]
        set_rate(group, hyper.lr)
        if "weight_decay" in group:
            group["weight_decay"] = hyper.weight_decay
        elif hyper.weight_decay:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        if step:
            if kept.ahead is not None:
                group[COUNT] = step + kept.ahead
            optimizer.state[param] = rebuilt(kept.state, lambda _, leaf: _value(leaf, state, step))
        # A class may write to the gradient, which may be read after the step.
        param.grad = grad.clone()
        try:
            optimizer.step()
            state[COUNT] += 1
            self._keep(optimizer.state.get(param, {}), param, kept, state)
        finally:
            # The optimizer outlives the step, but its tensors may be in temporary memory.
            param.grad = None
            group["params"] = []
            optimizer.state.clear()

    def _keep(self, found: Mapping[Any, Any], param: Tensor, kept: Kept, state: State) -> None:
        """Copy the tensors that the class has made anew into ``state``.

        Raises:
            StepError: they differ from those of ``kept``.
        """
        of_step = f"of a parameter of {tuple(param.shape)} after {int(state[COUNT])} steps"
        places = flat(kept.state)
        values = flat(found)
        for path, value in values.items():
            if isinstance(value, Tensor) and not isinstance(places.get(path), Leaf):
                raise StepError(
                    f"{self.rule} keeps {path} {tuple(value.shape)} "
                    f"{of_step}, which it did not in its first step; nothing has a place for it: "
                    "this class cannot be used here"
                )
        for path, leaf in places.items():
            if not isinstance(leaf, Leaf) or leaf.ahead is not None:
                continue
            place = state[leaf.key]
            value = plain_tensor(values.get(path))
            if leaf.kind is not Tensor:
                place.fill_(value)
            elif _told(value) != _told(place):
                raise StepError(
                    f"{self.rule} keeps {leaf.key} {of_step} as {_told(value)}, and its "
                    f"first step said {_told(place)}: this class cannot be used here"
                )
            elif value.data_ptr() != place.data_ptr():
                place.copy_(value)


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


@cache
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


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Set ``lr`` of a parameter group in the form of its present rate: a number, or a tensor, which
    its class may require.
    """
    rate = group["lr"]
    group["lr"] = lr
    if isinstance(rate, Tensor):
        group["lr"] = torch.full_like(rate, lr)


def _told(value: Any) -> str:
    if type(value) is Tensor:
        return f"{tuple(value.shape)} in {value.dtype}"
    return repr(value)


def _value(leaf: Any, state: State, step: int) -> Any:
    """Return the value that a class finds in the place of ``leaf`` after ``step`` steps."""
    if not isinstance(leaf, Leaf):
        return leaf
    if leaf.ahead is None:
        value = state[leaf.key]
        return value if leaf.kind is Tensor else leaf.kind(value.item())
    count = step + leaf.ahead
    if leaf.kind is not Tensor:
        return leaf.kind(count)
    return torch.tensor(count, dtype=getattr(torch, leaf.spec.dtype), device="cpu")
