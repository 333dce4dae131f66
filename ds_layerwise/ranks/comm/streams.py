"""Streams beside that of the computation: ours, for work that no backward pass may wait for, and a
reader's.
"""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor


class SideStream:
    """What is queued inside ``with side:`` runs on a stream of its own; where there are none, on a
    CPU, at once.
    """

    def __init__(self) -> None:
        accelerator = get_accelerator()
        self._stream: Any = None if accelerator.is_synchronized_device() else accelerator.Stream()
        self._inside: list[Any] = []

    @property
    def exists(self) -> bool:
        """Whether the device has streams."""
        return self._stream is not None

    def follow(self) -> None:
        """Let what is queued here next run after everything that the current stream has been given
        so far.
        """
        if self._stream is not None:
            self._stream.wait_stream(get_accelerator().current_stream())

    def join(self) -> None:
        """Let what the current stream is given next run after everything that was queued here. The
        host goes on.
        """
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)

    def moment(self) -> Moment:
        """The end of everything that was queued here so far; of a device with streams."""
        return Moment(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Let nobody have the memory of ``tensor``, made on another stream, before what is queued
        here is over.
        """
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def __enter__(self) -> None:
        """Queue here."""
        if self._stream is not None:
            self._inside.append(get_accelerator().stream(self._stream))
            self._inside[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        """Queue where it was before."""
        if self._stream is not None:
            self._inside.pop().__exit__(*error)


class Moment:
    """When all is over that ``stream`` has been given so far, for whoever waits as for a
    collective.
    """

    def __init__(self, stream: Any) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        """Let what the current stream is given next run after it. The host goes on."""
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
        if self._stream is not None and self._stream != (
            current := get_accelerator().current_stream()
        ):
            self._stream.wait_stream(current)
