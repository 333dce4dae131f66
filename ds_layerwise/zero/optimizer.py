"""The optimizer that DeepSpeed's engine talks to, in place of its own for ZeRO stages 1 and 2."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.utils.torch import register_grad_hook
from torch import Tensor, nn

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.optimizers.param_groups import Held, LayerWiseOptimizer
from ds_layerwise.optimizers.rule_registry import check_recipes, rules_of
from ds_layerwise.parallel import pipeline
from ds_layerwise.plan.forecast import cost, host_pieces
from ds_layerwise.plan.forecast.forecast import Forecast
from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.ranks.comm import comm, group_pool
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer
from ds_layerwise.ranks.owned.owned import Owned, OwnedSettings
from ds_layerwise.ranks.sync.bucket_transfers import Wires, make_wires
from ds_layerwise.ranks.sync.grad_sync import EagerGradSync, GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.zero import start_report
from ds_layerwise.zero.checkpoint.checkpointing import Checkpointing
from ds_layerwise.zero.qk_clip.attention_logits import AttentionLogits
from ds_layerwise.zero.setup import autocast, numerics_context, param_owner
from ds_layerwise.zero.setup.matmul_dtype import Products
from ds_layerwise.zero.setup.run_plan import plan
from ds_layerwise.zero.setup.run_settings import Settings
from ds_layerwise.zero.state_access import StateAccess
from ds_layerwise.zero.states_outside import StatesOutside
from ds_layerwise.zero.step.gradient_share import divide_once
from ds_layerwise.zero.step.interrupted import Interrupted
from ds_layerwise.zero.step.loss_scaling import LossScaling
from ds_layerwise.zero.step.metrics import Reports
from ds_layerwise.zero.step.offloading import Offloading
from ds_layerwise.zero.step.pre_step import BeforeUpdate
from ds_layerwise.zero.step.skipped_steps import SkippedSteps
from ds_layerwise.zero.step.step_progress import Progress
from ds_layerwise.zero.step.step_timing import norm_tensor, survivable, timed
from ds_layerwise.zero.step.update import Update
from ds_layerwise.zero.verify import first_step


class LayerWiseZeroOptimizer(StatesOutside):
    """Muon on whole owned matrices, an element-wise optimizer on evenly cut pieces of the rest.

    Model parameters become views into one buffer per dtype. ``param.grad`` is taken over as soon as
    it exists and is None afterwards. See :mod:`ds_layerwise.ranks.sync.grad_sync` for the life of a
    step.

    Raises:
        RoutingError, ConfigError, LayoutError: on every rank alike.
    """

    def __init__(
        self,
        optimizer: LayerWiseOptimizer,
        model: nn.Module,
        config: LayerWiseConfig,
        settings: Settings,
        engine: Any,
    ) -> None:
        super().__init__(
            LossScaling(
                settings.compute_dtype,
                static_scale=settings.static_loss_scale,
                dynamic=settings.dynamic_loss_scale,
                args=settings.loss_scale_args,
            )
        )
        self.optimizer: LayerWiseOptimizer
        self.optimizer, self.config, self.settings = optimizer, config, settings
        self._engine: Callable[[], Any] = weakref.ref(engine)
        self.dp_process_group = settings.group
        self.rank, self.world_size = comm.rank_of(settings.group), comm.size_of(settings.group)
        self.partition_gradients = settings.stage == 2
        self.clip_grad = settings.clip_grad
        self._planned = planned = plan(model, optimizer, config, settings)
        self.routes, self.specs, self.layout = planned.routes, planned.specs, planned.layout
        self._params = {name: p for name, p in model.named_parameters() if name in self.routes}
        param_owner.retire_owners(self._params.values())
        self._wire_dtypes = {spec.name: DTYPES[spec.wire] for spec in self.specs}
        self._tied_are_checked = False
        names = {param: name for name, param in self._params.items()}
        self._tied = [
            (names[weight], group)
            for weight, group in pipeline.tied_weights(model)
            if weight in names
        ]
        self._device = next(iter(self._params.values())).device
        self.attention = AttentionLogits(
            model,
            config,
            settings,
            params=self._params,
            routes=self.routes,
            device=self._device,
            held={piece.name for piece in self.layout.pieces(self.rank)},
        )
        self._products = Products.agree(
            {route.recipe for route in self.routes.values()}, self._device
        )
        # One rank may find no memory, on the device or, page-locked, on the host.
        with comm.Alike(None), numerics_context.set_aside(self._device):
            self._init_buffers(self._device)
        groups = self._init_syncs()
        self._first_step = (
            None
            if not config.verify_first_step
            else first_step.FirstStep(
                self._params,
                self._owned,
                planned,
                optimizer,
                config,
                settings,
                groups=groups,
                fast_dtypes=self._products.dtypes,
            )
        )
        self._init_parts(model)
        self._init_hooks(model, groups)
        start_report.warn_of_zeros(planned, settings, self._owned)
        # One checkpoint group a parameter; see checkpoint.formats.regular.
        self.bit16_groups = self.round_robin_bit16_groups = [
            [param] for name, param in self._params.items() if name not in planned.saved_elsewhere
        ]

    # --- construction

    def _init_buffers(self, device: torch.device) -> None:
        s, config, layout = self.settings, self.config, self.layout
        self._values = FlatBuffer(layout, device, fill=self._move_in)
        stored_as = (
            {} if s.accumulation_dtype is None else {d: s.accumulation_dtype for d in layout.dtypes}
        )
        self._grads = None if s.stage == 2 else FlatBuffer(layout, device, stored_as=stored_as)
        check_recipes({route.recipe for route in self.routes.values()}, device)
        on_host = host_pieces.pieces_on_host(
            layout, self.rank, s.host_ratio, state_bytes=cost.state_bytes_of(self.specs)
        )
        peers = None if s.tensor_group is None else comm.Peers(s.tensor_group)
        self._owned = Owned(
            self.rank,
            self.routes,
            self._values,
            self._grads,
            rules_of(self.routes, peers, fast_dtypes=self._products.dtypes),
            OwnedSettings(
                names=self._planned.names,
                batch_matrices=config.batch_matrices,
                on_host=on_host,
                pin_memory=s.pin_memory,
                tp_size=s.tp_size,
                master_dtype=config.master_dtype,
                rounding_seed=config.rounding_seed,
            ),
        )
        self.optimizer.hold(
            Held(
                self._params[piece.name],
                self.routes[piece.name],
                piece,
                self._owned.states[piece.name],
            )
            for pieces in self._owned.pieces
            for piece in pieces
        )

    def _move_in(self, name: str, place: Tensor) -> None:
        """Let a parameter live in ``place``, which gives back the memory that it had."""
        param = self._params[name]
        view = place.view(param.shape)
        view.copy_(param.data)
        param.data = view

    def _init_syncs(self) -> comm.Groups:
        s = self.settings
        groups = {
            self.world_size // comm.size_of(group): group
            for group in (*s.expert_groups.values(), s.group)
        }
        wires = make_wires(
            group_pool.take(groups, self, self._device),
            self._planned.where,
            device=self._device,
            native=self._planned.reduction == "native",
            rings=self._planned.rings,
        )
        with comm.Alike(None), numerics_context.set_aside(self._device):
            self._make_syncs(wires)
        for _, wire in sorted(wires.items()):
            wire.connect(self._device)
        return groups

    def _make_syncs(self, wires: Wires) -> None:
        s, reduced = self.settings, self._owned.reduced
        self._grad_sync: GradSync | EagerGradSync
        if self._grads is None:
            self._grad_sync = EagerGradSync(
                self._params,
                reduced,
                wires=wires,
                divide_by=s.divide_by,
                wire_dtype=self._wire_dtype,
                max_waiting=self.config.max_waiting_buckets,
            )
        else:
            self._grad_sync = GradSync(
                self._params,
                reduced,
                self._grads,
                wires=wires,
                divide_by=s.divide_by,
                wire_dtype=self._wire_dtype,
            )
        self._param_sync = ParamSync(
            self.layout, self.rank, self._params, self._values, wires=wires
        )

    def _init_parts(self, model: nn.Module) -> None:
        self.progress, self.interrupted = Progress(), Interrupted()
        self.offloading = Offloading(
            self._params,
            self._values,
            self._grads,
            self._owned,
            self._param_sync,
            self._grad_sync.cuts,
            model=model,
        )
        self._before_update = BeforeUpdate(
            model,
            self._params,
            self._values,
            self._owned,
            planned=self._planned,
            config=self.config,
            settings=self.settings,
            tied=self._tied,
            grad_sync=self._grad_sync,
            offloading=self.offloading,
            interrupted=self.interrupted,
            progress=self.progress,
            check_groups=self.optimizer.check_groups,
            engine=self._engine,
            inside_pass=self._is_inside_pass,
        )
        self._update = Update(
            self.optimizer,
            self._owned,
            self._param_sync,
            interrupted=self.interrupted,
            timers=self.settings.timers,
            zero_grad=self.zero_grad,
        )
        self._skipped = SkippedSteps(
            [spec.name for spec in self.specs],
            self._owned,
            most=self.config.max_skipped_steps,
            threshold=self.config.grad_norm_skip_threshold,
            pipeline_stage=self.settings.mp_rank if pipeline.is_pipeline(model) else 0,
        )
        self.reports = Reports(
            self._planned,
            self.optimizer,
            self.config,
            device=self._device,
            sum_over_ranks=self._before_update.agreement.sum_over_everyone,
        )
        self.checkpointing = Checkpointing(
            engine=self._engine,
            module=model,
            config=self.config,
            settings=self.settings,
            planned=self._planned,
            optimizer=self.optimizer,
            owned=self._owned,
            grad_sync=self._grad_sync,
            param_sync=self._param_sync,
            scaling=self.scaling,
            products=self._products,
            offloading=self.offloading,
            progress=self.progress,
            interrupted=self.interrupted,
            zero_grad=self.zero_grad,
            first_step=self._first_step,
            attention=self.attention,
            skipped=self._skipped,
            guard=self._before_update.guard,
        )

    def _init_hooks(self, model: nn.Module, groups: comm.Groups) -> None:
        if self.config.overlap_param_gather:
            self._param_sync.overlap_with_forward(model)
        self._divided = divide_once(self._engine(), every := list(self._params.values()))
        self._hooks = [
            *self._divided.values(),
            *(
                register_grad_hook(param, self._make_hook(name, every))
                for name, param in self._params.items()
            ),
        ]
        param_owner.take(self._params.values(), self)
        self._access = [
            StateAccess(
                name,
                param,
                self._owned,
                group=groups[self.layout.bucket_of(name).ep_size],
                local_sum=self._grad_sync.local_sum,
                gradient_divisor=self._grad_sync.divisor,
                wait=self._ready_for_access,
            )
            for name, param in self._params.items()
        ]
        for access in self._access:
            access.attach()

    def _ready_for_access(self) -> None:
        self.offloading.check_not_offloaded()
        self._param_sync.finish()

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """What the gradients of ``bucket`` travel in."""
        return self._wire_dtypes[bucket.slots[0].name]

    def _make_hook(self, name: str, every: Sequence[nn.Parameter]) -> Any:
        def gradient_is_ready(*_: Any) -> None:
            # Re-entering changes the depth that the question depends on.
            refresh = self.should_refresh_expected_hook_count()
            self.reenter_backward_if_needed()
            if self._first_step is not None:
                self._first_step.see(name, self._params[name].grad)
            self._skipped.see(self._params[name].grad)
            if not self._coalesce_grad_reduction:
                # DeepSpeed's tiled layers have a backward pass for each tile, and say so until the
                # last.
                last = getattr(self._params[name], "ds_grad_is_ready", True)
                self._grad_sync.accumulate(name, launch=last and self._may_launch())
                self.progress.gradient_came(
                    name, self._engine, inside=self._backward_active_depth > 0
                )
            if self.queue_post_backward_callback():
                # Autograd says when the pass is over, and counting its hooks beforehand is an
                # operation a parameter.
                expected = self._hooks_fired_this_backward + 1
            else:
                expected = (
                    count_used_parameters_in_backward(every)
                    if refresh
                    else self._max_expected_hooks_seen
                )
            self.update_hook_state_and_maybe_run_epilogue(expected)

        return gradient_is_ready

    def _may_launch(self) -> bool:
        """Whether buckets may be reduced from inside this backward pass.

        Asks the engine rather than the flags that it mirrors: those are not set for every form of
        backward, and not at all inside ``no_sync``.
        """
        engine = self._engine()
        return bool(
            self.settings.overlap_comm
            and self._backward_active_depth > 0
            and engine is not None
            and engine.enable_backward_allreduce
            and not engine.inside_no_sync_ctxt
            and (self.settings.stage == 2 or engine.is_gradient_accumulation_boundary())
        )

    def exit_backward(self) -> None:
        """Leave a backward pass, which counts if it had gradients; see
        :mod:`.zero.step.step_progress`.
        """
        engine = self._engine()
        # A rank whose loss reaches no parameter of ours has a part in the pass of the others.
        counts = self._hooks_fired_this_backward or engine._running_engine_backward
        super().exit_backward()
        if counts and not self._backward_active_depth:
            self.progress.pass_ended()

    def _is_inside_pass(self) -> bool:
        return bool(self._backward_active_depth or self._hooks_fired_this_backward)

    # --- one step

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Finish the reduction after a backward pass. The engine calls it at the boundary; see the
        next one.
        """
        if pipeline_parallel and isinstance(self._grad_sync, GradSync):
            if not self._tied_are_checked:
                pipeline.check_copies(
                    self._planned.saved_elsewhere - {name for name, _ in self._tied},
                    self._grad_sync.accumulated(),
                )
                self._tied_are_checked = True
            # The engine has done so for gradients that stay on the parameters, and ours do not.
            for name, group in self._tied:
                self._grad_sync.sum_over(name, group=group)
        elif (
            self._backward_active_depth
            and not self._hooks_fired_this_backward
            and self._passes_through()
        ):
            return
        self.progress.reduces(self._engine())
        self._grad_sync.reduce()

    def _passes_through(self) -> bool:
        """Whether the backward pass at hand is not one of this model: torch.autograd.grad, which
        leaves no gradient and which any rank may call alone, or one of another engine through a
        model that is frozen for it."""
        engine = self._engine()
        if engine is not None and engine._running_engine_backward:
            return False
        return self.only_asked or not any(param.requires_grad for param in self._params.values())

    def step(self) -> None:
        """One optimizer step: skip, clip, update, send. Called by the engine at the boundary.

        Raises:
            LayerWiseError: on every rank, if on none a backward pass has left gradients, or one has
                ended in an error on any, or parameters are no longer what they were, see
                :class:`~ds_layerwise.zero.step.param_guard.Guard`.
        """
        with numerics_context.set_aside(self._device), survivable(self._engine()):
            self._step()

    def _step(self) -> None:
        timers = self.settings.timers
        # A forward pass that left out a module left its bucket under way, and an update writes to
        # that memory.
        self._param_sync.finish()
        with timed(timers, "optimizer_gradients"):
            decision = self._before_update.decide(
                clip_grad=self.clip_grad, loss_scale=self.loss_scale
            )
        self.scaling.overflow = decision.skipped
        self._global_grad_norm = (
            None if decision.norm is None else norm_tensor(decision.norm, self._device)
        )
        self.reports.begin(decision)
        self._skipped.note(decision, self.loss_scaler, self.progress.updates + 1)
        if self.overflow:
            self.attention.forget()
            return
        scaled = self.attention.settle(decision.frozen)
        self.reports.add(self.attention.values())
        with first_step.compared(
            self._first_step,
            decision,
            self._grad_sync,
            self._param_sync,
            scaled=scaled,
            clip=self.clip_grad,
        ):
            self.progress.updates += 1
            step = self.progress.updates
            self.reports.add(self._update.run(step, decision, scaled, self.reports.watch(step)))
        timers.log(["optimizer_gradients", "optimizer_step", "optimizer_allgather"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step, reduced or not."""
        self._grad_sync.reset()
        self._skipped.begin_step()
        if self._first_step is not None:
            self._first_step.forget()
        self.progress.restart()
        for param in self._params.values():
            param.grad = None

    @property
    def step_count(self) -> int:
        """How many updates there were, before a load as well; a step that is skipped makes none."""
        return self.progress.updates

    # --- parameters and states

    def wait_for_params(self) -> None:
        """Wait until every parameter has its new value: with ``layerwise.overlap_param_gather``,
        before a script itself reads weights outside of a forward pass; see
        :class:`~ds_layerwise.ranks.sync.param_sync.ParamSync`."""
        self._param_sync.finish()

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = None,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move what ``include`` names to the host: members of DeepSpeed's ``OffloadStateTypeEnum``;
        None for all.

        Where masters are the model's parameters, and averaged gradients the gradient buffer, they
        go with those. Saving brings everything back by itself; for anything else,
        :meth:`reload_states` comes first.

        Raises:
            LayerWiseError: on every rank, if the host of any rank has no such memory left; nothing
                has moved then.
        """
        self.offloading.offload(include, pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` has moved.

        Raises:
            LayerWiseError: on every rank, if the device of any rank has no memory for it.
        """
        self.offloading.reload()

    def checkpoint_event_prologue(self) -> None:
        """Before a save or a load: no parameter may be under way, and nothing away."""
        self.reload_states()
        self.wait_for_params()

    def state_dict(self) -> dict[str, Any]:
        """The ``optimizer_state_dict`` of this rank's ``*_optim_states.pt``; see
        :mod:`.checkpoint.formats.regular`.

        Tensors are views into live memory: save or copy them before the next step.
        """
        return self.checkpointing.state_dict(clip_grad=self.clip_grad)

    @property
    def fresh_states(self) -> dict[str, str]:
        """After a load, by parameter, why its optimizer state is not the checkpoint's."""
        return self.checkpointing.fresh_states

    def refresh_fp32_params(self) -> None:
        """Masters from the model's weights, after only those were loaded."""
        self.checkpointing.masters_from_weights()

    _restore_from_bit16_weights = refresh_fp32_params

    def update_lp_params(self) -> None:
        """The model's weights from the masters, on every rank."""
        self.checkpointing.weights_from_masters()

    # --- reports and the end

    def report(self) -> dict[str, float]:
        """What DeepSpeed's monitor gets, by name, on every rank: the last value of each; see
        docs/training.md.
        """
        return self.reports.last(self._engine())

    def forecast(self) -> Forecast:
        """What this layout costs each rank."""
        return start_report.forecast(self._planned, self.settings, self._grads, self.config)

    def describe(self) -> str:
        """The start-up table: who trains what and why, and what it costs each rank."""
        return start_report.table(
            self._planned,
            self.settings,
            self.forecast(),
            self.optimizer,
            self._products,
            self.attention,
            self.config,
        )

    def listed(self) -> list[dict[str, Any]]:
        """Every parameter's route; see :func:`.plan.forecast.param_list.listed`."""
        return start_report.routes(self._planned, self.optimizer)

    def destroy(self) -> None:
        """Remove every hook. May be called twice, and after the process group is gone."""
        hooks = self.__dict__.pop("_hooks", None)
        if hooks is None:
            return
        for hook in hooks:
            hook.remove()
        param_owner.release(self._params.values())
        group_pool.release(self)
        for param in self._params.values():
            autocast.forget(param)
        for access in self._access:
            access.detach()
        self.attention.destroy()
        self._param_sync.remove_hooks()
        self._param_sync.finish()


def uses_us(engine: Any) -> bool:
    """Whether ``engine`` trains with this optimizer."""
    return isinstance(engine.optimizer, LayerWiseZeroOptimizer)
