"""Memory that leaves the device for a while, and comes back under the views that lead to it.

Note: how views survive
    Many views lead into one storage: pieces of a shard, parameters of a buffer. The storage object stays where it is
    and gives up its memory; filled again, it is behind all of them as before.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parking:
    """Storages whose memory is elsewhere. What looks into one of them must not be touched until it is back."""

    def __init__(self) -> None:
        self._parked: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is away."""
        return tuple(self._parked)

    def park(self, kind: str, tensors: Iterable[Tensor], *, pin_memory: bool) -> None:
        """Move the storages of ``tensors`` to the host, into page-locked memory if asked and possible."""
        if kind in self._parked:
            return
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}
        parked = self._parked[kind] = []
        for tensor in storages.values():
            storage = tensor.untyped_storage()
            away = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin_memory and tensor.is_cuda)
            away.copy_(_bytes(storage, tensor.device))
            storage.resize_(0)
            parked.append((storage, away))

    def unpark(self) -> None:
        """Bring everything back."""
        for parked in self._parked.values():
            for storage, away in parked:
                storage.resize_(away.numel())
                _bytes(storage, storage.device).copy_(away)
        self._parked.clear()


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
