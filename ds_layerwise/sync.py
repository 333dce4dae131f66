"""When a bucket is launched and when it is waited for: gradients to their owners, parameters back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ds_layerwise import comm
from ds_layerwise.buffers import FlatBuffer, ShardBuffer
from ds_layerwise.cost import MAX_UNDER_WAY
from ds_layerwise.errors import StepError
from ds_layerwise.layout import Bucket, Layout

#: By the number of variants of a bucket's parameters, the ranks of one variant.
Groups = Mapping[int, comm.Group]


def late_gradient(name: str, bucket: int) -> StepError:
    """The error for a gradient that comes when its bucket is gone."""
    return StepError(f"{name} got a gradient after its bucket {bucket} was reduced, so it would be lost; with several "
                     "backward passes in one step, or reentrant activation checkpointing, set "
                     "zero_optimization.overlap_comm to false and mark only the last backward pass as the boundary "
                     "(engine.set_gradient_accumulation_boundary)")


def nothing_reduced() -> StepError:
    """The error for a step without gradients."""
    return StepError("step() before the gradients were reduced: no backward pass reached the boundary of gradient "
                     "accumulation; call engine.backward(loss) first")


def no_gradient() -> StepError:
    """The error for a question about averaged gradients at a time when there are none."""
    return StepError("averaged gradients are there between the backward pass that reaches the boundary of gradient "
                     "accumulation (at stage 2, any backward pass) and the step, not now")


class _BucketOrder:
    """When a bucket starts: once its gradients and all buckets before it are there, and a few at a time at most."""

    def __init__(self, layout: Layout, params: Mapping[str, nn.Parameter], reduced: ShardBuffer, *, groups: Groups,
                 divide_by: float, wire_dtype: Callable[[Bucket], torch.dtype], in_flight: int = MAX_UNDER_WAY) -> None:
        self.layout, self.reduced = layout, reduced
        self._params, self._groups = params, groups
        self._divide_by, self._wire_dtype, self._in_flight = divide_by, wire_dtype, in_flight
        self._bucket_of = {slot.name: bucket.index for bucket in layout.buckets for slot in bucket.slots}
        self._pending: deque[comm.Pending] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        # A backward pass that an exception ended may have left buckets under way, which read what it writes next.
        self._wait()
        self._start_pass()
        self.finished = False

    def _start_pass(self) -> None:
        self._arrived: set[str] = set()
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._launched = 0

    @torch.no_grad()
    def accumulate(self, name: str, *, launch: bool) -> None:
        """Take note of ``param.grad`` of ``name``; with ``launch``, start every bucket that this completes.

        Raises:
            StepError: the bucket of ``name`` was reduced already, so this gradient would be lost.
        """
        if self._params[name].grad is None:
            return
        bucket = self._bucket_of[name]
        if bucket < self._launched:
            raise late_gradient(name, bucket)
        self._take(name)
        if launch and name not in self._arrived:
            self._arrived.add(name)
            self._missing[bucket] -= 1
            # Buckets start in index order on every rank: a rank whose gradients arrive in another order would
            # otherwise enter the collectives in another order, and hang.
            while self._launched < len(self._missing) and not self._missing[self._launched]:
                self._launch()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what is left, including parameters without a gradient, and wait.

        Raises:
            StepError: a parameter has a new gradient, but its bucket was reduced already.
        """
        for name, param in self._params.items():
            if param.grad is not None:
                self.accumulate(name, launch=False)
        while self._launched < len(self.layout.buckets):
            self._launch()
        self._wait()
        self._end_pass()

    def _wait(self, left: int = 0) -> None:
        """Wait until at most ``left`` buckets are under way."""
        while len(self._pending) > left:
            self._pending.popleft().wait()

    def _take(self, name: str) -> None:
        """Do what must be done with a gradient before its bucket starts."""

    def _launch(self) -> None:
        """Start the next bucket."""
        self._launched += 1

    def _end_pass(self) -> None:
        """All buckets have arrived."""


