"""When a bucket is launched and when it is waited for: gradients to their owners, parameters back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ds_layerwise import comm
from ds_layerwise.buffers import FlatBuffer, ShardBuffer
from ds_layerwise.errors import StepError
from ds_layerwise.layout import Layout


class GradSync:
    """Accumulates gradients into buckets and averages every bucket over the ranks, into its owners' shards.

    Args:
        params: the trainable parameters by name; ``param.grad`` is None after it was taken over.
        grads: where micro-batches accumulate, laid out like the parameters.
        reduced: where the averaged gradient of this rank's shards ends up, float32; may alias ``grads``.
        in_flight: buckets under way at a time; it bounds the memory for what is received.

    Life of a step: ``accumulate`` for every gradient of every micro-batch, ``finish`` once, ``reset``.
    """

    def __init__(self, layout: Layout, params: Mapping[str, nn.Parameter], grads: FlatBuffer, reduced: ShardBuffer, *,
                 group: comm.Group, divide_by: float, wire_dtype: Callable[[str], torch.dtype],
                 in_flight: int = 2) -> None:
        self.layout, self.reduced = layout, reduced
        self._params, self._grads, self._group = params, grads, group
        self._divide_by, self._wire_dtype, self._in_flight = divide_by, wire_dtype, in_flight
        self._bucket_of = {slot.name: bucket.index for bucket in layout.buckets for slot in bucket.slots}
        self._pending: deque[comm.Pending] = deque()
        self.reset()

    def reset(self) -> None:
        """Forget all gradients: the next one starts a new step."""
        # A backward pass that an exception ended may have left buckets under way, which read what it writes next.
        self._wait()
        self._has_grad: set[str] = set()
        self._arrived: set[str] = set()
        self._missing = [len(bucket.slots) for bucket in self.layout.buckets]
        self._launched = 0
        self.finished = False

    def accumulated(self) -> dict[str, Tensor]:
        """The gradients of a step that has not been reduced yet, by name, 1-D, as views; none once it has begun to."""
        return {} if self._launched else {name: self._grads.param(name) for name in sorted(self._has_grad)}

    def add(self, name: str, values: Tensor) -> None:
        """Add ``values`` to what has accumulated for ``name``."""
        view = self._grads.param(name).view(values.shape)
        view.add_(values) if name in self._has_grad else view.copy_(values)
        self._has_grad.add(name)

    @torch.no_grad()
    def accumulate(self, name: str, *, launch: bool) -> None:
        """Take over ``param.grad`` of ``name``; with ``launch``, start every bucket that this completes.

        Raises:
            StepError: the bucket of ``name`` was reduced already, so this gradient would be lost.
        """
        param = self._params[name]
        grad = param.grad
        if grad is None:
            return
        bucket = self._bucket_of[name]
        if bucket < self._launched:
            raise StepError(f"{name} got a gradient after its bucket {bucket} was reduced, so it would be lost; with "
                            "several backward passes in one step, or reentrant activation checkpointing, set "
                            "zero_optimization.overlap_comm to false and mark only the last backward pass as the "
                            "boundary (engine.set_gradient_accumulation_boundary)")
        self.add(name, grad)
        param.grad = None
        if launch and name not in self._arrived:
            self._arrived.add(name)
            self._missing[bucket] -= 1
            # Buckets start in index order on every rank: a rank whose gradients arrive in another order would
            # otherwise enter the collectives in another order, and hang.
            while self._launched < len(self._missing) and not self._missing[self._launched]:
                self._launch()

    def finish(self) -> None:
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
        self.finished = True

    def _wait(self, left: int = 0) -> None:
        """Wait until at most ``left`` buckets are under way."""
        while len(self._pending) > left:
            self._pending.popleft().wait()

    def _launch(self) -> None:
        bucket = self.layout.buckets[self._launched]
        for slot in bucket.slots:
            if slot.name not in self._has_grad:
                self._grads.param(slot.name).zero_()
        self._wait(self._in_flight - 1)
        self._pending.append(comm.reduce_to_owners(
            self._grads.bucket(bucket), bucket.shard_numels, self.reduced.bucket(bucket.index), group=self._group,
            divide_by=self._divide_by, wire_dtype=self._wire_dtype(bucket.dtype)))
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

    def __init__(self, layout: Layout, values: FlatBuffer, *, group: comm.Group) -> None:
        self.layout = layout
        self._values, self._group = values, group
        self._pending: dict[int, comm.Pending] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.overlapping = False

    def launch(self, index: int) -> None:
        """Start sending bucket ``index``; its shards must not be written until it has been waited for."""
        bucket = self.layout.buckets[index]
        self._pending[index] = comm.gather_from_owners(self._values.bucket(bucket), bucket.shard_numels,
                                                       group=self._group)

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

        def before_model(*_: object) -> None:
            nonlocal inside
            inside = True
            self.finish() if late is None else self.wait(late)

        def after_model(*_: object) -> None:
            nonlocal inside, late
            inside = False
            late = sorted({index for module, indices in needs.items() if module not in ran for index in indices},
                          reverse=True)

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
