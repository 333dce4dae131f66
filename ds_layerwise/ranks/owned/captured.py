"""Updates that are captured as graphs of the device, and replayed with other numbers.

A graph keeps the operations of an update and the addresses that they read and write, so that the
host launches a bucket at once. What changes from step to step is then in the memory of the device:
:class:`Numbers` writes it there before a replay, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError

#: The numbers that lie in one piece of memory.
_AT_A_TIME = 256


class CudaGraph:
    """A graph of CUDA.

    Args:
        beside: a graph that is always replayed before this one, so that both work in one memory.
    """

    def __init__(self, beside: CudaGraph | None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        if beside is not None:
            self._pool = beside._pool

    def capture(self) -> AbstractContextManager[object]:
        """Enclose the operations to keep, which are not run. Other threads, as NCCL has, may use
        the device meanwhile.
        """
        return torch.cuda.graph(self._graph, self._pool, capture_error_mode="thread_local")

    def replay(self) -> None:
        """Run the operations. The host does not wait."""
        self._graph.replay()


#: Makes a graph of a device, to be replayed after another one; None for the first.
NewGraph = Callable[[CudaGraph | None], CudaGraph]


def graphs_of(device: torch.device) -> NewGraph:
    """Return the function that makes graphs of ``device``.

    Raises:
        ConfigError: the device has none.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"layerwise.cuda_graph is true, and the model is on {device}, which has no CUDA "
            "graphs; set it to false"
        )
    return CudaGraph


class Numbers:
    """Numbers in the memory of ``device``, and the functions that return them for an update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._functions: list[Callable[[Any], float]] = []
        self._memory: list[Tensor] = []

    def register(self, function: Callable[[Any], float]) -> Tensor:
        """Return the place of the result of ``function``, 0-d float32; :meth:`fill` writes it."""
        place = len(self._functions) % _AT_A_TIME
        if not place:
            self._memory.append(torch.empty(_AT_A_TIME, dtype=torch.float32, device=self._device))
        self._functions.append(function)
        return self._memory[-1][place]

    def fill(self, turn: Any) -> None:
        """Call every function once, in order, and write what it returns. The host does not wait."""
        values = [function(turn) for function in self._functions]
        here = torch.tensor(values, dtype=torch.float32, device="cpu")
        if self._device.type != "cpu":
            here = here.pin_memory()
        for memory, part in zip(self._memory, torch.split(here, _AT_A_TIME), strict=False):
            memory[: len(part)].copy_(part, non_blocking=True)


class Captured:
    """The captured updates of a rank's buckets.

    The first update with a key runs as it is, which also prepares what libraries allocate at their
    first call; the second is captured; later ones are replays. Another key starts again. An update
    without a key runs as it is.
    """

    def __init__(self, device: torch.device, new_graph: NewGraph) -> None:
        self._device = device
        self._new_graph = new_graph
        self._key: Hashable = None
        self._is_captured = False
        self._graphs: dict[int, tuple[CudaGraph, Numbers]] = {}

    def begin(self, key: Hashable) -> None:
        """Begin an update of all buckets.

        Args:
            key: all that the update depends on, beside its numbers; None not to capture it.
        """
        self._is_captured = key is not None and key == self._key
        # Bucket 0 is the last to be captured: without it, an error has ended the captures, and each
        # may open buckets for others.
        if key is not None and not (self._is_captured and 0 in self._graphs):
            self._graphs.clear()
            self._key = key

    def run(self, index: int, turn: Any, update: Callable[[Any, Numbers | None], None]) -> None:
        """Update bucket ``index``: run ``update``, capture and replay it, or replay it."""
        if not self._is_captured:
            update(turn, None)
            return
        if index not in self._graphs:
            graph = self._new_graph(next((other for other, _ in self._graphs.values()), None))
            numbers = Numbers(self._device)
            with graph.capture():
                update(turn, numbers)
            self._graphs[index] = graph, numbers
        graph, numbers = self._graphs[index]
        numbers.fill(turn)
        graph.replay()
