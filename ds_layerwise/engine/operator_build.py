"""The message that DeepSpeed is compiling an operator, which takes minutes without any output."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_layerwise.output import announce

#: The seconds after which a start that is still not over may wait for a process that was killed.
_PATIENCE = 240.0
#: The same where a lock is there and nothing compiles.
_SHORT_PATIENCE = 5.0


def _jit_load(original: Callable[..., Any], builder: Any, *args: Any, **options: Any) -> Any:
    """Print on the first rank of a node which operator DeepSpeed compiles, unless it is compiled
    already, and after :data:`_PATIENCE` what it may be waiting for; soon, if a lock is there and
    no compiler.
    """
    if not builder.is_compatible(verbose=False):
        # DeepSpeed explains the reason itself.
        return original(*args, **options)
    # Importing the extension tools takes a while, and few starts need them.
    from psutil import process_iter
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return original(*args, **options)
    if not (folder / f"{builder.name}.so").exists():
        announce(
            f"ds_layerwise: DeepSpeed compiles {builder.name} in {folder}; this takes one to three "
            "minutes, only at the first start"
        )
    waits = (
        f"ds_layerwise: DeepSpeed still compiles {builder.name}, or waits for another process to "
        "do so; if there is none, because an earlier start was killed, stop this one and delete "
        f"{folder / 'lock'}"
    )
    stale = (folder / "lock").exists() and not any(
        process.info["name"] == "ninja" for process in process_iter(["name"])
    )
    still_there = threading.Timer(_SHORT_PATIENCE if stale else _PATIENCE, announce, [waits])
    still_there.daemon = True
    still_there.start()
    try:
        return original(*args, **options)
    finally:
        still_there.cancel()


WRAPS = {"jit_load": _jit_load}
