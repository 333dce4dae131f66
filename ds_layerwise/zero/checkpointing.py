"""What a checkpoint takes from the optimizer, and what it gives back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import CLIP_GRAD, DS_VERSION, LOSS_SCALER, ZERO_STAGE
from deepspeed.git_version_info import version as deepspeed_version
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_layerwise.checkpoint import regular
from ds_layerwise.checkpoint.names import Renamed
from ds_layerwise.checkpoint.pipeline import PipelineCheckpoint
from ds_layerwise.checkpoint.record import Header
from ds_layerwise.checkpoint.regular import RegularCheckpoint
from ds_layerwise.checkpoint.reshard import LoadPlan, check_shapes, plan_load
from ds_layerwise.checkpoint.universal import UniversalCheckpoint
from ds_layerwise.checkpoint.untrained import find_others
from ds_layerwise.config import LayerWiseConfig
from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.output import announce
from ds_layerwise.parallel import pipeline
from ds_layerwise.plan.layout import Layout, ParamSpec
from ds_layerwise.ranks import comm
from ds_layerwise.ranks.buffers import FlatBuffer
from ds_layerwise.ranks.host_memory import Parking
from ds_layerwise.ranks.owned import Owned
from ds_layerwise.ranks.param_sync import ParamSync
from ds_layerwise.ranks.sync import EagerGradSync, GradSync
from ds_layerwise.recipes.recipe import Recipe
from ds_layerwise.zero import resumed_groups, unfinished
from ds_layerwise.zero.engine_protocol import EngineOptimizer
from ds_layerwise.zero.interrupted import Interrupted
from ds_layerwise.zero.unfinished import Accumulated


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A checkpoint that was found whole and fitting; nothing of it has been taken over."""

    folder: Path
    header: Header
    plan: LoadPlan
    states: bool
    masters: bool
    universal: bool
    others: dict[str, Tensor]
    """Frozen parameters and buffers that the engine does not load itself."""
    accumulated: Accumulated | None


