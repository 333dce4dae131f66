"""When updated parameters are sent to all ranks, and when they are waited for."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ds_layerwise.output import announce
from ds_layerwise.plan.layout import Bucket, Layout
from ds_layerwise.ranks import comm
from ds_layerwise.ranks.buffers import FlatBuffer, cut_of
from ds_layerwise.ranks.exchange import Exchange
from ds_layerwise.ranks.in_flight import Turn
from ds_layerwise.ranks.profiling import profiled
from ds_layerwise.ranks.side_stream import LaunchStream, SideStream
from ds_layerwise.ranks.under_way import can_mark, mark, references, transforms, unmark
from ds_layerwise.ranks.wires import Wires


class ParamSync:
    """Sends updated shards of the parameter buffer to all ranks, bucket by bucket.

    With :meth:`overlap_with_forward` the wait moves from the optimizer step to whoever uses a parameter first.

    Note: who waits for a parameter that is under way
        A module waits for its own parameters just before it runs, whatever its code is. Any other reader (a penalty on
        weights, ``F.embedding(tokens, self.head.weight)``, a functional call, a copy, a write, a look after the step)
        goes through torch, which asks the parameter: see :mod:`.ranks.under_way`. That leaves who looks at the memory
        past the parameter. So the step waits for everything where there may be any: another tensor into the same
        memory, as ``param.data`` or a ``state_dict`` that was kept; parameters of a class of their own; scripted
        modules; and once torch has compiled anything, which asks for the class of a parameter over and over. A
        transform of torch.func unpacks parameters unasked, and so waits for everything when it begins; where nobody
        can notice that, the step waits. Nobody sees C++ code that a module hands the weight of another one:
        docs/training.md says so.

    Note: buckets in cuts
        Owners send what the cuts of all ranks hold of their shards, in the rounds of an
        :class:`~ds_layerwise.ranks.exchange.Exchange`, and then each rank gives its cut to all. A round begins when its
        last bucket is launched, and the buckets that it completes when the next round has begun, so that all ranks
        begin everything in the same order.

    Note: gathers in two levels on a device
        Where a wire has any, all of its gathers go one after the other on a stream of their own: neither the host nor
        the update of the next bucket waits between the two collectives, those of different groups are in one order on
        all ranks, and one bucket at a time has memory for what is sorted.
    """

    def __init__(self, layout: Layout, rank: int, params: Mapping[str, nn.Parameter], values: FlatBuffer, *,
                 wires: Wires) -> None:
        self.layout, self.rank = layout, rank
        self._values, self._wires = values, wires
        self._exchange = Exchange(reversed(layout.buckets), rank, wires)
        self._rounds: dict[int, list[int]] = {bucket.index: [] for bucket in layout.buckets}
        for number, each in enumerate(self._exchange.rounds):
            for index in each.buckets:
                self._rounds[index].append(number)
        self._start_rounds()
        self._params = [[params[slot.name] for slot in bucket.slots] for bucket in layout.buckets]
        self._pending: dict[int, comm.Pending] = {}
        self._chained: deque[comm.Pending] = deque()
        self._side = SideStream()
        self._turn = Turn(values.tensors[0].device)
        self._launched_on = LaunchStream()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._views: list[int] | None = None
        self._apart: list[Tensor] = []
        self._told = False
        # Another thread than the one that trains may be the one that reads.
        self._lock = threading.RLock()

    def launch(self, index: int) -> None:
        """Start sending bucket ``index``; its shards must not be written until it has been waited for.

        It may find no memory for what travels, and goes on from there when it is called again.
        """
        bucket = self.layout.buckets[index]
        memory = self._values.bucket(bucket)
        if self._views is not None:
            if self._apart[index].data_ptr() != memory.data_ptr():
                self._apart[index] = _apart(memory)
            memory = self._apart[index]
        self._launched_on = LaunchStream()
        with profiled("gather"):
            if bucket.way == "cuts":
                self._launch_in_cuts(bucket, memory)
            else:
                self._gather(bucket, memory)

    def _gather(self, bucket: Bucket, memory: Tensor) -> None:
        wire = self._wires[bucket.ep_size]
        if self._side.exists and wire.rings.gather:
            self._side.follow()
            with self._side:
                wire.gather(memory, bucket, self._turn).wait()
            self._pending[bucket.index] = comm.Pending([self._side.moment()])
            return
        pending = self._pending[bucket.index] = wire.gather(memory, bucket)
        if pending.is_chained:
            self._chained.append(pending)

    def _start_rounds(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._missing = [set(each.buckets) for each in self._exchange.rounds]
        self._incomplete = {index: set(rounds) for index, rounds in self._rounds.items()}
        self._under_way: deque[tuple[int, comm.Pending]] = deque()
        self._started: set[int] = set()

    def _launch_in_cuts(self, bucket: Bucket, memory: Tensor) -> None:
        self._memory[bucket.index] = memory
        self._end_rounds(but=1)
        for number in self._rounds[bucket.index]:
            self._missing[number].discard(bucket.index)
            if not self._missing[number] and number not in self._started:
                self._start_round(number)
                self._end_rounds(but=1)
        if len(self._started) == len(self._exchange.rounds):
            self._end_rounds(but=0)
            self._start_rounds()

    def _start_round(self, number: int) -> None:
        each = self._exchange.rounds[number]
        some = self._memory[min(each.buckets)]
        shard = some[:0]
        if each.own is not None:
            bucket = self.layout.buckets[each.own]
            start, stop = bucket.shard(self.rank)
            shard = self._memory[each.own][start - bucket.start:stop - bucket.start]
        cuts = {index: cut_of(self._memory[index], self.layout.buckets[index], self.rank)
                for index in {run.bucket for run in each.held}}
        self._under_way.append((number, self._exchange.to_cuts(each, shard, cuts)))
        self._started.add(number)

    def _end_rounds(self, *, but: int) -> None:
        """End those under way, the latest ``but`` excepted."""
        while len(self._under_way) > but:
            number, pending = self._under_way[0]
            pending.wait()
            for index in sorted(self._exchange.rounds[number].buckets, reverse=True):
                self._incomplete[index].discard(number)
                if not self._incomplete[index] and index not in self._pending:
                    self._gather(self.layout.buckets[index], self._memory[index])
            self._under_way.popleft()

    def send(self, indices: Iterable[int]) -> None:
        """Send the buckets ``indices``, in this order, and wait until nothing is under way."""
        for index in indices:
            self.launch(index)
        self.finish()

    def wait(self, indices: Iterable[int]) -> None:
        """Wait for those of ``indices`` that are under way."""
        with self._lock:
            self._begin_last()
            for index in indices:
                if index in self._pending:
                    self._pending[index].wait()
                    self._launched_on.follow()
                    unmark(self._params[index])
                    del self._pending[index]
            if not self._pending:
                transforms.leave(self)

    def _wait_for_all(self) -> None:
        with self._lock:
            self.wait(sorted(self._pending, reverse=True))

    def _before_transform(self) -> None:
        if self._pending and self.rank == 0 and not self._told:
            self._told = True
            announce("ds_layerwise: overlap_param_gather: a transform of torch.func (vmap, grad, ...) began before all "
                     "updated parameters had arrived, and waited for all of them; where each forward pass begins with "
                     "one, nothing is left to overlap")
        self._wait_for_all()

    def finish(self) -> None:
        """Wait for everything under way."""
        self._wait_for_all()
        self._turn.release()
        if self._memory:
            # An update that was left half-way launched some of the buckets of a round.
            self._start_rounds()

    def may_be_late(self) -> bool:
        """Whether everybody who uses parameters after this step will wait for them; ask before :meth:`launch`."""
        return (self._views is not None and self._views == self._count_views() and not _has_compiled()
                and transforms.can_be_noticed and all(can_mark(param) for params in self._params for param in params))

    def _begin_last(self) -> None:
        """Let the last collective of everything under way begin, in the order of launching."""
        while self._chained:
            self._chained.popleft().begin_last()

    def leave_under_way(self) -> None:
        """Let everything arrive when it is used first; only where it :meth:`may_be_late`."""
        # What is used when, and what else begins before, may differ between ranks.
        self._begin_last()
        self._turn.release()
        for index in self._pending:
            mark(self._params[index], functools.partial(self.wait, (index, )))
        if self._pending:
            transforms.listen(self, self._before_transform)

    def _count_views(self) -> list[int]:
        return [references(memory) for memory in self._values.tensors]

    def overlap_with_forward(self, model: nn.Module) -> None:
        """Hook every module of ``model`` that holds parameters of the layout."""
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            return
        # A backend holds on to what it has sent for a moment that nobody can wait for: not to what is counted.
        self._apart = [_apart(self._values.bucket(bucket)) for bucket in self.layout.buckets]
        self._views = self._count_views()
        index_of = {param: index for index, params in enumerate(self._params) for param in params}
        # A copy of a module has its hooks, too: they know it from the original, and keep neither alive.
        needs = weakref.WeakKeyDictionary({
            module: indices for module in model.modules()
            if (indices := sorted({index_of[p] for p in module._parameters.values() if p in index_of}, reverse=True))})
        this = weakref.ref(self)

        # A compiler would trace these with the modules that they hook, and cannot: they wait for collectives.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_module(module: nn.Module, _args: object) -> None:
            sync = this()
            if sync is not None:
                sync.wait(needs.get(module, ()))

        self._hooks += [module.register_forward_pre_hook(before_module, prepend=True) for module in needs]

    def remove_hooks(self) -> None:
        """Undo :meth:`overlap_with_forward`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._views, self._apart = None, []


def _apart(memory: Tensor) -> Tensor:
    """``memory`` by another storage: who holds that one is one reference to the first, for all."""
    return from_dlpack(memory)


def _has_compiled() -> bool:
    """Whether torch has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])
