"""The order in which reductions of buckets start, and when ranks wait for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.plan.layout.transport import MAX_PENDING
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.comm.streams import Moment, SideStream


class BucketScheduler:
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
        begin: begins the reduction of a bucket, with memory of a turn, on the stream of reductions.
        max_waiting: the number of buckets that may be complete and not started before the backward
            pass waits for them; None for any number.
    """

    def __init__(
        self,
        layout: Layout,
        begin: Callable[[Bucket, Turn], comm.Pending],
        device: torch.device,
        *,
        max_waiting: int | None,
    ) -> None:
        self._layout = layout
        self._begin = begin
        self._max_waiting = math.inf if max_waiting is None else max_waiting
        # On a device with a limit: gradients, each with the moment when it has been copied.
        self._copied: deque[tuple[Moment, list[Tensor]]] = deque()
        self._pending: deque[comm.Pending] = deque()
        self.side = SideStream()
        """The stream of reductions."""
        self._ends = [SideStream() for _ in range(MAX_PENDING)]
        self._turns = [Turn(device) for _ in self._ends]
        self.start_pass()

    def start_pass(self) -> None:
        """Expect the gradients of a new backward pass. Nothing may be pending."""
        self._arrived: set[str] = set()
        self._missing = [len(bucket.slots) for bucket in self._layout.buckets]
        self.ready = 0
        """The number of buckets that may start, or have started, in this pass."""
        self.launched = 0
        """The number of buckets that have started in this pass."""

    def waits(self, name: str) -> bool:
        """Tell whether the bucket of ``name`` is complete and has not started."""
        return self.launched <= self._layout.bucket_of(name).index < self.ready

    def arrive(self, name: str) -> None:
        """Record the gradient of ``name``, the last one of this pass."""
        if name not in self._arrived:
            self._arrived.add(name)
            self._missing[self._layout.bucket_of(name).index] -= 1
            while self.ready < len(self._missing) and not self._missing[self.ready]:
                self.ready += 1

    def complete(self) -> None:
        """Let all buckets start, also those whose gradients have not come."""
        self.ready = len(self._missing)

    def start(self) -> None:
        """Start the buckets that may start without a wait for another rank."""
        self.side.follow()
        self._advance(wait=False)

    def end_pass(self) -> None:
        """Start all buckets that may start, and wait until nothing is pending."""
        self.side.follow()
        self._advance(wait=True)
        self._wait()
        if self.side.exists:
            # The device's allocator keeps the memory for the exchange and other users until the
            # next pass.
            for turn in self._turns:
                turn.release()

    def reset(self) -> None:
        """Begin a new step, whatever has become of the last pass."""
        # If an exception ended a backward pass, some buckets may be pending and read memory that
        # the next pass writes. Which ones have started depends on the speed of other ranks; which
        # ones may start, only on gradients.
        self._advance(wait=True)
        self._wait()
        self.start_pass()

    def copied(self, gradients: list[Tensor]) -> None:
        """Reserve the memory of ``gradients`` until the copies queued so far are made. Call it in
        ``begin``.
        """
        if math.isinf(self._max_waiting):
            for gradient in gradients:
                self.side.keep(gradient)
        elif gradients and self.side.exists:
            self._copied.append((self.side.moment(), gradients))

    def _advance(self, *, wait: bool) -> None:
        """Start buckets that may start. Without ``wait``, stop where starting one would wait for
        another rank.
        """
        while self.launched < self.ready:
            if len(self._pending) >= MAX_PENDING:
                if wait or self.ready - self.launched > self._max_waiting:
                    self._begin_last()
                    self._pending[0].wait()
                elif not self._pending[0].advance():
                    return
                self._pending.popleft()
            with profiled("reduce"):
                self._launch()

    def _launch(self) -> None:
        """Start the next bucket, in the memory of its turn, after the previous bucket of that turn
        has left it.
        """
        turn = self.launched % len(self._turns)
        end = self._ends[turn]
        with self.side:
            end.join()
            bucket = self._layout.buckets[self.launched]
            pending = self._begin(bucket, self._turns[turn])
            if self.side.exists:
                # Streams wait here; the host and the computation do not.
                pending.begin_last()
                end.follow()
                with end:
                    pending.wait()
            else:
                self._pending.append(pending)
            self.launched += 1
        while len(self._copied) > self._max_waiting:
            # After this wait, the computation may reuse the memory.
            self._copied[0][0].wait()
            self._copied.popleft()

    def _wait(self) -> None:
        """Wait until nothing is pending."""
        self._begin_last()
        while self._pending:
            self._pending.popleft().wait()
        with self.side:
            # The stream that has used the memory of turns waits, too, and gets it back.
            for end in self._ends:
                end.join()
        self.side.join()
        # The computation may be on another stream than the caller.
        while self._copied:
            for gradient in self._copied.popleft()[1]:
                self.side.keep(gradient)

    def _begin_last(self) -> None:
        """Wait until the last collective of every pending bucket has begun. One bucket is in
        transit while another is waited for.
        """
        for pending in self._pending:
            pending.begin_last()
