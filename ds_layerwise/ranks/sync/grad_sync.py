"""The sums of gradients in a step, and their averages at the owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.plan.layout.transfer_plan import deal
from ds_layerwise.plan.layout.transport import sum_dtype
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer, lay_in_rows
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync.bucket_scheduler import BucketScheduler
from ds_layerwise.ranks.sync.bucket_transfers import Wires, room_in
from ds_layerwise.ranks.sync.step_state import (
    Gradients,
    StepState,
    late_gradient,
    nothing_reduced,
)
from ds_layerwise.ranks.sync.transfer import Transfer


class GradSync:
    """Sums gradients over micro-batches and ranks into the shards of their owners.

    Life of a step: ``accumulate`` for every gradient, ``reduce`` at the end of a backward pass,
    ``finish`` once, ``reset``. ``param.grad`` is None when a gradient has been taken.

    Note: stage 1
        With ``grads``, micro-batches accumulate there, and only the last backward pass of a step is
        reduced, to averages.

    Note: stages 2 and 3
        Without ``grads``, every backward pass is reduced, so that no rank keeps gradients of other
        owners. Gradients stay in ``param.grad`` until their bucket is complete. Then they are
        copied into a bucket that exists only while it is in transit. The sums over ranks are added
        up in float32, and stay sums until the update, because more may come after a refused step.
        Those that the backend has made in bfloat16 are kept so until others are added to them. So
        with several micro-batches the two round differently, but integer gradients have the same
        sums.

    Note: memory of sums
        What does not share the memory of ``grads`` is allocated when sums come: a cut with the
        first reduction of its bucket, an owner's shard with that or with its round of the exchange.
        A cut has its memory until it is sent, a shard until :meth:`reset`. On a device all of it is
        allocated on the stream of reductions, to which it goes back. By then that stream has waited
        for all who use it: for the ends of buckets when a pass ends, and in :meth:`reset` for the
        computation. The computation waits for that stream before it reads.

    Args:
        params: the trainable parameters by name.
        reduced: the averages, or sums, of this rank's shards, float32; may alias ``grads``.
        grads: the memory in which micro-batches accumulate, laid out like the parameters; None for
            stages 2 and 3.
        divide_by: the sum over ranks divided by this is the average.
        sent_as: the dtype in which gradients are sent, by bucket.
        max_waiting: see :class:`.BucketScheduler`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        reduced: ReducedGradients,
        grads: FlatBuffer | None = None,
        *,
        wires: Wires,
        divide_by: float,
        sent_as: Sequence[str],
        max_waiting: int | None = None,
    ) -> None:
        self.layout = reduced.layout
        self.rank = reduced.rank
        self.reduced = reduced
        self.state = StepState()
        self._params = params
        self._grads = grads
        self._shaped: dict[str, Tensor] = {}
        if grads is not None:
            for name, param in params.items():
                self._shaped[name] = grads.params[name].view(param.shape)
        self._wires = wires
        self._divide_by = divide_by
        if grads is None:
            self.reduced.divide_by = divide_by
        self._sent_as = sent_as
        buckets = self.layout.buckets
        self._device = device = reduced.tensors[0].device
        self._transfer = Transfer(
            self.rank,
            deal(buckets, self._sum_dtype),
            group_of=lambda ep_size: wires[ep_size].group,
            cut_of=self._cut,
            shard_of=self._shard,
            device=device,
            then=self._forget_cuts,
        )
        self._in_cuts = {bucket.index for bucket in buckets if bucket.transport == "cuts"}
        self._cuts: dict[int, Tensor] = {}
        self._scheduler = BucketScheduler(self.layout, self._begin, device, max_waiting=max_waiting)
        self.reset()

    def _sum_dtype(self, bucket: Bucket) -> str:
        """Return the layout's name of the dtype for sums of a bucket in cuts, before they reach
        their owners.
        """
        native = self._wires[bucket.ep_size].native
        stage = 2 if self._grads is None else 1
        wire = self._sent_as[bucket.index]
        return sum_dtype(wire, "native" if native else "ordered", stage=stage)

    def _shard(self, index: int) -> Tensor:
        """Return the memory for this rank's sums at their owner: float32 where any are added."""
        if self._adds or self._owners_have_sums:
            return self.reduced.widen(index)
        return self.reduced.allocate(index)

    def _sums_of(self, bucket: Bucket) -> Tensor:
        """Return the memory for this rank's sums of ``bucket``, which is new if it had none.

        That of a cut is the gradient memory, if that has the dtype of sums.
        """
        index = bucket.index
        if index not in self._in_cuts:
            return self._shard(index)
        dtype = DTYPES[self._sum_dtype(bucket)]
        if self._adds and index in self._cuts:
            self._cuts[index] = self._cuts[index].to(dtype)
        if index not in self._cuts:
            if self._grads is None and not self._adds:
                dtype = self.reduced.kept.tensors[index].dtype
            if self._grads is not None and self._grads.tensors[index].dtype == dtype:
                cut = self._grads.cut(bucket, self.rank)
            else:
                cut = torch.empty(bucket.cut_numel, dtype=dtype, device=self._device)
            self._cuts[index] = cut
        return self._cuts[index]

    @property
    def cuts(self) -> tuple[Tensor, ...]:
        """This rank's cuts that have sums, which may be in the gradient memory."""
        return tuple(self._cuts.values())

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        self._scheduler.reset()
        self._cuts.clear()
        # The stream of reductions has its memory back after the computation has read it.
        self._scheduler.side.follow()
        self.reduced.free()
        self.state.drop()
        self.got: set[str] = set()
        """The parameters that got a gradient on this rank in any micro-batch of this step."""
        self.by_hand = False
        """True once a gradient of this step comes from something other than a backward pass."""
        self._late: StepError | None = None
        # The parameters that have a sum in ``grads``.
        self._has_grad: set[str] = set()
        # The buckets that have sums of this step in this rank's cut, else in its shard.
        self._has_sums: set[int] = set()
        self._owners_have_sums = False
        # True once any are added to those of an earlier pass.
        self._adds = False

    # --- gradients of this rank

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
        scheduler = self._scheduler
        bucket = self.layout.bucket_of(name).index
        if bucket < scheduler.ready:
            # Do not raise here: the other ranks need the rest of this backward pass.
            self._late = self._late or late_gradient(name, bucket)
            return
        self.got.add(name)
        if self._grads is not None:
            self._add(name, grad)
        if launch:
            scheduler.arrive(name)
            if scheduler.ready:
                self.state.move(Gradients.UNDER_WAY)
            scheduler.start()

    def _add(self, name: str, grad: Tensor) -> None:
        """Add a gradient to the sum of its parameter, and set ``param.grad`` to None."""
        view = self._shaped[name]
        if name in self._has_grad:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._note_sum(name)
        self._params[name].grad = None

    def _note_sum(self, name: str) -> None:
        self._has_grad.add(name)
        if self.state.gradients is Gradients.NONE:
            self.state.move(Gradients.SUMS)

    def _sum_of(self, name: str) -> Tensor:
        """Return the sum for ``name`` so far, in the shape of the parameter. Without gradients it
        is set to zeros.
        """
        whole = self._shaped[name]
        if name not in self._has_grad:
            whole.zero_()
        return whole

    def local_sum(self, name: str, *, to_write: bool = False) -> Tensor | None:
        """Return this rank's own sum for ``name`` before the reduction of the step, as a 1-D view;
        zeros if it has no gradient so far.

        Return None if there are no such sums: no gradients at all yet, or reduced ones.

        Args:
            to_write: True if the caller will write the sum, so that it counts.
        """
        if self._grads is None or self.state.gradients is not Gradients.SUMS:
            return None
        whole = self._sum_of(name)
        if to_write:
            self._has_grad.add(name)
            self.got.add(name)
            self.by_hand = True
        return whole.view(-1)

    @torch.no_grad()
    def sum_over(self, name: str, *, group: comm.Group) -> None:
        """Sum the accumulated gradient of ``name`` over the ranks of ``group``, which have it in
        their layouts, too. It must be accumulated in ``grads``.
        """
        if self._grads is not None:
            self.accumulate(name, launch=False)
            comm.sum_over_ranks(self._sum_of(name), group=group)
            self._note_sum(name)

    # --- sums over ranks

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all remaining buckets, including parameters without a gradient, and wait."""
        scheduler = self._scheduler
        for name, param in self._params.items():
            # A gradient that waits for its bucket to start is not a new one.
            if param.grad is not None and not scheduler.waits(name):
                self.accumulate(name, launch=False)
        scheduler.complete()
        if self._grads is not None and self.state.gradients is Gradients.AVERAGES:
            # A second call, perhaps on this rank alone, must send nothing and not change the
            # averages.
            return
        self.state.move(Gradients.UNDER_WAY)
        scheduler.end_pass()
        if self._grads is None:
            scheduler.start_pass()
            self.state.move(Gradients.SUMS)
        else:
            self._exchange_sums()
            self.state.move(Gradients.AVERAGES)

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
        # The step may run on another stream than the end of the backward pass.
        self._scheduler.side.join()
        if self._grads is None:
            # Also on a rank that has lost its gradients, or that has finished while another could
            # not: the other ranks need it.
            self._exchange_sums()
            if self.state.gradients is Gradients.SUMS and not aside:
                self.state.move(Gradients.AVERAGES)
        self.reduced.average_over_lanes()
        if self._late is not None:
            raise self._late
        if not (self.state.gradients is Gradients.AVERAGES or aside):
            raise nothing_reduced()

    def divisor(self, *, to_write: bool = False) -> float:
        """Return the divisor that turns ``reduced`` into the averages of the step so far. At stages
        2 and 3, every rank must call this.

        Args:
            to_write: True if the caller will write the averages.

        Raises:
            StepError: there are no averages now.
        """
        gradients = self.state.gradients
        has_sums = self._grads is None and gradients is Gradients.SUMS
        if not (has_sums or gradients is Gradients.AVERAGES):
            raise StepError(
                "averaged gradients exist only between the backward pass at the boundary of "
                "gradient accumulation (at stage 2, any backward pass) and engine.step(); read or "
                "write them there; Accelerate and a Trainer call engine.step() inside their "
                "backward, so that layerwise.norm_groups and torch's hooks alone see them"
            )
        self.by_hand |= to_write
        if self._has_sums & self._in_cuts:
            self._exchange_sums()
        return self.reduced.divide_by

    def _begin(self, bucket: Bucket, turn: Turn) -> comm.Pending:
        """Begin to reduce ``bucket``."""
        wire_dtype = DTYPES[self._sent_as[bucket.index]]
        is_first = bucket.index not in self._has_sums
        self._adds |= self._grads is None and not is_first
        # Allocate all memory before anything changes: a launch that runs out of it begins again.
        total = self._sums_of(bucket)
        numel = total.numel()
        in_place = is_first and numel == bucket.cut_numel
        out = total if in_place else turn.empty("added", bucket.cut_numel, total.dtype)
        divide_by = 1.0
        if self._grads is None:
            memory = turn.empty("travelling", bucket.numel, wire_dtype).zero_()
            self._hand_over(bucket, memory)
        else:
            memory = self._grads.tensors[bucket.index]
            for slot in bucket.slots:
                self._sum_of(slot.name)  # zeros if no gradient has come
            if out.dtype == torch.float32:
                # A sum in another dtype is divided when it becomes float32.
                divide_by = self._divide_by
        pending = self._wires[bucket.ep_size].reduce(
            memory, out, divide_by=divide_by, wire_dtype=wire_dtype, turn=turn
        )
        self._has_sums.add(bucket.index)
        if in_place:
            return pending
        put = total.copy_ if is_first else total.add_
        return pending.then(lambda: put(out[:numel]))

    def _hand_over(self, bucket: Bucket, memory: Tensor) -> None:
        """Copy the gradients of ``bucket`` from parameters to ``memory``, and set them to None."""
        gradients = []
        for slot in bucket.slots:
            param = self._params[slot.name]
            gradient = param.grad
            if gradient is None:
                continue
            if bucket.transport == "by_param":
                first = bucket.offset_in_shard(slot)
                rows = memory.view(bucket.holders, -1)[:, first : first + bucket.cut_of(slot)]
                lay_in_rows(gradient.reshape(-1), rows)
            else:
                place = memory.narrow(0, slot.start - bucket.start, slot.numel)
                place.view(gradient.shape).copy_(gradient)
            gradients.append(gradient)
            param.grad = None
        self._scheduler.copied(gradients)

    def _exchange_sums(self) -> None:
        """Send sums in cuts to their owners; add them to those that have come before. What was sent
        in another dtype than float32 is divided there.
        """
        side = self._scheduler.side
        side.follow()
        with side:
            self._transfer.all_to_owners(add=self._owners_have_sums)
            for index in self._in_cuts:
                bucket = self.layout.buckets[index]
                dtype = DTYPES[self._sum_dtype(bucket)]
                if dtype != torch.float32:
                    ranks = self._wires[bucket.ep_size].size
                    self.reduced.tensors[index].div_(self._divide_by * room_in(dtype, ranks))
        side.join()
        self._owners_have_sums = True

    def _cut(self, index: int) -> Tensor:
        """Return this rank's cut of bucket ``index``; zeros if no sums have come."""
        cut = self._sums_of(self.layout.buckets[index])
        if index not in self._has_sums:
            cut.zero_()
            self._has_sums.add(index)
        return cut

    def _forget_cuts(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._cuts.pop(index, None)
            self._has_sums.discard(index)
