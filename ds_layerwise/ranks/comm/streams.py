"""Streams beside that of the computation, for work that no backward pass may wait for.

On a device without streams, such as a CPU, everything runs at once, and all of this does nothing.
"""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor


class SideStream:
    """A stream of its own for what is queued inside ``with side:``."""

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._inside: list[Any] = []

    @property
    def exists(self) -> bool:
        """Tell whether the device has streams."""
        return self._stream is not None

    def follow(self) -> None:
        """Let what is queued here next run after everything that the current stream has been given
        so far.
        """
        if self.exists:
            self._stream.wait_stream(get_accelerator().current_stream())

    def join(self) -> None:
        """Let what the current stream is given next run after everything that was queued here. The
        host goes on.
        """
        if self.exists:
            get_accelerator().current_stream().wait_stream(self._stream)

    def moment(self) -> Moment:
        """Return the end of everything that was queued here so far."""
        return Moment(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for everything that was queued here."""
        if self.exists:
            self._stream.synchronize()

    def keep(self, tensor: Tensor) -> None:
        """Let nobody have the memory of ``tensor``, made on another stream, before what is queued
        here is over.
        """
        if self.exists:
            tensor.record_stream(self._stream)

    def __enter__(self) -> None:
        """Queue here."""
        if self.exists:
            self._inside.append(get_accelerator().stream(self._stream))
            self._inside[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        """Queue where it was before."""
        if self.exists:
            self._inside.pop().__exit__(*error)


class Moment:
    """The end of all that ``stream`` has been given so far, to wait for as for a collective."""

    def __init__(self, stream: Any) -> None:
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Let what the current stream is given next run after it. The host goes on."""
        if self._event is not None:
            get_accelerator().current_stream().wait_event(self._event)


class LaunchStream:
    """The stream on which something was launched, for whoever waits for it on another one.

    A wait holds up the stream that is current for whoever waits, and no other: work that goes on
    where it was launched would take it for done.
    """

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._stream: Any = (
            None if accelerator.is_synchronized_device() else accelerator.current_stream()
        )

    def follow(self) -> None:
        """Let it go on after all that the current stream waits for."""
        if self._stream is not None:
            current = get_accelerator().current_stream()
            if current != self._stream:
                self._stream.wait_stream(current)
