"""Look up a dotted name of another package: whether it is there, with which parameters, set or asked for by whose code.

An attribute that objects only get when they are made is found in the code that sets it, so that none has to be made.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Hashable, Iterator, Sequence
from importlib import import_module
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_NOTHING: Any = object()


class Absent(Exception):
    """There is no such name; ``part`` of it is not there."""

    def __init__(self, part: str, why: str = "is not there") -> None:
        super().__init__(f"{part} {why}")
        self.part = part


def find(path: str) -> Any:
    """What ``path`` names: a module, or what is reached from one by attributes.

    Raises:
        Absent: some part of it is not there.
    """
    found, module, parts = None, "", path.split(".")
    for done, part in enumerate(parts):
        if found is None or isinstance(found, ModuleType):
            # As import statements do, and a module may have an attribute of the same name.
            module = ".".join(parts[:done + 1])
            if (imported := _imported(module)) is not None:
                found = imported
                continue
        found = getattr(found, part, _NOTHING)
        # A module may still hold one that it imported, and that cannot be imported.
        if found is _NOTHING or getattr(found, "__name__", None) == module and isinstance(found, ModuleType):
            raise Absent(".".join(parts[:done + 1]))
    return found


def owner_of(path: str) -> tuple[Any, str]:
    """The class or module that ``path`` is an attribute of, and the attribute's name.

    Raises:
        Absent: there is no such owner.
    """
    owner, _, name = path.rpartition(".")
    return find(owner), name


def _imported(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return None
        raise Absent(module, f"cannot be imported: {error}") from error
    except ImportError as error:
        raise Absent(module, f"cannot be imported: {error}") from error


def defines(owner: Any, name: str) -> bool:
    """Whether ``owner``, a module or a class with the bases that are of its package, defines ``name``."""
    return any(name in vars(base) for base in _bases(owner)) if isinstance(owner, type) else hasattr(owner, name)


def is_attribute(owner: Any, name: str) -> bool:
    """Whether ``owner`` defines ``name``, or its instances have such an attribute: a field, or set by its code."""
    if defines(owner, name) or not isinstance(owner, type):
        return defines(owner, name)
    fields = {**getattr(owner, "model_fields", {}), **getattr(owner, "__dataclass_fields__", {})}
    return name in fields or any(_sets(code, name) for code in codes_of(owner))


def is_asked_for(owner: Any, name: str) -> bool:
    """Whether code of ``owner``, a class or a module, asks something for its attribute ``name``."""
    return any(name in (*code.co_names, *code.co_consts) for code in codes_of(owner))


def difference(found: Any, expected: Sequence[str]) -> str | None:
    """How ``found`` differs from what is called with ``expected``, in this order or by name; None if it does not.

    It may take more, by default.
    """
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return "cannot be called"
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    # A decorator that takes anything does not say what is inside.
    takes_anything = not named and len(parameters) == 2
    as_expected = [p.name for p in named[:len(expected)]] == list(expected)
    if takes_anything or as_expected and all(p.default is not p.empty for p in named[len(expected):]):
        return None
    return f"takes {inspect.signature(found)}, not ({', '.join(expected)})"


def _sets(code: CodeType, name: str) -> bool:
    return (name in code.co_names or name in code.co_consts) and name in _all_set(code)


@functools.cache
def _all_set(code: CodeType) -> frozenset[str]:
    """The names of attributes that it sets."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    # Modules of torch are kept out of the list of submodules by self.__dict__["name"] = ...
    return frozenset({name for operation, name in steps if operation == "STORE_ATTR"} | {
        name for before, (operation, name), after in zip(steps, steps[1:], steps[2:])
        if before == ("LOAD_ATTR", "__dict__") and operation == "LOAD_CONST" and after[0] == "STORE_SUBSCR"})


@functools.cache
def codes_of(owner: Hashable) -> tuple[CodeType, ...]:
    """All code of a class and the classes of its package that it is derived from, or of a module."""
    if isinstance(owner, ModuleType):
        members = [value for value in vars(owner).values() if getattr(value, "__module__", None) == owner.__name__]
    elif isinstance(owner, type):
        members = [value for base in _bases(owner) for value in vars(base).values()]
    else:
        members = []
    return tuple(nested for value in members for function in _functions(value) for nested in _nested(function.__code__))


def _bases(owner: type) -> list[type]:
    package = owner.__module__.partition(".")[0]
    return [base for base in owner.__mro__ if base.__module__.partition(".")[0] == package]


def _functions(member: Any) -> Iterator[FunctionType]:
    members = (member.fget, member.fset) if isinstance(member, property) else (getattr(member, "__func__", member),)
    for each in members:
        function = inspect.unwrap(each) if callable(each) else None
        if isinstance(function, FunctionType):
            yield function
            # What a decorator goes around, and does not say so.
            for cell in function.__closure__ or ():
                if isinstance(inner := _content(cell), FunctionType):
                    yield from _functions(inner)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # It is empty as long as what it is for is being defined.
        return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
