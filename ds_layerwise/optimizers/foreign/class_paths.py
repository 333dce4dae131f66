"""The path of a class in a config, and the name of its family in a checkpoint."""

from __future__ import annotations

import re
import sys
import sysconfig
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePath
from typing import Annotated

from pydantic import Field
from torch.optim import Optimizer

from ds_layerwise.errors import ConfigError

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
