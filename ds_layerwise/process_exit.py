"""The exit of a process that has had process groups.

Note: threads and the end of the interpreter
    A gloo group has threads. They live as long as anything refers to the group, even after it was
    destroyed, and DeepSpeed's modules do. If a thread releases a Python tensor during the shutdown
    of the interpreter, the process dies with SIGABRT ("terminate called without an active
    exception"), and the launcher reports a finished run as failed. So :func:`leave` ends a script
    that comes to its end, or to ``sys.exit(0)``, without that shutdown. After an error the process
    exits as usual, because other ranks may not have it: destroying a group may wait for ranks that
    wait for this one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
from typing import NoReturn


def leave(code: int = 0) -> NoReturn:
    """End the process after its threads and its ``atexit`` functions.

    Call it in the last line of a script. Groups are destroyed and open files are written, but the
    interpreter is not shut down: no destructor runs.

    Args:
        code: the exit code. Every rank must call this, with any code.
    """
    # This is how multiprocessing ends its processes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter does
    _flush_open_files()
    os._exit(code)


def _flush_open_files() -> None:
    """Flush all open files, and report on stderr which ones cannot be written."""
    gc.unfreeze()
    lost: dict[str, Exception] = {}
    for file in gc.get_objects():
        # Check the class: isinstance() would ask a proxy object, which may run any code.
        if not issubclass(type(file), io.IOBase.__base__):  # type: ignore[arg-type]
            continue
        with (attempt := Attempt()):
            file.flush()
        error = attempt.error
        # The pipe has no reader any more, or the file is closed.
        if error is not None and not isinstance(error, (BrokenPipeError, ValueError)):
            # A text file and its byte stream both fail.
            lost.setdefault(repr(getattr(file, "name", type(file))), error)
    for name, reason in lost.items():
        # There may be no reader any more.
        with Attempt():
            sys.stderr.write(f"ds_layerwise: {name} could not be written at the end: {reason}\n")
            sys.stderr.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # the output that C libraries have printed


class Attempt:
    """A context manager that keeps an exception as ``error`` and stops it."""

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None

    def raise_original(self) -> None:
        """Raise the exception, if there is one, and drop the reference to it: its traceback keeps
        tensors alive.
        """
        error = self.error
        self.error = None
        if error is not None:
            raise error
