"""The transfer of updated parameters to all ranks, and the waits for it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ds_layerwise.output import announce
from ds_layerwise.plan.layout.transfer_plan import begun_backwards
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.comm.streams import SideStream
from ds_layerwise.ranks.owned.buffers import FlatBuffer
from ds_layerwise.ranks.sync.bucket_transfers import Wires
from ds_layerwise.ranks.sync.transfer import Transfer


class ParamSync:
    """Sends updated shards of the parameter buffer to all ranks, bucket by bucket.

    With :meth:`overlap_with_forward` the wait moves from the optimizer step to the first use of a
    parameter.

    Note: who waits for a pending parameter
        A module with parameters waits for them just before it runs, saves or loads, whatever its
        code is. Outside of a forward pass of the model it waits for all parameters. Within one,
        every call of torch also waits for its arguments, such as ``F.linear(x, self.head.weight)``
        in the code of another module. When that forward pass is over, nothing is pending. The step
        itself waits for all parameters of a module whose ``forward`` was replaced, as by a captured
        graph, and for everything once torch has compiled anything. A script that reads weights
        between a step and the forward pass calls :meth:`finish`.

    Note: buckets in cuts
        Owners send the parts of their shards to the cuts of all ranks, in the rounds of an
        :class:`~ds_layerwise.ranks.sync.transfer.Transfer`. Then each rank sends its cut to all. A
        round begins when its last bucket is launched. The gather of the buckets that a round
        completes begins after the next round has begun, so that all ranks begin everything in the
        same order.
    """

    def __init__(
        self,
        rank: int,
        params: Mapping[str, nn.Parameter],
        values: FlatBuffer,
        *,
        wires: Wires,
    ) -> None:
        self.layout = layout = values.layout
        self.rank = rank
        self._values = values
        self._wires = wires
        self._transfer = Transfer(
            rank,
            begun_backwards(layout.buckets),
            group_of=lambda ep_size: wires[ep_size].group,
            cut_of=lambda index: values.cut(layout.buckets[index], rank),
            shard_of=values.shards(rank).tensors.__getitem__,
            device=values.tensors[0].device,
            then=self._gather,
        )
        self._pending: dict[int, comm.Pending] = {}
        self._chained: deque[comm.Pending] = deque()
        self._launched_on = SideStream.current()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._index_of: dict[object, int] = {}
        for bucket in layout.buckets:
            self._index_of.update((params[slot.name], bucket.index) for slot in bucket.slots)
        self._modules: list[nn.Module] = []
        self._modes: list[Any] = []
        self._overlaps = False
        # Another thread than the training thread may read parameters.
        self._lock = threading.RLock()

    def launch(self, index: int) -> None:
        """Start to send bucket ``index``. Its shards must not be written until it has been waited
        for.

        If it runs out of memory, it can be called again, and continues from there.
        """
        self._launched_on = SideStream.current()
        with profiled("gather"):
            if self.layout.buckets[index].transport == "cuts":
                self._transfer.launch(index)
            else:
                self._gather([index])

    def _gather(self, indices: Sequence[int]) -> None:
        """Begin to gather those of ``indices`` that are not pending."""
        for index in indices:
            if index not in self._pending:
                bucket = self.layout.buckets[index]
                memory = self._values.tensors[index]
                pending = self._wires[bucket.ep_size].gather(memory, in_mxfp8=bucket.in_mxfp8)
                self._pending[index] = pending
                if pending.is_chained:
                    self._chained.append(pending)

    def wait(self, indices: Iterable[int]) -> None:
        """Wait for those of ``indices`` that are pending, last bucket first."""
        with self._lock:
            self._begin_last()
            for index in sorted(indices, reverse=True):
                if index in self._pending:
                    # Work that continues on the stream of the launch assumes that the collective is
                    # finished, and gets the memory in which it was sent.
                    with self._launched_on:
                        self._pending[index].wait()
                    self._launched_on.join()
                    del self._pending[index]

    def wait_for(self, params: Iterable[object]) -> None:
        """Wait for those of ``params`` that are pending."""
        indices = set()
        for param in params:
            if param in self._index_of:
                indices.add(self._index_of[param])
        self.wait(indices)

    def finish(self) -> None:
        """Wait for everything that is pending."""
        self.wait(self._pending)
        self._transfer.restart()

    def _begin_last(self) -> None:
        """Begin the last collective of every pending bucket, in the order of launching."""
        while self._chained:
            self._chained.popleft().begin_last()

    def leave_pending(self) -> None:
        """Leave collectives pending until the first use of a parameter, if first uses wait;
        otherwise wait now.
        """
        dynamo = sys.modules.get("torch._dynamo.utils")
        if self._overlaps and dynamo is not None and any(dynamo.counters.values()):
            self._do_not_overlap("compiled code (torch.compile) does not wait for parameters")
        if not self._overlaps:
            self.finish()
            return
        # Begin everything now: the order of first uses, and of other collectives before them, may
        # differ between ranks.
        self._begin_last()
        for module in self._modules:
            # A captured graph reads addresses, and calls none of the modules below this one.
            if "forward" in vars(module):
                self.wait_for(module.parameters())

    def _do_not_overlap(self, reason: str) -> None:
        self._overlaps = False
        if self.rank == 0:
            announce(
                f"ds_layerwise: overlap_param_gather has no effect: {reason}; every step waits for "
                "its parameters"
            )

    def overlap_with_forward(self, model: nn.Module) -> None:
        """Hook ``model``, and every module in it that has parameters of the layout, directly or in
        its submodules.
        """
        modules = list(model.modules())
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
            self._do_not_overlap("scripted modules do not call hooks")
            return
        self._overlaps = True
        self._modules = modules
        # Copies of a module keep its hooks, so the hooks must keep no object alive.
        this = weakref.ref(self)
        pending = self._pending
        modes = self._modes

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def run(method: Callable[..., None], *args: object) -> None:
            sync = this()
            if sync is not None:
                method(sync, *args)

        # A compiler traces these hooks, guards on whether anything is pending, and compiles anew
        # when that changes.
        def before_module(module: nn.Module, *_: object) -> None:
            if pending:
                run(ParamSync._arrive, module)

        def before_forward(*_: object) -> None:
            if pending:
                run(ParamSync._begin_forward)

        def after_forward(*_: object) -> None:
            if modes:
                run(ParamSync._end_forward)

        for module in modules:
            # Also for parameters of submodules: the module's code may use them without calling the
            # submodules.
            if any(param in self._index_of for param in module.parameters()):
                self._hooks += [
                    module.register_forward_pre_hook(before_module, prepend=True),
                    module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                        before_module
                    ),
                    module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                        before_module
                    ),
                ]
        self._hooks += [
            model.register_forward_pre_hook(before_forward, prepend=True),
            model.register_forward_hook(after_forward, always_call=True),
        ]

    def _arrive(self, module: nn.Module) -> None:
        if self._modes:
            self.wait_for(module._parameters.values())
        elif any(param in self._index_of for param in module.parameters()):
            self.finish()

    def _begin_forward(self) -> None:
        self._modes.append(_Readers(self))
        self._modes[-1].__enter__()

    def _end_forward(self) -> None:
        self._modes.pop().__exit__(None, None, None)
        if not self._modes:
            self.finish()

    def fetch(self, *_: object) -> None:
        """Do nothing: shards are the memory of the parameters."""

    follow_writes = fetch

    def remove_hooks(self) -> None:
        """Undo :meth:`overlap_with_forward`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._modules.clear()


class _Readers(TorchFunctionMode):
    """A forward pass in which every call of torch waits for the parameters among its arguments."""

    def __init__(self, sync: ParamSync) -> None:
        super().__init__()
        self._sync = sync

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._sync._pending:
            self._sync.wait_for(_tensors_in((args, kwargs)))
        return function(*args, **(kwargs or {}))


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        # Transforms of torch.func wrap their arguments.
        yield torch.func.debug_unwrap(value)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors_in(member)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
