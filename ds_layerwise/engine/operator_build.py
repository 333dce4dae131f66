"""The message that DeepSpeed is compiling an operator, which takes minutes without any output."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_layerwise.output import announce


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
    lock = folder / "lock"
    is_built = (folder / f"{builder.name}.so").exists() and not lock.exists()
    if os.environ.get("LOCAL_RANK", "0") == "0" and not is_built:
        announce(f"ds_layerwise: {progress(builder.name, folder, is_locked=lock.exists())}")
    return original(*args, **options)


def progress(name: str, folder: Path, *, is_locked: bool) -> str:
    """Return the line about the operator ``name`` that is compiled in ``folder``.

    Args:
        is_locked: True if another process has locked the folder.
    """
    if is_locked:
        return (
            f"DeepSpeed waits for another process to compile {name}; if there is none, because an "
            f"earlier start was killed, stop this one and delete {folder / 'lock'}"
        )
    return (
        f"DeepSpeed compiles {name} in {folder}; this takes one to three minutes, only at the "
        "first start"
    )


WRAPS = {"jit_load": _jit_load}
