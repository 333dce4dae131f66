"""Streams beside that of the computation, for work that no backward pass may wait for.

On a device without streams, such as a CPU, work runs at once, and this module does nothing.
"""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor


class SideStream:
    """A stream for the work that is queued inside ``with side:``.

    Args:
        stream: a stream of others; None for a new one, if the device has streams.
    """

    def __init__(self, stream: Any = None) -> None:
        accelerator = get_accelerator()
        if stream is None and not accelerator.is_synchronized_device():
            stream = accelerator.Stream()
        self._stream = stream
        self._inside: list[Any] = []

    @classmethod
    def current(cls) -> SideStream:
        """Return the stream on which the caller's work is queued."""
        return cls(get_accelerator().current_stream())

    @property
    def exists(self) -> bool:
        """Tell whether the device has streams."""
        return self._stream is not None

    def follow(self) -> None:
        """Make later work on this stream wait for all work queued so far on the current stream."""
        if self.exists:
            self._stream.wait_stream(get_accelerator().current_stream())

    def join(self) -> None:
        """Make later work on the current stream wait for all work queued here. The host does not
        wait.
        """
        if self.exists:
            get_accelerator().current_stream().wait_stream(self._stream)

    def moment(self) -> Moment:
        """Return the end of all work queued here so far."""
        return Moment(self._stream)

    def synchronize(self) -> None:
        """Make the host wait for all work queued here."""
        if self.exists:
            self._stream.synchronize()

    def keep(self, tensor: Tensor) -> None:
        """Reserve the memory of ``tensor``, made on another stream, until the work queued here is
        finished.
        """
        if self.exists:
            tensor.record_stream(self._stream)

    def __enter__(self) -> None:
        """Make this the current stream."""
        if self.exists:
            self._inside.append(get_accelerator().stream(self._stream))
            self._inside[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        """Restore the previous stream."""
        if self.exists:
            self._inside.pop().__exit__(*error)


class Moment:
    """The end of all work queued on ``stream`` so far. It can be waited for like a collective."""

    def __init__(self, stream: Any) -> None:
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Make later work on the current stream wait for it. The host does not wait."""
        if self._event is not None:
            get_accelerator().current_stream().wait_event(self._event)
