"""Be rank 0 of many in one process: real engines on groups of torch's ``fake`` backend.

A :class:`Network` runs the collectives of buckets. All others, such as those of an engine's start, answer at once, as
if all ranks said the same. So values of other ranks' shards are wrong, and their norms missing. Tests look at the
operations of this rank, and at their order.
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed.comm
import deepspeed.comm.comm as deepspeed_comm
import deepspeed.ops
import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.utils import groups as deepspeed_groups
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from ds_layerwise.ranks.comm import comm, nodes


class Over:
    """A collective that was over at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Network:
    """:mod:`deepspeed.comm`, except that it notes the collectives of buckets. Sums are those of ranks with equal
    gradients; an exchange brings zeros."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        """The kind of each collective, the bytes that this rank reads from or writes to others, and the number of
        ranks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(deepspeed.comm, name)

    def begin(self, kind: str, nbytes: int, group: Any, tensors: Sequence[Tensor]) -> Any:
        """Note a collective, and return an object to wait for."""
        self.begun.append((kind, nbytes, comm.size_of(group)))
        return Over()

    def reduce_scatter_tensor(self, out: Tensor, sent: Tensor, *, group: Any, async_op: bool) -> Any:
        """Sum equal gradients, in their dtype."""
        first = comm.rank_of(group) * out.numel()
        with _disable_current_modes():
            torch.mul(sent[first : first + out.numel()], comm.size_of(group), out=out)
        return self.begin("reduce_scatter", sent.nbytes, group, [out, sent])

    def all_to_all_single(self, out: Tensor, sent: Tensor, *, group: Any, async_op: bool, **splits: Any) -> Any:
        """Bring zeros."""
        with _disable_current_modes():
            out.zero_()
        return self.begin("all_to_all", max(out.nbytes, sent.nbytes), group, [out, sent])

    def all_gather_into_tensor(self, out: Tensor, own: Tensor, *, group: Any, async_op: bool = False) -> Any:
        """Leave the received part as it is."""
        return self.begin("all_gather", out.nbytes, group, [out, own])


class Count:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and make it."""
        self.calls += 1
        return self.function(*args, **kwargs)


@contextmanager
def rank_of_many(size: int, per_node: int, network: Network) -> Iterator[tuple[Count, Count]]:
    """Be rank 0 of ``size``, of which ``per_node`` are on each node; no process group may be there.

    Returns:
        The gathers of objects, and the groups made.
    """
    where = [rank // per_node for rank in range(size)]
    gathers, groups = Count(comm.gather_objects), Count(distributed.new_group)
    with ExitStack() as stack:
        for owner, name, value in (
            (nodes, "node_of_each_rank", lambda: where), (comm, "gather_objects", gathers),
            (distributed, "new_group", groups), (comm, "dist", network), (deepspeed_comm, "cdb", None)):
            stack.enter_context(unittest.mock.patch.object(owner, name, value))
        # Only inference uses this operator, and building it takes a minute.
        stack.enter_context(unittest.mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False))
        # DeepSpeed remembers groups for good.
        stack.enter_context(unittest.mock.patch.dict(vars(deepspeed_groups)))
        distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        stack.callback(distributed.destroy_process_group)
        deepspeed_comm.cdb = TorchBackend("fake", None, None)
        yield gathers, groups
