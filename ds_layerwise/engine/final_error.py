"""The end of a run by an error of this package: one framed message of one rank instead of a
traceback of each.

Note: which rank prints
    Most errors are raised on all ranks. Rank 0 prints its own error and records that in the store
    of the process group. The other ranks wait for this record before they exit, because a launcher
    ends every rank once one has failed. Rank 0 waits until they have read it, because the store may
    end with rank 0. A rank that finds no record in time is the only one with an error, and prints
    it itself.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import distributed

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import say
from ds_layerwise.ranks.comm.comm import AGREED

#: The time in seconds that ranks wait for each other.
_PATIENCE = 10

_TOLD = "ds_layerwise/told"
_HEARD = "ds_layerwise/heard"

_NOT_OF_THE_SCRIPT = (
    "<",
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
)
_INSTALLED = {"site-packages", "dist-packages"}

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


#: The kind of the error that has ended the script, if there is one.
_ended_by: list[type[BaseException]] = []


def has_failed() -> bool:
    """Tell whether an uncaught error has ended the script."""
    # In a process of multiprocessing, the error is still being handled while the process ends.
    return bool(_ended_by) or sys.exc_info()[0] not in (None, SystemExit)


def begin() -> None:
    """Print uncaught errors of this package once. All other errors go to the existing hook."""
    if not _is_ours(sys.excepthook):
        sys.excepthook = partial(_tell, sys.excepthook)


def end() -> None:
    """Restore the earlier hook."""
    if _is_ours(sys.excepthook):
        sys.excepthook = sys.excepthook.args[0]  # type: ignore[attr-defined]


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, partial) and hook.func is _tell


def _tell(
    earlier: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _ended_by.append(kind)
    if sys.flags.dev_mode or not (isinstance(error, LayerWiseError) or hasattr(error, AGREED)):
        earlier(kind, error, trace)
        return
    store: Any = (
        distributed.distributed_c10d._get_default_store() if distributed.is_initialized() else None
    )
    rank = int(os.environ.get("RANK", 0)) if store is None else distributed.get_rank()
    if not isinstance(error, (LayerWiseError, OSError, ValueError)):
        # The error is unexpected, so its traceback is needed. The errors of other ranks only name
        # this rank.
        earlier(kind, error, trace)
    elif not (rank and _is_told(store)):
        say(framed(error), sys.stderr)
    if rank == 0 and store is not None:
        others = [f"{_HEARD}/{rank}" for rank in range(1, distributed.get_world_size())]
        # A launcher may have ended the process with the store.
        with suppress(RuntimeError):
            store.set(_TOLD, "")
            wait_for(store, others, _PATIENCE)
    # Call the other hooks in the chain, which may report errors elsewhere. Python's own, at its
    # end, prints a traceback, which is dropped.
    with redirect_stderr(StringIO()):
        earlier(kind, error, trace)


def _is_told(store: Any) -> bool:
    """Tell whether rank 0 has printed an error of its own within :data:`_PATIENCE`."""
    if store is None:
        # If rank 0 has failed, a launcher ends this rank during the sleep.
        time.sleep(_PATIENCE)
        return False
    with suppress(RuntimeError):
        if wait_for(store, [_TOLD], _PATIENCE):
            store.set(f"{_HEARD}/{distributed.get_rank()}", "")
            return True
    return False


def wait_for(store: Any, keys: list[str], seconds: float) -> bool:
    """Wait up to ``seconds`` for ``keys`` to be in ``store``. Return True if they are.

    The store's own ``wait`` logs lines of C++ if they are not.
    """
    until = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def framed(error: BaseException) -> str:
    """Return ``error`` in a few lines: the message, the line of the script that caused it, and
    where to read more.
    """
    places = traceback.extract_tb(error.__traceback__)
    lines = [f"ds_layerwise: {type(error).__name__}: {error}"]
    of_script = [
        place
        for place in places
        if not place.filename.startswith(_NOT_OF_THE_SCRIPT)
        and not _INSTALLED.intersection(Path(place.filename).parts)
    ]
    if of_script:
        place = of_script[-1]
        lines.append(f"at {place.filename}:{place.lineno}, in {place.name}: {place.line}")
    if any(place.name == RunConfig.from_ds_config.__name__ for place in places):
        lines.append("to check a config without a run: ds-layerwise check FILE")
    lines.append("to see the whole traceback: PYTHONDEVMODE=1")
    bar = "=" * 100
    return "\n".join([bar, *lines, bar])