class StatefulOptimizer(EngineOptimizer):
    """State that outlives the process. Subclasses set the attributes below."""

    config: LayerWiseConfig
    optimizer: LayerWiseOptimizer
    layout: Layout
    specs: list[ParamSpec]
    rank: int
    world_size: int
    step_count: int
    _names: dict[str, tuple[str, ...]]
    clip_grad: float
    settings: Any
    _engine: Any
    _module: nn.Module
    _owned: Owned
    _saved_elsewhere: frozenset[str]
    """Parameters that are in the files of another stage."""
    _recipes_elsewhere: dict[str, Recipe]
    """The recipes of parameters that other stages have; DeepSpeed's converter keeps what one stage knows of all."""
    _values: FlatBuffer
    _grads: FlatBuffer | None
    _params: dict[str, nn.Parameter]
    _param_sync: ParamSync
    _grad_sync: GradSync | EagerGradSync
    _prepared: PreparedLoad | None = None
    _point: unfinished.Point | None = None
    """During a save, where in a step all ranks are."""

    def __init__(self) -> None:
        super().__init__()
        self._parking, self.progress, self.interrupted = Parking(), unfinished.Progress(), Interrupted()

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {spec.name: spec.shape for spec in self.specs}

    @property
    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same by name in a checkpoint, of the parameters of all ranks."""
        return {saved: spec.shape for spec in self.specs for saved in self._names[spec.name]}

    #: After a load, by parameter, why its optimizer state is not the checkpoint's.
    fresh_states: dict[str, str] = {}

    # --- away and back -----------------------------------------------------------------------------------------------

    def offload_states(self, include: Container[Any] | None = None, device: Any = None, pin_memory: bool = True,
                       non_blocking: bool = False) -> None:
        """Move what ``include`` names to the host: members of DeepSpeed's ``OffloadStateTypeEnum``; None for all.

        Where masters are the model's parameters, and averaged gradients the gradient buffer, they go with those. Saving
        brings everything back by itself; for anything else, :meth:`reload_states` comes first.

        Raises:
            LayerWiseError: on every rank, if the host of any rank has no such memory left; nothing has moved then.
        """
        self._param_sync.finish()
        with comm.Alike(None):
            room = self._parking.find_room({kind.value: tensors for kind, tensors in self._memory().items()
                                            if include is None or kind in include}, pin_memory=pin_memory)
        self._parking.park(room)
        if OffloadStateTypeEnum.lp_params.value in self._parking.kinds:
            for param in self._params.values():
                # Whoever uses it meets an error of its shape.
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        get_accelerator().empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what :meth:`offload_states` has moved.

        Raises:
            LayerWiseError: on every rank, if the device of any rank has no memory for it.
        """
        with comm.Alike(None):
            self._parking.unpark()
        for name, param in self._params.items():
            if not param.numel():
                param.data = self._values.param(name).view(self._shapes[name])

    def check_not_offloaded(self) -> None:
        """Refuse to go on without what is away.

        Raises:
            StepError: something is.
        """
        if self._parking.kinds:
            raise StepError(f"{', '.join(self._parking.kinds)} are offloaded; call engine.reload_states() first")

    def _memory(self) -> dict[OffloadStateTypeEnum, list[Tensor]]:
        """Every tensor on the device by its kind; memory that two kinds share belongs to the first."""
        kind, owned = OffloadStateTypeEnum, self._owned
        tensors = {kind.lp_params: self._values.tensors,
                   kind.contiguous_grad_buffer: () if self._grads is None else self._grads.tensors,
                   kind.lp_grads: owned.reduced.tensors, kind.hp_params: owned.masters.tensors,
                   kind.optim_states: [value for state in owned.states.values() for value in state.values()
                                       if value.dim()]}
        taken = {t.untyped_storage()._cdata for t in owned.host.tensors}
        memory: dict[OffloadStateTypeEnum, list[Tensor]] = {}
        for each, those in tensors.items():
            memory[each] = [t for t in those if t.untyped_storage()._cdata not in taken]
            taken |= {t.untyped_storage()._cdata for t in memory[each]}
        return memory

    # --- out ---------------------------------------------------------------------------------------------------------

    def header(self) -> Header:
        """What a checkpoint of now says beside its tensors."""
        return Header(
            step=self.step_count, repeats=(self._point or self._point_now()).dropped,
            shapes={name: shape for name, shape in self._saved_shapes.items() if name not in self._saved_elsewhere},
            rules=self._owned.rule_records(self._recipes_elsewhere), dtypes=self.layout.dtypes,
            param_groups=resumed_groups.described(self.param_groups),
            configured=resumed_groups.described(self.optimizer.configured))

    def state_dict(self) -> dict[str, Any]:
        """The ``optimizer_state_dict`` of this rank's ``*_optim_states.pt``; see :mod:`.checkpoint.regular`.

        Tensors are views into live memory: save or copy them before the next step.
        """
        self.check_not_offloaded()
        self.interrupted.check()
        for index in range(len(self.layout.buckets)):
            # Weights that were written since the last step are in the model's file, which this has to go with.
            self._owned.follow_values(index)
        point = self._point or self._point_now()
        accumulated = unfinished.to_record(point, self._grad_sync, engine=self._engine(), owned=self._owned,
                                           settings=self.settings)
        return {
            LOSS_SCALER: self.loss_scaler,
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            CLIP_GRAD: self.clip_grad,
            ZERO_STAGE: self.settings.stage,
            DS_VERSION: deepspeed_version,
            **regular.to_state_dict(self._owned.record(), self.header(), self.settings.num_parts, accumulated),
        }

    def exit_backward(self) -> None:
        """Leave a backward pass, which counts if it had gradients; see :mod:`.zero.unfinished`."""
        engine = self._engine()
        # A rank whose loss reaches no parameter of ours has a part in the pass of the others.
        counts = self._hooks_fired_this_backward or engine._running_engine_backward
        super().exit_backward()
        if counts and not self._backward_active_depth:
            self.progress.pass_ended(engine)

    def agree_on_point(self) -> None:
        """Before a save: find out where in a step all ranks are. :meth:`forget_point` ends it.

        Raises:
            LayerWiseError: on every rank, if one is inside an update, or they are not at the same step.
        """
        engine = self._engine()
        with comm.Alike(None):
            point = self._point_now()
            # What cannot be read back is found before anything is written.
            self.header()
        self._point = unfinished.agree(point, (engine.global_steps, self.step_count))
        if self._point.dropped and comm.rank_of(None) == 0:
            logger.warning(f"ds_layerwise: saved {self._point.dropped}: the gradients of this step are not in the "
                           "checkpoint, and a resumed run repeats the step")

    def forget_point(self) -> None:
        """After a save."""
        self._point = None

    def _point_now(self) -> unfinished.Point:
        is_whole = not (self._backward_active_depth or self._hooks_fired_this_backward
                        or self._grad_sync.is_reducing)
        return self.progress.where(self._engine(), is_whole=is_whole, is_reduced=self._grad_sync.finished,
                                   is_pipeline=pipeline.is_pipeline(self._module))

    # --- in ----------------------------------------------------------------------------------------------------------

    def open_regular(self, folder: Path) -> RegularCheckpoint | PipelineCheckpoint:
        """The regular checkpoint in ``folder``, as far as this rank may need it."""
        if pipeline.is_pipeline(self._module):
            return PipelineCheckpoint(folder, rank=self.rank, stage=self.settings.part)
        return RegularCheckpoint(folder, rank=self.rank, part=self.settings.part)

    def prepare_load(self, folder: Path, *, universal: bool, states: bool, masters: bool, strict: bool) -> None:
        """Open the checkpoint in ``folder``, check every byte, and find what :meth:`finish_load` will take over.

        The world size, the layout and the bucket size that it was saved with may be others. Nothing is written yet.

        Args:
            universal: whether it is a universal checkpoint, of which the engine loads no weights.
            states, masters: whether optimizer states, and float32 weights, are wanted.
            strict: whether every parameter must be in it.

        Raises:
            LayerWiseError: on every rank, if any rank finds something missing or wrong.
        """
        self.reload_states()
        names = pipeline.names_of_all_stages(self._module, self.settings.model_group)
        with comm.Alike(None):
            opened = UniversalCheckpoint(folder) if universal else self.open_regular(folder)
            # A regular checkpoint names what is not trained in the file of the model, which the engine reads later.
            saved = Renamed(opened, self.config.rename, use_all=universal)
            check_shapes(self._saved_shapes, saved.header.shapes)
            groups = saved.header.param_groups
            if states and groups is not None and len(groups) != len(self.param_groups):
                raise LayerWiseError(f"{folder} has {len(groups)} parameter groups, this run {len(self.param_groups)}; "
                                     "make as many, empty ones count, or load with load_optimizer_states=False")
            plan = plan_load(self._owned.record(), saved, self._owned.rule_records(), masters=masters, states=states,
                             on_missing_state=self.config.on_missing_state,
                             on_optimizer_change=self.config.on_optimizer_change)
            if universal and strict:
                self._check_names(saved, folder, names)
            others = find_others(saved, folder, self._module, trained={spec.name for spec in self.specs},
                                 rename=self.config.rename, strict=strict) if universal else {}
            prepared = PreparedLoad(
                folder, saved.header, plan, states, masters, universal, others,
                unfinished.from_records(
                    opened, engine=self._engine(), owned=self._owned, settings=self.settings, rank=self.rank,
                    world_size=self.world_size, rename=self.config.rename, names=self._saved_shapes,
                ) if states and isinstance(opened, RegularCheckpoint) else None)
        # Each rank may have read another file, or have its own disk: on all of them it must be the same save.
        which = [f"step {saved.header.step}"]
        if not isinstance(opened, UniversalCheckpoint):
            which += opened.identity()
        with comm.Alike(None):
            comm.check_alike(f"the checkpoint in {folder}", comm.digest_of(which), which, group=self.dp_process_group)
        self._prepared = prepared

    def _check_names(self, saved: Renamed, folder: Path, names: Set[str]) -> None:
        """Compare the names in a universal checkpoint with ``names``, those of the model.

        Raises:
            LayerWiseError: one has what the other lacks.
        """
        if missing := self._saved_shapes.keys() - saved.header.shapes.keys():
            raise LayerWiseError(f"{min(missing)} is not in the checkpoint in {folder}, which has "
                                 f"{len(saved.header.shapes)} parameters; with load_module_strict=False it keeps its "
                                 "weights")
        if unknown := sorted(saved.header.shapes.keys() - names - self._saved_shapes.keys()):
            raise LayerWiseError(f"the checkpoint in {folder} has {', '.join(unknown[:5])}"
                                 f"{' and more' * (len(unknown) > 5)}, which the model lacks; rename it with "
                                 "layerwise.rename, or load what fits with load_module_strict=False")

    @torch.no_grad()
    def finish_load(self) -> None:
        """Take over what :meth:`prepare_load` found. The engine has loaded the model in between, or, from a universal
        checkpoint, has not and calls :meth:`update_lp_params` next."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            raise LayerWiseError("finish_load() without prepare_load(): load through engine.load_checkpoint()")
        for into, out_of in prepared.plan.copies:
            into.copy_(out_of)
        for name, keys in prepared.plan.restarts.items():
            self._owned.restart(name, keys)
        for name in prepared.plan.masters_from_model:
            self._owned.master_from_values(name)
        if not prepared.masters:
            self._restore_from_bit16_weights()
        held = self._module.state_dict(keep_vars=True)
        for name, value in prepared.others.items():
            held[name].copy_(value.view(held[name].shape))
        if prepared.states:
            self._take_over(prepared)
            self.interrupted.forget()
        self.zero_grad()
        unfinished.resume(prepared.accumulated, engine=self._engine(), progress=self.progress,
                          grad_sync=self._grad_sync, scale_before=getattr(prepared.header.loss_scaler, "loss_scale", 1),
                          scale_now=self.loss_scaler.loss_scale)
        if prepared.masters and not prepared.universal and (
                prepared.header.dtypes != self.layout.dtypes or self._saved_elsewhere):
            # The engine has loaded weights that were rounded to another dtype, or none of what other stages save.
            self.update_lp_params()
        self._report(prepared)

    def _take_over(self, prepared: PreparedLoad) -> None:
        """What is beside the tensors: step count, hyper-parameters, loss scale."""
        header, engine = prepared.header, self._engine()
        self.step_count, self.overflow = header.step, header.overflow
        goes_on = (getattr(engine, "_layerwise_wants_scheduler", False)
                   and type(engine.lr_scheduler).__module__ != lr_schedules.__name__)
        lines = resumed_groups.take_over(self.optimizer, header, wins=self.config.on_hyper_change,
                                         scheduler=engine.lr_scheduler, goes_on=goes_on)
        if comm.rank_of(None) == 0:
            for line in lines:
                announce(f"ds_layerwise: {line}")
        # A scale that another dtype needed says nothing about this one.
        scaler = header.loss_scaler
        both_half = "float16" in self.layout.dtypes and "float16" in (header.dtypes or ())
        if scaler is not None and scaler.dynamic == self.loss_scaler.dynamic and (both_half or scaler.dynamic):
            self.loss_scaler = scaler

    def _report(self, prepared: PreparedLoad) -> None:
        """Say once, for all ranks, what could not be taken over."""
        everywhere: dict[str, str] = {}
        for reasons in comm.gather_objects(prepared.plan.reasons, group=self.dp_process_group):
            everywhere.update(reasons)
        self.fresh_states = everywhere
        if self.rank == 0 and prepared.states and prepared.header.repeats:
            announce(f"ds_layerwise: {prepared.folder} was saved {prepared.header.repeats}: the gradients of that step "
                     "are not in it, and training goes on with the first micro-batch of that step")
        step, engine = prepared.accumulated, self._engine()
        counted = engine.micro_steps % engine.gradient_accumulation_steps()
        if self.rank == 0 and step and step.passes and step.passes != counted:
            announce(f"ds_layerwise: {prepared.folder} has the gradients of {step.passes} backward passes of a step, "
                     f"of which engine.micro_steps counts {counted}; go on with the pass after those")
        if self.rank or not everywhere:
            return
        counts = ", ".join(f"{count} x {why}" for why, count in sorted(Counter(everywhere.values()).items()))
        # DeepSpeed's logger is silent below warnings by default, and this must not be missed.
        announce(f"ds_layerwise: {len(everywhere)} of {len(self.specs)} parameters do not go on from the optimizer "
                 f"state in {prepared.folder}: {counts}")
        for name, why in everywhere.items():
            logger.debug(f"ds_layerwise: {name}: {why}")

    def forget_prepared(self) -> None:
        """Let go of the files of :meth:`prepare_load`."""
        self._prepared = None

    @torch.no_grad()
    def _restore_from_bit16_weights(self) -> None:
        """Masters from the model's weights, after only those were loaded."""
        for index in range(len(self.layout.buckets)):
            self._owned.values_to_masters(index)

    refresh_fp32_params = _restore_from_bit16_weights

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """The model's weights from the masters, on every rank."""
        for index in range(len(self.layout.buckets)):
            self._owned.masters_to_values(index)
            self._param_sync.launch(index)
        self._param_sync.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step, reduced or not."""
        self._grad_sync.reset()
        self.progress.restart()
        for param in self._params.values():
            param.grad = None
