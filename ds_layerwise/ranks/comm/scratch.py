"""Reusable memory for buckets in transit, in turns."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Turn:
    """The memory for one bucket in transit, by use. It grows to the largest size needed, and stays.

    Note: why it stays
        Freed large blocks of host memory go back to the system, and every page of a new block costs
        a page fault at its first write. Over gloo that takes up to a tenth of a step.

    Note: memory of a device
        Between two passes the device's allocator has the memory; see :meth:`release`. In each pass,
        a turn asks at once for the sizes that it needed in the last pass. So blocks keep their
        sizes: nothing grows, and there are no gaps between blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self._most: dict[str, int] = {}
        # Many buckets of a model have equal lengths, and making a view takes as long as the rest of
        # a call.
        self._views: dict[str, dict[object, Tensor]] = {}

    def empty(self, what: str, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of ``shape``; an int means 1-D. The next call with the
        same ``what`` reuses its memory.
        """
        found = self._views.get(what, {}).get((shape, dtype))
        if found is None:
            numel = shape if isinstance(shape, int) else math.prod(shape)
            memory = self._bytes(what, numel * dtype.itemsize)
            found = self._views[what][shape, dtype] = memory.view(dtype).view(shape)
        return found

    def _bytes(self, what: str, nbytes: int) -> Tensor:
        if what not in self._memory or self._memory[what].numel() < nbytes:
            # Free the smaller block before the larger one is allocated.
            self._memory.pop(what, None)
            self._views[what] = {}
            most = self._most[what] = max(nbytes, self._most.get(what, 0))
            self._memory[what] = torch.empty(most, dtype=torch.uint8, device=self._device)
        return self._memory[what][:nbytes]

    def cast(self, what: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1-D ``value`` itself if it has ``dtype``, else a copy in memory of this turn."""
        if value.dtype == dtype:
            return value
        return self.empty(what, value.numel(), dtype).copy_(value)

    def release(self) -> None:
        """Free all memory. Tensors of this turn must not be in use any more."""
        self._views.clear()
        self._memory.clear()
