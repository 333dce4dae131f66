"""A device with streams that only know which work was over when their next work begins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stream:
    """A stream that knows the work that is over when its next work begins, and counts its waits."""

    def __init__(self) -> None:
        self.knows: set[Any] = set()
        self.waits = 0

    def wait_stream(self, other):
        self.knows |= other.knows
        self.waits += 1


class Streams:
    """The part of an accelerator that work on several streams asks for.

    Args:
        make: makes a stream.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.Stream = make
        self.current = make()

    def is_synchronized_device(self) -> bool:
        """Return False: the device has streams."""
        return False

    def current_stream(self) -> Any:
        """Return the stream on which operations are queued now."""
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Queue operations on ``stream`` inside."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Device(Streams):
    """A device with streams of the class :class:`Stream`."""

    def __init__(self) -> None:
        super().__init__(Stream)
