"""The end of a process that has had process groups.

Note: threads under an interpreter that ends
    A gloo group has threads, which live as long as anything refers to it, ended or not; DeepSpeed's
    modules do. A thread that lets go of a tensor of Python's while the interpreter is taken apart
    ends the process with SIGABRT ("terminate called without an active exception"), and the launcher
    reports a finished run as failed. So a script that comes to its end, or to ``sys.exit(0)``, is
    ended by :func:`leave`, after which nothing is taken apart. An error that other ranks may not
    have goes its own way: ending a group may wait for ranks that wait for this one.
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

    For the last line of a script. Groups are ended and open files are written, but the interpreter
    is not taken apart: no destructor runs.

    Args:
        code: the exit code; every rank leaves, with whatever code.
    """
    # As multiprocessing ends its processes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter's own
    _flush_open_files()
    os._exit(code)


def _flush_open_files() -> None:
    """Write what open files still have in memory, and report on stderr what cannot be written."""
    gc.unfreeze()
    lost: dict[str, Exception] = {}
    for file in gc.get_objects():
        # The class is asked: isinstance() asks a proxy, which may run anything.
        if not issubclass(type(file), io.IOBase.__base__):  # type: ignore[arg-type]
            continue
        with (attempt := Attempt()):
            file.flush()
        error = attempt.error
        # Nobody reads a pipe any more, or the file is closed.
        if error is not None and not isinstance(error, (BrokenPipeError, ValueError)):
            # A text and the bytes below it fail both.
            lost.setdefault(repr(getattr(file, "name", type(file))), error)
    for name, reason in lost.items():
        # Nobody may be left to read it.
        with Attempt():
            sys.stderr.write(f"ds_layerwise: {name} could not be written at the end: {reason}\n")
            sys.stderr.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed


class Attempt:
    """A block whose exception goes no further, and is kept as ``error``."""

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None
