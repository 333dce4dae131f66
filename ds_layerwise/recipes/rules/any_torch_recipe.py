"""Optimizers that nobody here wrote: any class of ``torch.optim.Optimizer``, by its path.

What such a class keeps, and from when on, only a step of it can tell.
:mod:`ds_layerwise.optimizers.foreign.probe` takes some on tensors without memory, and is found by
its name, like rules, because it takes torch.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import PurePath
from types import new_class
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ds_layerwise.recipes.base.fields import normalised
from ds_layerwise.recipes.base.recipe import Recipe, StateSpec

#: What names a class: its module, a colon, its name.
PATH = r"^[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*$"


def _arguments(value: object) -> object:
    if isinstance(value, tuple) and all(isinstance(each, tuple) for each in value):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("dict_type", "no keyword arguments")
    found = tuple((key, normalised(each)) for key, each in sorted(value.items()))
    for key, each in found:
        if not _is_plain(each):
            raise ValueError(
                f"the argument {key} of a class is {each!r}; arguments are numbers, texts, true, "
                "false, null, and lists of them, so that ranks can compare them"
            )
    return found


def _is_plain(value: object) -> bool:
    return (
        all(map(_is_plain, value))
        if isinstance(value, tuple)
        else value is None or isinstance(value, (str, bool, int, float))
    )


#: Keyword arguments, as pairs in the order of their names, with tuples for lists.
Arguments = Annotated[
    tuple[tuple[str, Any], ...], BeforeValidator(_arguments), WithJsonSchema({"type": "object"})
]


class AnyTorch(Recipe):
    """One class of ``torch.optim.Optimizer``, with its own arguments.

    Its ``lr`` and, where it has one, its ``weight_decay`` are those of the parameter group, so that
    schedules move them; where it has none, weight decay is decoupled, beside it. A subclass stands
    for one path.
    """

    hyper = ()

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
        """What another process makes an equal recipe of, which has no module to find its type in:
        stages of a pipeline tell each other their routes."""
        return _again, (
            self.rule,
            self.whole,
            {key: getattr(self, key) for key in self.model_fields_set},
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """What the class is called with, beside ``lr`` and ``weight_decay``."""
        raise NotImplementedError

    def wants(self, key: str) -> bool:
        """Whether it has an argument ``key`` that nobody has given."""
        return key not in self.arguments and key in signature(_probe().class_of(self)).parameters

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """What a probe of the class has kept."""
        found: dict[str, StateSpec] = _probe().states_of(self, shape)
        return found

    def work(self, shape: tuple[int, ...]) -> int:
        """The FLOPs of the matrix products of a step, as counted in a probe; decompositions count
        for none.
        """
        flops: int = _probe().kept_of(self, shape).flops
        return flops

    def workspace(self, shape: tuple[int, ...]) -> int:
        """A copy of the gradient, which a class may write to, and two more tensors like it: what
        AdamW takes.
        """
        return 3 * super().workspace(shape)

    def refusal(self, shape: tuple[int, ...], *, cut_axis: Any = None) -> str | None:
        """What the class says to such a matrix; and parts of matrices are refused."""
        if cut_axis is not None:
            return (
                f"is cut by tensor parallelism, and {self.rule} knows nothing of the other parts; "
                "send it to another optimizer with layerwise.overrides"
            )
        said: str | None = _probe().refusal_of(self, shape)
        return said

    @property
    def takes_rate_of_adamw(self) -> bool:
        """The class says which rates are right; one for all is, as far as anybody here knows."""
        return True

    def summary(self, hyper: Callable[[str], str]) -> str:
        """Its arguments."""
        return ", ".join(f"{key} {value}" for key, value in self.arguments.items())


class WholeTorch(AnyTorch):
    """Such a class on whole matrices."""

    whole = True
    matrix_params: Arguments = ()
    """Keyword arguments of ``matrix_optimizer``, where that is a class."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``matrix_params``."""
        return dict(self.matrix_params)


class ElementTorch(AnyTorch):
    """Such a class that updates every element as if it were alone: parameters may be cut
    anywhere.
    """

    whole = False
    lr_ratio = "scalar_lr_ratio"
    scalar_params: Arguments = ()
    """Keyword arguments of ``scalar_optimizer``, where that is a class."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``scalar_params``."""
        return dict(self.scalar_params)


#: What a config may say for the name of an optimizer, beside those of the registry.
Path = Annotated[
    str,
    Field(pattern=PATH, json_schema_extra={"expects": "the path of a class, package.module:Class"}),
]


@lru_cache(maxsize=None)
def any_of(*named: str) -> Any:
    """The type of a key that takes one of ``named``, or the path of a class."""
    return Literal[named] | Path


def is_path(name: object) -> bool:
    """Whether ``name`` is the path of a class."""
    return isinstance(name, str) and re.match(PATH, name) is not None


def path_of(kind: type) -> str:
    """What a config calls the class ``kind``: by the outermost package that has it."""
    name, parts = kind.__qualname__.rpartition(".")[2], kind.__module__.split(".")
    packages = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    found = next(
        (each for each in packages if getattr(sys.modules.get(each), name, None) is kind),
        kind.__module__,
    )
    return f"{found}:{name}"


def family_at(path: str) -> str:
    """The one name that the class at ``path`` goes by, however a config spells it: as
    :func:`path_of`, and of a script by the name with which another one imports it. Nothing is
    imported; what is no class by now stays as it is."""
    module, _, name = path.partition(":")
    kind = getattr(sys.modules.get(module), name, None) if name else None
    if not isinstance(kind, type):
        return path
    module, _, name = path_of(kind).partition(":")
    return f"{_name_of_script() if module == '__main__' else module}:{name}"


def are_one_family(saved: str, own: str) -> bool:
    """Whether the family ``saved`` of a checkpoint is ``own`` of this run, both as
    :func:`family_at` has them.

    A script may have another name by now, or be started as a module: a class of the script at hand
    is the one of its name in a module that is neither loaded nor of an installed package.
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
    found = find_spec(module)
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    places = [found.origin or "", *(found.submodule_search_locations or ())] if found else []
    return any(place.startswith(folder) for place in places for folder in folders)


def _name_of_script() -> str:
    """The name with which another script imports the one that runs."""
    script = sys.modules["__main__"]
    spec, file = getattr(script, "__spec__", None), getattr(script, "__file__", None)
    return spec.name if spec else PurePath(file).stem if file else "__main__"


@lru_cache(maxsize=None)
def recipe_of(path: str, *, whole: bool) -> type[AnyTorch]:
    """The recipe of the class at ``path``. Its states are of use to that class alone."""
    base = WholeTorch if whole else ElementTorch
    found: type[AnyTorch] = new_class(
        path,
        (base,),
        exec_body=lambda body: body.update(
            rule=path,
            family=path,
            __module__=__name__,
            __doc__=base.__doc__,
            __annotations__={"rule": ClassVar[str], "family": ClassVar[str]},
        ),
    )
    return found


def _again(path: str, whole: bool, settings: dict[str, Any]) -> AnyTorch:
    return recipe_of(path, whole=whole)(**settings)


def _probe() -> Any:
    return import_module("ds_layerwise.optimizers.foreign.probe")
