"""The order in which reductions of buckets start, and when ranks wait for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.network.reduction import sum_dtype
from ds_layerwise.plan.network.transport import MAX_PENDING
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.comm.streams import Moment, SideStream
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer, ShardBuffer, cut_of, dtype_name
from ds_layerwise.ranks.sync.bucket_transfers import Wires
from ds_layerwise.ranks.sync.exchange import Exchange


def late_gradient(name: str, bucket: int) -> StepError:
    """Return the error for a gradient that comes after the reduction of its bucket."""
    return StepError(
        f"{name} got a gradient after its bucket {bucket} was reduced, so it would be lost; call "
        "engine.step() after every micro-batch, also of those that accumulate. Where the loss of "
        "another engine goes through this model, as a generator's through its discriminator, "
        "freeze this model for that pass, or call this engine's zero_grad() after it and before "
        "its own. With several backward passes in one step, or reentrant activation "
        "checkpointing, set zero_optimization.overlap_comm to false and mark only the last "
        "backward pass as the boundary (engine.set_gradient_accumulation_boundary)"
    )


def nothing_reduced() -> StepError:
    """Return the error for a step without gradients."""
    return StepError(
        "step() before the gradients were reduced: no backward pass reached the boundary of "
        "gradient accumulation; call engine.backward(loss) first, and engine.step() after every "
        "micro-batch, also of those that accumulate: it counts them, and updates after the last"
    )


class Gradients(Enum):
    """The state of the gradients of a step."""

    NONE = auto()
    """No backward pass has left a gradient."""
    SUMS = auto()
    """Gradients are being summed: at stage 1 those of each rank, at stage 2 those of all ranks
    after every backward pass.
    """
    UNDER_WAY = auto()
    """Some buckets are being reduced, or have been reduced in a backward pass that has not ended.
    There are neither sums nor averages.
    """
    AVERAGES = auto()
    """The averages over all ranks are at their owners, at stage 2 as sums. At stage 1, no gradient
    may come before the step.
    """


class BucketScheduler(ABC):
    """Starts the reduction of a bucket when its gradients are complete and all earlier buckets have
    started, a few at a time.

    Note: what a backward pass may wait for
        Nothing that depends on the backward pass of another rank. That rank may not use a
        parameter, so its bucket starts there only after the pass. Before that, the rank may be in a
        collective of the model, such as that of SyncBatchNorm, which waits for this rank. So on a
        device with streams, reductions have a stream of their own, and computation waits for it
        after the pass. On a host, a bucket starts in the hook of its last gradient if enough
        earlier buckets are finished by then; otherwise it starts in a later hook, or after the
        pass. With ``max_waiting`` a backward pass does wait; the user of a model without
        collectives may ask for this.

    Note: one order for all ranks
        Collectives of a group must begin in the same order on every rank, but gradients arrive in a
        different order on each. Buckets start in the order of their index. If a bucket needs two
        collectives, in groups of their own, the second begins when the first is finished and the
        second collectives of all earlier buckets have begun. The contents of buckets in cuts go on
        to their owners when all buckets have arrived.

    Note: collectives of a bucket on a device
        Each turn has a stream, on which the last collective of its bucket is waited for. An earlier
        one is waited for on the stream of reductions. So the next bucket is copied while this one
        is in transit, and moves inside its node while this one moves between nodes. The bucket
        after that has the same turn and waits for both.

    Args:
        params: the trainable parameters by name.
        reduced: the memory of the averages, or sums, of this rank's shards, float32; may alias
            ``grads``.
        grads: the memory in which micro-batches accumulate, laid out like the parameters, if any.
        divide_by: the sum over ranks divided by this is the average.
        wire_dtype: returns the dtype in which the gradients of a bucket are sent.
        max_waiting: the number of buckets that may be complete and not started before the backward
            pass waits for them; None for any number.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        reduced: ShardBuffer,
        grads: FlatBuffer | None = None,
        *,
        wires: Wires,
        divide_by: float,
        wire_dtype: Callable[[Bucket], torch.dtype],
        max_waiting: int | None = None,
    ) -> None:
        self.layout = reduced.layout
        self.rank = reduced.rank
        self.reduced = reduced
        self._params = params
        self._grads = grads
        self._wires = wires
        self._divide_by = divide_by
        self._wire_dtype = wire_dtype
        # On a device with a limit: gradients, each with the moment when it has been copied.
        self._copied: deque[tuple[Moment, list[Tensor]]] = deque()
        self._max_waiting = math.inf if max_waiting is None else max_waiting
        self._exchange = Exchange(self.layout.buckets, self.rank, wires, self._sum_dtype)
        self._cuts = {
            bucket.index: self._make_cut(bucket)
            for bucket in self.layout.buckets
            if bucket.way == "cuts"
        }
        self._bucket_of: dict[str, int] = {}
        for bucket in self.layout.buckets:
            self._bucket_of.update((slot.name, bucket.index) for slot in bucket.slots)
        self._pending: deque[comm.Pending] = deque()
        self._side = SideStream()
        self._ends = [SideStream() for _ in range(MAX_PENDING)]
        self._turns = [Turn(reduced.bucket(0).device) for _ in self._ends]
        self._ready = self._launched = 0
        self.reset()

    def _sum_dtype(self, bucket: Bucket) -> str:
        """Return the layout's name of the dtype for sums of a bucket in cuts, before they reach
        their owners.
        """
        wire_dtype = dtype_name(self._wire_dtype(bucket))
        native = self._wires[bucket.ep_size].native
        stage = 2 if self._grads is None else 1
        return sum_dtype(wire_dtype, "native" if native else "ordered", stage=stage)

    def _make_cut(self, bucket: Bucket) -> Tensor:
        """Return memory for this rank's cut of ``bucket``: the gradient memory, if that has the
        dtype of sums.
        """
        dtype = DTYPES[self._sum_dtype(bucket)]
        if self._grads is not None and self._grads.dtype(bucket.dtype) == dtype:
            return cut_of(self._grads.bucket(bucket), bucket, self.rank)
        device = self.reduced.bucket(0).device
        return torch.zeros(bucket.cut_numel, dtype=dtype, device=device)

    @property
    def cuts(self) -> tuple[Tensor, ...]:
        """The memory of this rank's cuts, which may be the gradient memory."""
        return tuple(self._cuts.values())

    @property
    @abstractmethod
    def gradients(self) -> Gradients:
        """The state of the gradients of the current step."""

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        # If an exception ended a backward pass, some buckets may be pending and read memory that
        # the next pass writes. Which ones have started depends on the speed of other ranks; which
        # ones may start, only on gradients.
        self._advance(wait=True)
        self._wait()
        self._start_pass()
        self._finished = False
        self.got: set[str] = set()
        """The parameters that got a gradient on this rank in any micro-batch of this step."""
        self.by_hand = False
        """True once a gradient of this step comes from something other than a backward pass."""
        self._late: StepError | None = None

    def _start_pass(self) -> None:
        self._arrived: set[str] = set()
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._ready = self._launched = 0

    def accumulate(self, name: str, *, launch: bool) -> None:
        """Take ``param.grad`` of ``name``.

        If its bucket has already been reduced, the gradient would be lost; :meth:`finish` raises
        the error.

        Args:
            launch: True to start every bucket that may start now.
        """
        if torch.is_grad_enabled():
            # A backward pass may build a graph. Otherwise this check is all that every hook pays
            # for.
            with torch.no_grad():
                self.accumulate(name, launch=launch)
            return
        grad = self._params[name].grad
        if grad is None:
            return
        bucket = self._bucket_of[name]
        if bucket < self._ready:
            # Do not raise here: the other ranks need the rest of this backward pass.
            self._late = self._late or late_gradient(name, bucket)
            return
        self.got.add(name)
        self._take(name, grad)
        if not launch:
            return
        if name not in self._arrived:
            self._arrived.add(name)
            self._missing[bucket] -= 1
            while self._ready < len(self._missing) and not self._missing[self._ready]:
                self._ready += 1
        self._side.follow()
        self._advance(wait=False)

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all remaining buckets, including parameters without a gradient, and wait."""
        for name, param in self._params.items():
            # A gradient that waits for its bucket to start is not a new one.
            if param.grad is not None and not self._launched <= self._bucket_of[name] < self._ready:
                self.accumulate(name, launch=False)
        self._ready = len(self.layout.buckets)
        self._side.follow()
        self._advance(wait=True)
        self._wait()
        if self._side.exists:
            # The device's allocator keeps the memory for the exchange and other users until the
            # next pass.
            for turn in self._turns:
                turn.release()

    def finish(self, *, aside: bool = False) -> None:
        """Make sure that ``reduced`` has the gradients of this step over all ranks. Every rank must
        call this at the same point.

        Args:
            aside: True to take part in the collectives of other ranks, and leave this rank's
                gradients unfinished.

        Raises:
            StepError: nothing was reduced, because no backward pass reached the boundary; or a
                gradient came too late.
        """
        if self._late is not None:
            raise self._late
        # The step may run on another stream than the end of the backward pass.
        self._side.join()
        if not (self._finished or aside):
            raise nothing_reduced()

    def divisor(self, *, to_write: bool = False) -> float:
        """Return the divisor that turns ``reduced`` into the averages of the step so far.

        Args:
            to_write: True if the caller will write the averages.

        Raises:
            StepError: there are no averages now.
        """
        if self.gradients is not Gradients.AVERAGES:
            raise StepError(
                "averaged gradients exist only between the backward pass at the boundary of "
                "gradient accumulation (at stage 2, any backward pass) and engine.step(); read or "
                "write them there; Accelerate and a Trainer call engine.step() inside their "
                "backward, so that layerwise.norm_groups and torch's hooks alone see them"
            )
        self.by_hand |= to_write
        return 1.0

    def _advance(self, *, wait: bool) -> None:
        """Start buckets that may start. Without ``wait``, stop where starting one would wait for
        another rank.
        """
        while self._launched < self._ready:
            if len(self._pending) >= MAX_PENDING:
                if wait or self._ready - self._launched > self._max_waiting:
                    self._begin_last()
                    self._pending[0].wait()
                elif not self._pending[0].advance():
                    return
                self._pending.popleft()
            with profiled("reduce"):
                self._launch()

    def _wait(self) -> None:
        """Wait until nothing is pending."""
        self._begin_last()
        while self._pending:
            self._pending.popleft().wait()
        with self._side:
            # The stream that has used the memory of turns waits, too, and gets it back.
            for end in self._ends:
                end.join()
        self._side.join()
        # The computation may be on another stream than the caller.
        while self._copied:
            for gradient in self._copied.popleft()[1]:
                self._side.keep(gradient)

    def _begin_last(self) -> None:
        """Wait until the last collective of every pending bucket has begun. One bucket is in
        transit while another is waited for.
        """
        for pending in self._pending:
            pending.begin_last()

    def _to_owners(self, *, add: bool = False) -> None:
        """Send the sums of buckets in cuts to ``reduced`` of their owners; with ``add``, add them
        there.
        """
        self._side.follow()
        with self._side:
            self._exchange.to_owners(self._cuts, self.reduced.bucket, add=add)
        self._side.join()

    def _turn(self) -> Turn:
        """Return the memory for the next bucket, after the previous bucket of that turn has left
        it. Call it in ``with self._side``.
        """
        turn = self._launched % len(self._turns)
        self._ends[turn].join()
        return self._turns[turn]

    def _start(self, pending: comm.Pending) -> None:
        """Register the next bucket, whose collective has begun. Call it in ``with self._side``."""
        if self._side.exists:
            # Streams wait here; the host and the computation do not.
            pending.begin_last()
            end = self._ends[self._launched % len(self._ends)]
            end.follow()
            with end:
                pending.wait()
        else:
            self._pending.append(pending)
        self._launched += 1

    @abstractmethod
    def _take(self, name: str, grad: Tensor) -> None:
        """Take a new gradient, whose bucket has not started."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the next bucket."""
