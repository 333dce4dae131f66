"""The message that DeepSpeed is compiling an operator, which takes minutes without any output."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_layerwise.output import announce

#: The seconds after which a lock may be that of a killed process. Every start locks the folder for
#: a moment, to look whether the operator is up to date.
_LOCKED_FOR = 60


def _jit_load(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
    """Print on the first rank of a node which operator DeepSpeed compiles, unless it is compiled
    already.
    """
    if not builder.is_compatible(verbose=False):
        # DeepSpeed explains the reason itself.
        return original(*args, **options)
    # Importing the extension tools takes a while, and few starts need them.
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
    line = progress(builder.name, folder)
    if os.environ.get("LOCAL_RANK", "0") == "0" and line:
        announce(f"ds_layerwise: {line}")
    return original(*args, **options)


def progress(name: str, folder: Path) -> str:
    """Return the line about the operator ``name`` that is compiled in ``folder``; empty if it is
    there.
    """
    lock = folder / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        age = 0.0
    if age > _LOCKED_FOR:
        return (
            f"DeepSpeed waits for another process to compile {name}; if there is none, because an "
            f"earlier start was killed, stop this one and delete {lock}"
        )
    if (folder / f"{name}.so").exists():
        return ""
    return (
        f"DeepSpeed compiles {name} in {folder}; this takes one to three minutes, only at the "
        "first start"
    )


WRAPS = {"jit_load": _jit_load}
