"""From the gradients of a step to their averages at the owners: how they add up, and what there is
of them when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.plan.network.reduction import Reduction, sum_dtype
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer, ShardBuffer, cut_of, dtype_name
from ds_layerwise.ranks.sync.bucket_scheduler import BucketOrder, Gradients
from ds_layerwise.ranks.sync.bucket_transfers import Wires, room_in


def nothing_reduced() -> StepError:
    """The error for a step without gradients."""
    return StepError(
        "step() before the gradients were reduced: no backward pass reached the boundary of "
        "gradient accumulation; call engine.backward(loss) first, and engine.step() after every "
        "micro-batch, also of those that accumulate: it counts them, and updates after the last"
    )


def half_a_pass(*, outside: bool) -> StepError:
    """The error for a step after a backward pass that was not reduced; ``outside`` where the engine
    knew of none.
    """
    if outside:
        return StepError(
            "step() before the gradients were reduced: their backward pass did not go through the "
            "engine; call engine(inputs) in place of the model, then engine.backward(loss) and "
            "engine.step(). engine.zero_grad() on all ranks drops what there is"
        )
    return StepError(
        "step() before the gradients were reduced: an exception has ended a backward pass, and not "
        "all of its gradients are there; call engine.zero_grad() on all ranks, and go on with the "
        "next batch"
    )


def no_gradient() -> StepError:
    """The error for a question about averaged gradients at a time when there are none."""
    return StepError(
        "averaged gradients are there between the backward pass that reaches the boundary of "
        "gradient accumulation (at stage 2, any backward pass) and the step, not now"
    )


class GradSync(BucketOrder):
    """Accumulates gradients into buckets and averages every bucket over the ranks, into its owners'
    shards.

    Args:
        params: the trainable parameters by name; ``param.grad`` is None after it was taken over.
        grads: where micro-batches accumulate, laid out like the parameters.
        reduced: where the averaged gradient of this rank's shards ends up, float32; may alias
            ``grads``.

    Life of a step: ``accumulate`` for every gradient of every micro-batch, ``reduce`` and
    ``finish`` once, ``reset``.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        params: Mapping[str, nn.Parameter],
        grads: FlatBuffer,
        reduced: ShardBuffer,
        *,
        wires: Wires,
        divide_by: float,
        wire_dtype: Callable[[Bucket], torch.dtype],
    ) -> None:
        self._grads = grads
        self._shaped = {name: grads.param(name).view(param.shape) for name, param in params.items()}
        super().__init__(
            layout, rank, params, reduced, wires=wires, divide_by=divide_by, wire_dtype=wire_dtype
        )

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._has_grad: set[str] = set()

    @property
    def gradients(self) -> Gradients:
        """What there is of the gradients of the step at hand."""
        if self._finished:
            return Gradients.AVERAGES
        if self._ready:
            return Gradients.UNDER_WAY
        return Gradients.SUMS if self._has_grad else Gradients.NONE

    def accumulated(self) -> dict[str, Tensor]:
        """The gradients of a step that has not been reduced yet, by name, 1-D, as views; none once
        it has begun to.
        """
        if self.gradients is not Gradients.SUMS:
            return {}
        return {name: self._grads.param(name) for name in sorted(self._has_grad)}

    def local_sum(self, name: str, *, to_write: bool = False) -> Tensor | None:
        """This rank's own sum for ``name`` before the step is reduced, 1-D, a view; zeros where it
        has none so far.

        None where there is nothing to add up: no gradient at all yet, or reduced ones.

        Args:
            to_write: whether what it holds is to count.
        """
        if self.gradients is not Gradients.SUMS:
            return None
        whole = self._grads.param(name)
        if name not in self._has_grad:
            whole.zero_()
        if to_write:
            self._has_grad.add(name)
            self.got.add(name)
            self.by_hand = True
        return whole

    def divisor(self, *, to_write: bool = False) -> float:
        """What ``reduced`` must be divided by to hold the averages of the step so far.

        Args:
            to_write: whether somebody is to write them.

        Raises:
            StepError: it holds none now.
        """
        if self.gradients is not Gradients.AVERAGES:
            raise no_gradient()
        self.by_hand |= to_write
        return 1.0

    @torch.no_grad()
    def sum_over(self, name: str, *, group: comm.Group) -> None:
        """Add up what has accumulated of ``name`` on the ranks of ``group``, which hold it in their
        layouts, too.
        """
        self.accumulate(name, launch=False)
        whole = self._grads.param(name)
        if name not in self._has_grad:
            whole.zero_()
            self._has_grad.add(name)
        comm.sum_over_ranks(whole, group=group)

    def _take(self, name: str, grad: Tensor) -> None:
        """Add the gradient into the bucket; None stays behind."""
        view = self._shaped[name]
        if name in self._has_grad:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._has_grad.add(name)
        self._params[name].grad = None

    def _end_pass(self) -> None:
        if not self._finished:
            # Once a step: what comes after it, on this rank alone perhaps, sends nothing and leaves
            # averages alone.
            self._to_owners(self.reduced.bucket)
            with self._side:
                for index, cut in self._cuts.items():
                    if cut.dtype != torch.float32:
                        ranks = self._wires[self.layout.buckets[index].ep_size].size
                        self.reduced.bucket(index).div_(self._divide_by * room_in(cut.dtype, ranks))
        self._finished = True

    def finish(self, *, aside: bool = False) -> None:
        """Make sure that ``reduced`` holds the averages of this step.

        Raises:
            StepError: nothing was reduced, because no backward pass reached the boundary; or a
                gradient came too late.
        """
        super().finish(aside=aside)
        if self.gradients is not Gradients.AVERAGES:
            raise nothing_reduced()

    def _launch(self) -> None:
        bucket = self.layout.buckets[self._launched]
        with self._side:
            for slot in bucket.slots:
                if slot.name not in self._has_grad:
                    self._grads.param(slot.name).zero_()
            out = (
                self._cuts[bucket.index]
                if bucket.way == "cuts"
                else self.reduced.bucket(bucket.index)
            )
            # What is not float32 yet is divided when it is.
            divide_by = self._divide_by if out.dtype == torch.float32 else 1
            self._start(
                self._wires[bucket.ep_size].reduce(
                    self._grads.bucket(bucket),
                    bucket,
                    out,
                    divide_by=divide_by,
                    wire_dtype=self._wire_dtype(bucket),
                    turn=self._turn(),
                )
            )

    def _sum_dtype(self, bucket: Bucket) -> str:
        reduction: Reduction = "native" if self._wires[bucket.ep_size].native else "ordered"
        return sum_dtype(dtype_name(self._wire_dtype(bucket)), reduction, stage=1)

    def _cut_in_place(self, bucket: Bucket, dtype: str) -> Tensor | None:
        same = self._grads.dtype(bucket.dtype) == DTYPES[dtype]
        return cut_of(self._grads.bucket(bucket), bucket, self.rank) if same else None


