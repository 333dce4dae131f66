"""Look up a dotted name of another package."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

_NOTHING: Any = object()


class Absent(Exception):
    """A dotted name does not exist; ``part`` is the part that is missing."""

    def __init__(self, part: str, why: str = "is not there") -> None:
        super().__init__(f"{part} {why}")
        self.part = part


def find(path: str) -> Any:
    """Return the object that ``path`` names: a module, or something reached from one by attributes.

    Raises:
        Absent: some part of it is not there.
    """
    value, module, parts = None, "", path.split(".")
    for done, part in enumerate(parts):
        if value is None or isinstance(value, ModuleType):
            # Import statements try the module first. A module may have an attribute of the same name.
            module = ".".join(parts[: done + 1])
            if (imported := _imported(module)) is not None:
                value = imported
                continue
        value = getattr(value, part, _NOTHING)
        # A module may still hold a submodule that cannot be imported again.
        if (
            value is _NOTHING
            or getattr(value, "__name__", None) == module
            and isinstance(value, ModuleType)
        ):
            raise Absent(".".join(parts[: done + 1]))
    return value


def owner_of(path: str) -> tuple[Any, str]:
    """Return the class or module that ``path`` is an attribute of, and the attribute's name.

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
    """Return whether ``owner`` defines ``name``: a module, or a class with the bases that are of its package."""
    return (
        any(name in vars(base) for base in bases_of(owner))
        if isinstance(owner, type)
        else hasattr(owner, name)
    )


def bases_of(owner: type) -> list[type]:
    """Return the classes of its package that ``owner`` is derived from, itself among them."""
    package = owner.__module__.partition(".")[0]
    return [base for base in owner.__mro__ if base.__module__.partition(".")[0] == package]