class GradSync(_BucketOrder):
    """Accumulates gradients into buckets and averages every bucket over the ranks, into its owners' shards.

    Args:
        params: the trainable parameters by name; ``param.grad`` is None after it was taken over.
        grads: where micro-batches accumulate, laid out like the parameters.
        reduced: where the averaged gradient of this rank's shards ends up, float32; may alias ``grads``.
        in_flight: buckets under way at a time; it bounds the memory for what is received.

    Life of a step: ``accumulate`` for every gradient of every micro-batch, ``reduce`` and ``finish`` once, ``reset``.
    """

    def __init__(self, layout: Layout, params: Mapping[str, nn.Parameter], grads: FlatBuffer, reduced: ShardBuffer, *,
                 groups: Groups, divide_by: float, wire_dtype: Callable[[Bucket], torch.dtype],
                 in_flight: int = MAX_UNDER_WAY) -> None:
        self._grads = grads
        super().__init__(layout, params, reduced, groups=groups, divide_by=divide_by, wire_dtype=wire_dtype,
                         in_flight=in_flight)

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._has_grad: set[str] = set()

    def accumulated(self) -> dict[str, Tensor]:
        """The gradients of a step that has not been reduced yet, by name, 1-D, as views; none once it has begun to."""
        return {} if self._launched else {name: self._grads.param(name) for name in sorted(self._has_grad)}

    def divisor(self) -> float:
        """What ``reduced`` must be divided by to hold the averages of the step so far.

        Raises:
            StepError: it holds none now.
        """
        if not self.finished:
            raise no_gradient()
        return 1.0

    def restore(self, name: str, start: int, values: Tensor) -> None:
        """Add ``values`` to what has accumulated from element ``start`` of ``name`` on."""
        whole = self._grads.param(name)
        if name not in self._has_grad:
            whole.zero_()
            self._has_grad.add(name)
        whole[start:start + values.numel()].add_(values)

    @torch.no_grad()
    def sum_over(self, name: str, *, group: comm.Group) -> None:
        """Add up what has accumulated of ``name`` on the ranks of ``group``, which hold it in their layouts, too."""
        self.accumulate(name, launch=False)
        whole = self._grads.param(name)
        if name not in self._has_grad:
            whole.zero_()
            self._has_grad.add(name)
        comm.sum_over_ranks(whole, group=group)

    def _take(self, name: str) -> None:
        """Add the gradient into the bucket; None stays behind."""
        param = self._params[name]
        grad = param.grad
        if grad is None:
            return
        view = self._grads.param(name).view(grad.shape)
        if name in self._has_grad:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._has_grad.add(name)
        param.grad = None

    def _end_pass(self) -> None:
        self.finished = True

    def finish(self) -> None:
        """Make sure that ``reduced`` holds the averages of this step.

        Raises:
            StepError: nothing was reduced, because no backward pass reached the boundary.
        """
        if not self.finished:
            raise nothing_reduced()

    def _launch(self) -> None:
        bucket = self.layout.buckets[self._launched]
        for slot in bucket.slots:
            if slot.name not in self._has_grad:
                self._grads.param(slot.name).zero_()
        self._wait(self._in_flight - 1)
        self._pending.append(comm.reduce_to_owners(
            self._grads.bucket(bucket), bucket.shard_numels, self.reduced.bucket(bucket.index),
            group=self._groups[bucket.variants], divide_by=self._divide_by, wire_dtype=self._wire_dtype(bucket)))
        self._launched += 1


class EagerGradSync(_BucketOrder):
    """Averages gradients into their owners' shards after every micro-batch: nobody keeps gradients of other owners.

    Gradients stay where autograd put them, on ``param.grad``, until their bucket is complete; then they are copied
    into a bucket that lives as long as it travels, and are None. Their sums over ranks are added up in float32.
    Reduction follows accumulation where :class:`GradSync` has it the other way round, so with several micro-batches
    the two round differently; of whole numbers they make the same sums.

    Args:
        params: the trainable parameters by name.
        reduced: where the averaged gradient of this rank's shards is added up, float32.
        wire_dtype: what the gradients of a bucket travel in.
        in_flight: buckets under way at a time; it bounds the memory beside ``reduced`` for what travels and arrives.

    Life of a step: ``accumulate`` and ``reduce`` for every micro-batch, ``finish`` once, ``reset``.
    """

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        super().reset()
        self._empty = [True] * len(self.layout.buckets)
        self._passes = 0

    def divisor(self) -> float:
        """What ``reduced`` must be divided by to hold the averages of the step so far.

        Raises:
            StepError: it holds none now.
        """
        if not self._passes or self._launched:
            raise no_gradient()
        return 1.0 if self.finished else self._divide_by

    def restore(self, name: str, start: int, values: Tensor) -> None:
        """Add ``values`` to the sum from element ``start`` of ``name`` on, as far as this rank owns it."""
        if not self._passes:
            for index in range(len(self._empty)):
                self.reduced.bucket(index).zero_()
            self._empty = [False] * len(self._empty)
            self._passes = 1
        for piece in self.reduced.pieces[self._bucket_of[name]]:
            first = max(start, piece.param_start)
            last = min(start + values.numel(), piece.param_start + piece.numel)
            if piece.name == name and first < last:
                self.reduced.piece(name)[first - piece.param_start:last - piece.param_start].add_(
                    values[first - start:last - start])

    def accumulated(self) -> dict[str, Tensor]:
        """This rank's pieces of the sums so far, by name, 1-D, as views; none before the first micro-batch."""
        if self.finished or self._launched or not self._passes:
            return {}
        return {piece.name: self.reduced.piece(piece.name) for pieces in self.reduced.pieces for piece in pieces}

    def _end_pass(self) -> None:
        self._passes += 1
        self._start_pass()

    def finish(self) -> None:
        """Turn the sums of this step into averages.

        Raises:
            StepError: there was no backward pass.
        """
        if self.finished:
            return
        if not self._passes:
            raise nothing_reduced()
        for index in range(len(self.layout.buckets)):
            if self._divide_by != 1:
                self.reduced.bucket(index).div_(self._divide_by)
        self.finished = True

    def _launch(self) -> None:
        bucket = self.layout.buckets[self._launched]
        self._wait(self._in_flight - 1)
        device, wire_dtype = self.reduced.bucket(bucket.index).device, self._wire_dtype(bucket)
        travelling = torch.zeros(bucket.numel, dtype=wire_dtype, device=device)
        for slot in bucket.slots:
            param = self._params[slot.name]
            if param.grad is not None:
                start = slot.start - bucket.start
                travelling[start:start + slot.numel].view(param.shape).copy_(param.grad)
                param.grad = None
        total = self.reduced.bucket(bucket.index)
        out = total if self._empty[bucket.index] else torch.empty_like(total)
        self._empty[bucket.index] = False
        pending = comm.reduce_to_owners(travelling, bucket.shard_numels, out, group=self._groups[bucket.variants],
                                        divide_by=1, wire_dtype=wire_dtype)
        if out is not total:
            pending = pending.then(lambda: total.add_(out))
        self._pending.append(pending)
        self._launched += 1


