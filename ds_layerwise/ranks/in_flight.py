"""Memory for what is on its way, and what arrives, of a few buckets in turns."""

from __future__ import annotations

import torch
from torch import Tensor


class Turn:
    """Memory for one bucket under way, by what it is for; it grows to what the largest needs, and stays.

    Note: why it stays
        Large blocks of host memory go back to the system when they are let go of, and of the next ones each page is
        new again when it is written to: over gloo that takes up to a tenth of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def empty(self, what: str, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements, 1-D, that hold anything. The next call with the same ``what`` gives them away again."""
        nbytes = numel * dtype.itemsize
        if what not in self._memory or self._memory[what].numel() < nbytes:
            # The smaller one is gone before there is a larger.
            self._memory.pop(what, None)
            self._memory[what] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[what][:nbytes].view(dtype)

    def cast(self, what: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """1-D ``value`` in ``dtype``: itself if it is, else a copy in memory of this."""
        return value if value.dtype == dtype else self.empty(what, value.numel(), dtype).copy_(value)

    def release(self) -> None:
        """Let go of all memory. What was handed out must not be in use any more."""
        self._memory.clear()
