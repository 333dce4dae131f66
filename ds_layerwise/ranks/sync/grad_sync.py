"""The sums of gradients of a step, and their averages at the owners."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.plan.layout.layout import Bucket, Slot
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import FlatBuffer, ShardBuffer, lay_in_rows
from ds_layerwise.ranks.sync.bucket_scheduler import BucketScheduler, Gradients
from ds_layerwise.ranks.sync.bucket_transfers import room_in


def half_a_pass(*, outside: bool) -> StepError:
    """Return the error for a step after a backward pass that was not reduced; ``outside`` where the
    engine knew of none.
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


def _lay_in(memory: Tensor, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
    """Copy ``gradient`` to the place of ``slot`` in ``memory``, the whole of ``bucket``."""
    if bucket.way == "by_param":
        first = bucket.offset_in_shard(slot)
        rows = memory.view(bucket.holders, -1)[:, first : first + bucket.cut_of(slot)]
        lay_in_rows(gradient.reshape(-1), rows)
    else:
        place = memory.narrow(0, slot.start - bucket.start, slot.numel)
        place.view(gradient.shape).copy_(gradient)


class GradSync(BucketScheduler):
    """Accumulates gradients into buckets and averages every bucket over the ranks, into its owners'
    shards.

    It needs ``grads``. ``param.grad`` is None after it was taken over.

    Life of a step: ``accumulate`` for every gradient of every micro-batch, ``reduce`` and
    ``finish`` once, ``reset``.
    """

    _grads: FlatBuffer

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        reduced: ShardBuffer,
        grads: FlatBuffer,
        **settings: Any,
    ) -> None:
        self._shaped = {name: grads.param(name).view(param.shape) for name, param in params.items()}
        super().__init__(params, reduced, grads, **settings)

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._has_grad: set[str] = set()

    @property
    def gradients(self) -> Gradients:
        """The state of the gradients of the step at hand."""
        if self._finished:
            return Gradients.AVERAGES
        if self._ready:
            return Gradients.UNDER_WAY
        if self._has_grad:
            return Gradients.SUMS
        return Gradients.NONE

    def accumulated(self) -> dict[str, Tensor]:
        """Return the gradients of a step that has not been reduced yet, by name, 1-D, as views;
        none once it has begun to.
        """
        if self.gradients is not Gradients.SUMS:
            return {}
        found = {}
        for name in sorted(self._has_grad):
            found[name] = self._grads.param(name)
        return found

    def local_sum(self, name: str, *, to_write: bool = False) -> Tensor | None:
        """Return this rank's own sum for ``name`` before the step is reduced, 1-D, a view; zeros
        where it has none so far.

        None where there is nothing to add up: no gradient at all yet, or reduced ones.

        Args:
            to_write: whether what it holds is to count.
        """
        if self.gradients is not Gradients.SUMS:
            return None
        whole = self._sum_of(name)
        if to_write:
            self._has_grad.add(name)
            self.got.add(name)
            self.by_hand = True
        return whole

    def _sum_of(self, name: str) -> Tensor:
        """Return the sum of ``name`` so far, 1-D, a view; without gradients it is set to zeros."""
        whole = self._grads.param(name)
        if name not in self._has_grad:
            whole.zero_()
        return whole

    @torch.no_grad()
    def sum_over(self, name: str, *, group: comm.Group) -> None:
        """Add up what has accumulated of ``name`` on the ranks of ``group``, which have it in their
        layouts, too.
        """
        self.accumulate(name, launch=False)
        comm.sum_over_ranks(self._sum_of(name), group=group)
        self._has_grad.add(name)

    def _take(self, name: str, grad: Tensor) -> None:
        """Add the gradient into the bucket; None stays behind."""
        view = self._shaped[name]
        if name in self._has_grad:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._has_grad.add(name)
        self._params[name].grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what is left, including parameters without a gradient, and wait."""
        super().reduce()
        if self._finished:
            # What comes after the first time, on this rank alone perhaps, sends nothing and leaves
            # averages alone.
            return
        self._to_owners()
        with self._side:
            for index, cut in self._cuts.items():
                if cut.dtype != torch.float32:
                    ranks = self._wires[self.layout.buckets[index].ep_size].size
                    self.reduced.bucket(index).div_(self._divide_by * room_in(cut.dtype, ranks))
        self._side.join()
        self._finished = True

    def _launch(self) -> None:
        """Start the next bucket."""
        bucket = self.layout.buckets[self._launched]
        with self._side:
            for slot in bucket.slots:
                self._sum_of(slot.name)  # zeros where no gradient has come
            out = self._cuts.get(bucket.index)
            if out is None:
                out = self.reduced.bucket(bucket.index)
            pending = self._wires[bucket.ep_size].reduce(
                self._grads.bucket(bucket),
                bucket,
                out,
                # What is not float32 yet is divided when it is.
                divide_by=self._divide_by if out.dtype == torch.float32 else 1,
                wire_dtype=self._wire_dtype(bucket),
                turn=self._turn(),
            )
            self._start(pending)


class EagerGradSync(BucketScheduler):
    """Averages gradients into their owners' shards after every micro-batch: nobody keeps gradients
    of other owners.

    Gradients stay where autograd put them, on ``param.grad``, until their bucket is complete; then
    they are copied into a bucket that lives as long as it travels, and are None. Their sums over
    ranks are added up in float32. Reduction follows accumulation where :class:`GradSync` has it the
    other way round, so with several micro-batches the two round differently; of whole numbers they
    make the same sums.

    Life of a step: ``accumulate`` and ``reduce`` for every micro-batch, ``finish`` once, ``reset``.
    """

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._passes = 0
        # Buckets that have sums: in cuts, not yet at their owners; and in ``reduced``.
        self._in_cuts: set[int] = set()
        self._in_shards: set[int] = set()
        self._have_owners = False

    @property
    def gradients(self) -> Gradients:
        """The state of the gradients of the step at hand."""
        if self._ready:
            return Gradients.UNDER_WAY
        if self._finished:
            return Gradients.AVERAGES
        if self._passes:
            return Gradients.SUMS
        return Gradients.NONE

    def local_sum(self, name: str, *, to_write: bool = False) -> Tensor | None:
        """Return None: after every backward pass there are averages of the step so far."""
        return None

    def divisor(self, *, to_write: bool = False) -> float:
        """Return what ``reduced`` must be divided by to hold the averages of the step so far. Every
        rank must call this.

        Args:
            to_write: whether somebody is to write them.

        Raises:
            StepError: it holds none now.
        """
        if self.gradients is not Gradients.SUMS:
            return super().divisor(to_write=to_write)
        self.by_hand |= to_write
        if self._in_cuts:
            self._exchange_sums()
        return self._divide_by

    def _exchange_sums(self) -> None:
        """Send sums in cuts to their owners."""
        if not self._in_cuts:
            for cut in self._cuts.values():
                cut.zero_()
        self._in_cuts.clear()
        self._to_owners(add=self._have_owners)
        self._have_owners = True

    def _take(self, name: str, grad: Tensor) -> None:
        """Leave the gradient where it is."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what is left, including parameters without a gradient, and wait."""
        super().reduce()
        self._passes += 1
        self._start_pass()

    def finish(self, *, aside: bool = False) -> None:
        """Turn the sums of this step into averages.

        Args:
            aside: take part in what others need, and leave them sums.

        Raises:
            StepError: there was no backward pass; or a gradient came too late.
        """
        self._side.join()
        # Also on a rank that has lost its gradients, or has finished where another could not:
        # others count on it.
        if self._exchange.rounds:
            self._exchange_sums()
        if self._passes and not (self._finished or aside):
            if self._divide_by != 1:
                for shard in self.reduced.tensors:
                    shard.div_(self._divide_by)
            self._finished = True
        super().finish(aside=aside)

    def _launch(self) -> None:
        """Start the next bucket."""
        bucket = self.layout.buckets[self._launched]
        wire_dtype = self._wire_dtype(bucket)
        if bucket.way == "cuts":
            total = self._cuts[bucket.index]
            has_sums = self._in_cuts
        else:
            total = self.reduced.bucket(bucket.index)
            has_sums = self._in_shards
        is_first = bucket.index not in has_sums
        with self._side:
            if self._finished:
                # The step that the averages were for was refused: they are sums again.
                for shard in self.reduced.tensors:
                    shard.mul_(self._divide_by)
                self._finished = False
            turn = self._turn()
            travelling = turn.empty("travelling", bucket.numel, wire_dtype).zero_()
            gradients = []
            for slot in bucket.slots:
                param = self._params[slot.name]
                if param.grad is not None:
                    _lay_in(travelling, bucket, slot, param.grad)
                    if math.isinf(self._max_waiting):
                        self._side.keep(param.grad)
                    else:
                        gradients.append(param.grad)
                    param.grad = None
            if gradients and self._side.exists:
                self._copied.append((self._side.moment(), gradients))
            out = total if is_first else turn.empty("added", total.numel(), total.dtype)
            # Not before there is memory: a launch that found none begins again.
            has_sums.add(bucket.index)
            pending = self._wires[bucket.ep_size].reduce(
                travelling, bucket, out, divide_by=1, wire_dtype=wire_dtype, turn=turn
            )
            self._start(pending if is_first else pending.then(lambda: total.add_(out)))
        while len(self._copied) > self._max_waiting:
            # Their memory is there for what computation makes when it has waited.
            self._copied[0][0].wait()
            self._copied.popleft()
