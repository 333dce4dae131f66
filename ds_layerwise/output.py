"""Output to streams that may fail or lack characters. A failed output must not end the training."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

#: ASCII replacements for table frames and the other non-ASCII characters that this package writes.
#: All others become question marks.
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("─━═╌╍┄┅┈┉", "-"),
        **dict.fromkeys("│┃║╎╏┆┇┊┋", "|"),
        "…": "~",
        "×": "x",
        **{chr(code): "+" for code in (*range(0x250C, 0x254C), *range(0x2552, 0x256D))},
    }
)

#: The seconds after which a load shows its progress.
LONG_LOAD = 3.0


def say(text: str, stream: TextIO | None = None) -> bool:
    """Print ``text`` on ``stream``, or stdout. Return True if there was a reader.

    Characters that the stream's encoding lacks are replaced. A stream that is None, closed, or a
    pipe without a reader gets nothing.

    Raises:
        OSError: the stream is a file that cannot be written, as on a full disk.
    """
    stream = sys.stdout if stream is None else stream
    if stream is None or getattr(stream, "closed", False):
        return False
    try:
        try:
            print(
                _encodable(text, getattr(stream, "encoding", None) or "utf-8"),
                file=stream,
                flush=True,
            )
        except UnicodeEncodeError:
            # A stream that forwards its data may not know what characters the next stream supports.
            print(_encodable(text, "ascii"), file=stream, flush=True)
    except (BrokenPipeError, ValueError):  # raised by writing to a closed file
        return False
    return True


def announce(text: str) -> None:
    """Print ``text`` on stdout, or on stderr if stdout cannot be written. Never raises."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and say(text, stream):
                return
        except OSError:
            continue


def say_last(text: str) -> None:
    """Print ``text`` on stdout as the last output of a program.

    If its reader is gone, or its disk is full, stdout is redirected to nowhere. Otherwise Python
    reports at its exit that it cannot flush stdout, and exits with 120.

    Raises:
        OSError: as in :func:`say`.
    """
    try:
        if say(text) or sys.stdout is None or sys.stdout.closed:
            return
    except OSError:
        _lead_nowhere(sys.stdout)
        raise
    _lead_nowhere(sys.stdout)


def columns_of_terminal(most: int) -> int:
    """Return the width of the terminal that stdout is, from 60, in which numbers have room, up to
    ``most``; ``most`` if it is none.
    """
    with suppress(AttributeError, ValueError):  # a stand-in without isatty, a closed stdout
        if sys.stdout.isatty():
            return min(most, max(60, shutil.get_terminal_size().columns))
    return most


def _lead_nowhere(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)


@contextmanager
def progress(
    what: str, num_bytes: int, *, quiet: bool = False, delay: float = 0.0
) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on stderr while the block runs, if that is a terminal.

    The context returns a function to call with the number of bytes done since the last call.

    Args:
        quiet: True for no bar at all.
        delay: the seconds after which the bar appears.
    """
    stream = sys.stderr
    is_open = not getattr(stream, "closed", False)
    # A stream of a script's own may lack this method.
    if quiet or not is_open or not getattr(stream, "isatty", bool)():
        yield lambda _: None
        return
    # It takes longer to load than the rest of the package that plans need.
    from tqdm import tqdm

    with tqdm(
        desc=what, total=num_bytes, unit="B", unit_scale=True, delay=delay, leave=False
    ) as bar:
        yield bar.update


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text
