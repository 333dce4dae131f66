"""Memory for buckets on their way, in turns."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Turn:
    """Memory for one bucket on its way, by use; it grows to what the largest needs, and stays.

    Note: why it stays
        Large blocks of host memory go back to the system when they are let go of, and of the next
        ones each page is new again when it is written to: over gloo that takes up to a tenth of a
        step.

    Note: of a device
        Between two passes the device's allocator has it, see :meth:`release`. Who knows from the
        last pass how much it needs asks for that at once, in each pass for blocks of the same
        sizes: nothing grows, and nothing is left over between blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self._most: dict[str, int] = {}
        # Most buckets of a model are as long as another, and a view takes as long as the rest of a
        # call.
        self._views: dict[str, dict[object, Tensor]] = {}

    def empty(self, what: str, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of ``shape``, or 1-D, that holds anything. The next call with the same
        ``what`` gives its memory away again.
        """
        found = self._views.get(what, {}).get((shape, dtype))
        if found is None:
            numel = shape if isinstance(shape, int) else math.prod(shape)
            memory = self._bytes(what, numel * dtype.itemsize)
            found = self._views[what][shape, dtype] = memory.view(dtype).view(shape)
        return found

    def _bytes(self, what: str, nbytes: int) -> Tensor:
        if what not in self._memory or self._memory[what].numel() < nbytes:
            # The smaller one is gone before there is a larger.
            self._memory.pop(what, None)
            self._views[what] = {}
            most = self._most[what] = max(nbytes, self._most.get(what, 0))
            self._memory[what] = torch.empty(most, dtype=torch.uint8, device=self._device)
        return self._memory[what][:nbytes]

    def cast(self, what: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return 1-D ``value`` itself if it is of ``dtype``, else a copy in memory of this turn."""
        if value.dtype == dtype:
            return value
        return self.empty(what, value.numel(), dtype).copy_(value)

    def release(self) -> None:
        """Let go of all memory. What was handed out must not be in use any more."""
        self._views.clear()
        self._memory.clear()