class EagerGradSync(BucketOrder):
    """Averages gradients into their owners' shards after every micro-batch: nobody keeps gradients
    of other owners.

    Gradients stay where autograd put them, on ``param.grad``, until their bucket is complete; then
    they are copied into a bucket that lives as long as it travels, and are None. Their sums over
    ranks are added up in float32. Reduction follows accumulation where :class:`GradSync` has it the
    other way round, so with several micro-batches the two round differently; of whole numbers they
    make the same sums.

    Args:
        params: the trainable parameters by name.
        reduced: where the averaged gradient of this rank's shards is added up, float32.
        wire_dtype: what the gradients of a bucket travel in.
        max_waiting: how many buckets may have all their gradients and wait, before the backward
            pass waits for them; None for any number.

    Life of a step: ``accumulate`` and ``reduce`` for every micro-batch, ``finish`` once, ``reset``.
    """

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._empty = [True] * len(self.layout.buckets)
        self._passes = 0
        self._in_cuts: set[int] = set()
        self._have_owners = False
        self._aside: dict[int, Tensor] = {}

    @property
    def gradients(self) -> Gradients:
        """What there is of the gradients of the step at hand."""
        if self._ready:
            return Gradients.UNDER_WAY
        if self._finished:
            return Gradients.AVERAGES
        return Gradients.SUMS if self._passes else Gradients.NONE

    def local_sum(self, name: str, *, to_write: bool = False) -> Tensor | None:
        """None: every backward pass is reduced, and there are averages of the step so far."""
        return None

    def divisor(self, *, to_write: bool = False) -> float:
        """What ``reduced`` must be divided by to hold the averages of the step so far.

        Args:
            to_write: whether somebody is to write them.

        Raises:
            StepError: it holds none now.
        """
        if self.gradients not in (Gradients.SUMS, Gradients.AVERAGES):
            raise no_gradient()
        self.by_hand |= to_write
        self._settle()
        return 1.0 if self.gradients is Gradients.AVERAGES else self._divide_by

    def _settle(self) -> None:
        """Let the sums so far be at their owners, all of them. Every rank must call this."""
        self._take_aside()
        if self._in_cuts:
            self._exchange_sums(aside=False)

    def _exchange_sums(self, *, aside: bool) -> None:
        """Let what is in cuts be at its owners; with ``aside``, beside ``reduced`` until the next
        time.
        """
        if not self._in_cuts:
            for cut in self._cuts.values():
                cut.zero_()
        self._in_cuts.clear()
        if aside:
            self._to_owners(self._make_aside, add=True)
            return
        self._take_aside()
        self._to_owners(self.reduced.bucket, add=self._have_owners)
        self._have_owners = True

    def _take_aside(self) -> None:
        """Let ``reduced`` have what it was spared."""
        for index, values in self._aside.items():
            kept = self.reduced.bucket(index)
            kept.add_(values) if self._have_owners else kept.copy_(values)
        self._have_owners |= bool(self._aside)
        self._aside.clear()

    def _make_aside(self, index: int) -> Tensor:
        if index not in self._aside:
            bucket = self.layout.buckets[index]
            self._aside[index] = torch.zeros(
                bucket.shard_numels[self.rank // bucket.ep_size],
                dtype=torch.float32,
                device=self._device,
            )
        return self._aside[index]

    def _end_pass(self) -> None:
        self._passes += 1
        self._start_pass()

    def finish(self, *, aside: bool = False) -> None:
        """Turn the sums of this step into averages.

        Raises:
            StepError: there was no backward pass; or a gradient came too late.
        """
        self._side.join()
        # Also on a rank that has lost its gradients, or has finished where another could not:
        # others count on it.
        if self._exchange.rounds:
            self._exchange_sums(aside=aside)
        if self._passes and not (self._finished or aside):
            for index in range(len(self.layout.buckets)) if self._divide_by != 1 else ():
                self.reduced.bucket(index).div_(self._divide_by)
            self._finished = True
        super().finish(aside=aside)
        if not (self._finished or aside):
            raise nothing_reduced()

    def _reopen(self) -> None:
        """Let averages be sums again: the step that they were for was refused, and there is another
        backward pass.
        """
        for index in range(len(self.layout.buckets)):
            self.reduced.bucket(index).mul_(self._divide_by)
        self._finished = False

    def _launch(self) -> None:
        bucket = self.layout.buckets[self._launched]
        wire_dtype = self._wire_dtype(bucket)
        if bucket.way == "cuts":
            total, is_first = self._cuts[bucket.index], bucket.index not in self._in_cuts
            self._in_cuts.add(bucket.index)
        else:
            total, is_first = self.reduced.bucket(bucket.index), self._empty[bucket.index]
        with self._side:
            if self._finished:
                self._reopen()
            turn = self._turn()
            travelling = turn.empty("travelling", bucket.numel, wire_dtype).zero_()
            gradients = []
            for slot in bucket.slots:
                param = self._params[slot.name]
                if param.grad is not None:
                    start = slot.start - bucket.start
                    travelling[start : start + slot.numel].view(param.shape).copy_(param.grad)
                    if math.isinf(self._max_waiting):
                        self._side.keep(param.grad)
                    else:
                        gradients.append(param.grad)
                    param.grad = None
            if gradients and self._side.exists:
                self._copied.append((self._side.moment(), gradients))
            out = total if is_first else turn.empty("added", total.numel(), total.dtype)
            self._empty[bucket.index] = False
            pending = self._wires[bucket.ep_size].reduce(
                travelling, bucket, out, divide_by=1, wire_dtype=wire_dtype, turn=turn
            )
            self._start(pending if is_first else pending.then(lambda: total.add_(out)))
        while len(self._copied) > self._max_waiting:
            # Their memory is there for what computation makes when it has waited.
            self._copied[0][0].wait()
            self._copied.popleft()
