"""The end of a process that has had process groups.

Note: threads under an interpreter that ends
    A gloo group has threads, which live as long as anything refers to it, ended or not; DeepSpeed's modules do. One
    that lets go of a tensor of Python's while the interpreter is taken apart ends the process with SIGABRT ("terminate
    called without an active exception"), and the launcher reports a finished run as failed. So a script that comes to
    its end, or to ``sys.exit(0)``, is ended by :func:`leave`, after which nothing is taken apart. An error that other
    ranks may not have goes its own way: ending a group may wait for ranks that wait for this one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
from typing import Any, NoReturn


def leave(code: int = 0) -> NoReturn:
    """End the process once its threads, and what ``atexit`` knows of, are done, groups ended and open files written.

    For the last line of a script. The interpreter is not taken apart: of what a destructor would do, only the end of
    files, of zip archives and of shelves is done.

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
    """Write what open files hold back, as the interpreter's end would.

    What cannot be written is told on stderr; the interpreter's end would lose it in silence.
    """
    gc.unfreeze()
    kept = {id(stream) for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)}
    # By the classes: isinstance() asks a proxy for what it stands for, which may run anything.
    everything = gc.get_objects()
    found = [thing for thing in everything if io.IOBase.__base__ in type(thing).__mro__ and id(thing) not in kept]
    lost: dict[str, str] = {}
    for whole in _wholes(everything):
        with (attempt := Attempt()):
            whole.close()
        if attempt.error is not None:
            lost[f"{type(whole).__name__} {getattr(whole, 'filename', '')}".strip()] = str(attempt.error)
    for file in sorted(found, key=_depth):
        with (attempt := Attempt()):
            if type(file) not in _IN_MEMORY and not file.closed and file.writable():
                # A compressed file has its last bytes from close() alone, and one of an object store all of them.
                file.flush() if _is_plain(file) else file.close()
        # The process at the other end of a pipe has what it wanted; what is detached from its file has nothing.
        if attempt.error is not None and not isinstance(attempt.error, (BrokenPipeError, ValueError)):
            # A file that a text goes through fails once more by itself.
            lost.setdefault(_name_of(file), str(attempt.error))
    for name, why in lost.items():
        # There may be nobody left to tell.
        with Attempt():
            sys.stderr.write(f"ds_layerwise: {name} could not be written at the end: {why}\n")
            sys.stderr.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed


def _wholes(things: list[Any]) -> list[Any]:
    """Those of ``things`` that their destructors complete, in the library that comes with Python."""
    kinds = [kind for module, name in (("zipfile", "ZipFile"), ("shelve", "Shelf"))
             if (kind := getattr(sys.modules.get(module), name, None)) is not None]
    return [thing for thing in things if any(kind in type(thing).__mro__ for kind in kinds)]


_IN_MEMORY = (io.BytesIO, io.StringIO)
_PLAIN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


def _is_plain(file: Any) -> bool:
    return issubclass(type(file), _PLAIN)


def _depth(file: Any) -> int:
    """What a file is written through comes after it: text, what turns bytes into others, bytes."""
    if io.TextIOBase.__base__ in type(file).__mro__:
        return 0
    return 2 if _is_plain(file) else 1


class Attempt:
    """Files of other packages fail with anything; none of it goes any further."""

    error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def _name_of(file: Any) -> str:
    name = f"a file of {type(file)}"
    with Attempt():
        name = repr(file.name)
    return name
