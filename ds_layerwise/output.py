"""Output to streams that cannot take everything: a table that no log shows ends no training."""

from __future__ import annotations

import os
import sys
from typing import TextIO

#: Frames of tables, and what else this package writes that is not ASCII, in ASCII. Anything else
#: becomes a question mark.
_PLAIN = str.maketrans(
    {
        **dict.fromkeys("─━═╌╍┄┅┈┉", "-"),
        **dict.fromkeys("│┃║╎╏┆┇┊┋", "|"),
        "…": "~",
        "×": "x",
        **{chr(code): "+" for code in (*range(0x250C, 0x254C), *range(0x2552, 0x256D))},
    }
)


def say(text: str, stream: TextIO | None = None) -> bool:
    """Print ``text`` on ``stream``, or stdout; tell whether somebody was there to read it.

    What the stream's encoding lacks is replaced. A stream that is None, closed, or a pipe whose
    reader has gone gets nothing.

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
            # A stream that passes on what it gets to another one need not know what that can take.
            print(_encodable(text, "ascii"), file=stream, flush=True)
    except (BrokenPipeError, ValueError):  # what writing to a closed file raises
        return False
    return True


def announce(text: str) -> None:
    """Print ``text`` on stdout, or on stderr where stdout cannot be written. Never an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and say(text, stream):
                return
        except OSError:
            continue


def say_last(text: str) -> None:
    """Print ``text`` on stdout, for a program of which nobody else writes there.

    Once its reader has gone, or its disk is full, stdout leads nowhere: Python would say at its
    exit that it cannot be flushed, and exit with 120.

    Raises:
        OSError: as :func:`say` does.
    """
    try:
        if say(text) or sys.stdout is None or sys.stdout.closed:
            return
    except OSError:
        _lead_nowhere(sys.stdout)
        raise
    _lead_nowhere(sys.stdout)


def _lead_nowhere(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, stream.fileno())
    finally:
        os.close(null)


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text