class ParamSync:
    """Sends updated shards of the parameter buffer to all ranks, bucket by bucket.

    With :meth:`overlap_with_forward` the wait moves from the optimizer step into the next forward pass; see the note
    on what is safe to wait for late.

    Note: what is safe to wait for late
        A module that runs waits, just before, for the buckets of its own parameters. That is too late for parameters
        that others read without running the module, such as ``F.linear(x, self.embedding.weight)``. So the first
        forward pass waits for everything and remembers which modules ran; later ones wait at their start for all
        parameters of modules that did not. A forward pass of a part of the model waits for everything.
    """

    def __init__(self, layout: Layout, values: FlatBuffer, *, groups: Groups) -> None:
        self.layout = layout
        self._values, self._groups = values, groups
        self._pending: dict[int, comm.Pending] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.overlapping = False

    def launch(self, index: int) -> None:
        """Start sending bucket ``index``; its shards must not be written until it has been waited for."""
        bucket = self.layout.buckets[index]
        self._pending[index] = comm.gather_from_owners(self._values.bucket(bucket), bucket.shard_numels,
                                                       group=self._groups[bucket.variants])

    def wait(self, indices: Iterable[int]) -> None:
        """Wait for those of ``indices`` that are under way."""
        for index in indices:
            pending = self._pending.pop(index, None)
            if pending is not None:
                pending.wait()

    def finish(self) -> None:
        """Wait for everything under way."""
        self.wait(sorted(self._pending, reverse=True))

    def overlap_with_forward(self, model: nn.Module) -> None:
        """Hook ``model`` and every module of it that holds parameters of the layout."""
        self.overlapping = True
        names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        bucket_of = {slot.name: bucket.index for bucket in self.layout.buckets for slot in bucket.slots}
        needs = {module: sorted({bucket_of[names[p]] for p in module._parameters.values()
                                 if p is not None and names[p] in bucket_of}, reverse=True)
                 for module in model.modules()}
        ran: set[nn.Module] = set()
        late: list[int] | None = None
        inside = False

        # A compiler would trace these with the modules that they hook, and cannot: they wait for collectives.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_model(*_: object) -> None:
            nonlocal inside
            inside = True
            self.finish() if late is None else self.wait(late)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after_model(*_: object) -> None:
            nonlocal inside, late
            inside = False
            late = sorted({index for module, indices in needs.items() if module not in ran for index in indices},
                          reverse=True)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before_module(module: nn.Module, _args: object) -> None:
            ran.add(module)
            # A deep copy of the model keeps these hooks, and its modules are none of ours.
            self.wait(needs[module]) if inside and module in needs else self.finish()

        self._hooks.append(model.register_forward_pre_hook(before_model, prepend=True))
        self._hooks.append(model.register_forward_hook(after_model, always_call=True))
        self._hooks += [module.register_forward_pre_hook(before_module) for module, needed in needs.items() if needed]
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda *_: self.finish()))
            self._hooks.append(module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda *_: self.finish()))

    def remove_hooks(self) -> None:
        """Undo :meth:`overlap_with_forward`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
