"""The optimizer that DeepSpeed's engine talks to. It replaces DeepSpeed's own for ZeRO stages 1 to
3.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME
from deepspeed.utils.torch import register_grad_hook
from torch import nn

from ds_layerwise.errors import StepError
from ds_layerwise.parallel import folding, pipeline
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm, group_pool
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.ranks.sync.step_state import Call
from ds_layerwise.zero.checkpoint.checkpointing import Checkpointing
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.setup import numerics_context, param_owner
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.run_plan import plan
from ds_layerwise.zero.setup.run_settings import Settings
from ds_layerwise.zero.start_report import ReportingOptimizer
from ds_layerwise.zero.state_access import StateAccess
from ds_layerwise.zero.step.attention_logits import AttentionLogits
from ds_layerwise.zero.step.first_step import FirstStep
from ds_layerwise.zero.step.gradient_share import divide_once
from ds_layerwise.zero.step.metrics import Reports
from ds_layerwise.zero.step.pre_step import BeforeUpdate
from ds_layerwise.zero.step.skipped_steps import SkippedSteps
from ds_layerwise.zero.step.update import Step, StepObserver, timed, update
from ds_layerwise.zero.step_progress import survivable

#: The attributes in which DeepSpeed's engine keeps its hooks on the model.
_HANDLES = ("module_forward_pre_hook", "module_forward_post_hook")


class LayerWiseZeroOptimizer(ReportingOptimizer):
    """A ZeRO optimizer: whole matrices under one owner each, all other parameters cut by element.

    Model parameters become views into one buffer per dtype. The optimizer takes over ``param.grad``
    as soon as it exists; afterwards it is None. See :mod:`ds_layerwise.ranks.sync.grad_sync` for
    the life of a step.

    Raises:
        RoutingError, ConfigError, LayoutError: on every rank.
    """

    def __init__(
        self,
        optimizer: LayerWiseOptimizer,
        model: nn.Module,
        settings: Settings,
        engine: Any,
    ) -> None:
        super().__init__()
        self.scaling = settings.scaling
        self.optimizer = optimizer
        self.config = settings.layerwise
        self.settings = settings
        self.dp_process_group = settings.group
        self.clip_grad = settings.clip_grad
        self.parameter_offload = settings.fetcher

        # Collectives start here. Every rank must call them in the same order.
        planned = plan(model, optimizer, settings)
        self.routes = planned.routes
        self.saved_shapes = planned.saved_shapes
        self.expert_names = planned.names
        self.layout = planned.layout
        run = RunState(model, optimizer, settings, planned, weakref.ref(engine))
        self._run = run
        self._engine = run.engine
        self.rank = run.rank
        self._params = run.params
        param_owner.retire_owners(run.params.values())
        self.attention = AttentionLogits(run)
        run.allocate()
        run.connect()

        self.progress = run.progress
        self.interrupted = run.interrupted
        self.offloading = Offloading(run)
        self._before_update = BeforeUpdate(run, self.offloading)

        # Observers are called in this order.
        self.reports = Reports(run, self._before_update.agreement)
        self._observers: list[StepObserver] = [self.reports, SkippedSteps(run)]
        if self.attention.measures:
            self._observers.append(self.attention)
        if self.config.verify_first_step:
            self._observers.append(FirstStep(run))

        self.checkpointing = Checkpointing(
            run,
            offloading=self.offloading,
            guard=self._before_update.guard,
            restart_step=self._restart_step,
        )
        if self.config.overlap_param_gather and isinstance(run.param_sync, ParamSync):
            run.param_sync.overlap_with_forward(model)
        self._hooks: list[Any] = divide_once(engine, run.params.values())
        for name, param in run.params.items():
            self._hooks.append(register_grad_hook(param, self._make_hook(name, param)))
        if settings.lanes > 1:
            self._hooks += folding.divide_experts(run.params.values(), settings.lanes)
        param_owner.take(run.params.values(), self)
        self._access = StateAccess(run, self.offloading)
        self._warn_of_zeros()
        # One checkpoint group per parameter; see checkpoint.regular.
        self.bit16_groups = self.round_robin_bit16_groups = self.fp16_groups = [
            [param] for name, param in run.params.items() if name not in planned.saved_elsewhere
        ]

    # --- backward passes

    def _make_hook(self, name: str, param: nn.Parameter) -> Any:
        # Autograd calls it, also in a train step that torch compiles.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def gradient_is_ready(*_: Any) -> None:
            # Others may be on the host while gradients come, such as states.
            self.offloading.check_not_offloaded(gradients_alone=True)
            self.reenter_backward_if_needed()
            self.queue_post_backward_callback()
            self.progress.pass_began()
            for observer in self._observers:
                if observer.looks and param.grad is not None:
                    observer.saw_gradient(name, param.grad)
            if not self._coalesce_grad_reduction:
                # DeepSpeed's tiled layers run one backward pass per tile, and set ds_grad_is_ready
                # at the last one.
                last = getattr(param, "ds_grad_is_ready", True)
                self._run.grad_sync.accumulate(name, launch=last and self._may_launch())
                self.progress.gradient_came(name, inside=self._backward_active_depth > 0)
            # Autograd reports the end of the pass, so no hooks need to be counted beforehand.
            # Counting costs an operation per parameter.
            self.update_hook_state_and_maybe_run_epilogue(self._hooks_fired_this_backward + 1)

        return gradient_is_ready

    def _may_launch(self) -> bool:
        """Tell whether buckets may be reduced from inside this backward pass.

        This asks the engine and not the flags that mirror its state: some forms of backward do not
        set those flags, and inside ``no_sync`` they are never set.
        """
        engine = self._engine()
        return bool(
            self._backward_active_depth
            and engine
            and engine.zero_overlap_comm()
            and engine.enable_backward_allreduce
            and not engine.inside_no_sync_ctxt
            and (self.settings.stage > 1 or engine.is_gradient_accumulation_boundary())
        )

    def queue_post_backward_callback(self) -> bool:
        """Let autograd report the end of the current backward pass."""
        queued = bool(super().queue_post_backward_callback())
        # After DeepSpeed's own report, which may raise an error.
        if not self._passes_through():
            self.progress.pass_began()
        return queued

    def exit_backward(self) -> None:
        """Leave a backward pass, which counts if it had gradients; see
        :mod:`.zero.step_progress`.
        """
        engine = self._engine()
        # If the loss of this rank reaches none of its parameters, the pass still counts: the rank
        # takes part in the reductions of the other ranks.
        counts = self._hooks_fired_this_backward or engine._running_engine_backward
        super().exit_backward()
        state = self._backward_hook_state
        if not state.backward_active_depth:
            # The base class lets only the first pass after ``engine.forward`` queue its callback. A
            # second one would never be finished.
            state.post_backward_callback_queued = False
            state.hooks_fired_this_backward = 0
            if counts:
                self.progress.pass_ended()

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Finish the reduction after a backward pass. The engine calls this at the boundary.

        It does nothing in a pass that is not one of this model; see :meth:`_passes_through`.
        """
        run = self._run
        grad_sync = run.grad_sync
        if (
            self._backward_active_depth
            and not (pipeline_parallel or self._hooks_fired_this_backward)
            and self._passes_through()
        ):
            return
        with self.progress.reduction():
            if pipeline_parallel and self.settings.stage == 1:
                if not self._copies_are_checked:
                    pipeline.check_copies(
                        run.planned.saved_elsewhere - dict(run.tied).keys(), grad_sync.got
                    )
                    self._copies_are_checked = True
                # The engine sums tied gradients that are still on their parameters. Ours are in
                # buffers, so they are summed here.
                for name, group in run.tied:
                    grad_sync.sum_over(name, group=group)
            grad_sync.reduce()

    overlapping_partition_gradients_reduce_epilogue = reduce_gradients
    independent_gradient_partition_epilogue = reduce_gradients

    _copies_are_checked = False

    def _passes_through(self) -> bool:
        """Tell whether the current backward pass belongs to something other than this model.

        It is then a call of torch.autograd.grad, which leaves no gradient and which a single rank
        may make, or the pass of another engine through this model while it is frozen.
        """
        engine = self._engine()
        if engine is not None and engine._running_engine_backward:
            return False
        return self.only_asked or not any(param.requires_grad for param in self._params.values())

    # --- one step

    def step(self, closure: object = None) -> None:
        """Make one step: skip, clip, update, send. No closure is taken.

        Raises:
            LayerWiseError: on every rank, if no rank has gradients of a backward pass, if an error
                ended the backward pass of any rank, or if parameters have changed; see
                :class:`~ds_layerwise.zero.step.param_guard.Guard`.
        """
        if closure is not None:
            raise StepError(
                f"step() takes no closure, got {closure!r}: gradients are reduced before a step; "
                "call engine.backward(loss), then engine.step()"
            )
        state = self.progress.state
        if state.call is not Call.RUNS:
            comm.warn_once(
                "optimizer.step() updates, but the engine counts no step (global_steps), moves no "
                "schedule and ends no gradient accumulation; call engine.step()"
            )
        self._release_leftovers()
        with (
            state.steps(),
            numerics_context.set_aside(self._run.device),
            survivable(self._engine()),
        ):
            self._step()

    def _step(self) -> None:
        timers = self.settings.timers
        # If the forward pass left out a module, the gather of its bucket is still pending, and an
        # update writes to that memory.
        self.wait_for_params()
        with timed(timers, "optimizer_gradients"):
            decision = self._before_update.decide(
                clip_grad=self.clip_grad,
                loss_scale=self.loss_scale,
            )
        self._engine()._commit_decoupled_checkpoint()
        self.scaling.overflow = decision.skipped
        self._global_grad_norm = None
        if decision.norm is not None:
            # A tensor on the device, as in DeepSpeed's own optimizers, so that nothing waits for
            # it.
            self._global_grad_norm = torch.full(
                (), decision.norm, dtype=torch.float32, device=self._run.device
            )
        step = Step(
            self.optimizer.groups_now(),
            self.step_count + 1,
            decision.factor_of,
            decision.frozen,
            decision=decision,
        )
        for observer in self._observers:
            observer.before_update(step)
        if decision.skipped:
            return
        self.progress.state.updates = step.number
        try:
            update(self._run, step, self._observers)
        finally:
            if step.failed:
                self._drop_gradients()
                self.progress.rewind()
        timers.log(["optimizer_gradients", "optimizer_step", "optimizer_allgather"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step, and begin a refused one again."""
        state = self.progress.state
        self._drop_gradients()
        if state.call in (Call.REFUSED, Call.BROKEN):
            self.progress.rewind()
        if state.call is Call.REFUSED:
            state.restart()

    def _drop_gradients(self) -> None:
        """Drop the gradients of this step, and what observers have seen of them."""
        self._release_leftovers()
        self._run.grad_sync.reset()
        for observer in self._observers:
            observer.forget()
        self.progress.restart()
        for param in self._params.values():
            param.grad = None

    def _restart_step(self) -> None:
        """Restart the current step at its first micro-batch after a load: its gradients, and what
        observers have recorded, belong to other weights.
        """
        self._drop_gradients()
        for observer in self._observers:
            observer.restart()
        self.progress.rewind()
        self.progress.state.restart()

    @property
    def step_count(self) -> int:
        """The number of updates so far, including those before a load. A skipped step makes no
        update.
        """
        return self.progress.state.updates

    # --- parameters and states

    def wait_for_params(self) -> None:
        """Wait until every parameter has its new value.

        With ``layerwise.overlap_param_gather``, a script must call this before it reads weights
        outside of a forward pass; see :class:`~ds_layerwise.ranks.sync.param_sync.ParamSync`.
        """
        self._run.param_sync.finish()

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = None,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move the states that ``include`` names to the host.

        If the masters are the model's parameters, they move with those; if the averaged gradients
        are in the gradient buffer, they move with it. A save brings everything back by itself.
        Before anything else, call :meth:`reload_states`.

        Args:
            include: members of DeepSpeed's ``OffloadStateTypeEnum``; None for all.

        Raises:
            LayerWiseError: on every rank, if the host of any rank lacks the memory; nothing has
                moved then.
        """
        self.offloading.offload(include, pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back everything that :meth:`offload_states` has moved.

        Raises:
            LayerWiseError: on every rank, if the device of any rank lacks the memory.
        """
        self.offloading.reload()

    def empty_partition_cache(self) -> None:
        """Release whole parameters of ZeRO stage 3; values written into them stay."""
        self._run.places.follow_persistent()
        self._run.places.release()

    def checkpoint_event_prologue(self) -> None:
        """Bring everything back before a save or a load. A collective."""
        self.reload_states()
        self.wait_for_params()
        self._run.param_sync.follow_writes()
        self.empty_partition_cache()

    def checkpoint_event_epilogue(self) -> None:
        """Make persistent parameters of stage 3 whole again. A collective."""
        self._run.places.fetch_persistent()

    @contextmanager
    def checkpoint_event(self) -> Iterator[None]:
        """Begin and end a save or a load. If one rank raises within, all raise."""
        self.checkpoint_event_prologue()
        with (attempt := Attempt()):
            yield
        self.checkpoint_event_epilogue()
        attempt.raise_original()

    def state_dict(self) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of this rank's ``*_optim_states.pt``; see
        :mod:`.checkpoint.regular`.

        Its tensors are views into live memory: save or copy them before the next step.
        """
        return self.checkpointing.state_dict(clip_grad=self.clip_grad)

    @property
    def fresh_states(self) -> dict[str, str]:
        """The parameters whose optimizer state did not come as it is from the checkpoint whose
        states were loaded last, each with the reason.
        """
        return self.checkpointing.fresh_states

    def refresh_fp32_params(self) -> None:
        """Set the masters from the model's weights, after a load of the weights alone."""
        self.checkpointing.masters_from_weights()

    _restore_from_bit16_weights = refresh_fp32_params

    def reload_weights(self) -> None:
        """Let masters follow weights that a script has written where no counter shows it. Every
        rank must call this, before the next forward pass.

        Raises:
            LayerWiseError: on every rank, if ranks have different weights, or weights are
                offloaded.
        """
        self.wait_for_params()
        with comm.errors_on_all_ranks():
            self.offloading.check_not_offloaded()
        self._before_update.weights.reload()
        self._run.owned.follow_weights()

    def update_lp_params(self) -> None:
        """Set the model's weights from the masters, on every rank."""
        self.checkpointing.weights_from_masters()

    def save_state_dict_to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the masters and states of all parameters, whole, to one safetensors file; see
        :mod:`.whole_states`.

        Every rank must call this; rank 0 writes. The file does not contain frozen parameters, the
        scheduler, the engine's counters or the gradients of an unfinished step.
        """
        with self.checkpoint_event():
            self.checkpointing.save_file(Path(path))

    def load_state_dict_from_file(
        self, path: str | os.PathLike[str], *, states: bool = True, strict: bool = True
    ) -> None:
        """Load a file of :meth:`save_state_dict_to_file`. The world size may differ.

        Args:
            states: False to load the weights alone.
            strict: False to load only what both the file and this run have.

        Raises:
            LayerWiseError: on every rank, if any rank lacks the file, or the file is damaged or
                does not fit.
        """
        with self.checkpoint_event():
            self.checkpointing.load_file(Path(path), states=states, strict=strict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return a dict for ``torch.distributed.checkpoint.save``: {"model", "optim"} as for FSDP2,
        with masters as weights; see :mod:`.checkpoint.dcp`.

        Every rank must call this between two steps. The tensors are views: save them before the
        next step. The gradients of an unfinished step are not included.
        """
        with self.checkpoint_event():
            return self.checkpointing.sharded_state_dict()

    def load_sharded_state_dict(
        self, checkpoint: Any, *, states: bool = True, strict: bool = True
    ) -> None:
        """Load a checkpoint of :meth:`sharded_state_dict` or of FSDP2. The world size may differ.

        Args:
            checkpoint: its folder or a torch ``StorageReader``.
            states: False to load the weights alone.
            strict: False to load only what both the checkpoint and this run have.

        Raises:
            LayerWiseError: on every rank, if the checkpoint is damaged or does not fit any rank.
        """
        with self.checkpoint_event():
            self.checkpointing.load_sharded(checkpoint, states=states, strict=strict)

    # --- the end

    def destroy(self) -> None:
        """Remove every hook. May be called twice, and after the process group is destroyed."""
        hooks = self.__dict__.pop("_hooks", None)
        if hooks is None:
            return
        for hook in hooks:
            hook.remove()
        group_pool.release(self._run)
        param_owner.release(self._params.values())
        for name in _HANDLES:
            # With a hook of the engine, the model would keep all that it has in memory.
            if (handle := getattr(self._engine(), name, None)) is not None:
                handle.remove()
        for param in self._params.values():
            # The next engine may have another ``torch_autocast`` section, or none.
            param.__dict__.pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
        self._access.detach()
        self.attention.destroy()
        if self.parameter_offload is not None:
            self.parameter_offload.destroy()
        self._run.param_sync.remove_hooks()
        self.wait_for_params()


def uses_us(engine: Any) -> bool:
    """Tell whether ``engine`` trains with this optimizer."""
    # An engine whose construction failed is destroyed without an optimizer.
    return isinstance(getattr(engine, "optimizer", None), LayerWiseZeroOptimizer)
