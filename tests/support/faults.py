"""Faults of one rank while it does something: it dies, its disk fails, a class is missing on its node."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ds_layerwise

PACKAGE = str(Path(ds_layerwise.__file__).parent)

#: The functions in C that make, fill, move and remove files. ``_exchange`` brackets ``renameat2``.
FILE_CALLS = {"write_record", "write_end_of_file", "mkdir", "rmdir", "unlink", "rename", "replace", "link", "open",
              "write", "flush", "fsync", "close", "sendfile", "chmod"}


class FileEvents:
    """Lists the calls and returns of this package's functions, and of those that touch files, while it is entered.

    It calls ``die`` at the event number ``die_at``, among those with the name ``die_in`` if there is one. By default
    ``die`` sends the signal that nothing can catch.
    """

    def __init__(self, die_at: int | None = None,
                 die: Callable[[], Any] = lambda: os.kill(os.getpid(), signal.SIGKILL), die_in: str = "") -> None:
        self.names: list[str] = []
        self._die_at, self._die, self._die_in, self._met = die_at, die, die_in, 0

    def __enter__(self) -> FileEvents:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: Any, event: str, arg: Any) -> None:
        if event.startswith("c_"):
            name = getattr(arg, "__name__", "")
            if name not in FILE_CALLS or isinstance(getattr(arg, "__self__", None), str):
                return
        elif frame.f_code.co_filename.startswith(PACKAGE):
            name = frame.f_code.co_name
        else:
            return
        if self._die_in in ("", name):
            if self._met == self._die_at:
                sys.setprofile(None)
                self._die()
            self._met += 1
        self.names.append(name)


@contextmanager
def no_larger_files(num_bytes: int, process: int = 0) -> Iterator[None]:
    """Let no file of this process, or of that number, grow beyond ``num_bytes``, as on a full disk."""
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        try:
            resource.prlimit(process, resource.RLIMIT_FSIZE, before)
        except ProcessLookupError:
            # The full disk may have ended the process.
            pass


#: Events of Python's audit hooks, by kind of fault.
AUDITED = {"read": {"open", "os.listdir", "os.scandir"},
           "write": {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}}


@dataclass
class DiskFault:
    """An error of a disk. The file operation ``number`` of a kind in ``folder`` fails, of those with ``name`` in their
    path below it; where it ``stays``, every later one fails, too.

    ``kind`` is "read", "write" or "stat".
    """

    kind: str
    number: int
    error: str
    stays: bool
    folder: str
    name: str = ""
    seen: int = 0
    fired: str = ""

    def meets(self, path: Any) -> bool:
        """Return whether the current operation, on ``path``, has to fail."""
        if not isinstance(path, (str, bytes, os.PathLike)) or not os.fsdecode(path).startswith(self.folder):
            return False
        if self.name not in os.fsdecode(path)[len(self.folder):]:
            return False
        self.seen += 1
        return self.seen > self.number if self.stays else self.seen == self.number + 1

    def check(self, what: str, path: Any) -> None:
        """Fail if the current operation has to.

        Raises:
            OSError: the error of the disk.
        """
        if self.meets(path):
            self.fired = self.fired or f"{what} of {Path(os.fsdecode(path)).name}"
            number = getattr(errno, self.error)
            raise OSError(number, os.strerror(number), os.fsdecode(path))


_fault: list[DiskFault] = []
_stat = os.stat


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _fault or event not in AUDITED.get(_fault[0].kind, ()):
        return
    if event == "open":
        writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if writes != (_fault[0].kind == "write"):
            return
    _fault[0].check(event, args[0])


def _failing_stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
    _fault[0].check("stat", path)
    return _stat(path, *args, **options)


def watch_files() -> None:
    """Let this process have faults of disks. Nothing undoes this."""
    sys.addaudithook(_audit)


@contextmanager
def failing_disk(fault: DiskFault) -> Iterator[DiskFault]:
    """Let the files of this process fail as ``fault`` says. :func:`watch_files` must have been called."""
    _fault[:] = [fault]
    if fault.kind == "stat":
        os.stat = _failing_stat
    try:
        yield fault
    finally:
        os.stat = _stat
        _fault.clear()
