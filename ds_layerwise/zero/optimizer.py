"""The optimizer that DeepSpeed's engine talks to, in place of its own for ZeRO stages 1 and 2."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import count_used_parameters_in_backward
from deepspeed.utils.torch import register_grad_hook
from torch import Tensor, nn

from ds_layerwise.checkpoint.names import expert_names
from ds_layerwise.config import LayerWiseConfig
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.param_groups import HYPER_KEYS, LayerWiseOptimizer
from ds_layerwise.optimizers.registry import check_recipes, rules_of
from ds_layerwise.parallel import pipeline
from ds_layerwise.parallel.tensor import check_copies
from ds_layerwise.plan import cost
from ds_layerwise.plan.forecast import Forecast, specs_of
from ds_layerwise.plan.layout import Bucket, Layout, ParamSpec
from ds_layerwise.plan.planner import plan_layout
from ds_layerwise.plan.report import start_up_table
from ds_layerwise.plan.routes import Route
from ds_layerwise.ranks import comm, own_groups
from ds_layerwise.ranks.agreement import Agreement
from ds_layerwise.ranks.buffers import DTYPES, FlatBuffer, dtype_name
from ds_layerwise.ranks.owned import Owned
from ds_layerwise.ranks.param_sync import ParamSync
from ds_layerwise.ranks.same_weights import SameWeights
from ds_layerwise.ranks.sync import EagerGradSync, GradSync
from ds_layerwise.routing.rules import route_parameters
from ds_layerwise.zero import ambient, autocast, takeover
from ds_layerwise.zero.checkpointing import StatefulOptimizer
from ds_layerwise.zero.engine_protocol import norm_tensor, survivable, timed
from ds_layerwise.zero.guard import Guard
from ds_layerwise.zero.settings import Settings
from ds_layerwise.zero.skipped import SkippedSteps
from ds_layerwise.zero.state_access import StateAccess

#: What parallel groups add to a norm's denominator so that clipping to the norm itself changes nothing.
_CLIP_EPS = 1e-6


class LayerWiseZeroOptimizer(StatefulOptimizer):
    """Muon on whole owned matrices, an element-wise optimizer on evenly cut pieces of the rest.

    Model parameters become views into one buffer per dtype. ``param.grad`` is taken over as soon as it exists and
    is None afterwards. See :mod:`ds_layerwise.ranks.sync` for the life of a step.

    Raises:
        RoutingError, ConfigError, LayoutError: on every rank alike.
    """

    def __init__(self, optimizer: LayerWiseOptimizer, model: nn.Module, config: LayerWiseConfig, settings: Settings,
                 engine: Any) -> None:
        super().__init__()
        self.optimizer: LayerWiseOptimizer
        self.optimizer, self.config, self.settings = optimizer, config, settings
        self._engine, self._module = weakref.ref(engine), model
        self.dp_process_group = settings.group
        self.rank, self.world_size = comm.rank_of(settings.group), comm.size_of(settings.group)
        self.partition_gradients = settings.stage == 2
        self.clip_grad = settings.clip_grad
        self._init_loss_scaling(settings.compute_dtype, static_scale=settings.static_loss_scale,
                                dynamic=settings.dynamic_loss_scale, args=settings.loss_scale_args)
        self.routes, self.specs, self.layout = self._plan(model)
        self._params = {name: p for name, p in model.named_parameters() if name in self.routes}
        takeover.retire_owners(self._params.values())
        self._wire_dtypes = {spec.name: DTYPES[spec.wire] for spec in self.specs}
        self._counted_elsewhere = self._replicated()
        self._saved_elsewhere = self._counted_elsewhere if pipeline.is_pipeline(model) else frozenset()
        self._tied_are_checked = False
        names = {param: name for name, param in self._params.items()}
        self._tied = [(names[weight], group) for weight, group in pipeline.tied_weights(model) if weight in names]
        self._device = next(iter(self._params.values())).device
        # One rank may find no memory, on the device or, page-locked, on the host.
        with comm.Alike(None), ambient.set_aside(self._device):
            self._init_buffers(self._device)
        self._guard = Guard(model, self._params, self._values,
                            (param for group in optimizer.param_groups for param in group["params"]),
                            may_be_unused=settings.may_be_unused)
        self._agreement = Agreement({spec.name: spec.variants for spec in self.specs}, group=settings.group,
                                    model_group=settings.model_group, tensor_group=settings.tensor_group,
                                    tied=self._tied)
        self._skipped = SkippedSteps([spec.name for spec in self.specs], self._owned, most=config.max_skipped_steps,
                                     stage=settings.part if pipeline.is_pipeline(model) else 0)
        self._same_weights = SameWeights(self._params, {spec.name: spec.variants for spec in self.specs},
                                         group=settings.group)
        self._init_hooks(model)
        self.step_count = 0
        # One checkpoint group a parameter; see checkpoint.regular.
        self.bit16_groups = self.round_robin_bit16_groups = [
            [param] for name, param in self._params.items() if name not in self._saved_elsewhere]

    # --- construction ----------------------------------------------------------------------------------------------

    def _plan(self, model: nn.Module) -> tuple[dict[str, Route], list[ParamSpec], Layout]:
        """Route and place every parameter; ranks compare the outcome before anything else."""
        rules, elsewhere = self.optimizer.config, pipeline.elsewhere(model, self.settings.model_group)
        tensor_group = self.settings.tensor_group
        tp_size = 1 if tensor_group is None else comm.size_of(tensor_group)
        with comm.Alike(None):
            routes = route_parameters(model, self.optimizer.param_groups, overrides=self.config.overrides,
                                      per_head=rules.per_head_muon, recipes=rules.recipes, tp_size=tp_size,
                                      elsewhere=elsewhere)
            self.optimizer.require_chosen_rates(routes)
            trained = {name: param for name, param in model.named_parameters() if name in routes}
            specs = specs_of(((name, tuple(param.shape), dtype_name(param.dtype)) for name, param in trained.items()),
                             routes, tp_size=tp_size,
                             variants={name: self.settings.variants(name, getattr(param, "group_name"))
                                       for name, param in trained.items() if is_moe_param(param)},
                             wires={name: dtype_name(self._travels_in(param)) for name, param in trained.items()})
            layout = plan_layout(specs, self.world_size, bucket_numel=self.settings.bucket_numel,
                                 policy=self.config.layout, alignment=self.config.alignment)
            self._names = expert_names({spec.name: spec.variants for spec in specs})
        self._recipes_elsewhere = {} if elsewhere is None else pipeline.recipes_of_all_stages(
            routes, self.optimizer.param_groups, self.settings.model_group)
        described = [f"{spec.name} {spec.shape} {spec.dtype} by {route.described()}, group {route.group}, "
                     f"{spec.variants} variants, gradient sent in {spec.wire}"
                     f"{f', cut (axis {route.tp_axis})' if route.is_cut else ''}"
                     for spec in specs for route in [routes[spec.name]]]
        described += [f"param_groups[{i}] with {({k: v for k, v in group.items() if k in HYPER_KEYS})}"
                      for i, group in enumerate(self.optimizer.param_groups)]
        with comm.Alike(None):
            comm.check_alike("the layout", comm.digest_of([layout.digest(), *described]), described,
                             group=self.dp_process_group)
        if tensor_group is not None:
            with comm.Alike(None):
                # Owners of parts of the same matrices update them in the same order, so that their collectives meet.
                comm.check_alike("the layout of tensor-parallel parts", comm.digest_of([layout.digest(), *described]),
                                 described, group=tensor_group)
                check_copies({name: param for name, param in model.named_parameters()
                              if name in routes and not routes[name].is_cut}, group=tensor_group)
        return routes, specs, layout

    def _replicated(self) -> frozenset[str]:
        """Parameters that another rank of the same model holds, too, and counts in the norm."""
        group = self.settings.tensor_group
        first = group is None or comm.rank_of(group) == 0
        return frozenset(name for name, param in self._params.items() if getattr(param, "ds_pipe_replicated", False)
                         or not (first or self.routes[name].is_cut))

    def _init_buffers(self, device: torch.device) -> None:
        s, layout = self.settings, self.layout
        self._values = FlatBuffer(layout, device, fill=self._move_in)
        stored_as = {} if s.accumulation_dtype is None else {d: s.accumulation_dtype for d in layout.dtypes}
        self._grads = None if s.stage == 2 else FlatBuffer(layout, device, stored_as=stored_as)
        check_recipes({route.recipe for route in self.routes.values()}, device)
        on_host = cost.pieces_on_host(layout, self.rank, s.host_ratio, state_bytes=cost.state_bytes_of(self.specs))
        peers = None if s.tensor_group is None else comm.Peers(s.tensor_group)
        self._owned = Owned(layout, self.rank, self.routes, self._values, self._grads, rules_of(self.routes, peers),
                            names=self._names, batch_matrices=self.config.batch_matrices, on_host=on_host,
                            pin_memory=s.pin_memory)
        for name, state in self._owned.states.items():
            self.optimizer.state[self._params[name]] = state

    def _move_in(self, name: str, place: Tensor) -> None:
        """Let a parameter live in ``place``, which gives back the memory that it had."""
        param = self._params[name]
        view = place.view(param.shape)
        view.copy_(param.data)
        param.data = view

    def _init_hooks(self, model: nn.Module) -> None:
        s, reduced = self.settings, self._owned.reduced
        groups = {self.world_size // comm.size_of(group): group for group in (*s.expert_groups.values(), s.group)}
        own = own_groups.take(groups, self, self._device)
        self._grad_sync: GradSync | EagerGradSync
        if self._grads is None:
            self._grad_sync = EagerGradSync(self.layout, self._params, reduced, groups=own,
                                            divide_by=s.divide_by, wire_dtype=self._wire_dtype)
        else:
            self._grad_sync = GradSync(self.layout, self._params, self._grads, reduced, groups=own,
                                       divide_by=s.divide_by, wire_dtype=self._wire_dtype)
        self._param_sync = ParamSync(self.layout, self._params, self._values, groups=groups)
        if self.config.overlap_param_gather:
            self._param_sync.overlap_with_forward(model)
        every = list(self._params.values())
        self._hooks = [register_grad_hook(param, self._make_hook(name, every))
                       for name, param in self._params.items()]
        takeover.take(self._params.values(), self)
        self._access = [StateAccess(name, param, self._owned, group=groups[self.layout.bucket_of(name).variants],
                                    local_sum=self._grad_sync.local_sum, gradient_divisor=self._grad_sync.divisor,
                                    wait=self._ready_for_access)
                        for name, param in self._params.items()]
        for access in self._access:
            access.attach()

    def _ready_for_access(self) -> None:
        self.check_not_offloaded()
        self._param_sync.finish()

    def _travels_in(self, param: nn.Parameter) -> torch.dtype:
        s = self.settings
        if s.autocast:
            return autocast.travels_in(param)
        accumulated = s.accumulation_dtype if s.stage == 1 else None
        return s.wire_dtype or accumulated or param.dtype

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """What the gradients of ``bucket`` travel in."""
        return self._wire_dtypes[bucket.slots[0].name]

    def _make_hook(self, name: str, every: Sequence[nn.Parameter]) -> Any:
        def gradient_is_ready(*_: Any) -> None:
            # Re-entering changes the depth that the question depends on.
            refresh = self.should_refresh_expected_hook_count()
            self.reenter_backward_if_needed()
            if not self._coalesce_grad_reduction:
                # DeepSpeed's tiled layers have a backward pass for each tile, and say so until the last.
                last = getattr(self._params[name], "ds_grad_is_ready", True)
                self._grad_sync.accumulate(name, launch=last and self._may_launch())
            expected = count_used_parameters_in_backward(every) if refresh else self._max_expected_hooks_seen
            self.update_hook_state_and_maybe_run_epilogue(expected)
        return gradient_is_ready

    def _may_launch(self) -> bool:
        """Whether buckets may be reduced from inside this backward pass.

        Asks the engine rather than the flags that it mirrors: those are not set for every form of backward, and not
        at all inside ``no_sync``.
        """
        engine = self._engine()
        return bool(self.settings.overlap_comm and self._backward_active_depth > 0 and engine is not None
                    and engine.enable_backward_allreduce and not engine.inside_no_sync_ctxt
                    and (self.settings.stage == 2 or engine.is_gradient_accumulation_boundary()))

    # --- one step --------------------------------------------------------------------------------------------------

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Finish the reduction after a backward pass. The engine calls it at the boundary; see the next one."""
        if pipeline_parallel and isinstance(self._grad_sync, GradSync):
            if not self._tied_are_checked:
                pipeline.check_copies(self._saved_elsewhere - {name for name, _ in self._tied},
                                      self._grad_sync.accumulated())
                self._tied_are_checked = True
            # The engine has done so for gradients that stay on the parameters, and ours do not.
            for name, group in self._tied:
                self._grad_sync.sum_over(name, group=group)
        elif self._backward_active_depth and not self._hooks_fired_this_backward and self._passes_through():
            return
        self._grad_sync.reduce()

    def _passes_through(self) -> bool:
        """Whether the backward pass at hand is not one of this model: torch.autograd.grad, which leaves no gradient and
        which any rank may call alone, or one of another engine through a model that is frozen for it."""
        engine = self._engine()
        if engine is not None and engine._running_engine_backward:
            return False
        return self.only_asked or not any(param.requires_grad for param in self._params.values())

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """The same at stage 2, after every backward pass, and after ``coalesce_grad_reduction``."""
        self.reduce_gradients()

    def step(self) -> None:
        """One optimizer step: skip, clip, update, send. Called by the engine at the boundary.

        Raises:
            LayerWiseError: on every rank, if on any gradients have not been reduced, because no backward pass reached
                the boundary, or parameters are no longer what they were, see :class:`~ds_layerwise.zero.guard.Guard`.
        """
        with ambient.set_aside(self._device), survivable(self._engine()):
            self._step()

    def _step(self) -> None:
        timers = self.settings.timers
        # A forward pass that left out a module left its bucket under way, and an update writes to that memory.
        self._param_sync.finish()
        with timed(timers, "optimizer_gradients"):
            factor, frozen = self._prepare_update()
        self._skipped.note(self.overflow, self.loss_scaler, self.step_count + 1)
        if self.overflow:
            return
        self.step_count += 1
        left, late = list(range(len(self.layout.buckets))), self._param_sync.may_be_late()
        with timed(timers, "optimizer_step"):
            with self.interrupted.at(self.step_count), self._owned.host:
                # The forward pass needs the parameters of the last bucket first.
                while left:
                    self._owned.update(left[-1], self.param_groups, factor, leave_out=frozen)
                    self._param_sync.launch(left.pop())
                self.optimizer.mark_step()
        if self.interrupted:
            try:
                # The others wait for what is left.
                self._param_sync.send(reversed(left))
                self.zero_grad()
            finally:
                # If the others are gone by now, that is no more than what followed.
                self.interrupted.raise_original()
        with timed(timers, "optimizer_allgather"):
            self._param_sync.leave_under_way() if late else self._param_sync.finish()
        timers.log(["optimizer_gradients", "optimizer_step", "optimizer_allgather"])

    def _prepare_update(self) -> tuple[float, frozenset[str]]:
        """Agree on whether and what to update: what to multiply gradients with, and the parameters to leave out."""
        error: Exception | None = None
        idle, squares = frozenset[str](), torch.zeros(2, device=self._device, dtype=widest_float())
        try:
            self.interrupted.check()
            self.check_not_offloaded()
            self._grad_sync.finish()
            idle = self._guard.check(self._grad_sync.got)
            if self.settings.compute_grad_norm or self.settings.check_overflow:
                squares = self._squares()
        except (RuntimeError, MemoryError) as found:
            # The others are on their way to the sum, and some device may have no memory left for what is summed.
            error = found
        noticed = self._same_weights.noticed(self._owned.written)
        sums, frozen = self._agreement.reach(torch.cat([squares, noticed]), error, idle)
        self._same_weights.settle(*map(bool, sums[2:]))
        return self._clip_factor(math.sqrt(sums[0]), math.isfinite(sums[1])), frozen

    def _squares(self) -> Tensor:
        """Of this rank's averaged gradients, in the widest dtype: what the norm counts, and what must be finite.

        Where a model is cut, what several of its ranks hold alike counts once, but any of them may find it not finite.
        """
        counted = self._owned.sum_of_squares(leave_out=self._counted_elsewhere)
        return torch.stack([counted, self._owned.sum_of_squares() if self._counted_elsewhere else counted])

    def _clip_factor(self, norm: float, is_finite: bool) -> float:
        """Decide whether to skip, set the norm of the raw averaged gradient, and say what to multiply it with."""
        s, scale = self.settings, float(self.loss_scaler.loss_scale)
        self.overflow = False
        if not (s.compute_grad_norm or s.check_overflow):
            return 1 / scale
        norm /= scale
        self.overflow = s.check_overflow and not is_finite
        self._global_grad_norm = norm_tensor(math.inf if self.overflow else norm, self._device) if (
            s.compute_grad_norm) else None
        clip = (norm + _CLIP_EPS) / self.clip_grad if self.clip_grad > 0 else 1.0
        return 1 / (scale * (clip if clip > 1 else 1.0))

    # --- parameters ------------------------------------------------------------------------------------------------

    def wait_for_params(self) -> None:
        """Wait until every parameter has its new value.

        Only needed with ``layerwise.overlap_param_gather``, before weights are handed to something that does not ask
        torch for them, outside of a forward pass; see :class:`~ds_layerwise.ranks.param_sync.ParamSync`.
        """
        self._param_sync.finish()

    def checkpoint_event_prologue(self) -> None:
        """Before a save or a load: no parameter may be under way, and nothing away."""
        self.reload_states()
        self.wait_for_params()

    # --- reports and the end -----------------------------------------------------------------------------------------

    def forecast(self) -> Forecast:
        """What this layout costs each rank."""
        dtypes = self.layout.dtypes
        stored_as = {dtype: torch.float32 if self._grads is None else self._grads.dtype(dtype) for dtype in dtypes}
        return Forecast.of(
            self.layout, self.specs, stage=self.settings.stage,
            stored_as={dtype: dtype_name(stored_as[dtype]) for dtype in dtypes},
            host_ratio=self.settings.host_ratio)

    def describe(self) -> str:
        """The start-up table: who trains what and why, and what it costs each rank."""
        return start_up_table(self.routes, self.specs, self.forecast(), self.optimizer.config,
                              groups=self.param_groups, without_effect=self.settings.without_effect)

    def destroy(self) -> None:
        """Remove every hook. May be called twice, and after the process group is gone."""
        hooks = self.__dict__.pop("_hooks", None)
        if hooks is None:
            return
        for hook in hooks:
            hook.remove()
        takeover.release(self._params.values())
        own_groups.release(self)
        for param in self._params.values():
            autocast.forget(param)
        for access in self._access:
            access.detach()
        self._param_sync.remove_hooks()
        self._param_sync.finish()


def uses_us(engine: Any) -> bool:
    """Whether ``engine`` trains with this optimizer."""
    return isinstance(engine.optimizer, LayerWiseZeroOptimizer)
