"""A device with streams that only know what was over when their next work begins."""

from collections.abc import Callable, Iterator
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


class Streams:
    """As much of an accelerator as work on several streams asks for.

    Args:
        make: makes a stream.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.Stream = make
        self.current = make()

    def is_synchronized_device(self) -> bool:
        """It has streams."""
        return False

    def current_stream(self) -> Any:
        """On which operations are queued now."""
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Queue there."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Device(Streams):
    """Has streams of the kind above."""

    def __init__(self) -> None:
        super().__init__(Stream)
