"""The end of a process that has had process groups.

Note: threads under an interpreter that ends
    A gloo group has threads, which live as long as anything refers to it, ended or not; DeepSpeed's
    modules do. One that lets go of a tensor of Python's while the interpreter is taken apart ends
    the process with SIGABRT ("terminate called without an active exception"), and the launcher
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
    """End the process once its threads, and what ``atexit`` knows of, are done, groups ended and
    open files written.

    For the last line of a script. The interpreter is not taken apart: no destructor runs.

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
    _write_out()
    os._exit(code)


def _write_out() -> None:
    """Write what files hold back; what goes through a compressed file or an archive needs that
    one's ``close``.

    What cannot be written is told on stderr; the interpreter's end would lose it in silence.
    """
    gc.unfreeze()
    # By the class: isinstance() asks a proxy for what it stands for, which may run anything.
    files = [thing for thing in gc.get_objects() if io.IOBase.__base__ in type(thing).__mro__]
    lost: dict[str, str] = {}
    # A text goes through bytes, and fails once more there.
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):
        with (attempt := Attempt()):
            file.flush()
        # The process at the other end of a pipe has what it wanted; what is detached from its file
        # has nothing.
        if attempt.error is not None and not isinstance(
            attempt.error, (BrokenPipeError, ValueError)
        ):
            lost.setdefault(repr(getattr(file, "name", type(file))), str(attempt.error))
    for name, why in lost.items():
        # There may be nobody left to tell.
        with Attempt():
            sys.stderr.write(f"ds_layerwise: {name} could not be written at the end: {why}\n")
            sys.stderr.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed


class Attempt:
    """Files of other packages fail with anything; none of it goes any further."""

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None
