"""The sums of gradients in a step, and their averages at the owners."""

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
    """Return the error for a step with a backward pass that was not reduced.

    Args:
        outside: True if the engine did not know of the pass.
    """
    if outside:
        return StepError(
            "step() before the gradients were reduced: their backward pass did not go through the "
            "engine; call engine(inputs) in place of the model, then engine.backward(loss) and "
            "engine.step(). engine.zero_grad() on all ranks drops what there is"
        )
    return StepError(
        "step() before the gradients were reduced: an exception has ended a backward pass of this "
        "step, and not all of its gradients are there; call engine.zero_grad() on all ranks, and "
        "begin the step again with its first micro-batch"
    )


def _lay_in(memory: Tensor, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
    """Copy ``gradient`` to the place of ``slot`` in ``memory``, which is the whole ``bucket``."""
    if bucket.way == "by_param":
        first = bucket.offset_in_shard(slot)
        rows = memory.view(bucket.holders, -1)[:, first : first + bucket.cut_of(slot)]
        lay_in_rows(gradient.reshape(-1), rows)
    else:
        place = memory.narrow(0, slot.start - bucket.start, slot.numel)
        place.view(gradient.shape).copy_(gradient)


class GradSync(BucketScheduler):
    """Accumulates gradients into buckets, and averages every bucket over the ranks into its owners'
    shards.

    It needs ``grads``. It sets ``param.grad`` to None when it has taken a gradient.

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
        """The state of the gradients of the current step."""
        if self._finished:
            return Gradients.AVERAGES
        if self._ready:
            return Gradients.UNDER_WAY
        if self._has_grad:
            return Gradients.SUMS
        return Gradients.NONE

    def accumulated(self) -> dict[str, Tensor]:
        """Return the gradients of a step before its reduction, by name, as 1-D views. Empty once
        the reduction has begun.
        """
        if self.gradients is not Gradients.SUMS:
            return {}
        found = {}
        for name in sorted(self._has_grad):
            found[name] = self._grads.param(name)
        return found

    def local_sum(self, name: str, *, to_write: bool = False) -> Tensor | None:
        """Return this rank's own sum for ``name`` before the reduction of the step, as a 1-D view;
        zeros if it has no gradient so far.

        Return None if there are no sums: no gradients at all yet, or reduced ones.

        Args:
            to_write: True if the caller will write the sum, so that it counts.
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
        """Return the sum for ``name`` so far, as a 1-D view. Without gradients it is set to
        zeros.
        """
        whole = self._grads.param(name)
        if name not in self._has_grad:
            whole.zero_()
        return whole

    @torch.no_grad()
    def sum_over(self, name: str, *, group: comm.Group) -> None:
        """Sum the accumulated gradient of ``name`` over the ranks of ``group``, which have it in
        their layouts, too.
        """
        self.accumulate(name, launch=False)
        comm.sum_over_ranks(self._sum_of(name), group=group)
        self._has_grad.add(name)

    def _take(self, name: str, grad: Tensor) -> None:
        """Add the gradient to the bucket, and set ``param.grad`` to None."""
        view = self._shaped[name]
        if name in self._has_grad:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._has_grad.add(name)
        self._params[name].grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all remaining buckets, including parameters without a gradient, and wait."""
        super().reduce()
        if self._finished:
            # A second call, perhaps on this rank alone, must send nothing and not change the
            # averages.
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
                self._sum_of(slot.name)  # zeros if no gradient has come
            out = self._cuts.get(bucket.index)
            if out is None:
                out = self.reduced.bucket(bucket.index)
            pending = self._wires[bucket.ep_size].reduce(
                self._grads.bucket(bucket),
                bucket,
                out,
                # A sum in another dtype is divided when it becomes float32.
                divide_by=self._divide_by if out.dtype == torch.float32 else 1,
                wire_dtype=self._wire_dtype(bucket),
                turn=self._turn(),
            )
            self._start(pending)


class EagerGradSync(BucketScheduler):
    """Averages gradients into their owners' shards after every micro-batch, so that no rank keeps
    gradients of other owners.

    Gradients stay in ``param.grad`` until their bucket is complete. Then they are copied into a
    bucket that exists only while it is in transit, and set to None. The sums over ranks are added
    up in float32, and stay sums until the update, because more may come after a refused step. This
    class reduces first and then accumulates; :class:`GradSync` accumulates first and then reduces.
    So with several micro-batches the two round differently, but integer gradients have the same
    sums.

    Life of a step: ``accumulate`` and ``reduce`` for every micro-batch, ``finish`` once, ``reset``.
    """

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._passes = 0
        # The buckets whose sums are in cuts, not yet at their owners; and those whose sums are in
        # ``reduced``.
        self._in_cuts: set[int] = set()
        self._in_shards: set[int] = set()
        self._have_owners = False

    @property
    def gradients(self) -> Gradients:
        """The state of the gradients of the current step."""
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
        """Return the divisor that turns ``reduced`` into the averages of the step so far. Every
        rank must call this.

        Args:
            to_write: True if the caller will write the averages.

        Raises:
            StepError: there are no averages now.
        """
        if self.gradients is not Gradients.SUMS:
            super().divisor(to_write=to_write)
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
        """Leave the gradient in ``param.grad``."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all remaining buckets, including parameters without a gradient, and wait."""
        super().reduce()
        self._passes += 1
        self._start_pass()

    def finish(self, *, aside: bool = False) -> None:
        """Send the sums of this step to their owners.

        Args:
            aside: True to take part in the collectives of other ranks, and keep sums.

        Raises:
            StepError: there was no backward pass, or a gradient came too late.
        """
        self._side.join()
        # Also on a rank that has lost its gradients, or that has finished while another could not:
        # the other ranks need it.
        if self._exchange.rounds:
            self._exchange_sums()
        self._finished |= bool(self._passes) and not aside
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
            # If there was a step before this pass, it was refused.
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
            # Only after memory is allocated: a launch that runs out of memory begins again.
            has_sums.add(bucket.index)
            pending = self._wires[bucket.ep_size].reduce(
                travelling, bucket, out, divide_by=1, wire_dtype=wire_dtype, turn=turn
            )
            self._start(pending if is_first else pending.then(lambda: total.add_(out)))
        while len(self._copied) > self._max_waiting:
            # After this wait, the computation may reuse the memory.
            self._copied[0][0].wait()
            self._copied.popleft()
