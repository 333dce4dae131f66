"""The recipes of classes of ``torch.optim.Optimizer``, by path.

Only steps of such a class show its states. :mod:`ds_layerwise.optimizers.foreign.probe` makes some
on tensors without memory. It is imported by its name, like rules, because it needs torch.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.fields import T, normalised
from ds_layerwise.optimizers.base.recipe import HyperText, Recipe, Shape, States

#: The path of a class: its module, a colon, its name.
PATH = r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*$"


def _arguments(value: object) -> object:
    if isinstance(value, tuple):
        # The value is already a result of this function.
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("dict_type", "no keyword arguments")
    arguments = tuple((key, normalised(value[key])) for key in sorted(value))
    for key, argument in arguments:
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
        return _again, (self.rule, self.whole, self.model_dump(exclude_unset=True))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the class, without ``lr`` and ``weight_decay``."""
        return dict(getattr(self, self.params_key))

    def wants(self, key: str) -> bool:
        """Tell whether the class has an argument ``key`` that is not set."""
        return key not in self.arguments and key in signature(_probe().class_of(self)).parameters

    def states(self, shape: Shape) -> States:
        """Return the states that a probe of the class has found."""
        states: States = _probe().kept_of(self, shape).specs()
        return states

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of the matrix products of a step, counted in a probe. Decompositions do
        not count.
        """
        return int(_probe().kept_of(self, shape).flops)

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of a copy of the gradient, which a class may write to, and of two more
        tensors of its size, as AdamW needs.
        """
        return 3 * super().workspace(shape)

    def refusal(self, shape: Shape, *, cut_axis: Any = None) -> str | None:
        """Return the error of the class for such a matrix; refuse shards of matrices."""
        if cut_axis is None:
            try:
                _probe().kept_of(self, shape)
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


class WholeTorch(AnyTorch):
    """The recipe of a class on whole matrices."""

    whole = True
    params_key = "matrix_params"
    matrix_params: Arguments = ()
    """The keyword arguments of ``matrix_optimizer``, if that is a class."""


class ElementTorch(AnyTorch):
    """The recipe of a class that updates every element independently, so that parameters may be cut
    anywhere.
    """

    whole = False
    lr_ratio = "scalar_lr_ratio"
    params_key = "scalar_params"
    scalar_params: Arguments = ()
    """The keyword arguments of ``scalar_optimizer``, if that is a class."""


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
def recipe_of(path: str, *, whole: bool) -> type[AnyTorch]:
    """Return the recipe of the class at ``path``. Only that class can use its states."""
    return subclass(WholeTorch if whole else ElementTorch, path)


def subclass(base: type[T], path: str, **values: Any) -> type[T]:
    """Return a subclass of ``base`` for a class by its path, with ``values`` as class variables."""
    body = {"rule": path, "family": path, "__module__": __name__, "__doc__": base.__doc__, **values}
    metaclass: Any = type(base)
    made: type[T] = metaclass(path, (base,), body)
    return made


def _again(path: str, whole: bool, settings: dict[str, Any]) -> AnyTorch:
    return recipe_of(path, whole=whole)(**settings)


def _probe() -> Any:
    return import_module("ds_layerwise.optimizers.foreign.probe")
