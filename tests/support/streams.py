"""A device with streams that only know what was over when their next work begins."""

from contextlib import contextmanager
from typing import Any


class Stream:
    """Knows what is over when its next work begins, and how often it was told to wait."""

    def __init__(self) -> None:
        self.knows: set[Any] = set()
        self.waits = 0

    def wait_stream(self, other):
        self.knows |= other.knows
        self.waits += 1


class Device:
    """As much of an accelerator as work on several streams asks for."""

    Stream = staticmethod(Stream)

    def __init__(self) -> None:
        self.current = Stream()

    def is_synchronized_device(self):
        return False

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before
