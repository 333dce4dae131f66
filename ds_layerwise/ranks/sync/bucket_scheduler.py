"""In which order buckets of gradients start on their way to their owners, and what may be waited
for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.plan.network.transport import MAX_UNDER_WAY
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.comm.streams import Moment, SideStream
from ds_layerwise.ranks.owned.buffers import DTYPES, ShardBuffer
from ds_layerwise.ranks.sync.bucket_transfers import Wires
from ds_layerwise.ranks.sync.exchange import Exchange


def late_gradient(name: str, bucket: int) -> StepError:
    """The error for a gradient that comes when its bucket is gone."""
    return StepError(
        f"{name} got a gradient after its bucket {bucket} was reduced, so it would be lost; call "
        "engine.step() after every micro-batch, also of those that accumulate. Where the loss of "
        "another engine goes through this model, as a generator's through its discriminator, "
        "freeze this model for that pass, or call this engine's zero_grad() after it and before "
        "its own. With several backward passes in one step, or reentrant activation "
        "checkpointing, set zero_optimization.overlap_comm to false and mark only the last "
        "backward pass as the boundary (engine.set_gradient_accumulation_boundary)"
    )


class Gradients(Enum):
    """What there is of the gradients of a step."""

    NONE = auto()
    """No backward pass has left any."""
    SUMS = auto()
    """Gradients add up: at stage 1 each rank's own, at stage 2, after every backward pass, those of
    all ranks.
    """
    UNDER_WAY = auto()
    """Some buckets are being reduced, or have been in a backward pass that has not ended: neither
    sums nor averages.
    """
    AVERAGES = auto()
    """The averages over all ranks, at their owners: nothing is to come before the step."""


class BucketOrder:
    """When a bucket starts: once its gradients and all buckets before it are there, and a few at a
    time at most.

    Note: what a backward pass may wait for
        Nothing that depends on the backward pass of another rank: that one may not use a parameter,
        so that its bucket starts there when the pass is over, and may stand before that in a
        collective of the model, such as that of SyncBatchNorm, in which it waits for this rank. So
        on a device with streams reductions have a stream of their own, and computation waits for it
        when the pass is over. On a host a bucket that may start does so in the hook of its last
        gradient if enough of those before it are over by then; else in a later hook, or after the
        pass. With ``max_waiting`` it waits nevertheless, as the user of a model without collectives
        may ask for.

    Note: one order for all ranks
        Collectives of a group must begin in the same order on every rank, though gradients arrive
        in another on each. Buckets start in the order of their index. Where one takes two
        collectives, in groups of their own, the second begins when the first is over and those of
        all buckets before it have begun. What buckets in cuts hold goes on to its owners when all
        have arrived.

    Note: collectives of a bucket on a device
        The last is waited for on a stream that belongs to the bucket's turn, one before it on the
        stream of reductions: so the next bucket is copied while this one travels, and is inside its
        node while this one is between nodes. The next but one, whose turn it is then, waits for
        both.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        params: Mapping[str, nn.Parameter],
        reduced: ShardBuffer,
        *,
        wires: Wires,
        divide_by: float,
        wire_dtype: Callable[[Bucket], torch.dtype],
        max_waiting: int | None = None,
    ) -> None:
        self.layout, self.rank, self.reduced = layout, rank, reduced
        self._params, self._wires = params, wires
        self._divide_by, self._wire_dtype = divide_by, wire_dtype
        # Of a device, where a number may wait: gradients, and when they have been copied.
        self._copied: deque[tuple[Moment, list[Tensor]]] = deque()
        self._max_waiting = math.inf if max_waiting is None else max_waiting
        self._exchange = Exchange(layout.buckets, rank, wires, self._sum_dtype)
        self._cuts = self._make_cuts()
        self._bucket_of = {
            slot.name: bucket.index for bucket in layout.buckets for slot in bucket.slots
        }
        self._pending: deque[comm.Pending] = deque()
        self._side = SideStream()
        self._ends = [SideStream() for _ in range(MAX_UNDER_WAY)]
        self._turns = [Turn(self._device) for _ in self._ends]
        self._ready = self._launched = 0
        self.reset()

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        # A backward pass that an exception ended may have left buckets under way, which read what
        # it writes next. Which of them have started depends on how fast others are, which may
        # start, on gradients alone.
        self._advance(wait=True)
        self._wait()
        self._start_pass()
        self._finished = False
        self.got: set[str] = set()
        """Parameters that got a gradient on this rank in this step, whichever micro-batch it came
        from.
        """
        self.by_hand = False
        """Whether some gradients of this step come from elsewhere than from backward passes."""
        self._late: StepError | None = None

    def _start_pass(self) -> None:
        self._arrived: set[str] = set()
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._ready = self._launched = 0

    def accumulate(self, name: str, *, launch: bool) -> None:
        """Take note of ``param.grad`` of ``name``; with ``launch``, start every bucket that may
        start now.

        A gradient whose bucket was reduced already, and which would be lost, is an error of
        :meth:`finish`.
        """
        if torch.is_grad_enabled():
            # As where a backward pass makes a graph. Elsewhere asking is all that it takes, in
            # every hook.
            with torch.no_grad():
                self.accumulate(name, launch=launch)
            return
        grad = self._params[name].grad
        if grad is None:
            return
        bucket = self._bucket_of[name]
        if bucket < self._ready:
            # Not at once: the other ranks need what is left of this backward pass to come to an
            # end.
            self._late = self._late or late_gradient(name, bucket)
            return
        self.got.add(name)
        self._take(name, grad)
        if launch and name not in self._arrived:
            self._arrived.add(name)
            self._missing[bucket] -= 1
            while self._ready < len(self._missing) and not self._missing[self._ready]:
                self._ready += 1
        if launch:
            self._side.follow()
            self._advance(wait=False)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what is left, including parameters without a gradient, and wait."""
        for name, param in self._params.items():
            # One that waits for the start of its bucket is no new one.
            if param.grad is not None and not self._launched <= self._bucket_of[name] < self._ready:
                self.accumulate(name, launch=False)
        self._ready = len(self.layout.buckets)
        self._side.follow()
        self._advance(wait=True)
        self._wait()
        if self._side.exists:
            # A device's allocator keeps it, for the exchange and whoever else needs it until the
            # next pass.
            for turn in self._turns:
                turn.release()
        self._end_pass()
        self._side.join()

    def finish(self, *, aside: bool = False) -> None:
        """Make sure that ``reduced`` holds the averages of this step. Every rank must call this at
        the same point.

        Args:
            aside: take part in what others need, leave ``reduced`` alone, and be as unfinished as
                before.

        Raises:
            StepError: nothing was reduced, because no backward pass reached the boundary; or a
                gradient came too late.
        """
        if self._late is not None:
            raise self._late
        # The step may be on another stream than the end of the backward pass.
        self._side.join()

    def _advance(self, *, wait: bool) -> None:
        """Start buckets that may start; without ``wait``, as far as that takes no waiting for
        another rank.
        """
        while self._launched < self._ready:
            if len(self._pending) >= MAX_UNDER_WAY:
                if wait or self._ready - self._launched > self._max_waiting:
                    self._begin_last()
                    self._pending[0].wait()
                elif not self._pending[0].advance():
                    return
                self._pending.popleft()
            with profiled("reduce"):
                self._launch()

    def _wait(self) -> None:
        """Wait until nothing is under way."""
        self._begin_last()
        while self._pending:
            self._pending.popleft().wait()
        with self._side:
            # So does the stream that has taken the memory of turns, and gets it back.
            for end in self._ends:
                end.join()
        self._side.join()
        # Computation may be on another stream than who waits here.
        while self._copied:
            for gradient in self._copied.popleft()[1]:
                self._side.keep(gradient)

    def _begin_last(self) -> None:
        """Wait until the last collective of everything under way has begun: one travels while
        another is waited for.
        """
        for pending in self._pending:
            pending.begin_last()

    def _to_owners(self, shard: Callable[[int], Tensor], *, add: bool = False) -> None:
        """Let what buckets in cuts hold go on to its owners: into ``shard`` of a bucket, or with
        ``add`` on top.
        """
        self._side.follow()
        with self._side:
            self._exchange.to_owners(self._cuts, shard, add=add)
        self._side.join()

    def _make_cuts(self) -> dict[int, Tensor]:
        """Where what this rank adds up of buckets in cuts goes, by index, for the length of the
        run.
        """
        kinds: dict[str, list[Bucket]] = {}
        cuts: dict[int, Tensor] = {}
        for bucket in self.layout.buckets:
            if bucket.way == "cuts":
                dtype = self._sum_dtype(bucket)
                found = self._cut_in_place(bucket, dtype)
                if found is not None:
                    cuts[bucket.index] = found
                else:
                    kinds.setdefault(dtype, []).append(bucket)
        for dtype, alike in kinds.items():
            numels = [bucket.cut_numel for bucket in alike]
            memory = torch.zeros(sum(numels), dtype=DTYPES[dtype], device=self._device)
            cuts.update(
                {
                    bucket.index: cut
                    for bucket, cut in zip(alike, memory.split_with_sizes(numels), strict=True)
                }
            )
        return dict(sorted(cuts.items()))

    def _sum_dtype(self, bucket: Bucket) -> str:
        """The layout's name for what sums of a bucket in cuts are in, until they are at their
        owners.
        """
        return "float32"

    def _cut_in_place(self, bucket: Bucket, dtype: str) -> Tensor | None:
        """Memory of ``dtype`` that is there for this rank's cut of ``bucket`` already."""
        return None

    @property
    def cuts(self) -> tuple[Tensor, ...]:
        """The memory of :meth:`_make_cuts`, which may be that of gradients."""
        return tuple(self._cuts.values())

    @property
    def _device(self) -> torch.device:
        return next(iter(self._params.values())).device

    def _turn(self) -> Turn:
        """Memory for the next bucket, which the one whose turn it was has left: no more are under
        way than turns; ``with self._side``."""
        turn = self._launched % len(self._turns)
        self._ends[turn].join()
        return self._turns[turn]

    def _start(self, pending: comm.Pending) -> None:
        """Take over the next bucket, which has begun to travel; ``with self._side``."""
        if self._side.exists:
            # Streams wait, and neither the host nor the computation.
            pending.begin_last()
            end = self._ends[self._launched % len(self._ends)]
            end.follow()
            with end:
                pending.wait()
        else:
            self._pending.append(pending)
        self._launched += 1

    def _take(self, name: str, grad: Tensor) -> None:
        """Do what must be done with a gradient before its bucket starts."""

    def _launch(self) -> None:
        """Start the next bucket."""

    def _end_pass(self) -> None:
        """All buckets have arrived."""
