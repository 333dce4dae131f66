"""The optimizer's side of saves and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import CLIP_GRAD, DS_VERSION, LOSS_SCALER, ZERO_STAGE
from deepspeed.git_version_info import version as deepspeed_version
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_layerwise.checkpoint.files.safe_load import naming
from ds_layerwise.checkpoint.formats.dcp import ShardedCheckpoint, unwrapped
from ds_layerwise.checkpoint.formats.pipeline_files import PipelineCheckpoint
from ds_layerwise.checkpoint.formats.regular import RegularCheckpoint, to_state_dict
from ds_layerwise.checkpoint.formats.single_file import OneFile
from ds_layerwise.checkpoint.formats.universal import UniversalCheckpoint
from ds_layerwise.checkpoint.new_names import Renamed
from ds_layerwise.checkpoint.record import WITHIN_STEP, Header
from ds_layerwise.checkpoint.reshard import check_shapes, plan_load
from ds_layerwise.checkpoint.untrained import find_others
from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.output import announce
from ds_layerwise.parallel import pipeline
from ds_layerwise.plan.routes.low_bit_checks import check_accuracy
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.ranks.sync.grad_sync import EagerGradSync, GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.zero.checkpoint import dcp_states, resumed_groups, single_file_states
from ds_layerwise.zero.checkpoint.load_request import (
    Found,
    Load,
    check_names,
    converted,
    kept_of,
    nothing_prepared,
)
from ds_layerwise.zero.checkpoint.save_request import Save
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.qk_clip.attention_logits import AttentionLogits
from ds_layerwise.zero.setup.matmul_dtype import Products
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.setup.run_settings import Settings
from ds_layerwise.zero.step import step_progress
from ds_layerwise.zero.step.interrupted import Interrupted
from ds_layerwise.zero.step.loss_scaling import LossScaling
from ds_layerwise.zero.step.param_guard import Guard
from ds_layerwise.zero.step.skipped_steps import SkippedSteps
from ds_layerwise.zero.verify.first_step import FirstStep


@dataclass(kw_only=True, eq=False)
class Checkpointing:
    """Writes what a run goes on from, and takes it over again; also in another world size, layout
    or bucket size.
    """

    engine: Callable[[], Any]
    """The engine, while there is one."""
    module: nn.Module
    config: LayerWiseConfig
    settings: Settings
    planned: Planned
    optimizer: LayerWiseOptimizer
    """The user's parameter groups."""
    owned: Owned
    grad_sync: GradSync | EagerGradSync
    param_sync: ParamSync
    scaling: LossScaling
    products: Products
    offloading: Offloading
    progress: step_progress.Progress
    interrupted: Interrupted
    zero_grad: Callable[[], None]
    """Forgets the gradients of the step at hand."""
    first_step: FirstStep | None
    """The comparison of the first update after a load, if there is any."""
    attention: AttentionLogits
    """The logits noted of the weights that a load replaces."""
    skipped: SkippedSteps
    guard: Guard
    fresh_states: dict[str, str] = field(default_factory=dict, init=False)
    """After a load, by parameter, why its optimizer state is not the checkpoint's."""
    load: Load | None = field(default=None, init=False)
    """During a load, what its second half takes over."""
    save: Save | None = field(default=None, init=False)
    """A save that goes on beside the training, until it is committed."""
    _has_told: bool = field(default=False, init=False)
    """True once a save within a step has been reported in this run."""

    # --- out

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Make sure that a save can be made, and say that one within a step has no gradients.

        Raises:
            LayerWiseError: on every rank, if one is inside an update, or they are not at the same
                step.
        """
        engine = self.engine()
        with comm.errors_on_all_ranks(None):
            # What cannot be read back is found before anything is written.
            header = self.header()
        steps = [f"steps {engine.global_steps}", f"updates {header.step}"]
        comm.same_on_all_ranks(
            "what save_checkpoint() is called after", comm.digest_of(steps), steps, group=None
        )
        if header.repeats and not self._has_told and comm.rank_of(None) == 0:
            logger.warning(
                f"ds_layerwise: saved {WITHIN_STEP}: the checkpoint holds what the last update has "
                "left, and a resumed run repeats the step from its first micro-batch"
            )
        self._has_told |= bool(header.repeats)
        yield

    def header(self) -> Header:
        """Return the part of a checkpoint of now beside its tensors."""
        planned = self.planned
        within_step = self.progress.is_within_step(self.grad_sync.gradients)
        return Header(
            step=self.progress.updates,
            repeats=WITHIN_STEP if within_step else "",
            shapes={
                name: shape
                for name, shape in planned.saved_shapes.items()
                if name not in planned.saved_elsewhere
            },
            rules=self.owned.rule_records(planned.routes_elsewhere),
            dtypes=planned.layout.dtypes,
            kept=kept_of({**planned.routes_elsewhere, **planned.routes}, planned.names),
            fast_dtypes=self.products.fast,
            param_groups=resumed_groups.described(self.optimizer.param_groups),
            configured=resumed_groups.described(self.optimizer.configured),
        )

    def state_dict(self, *, clip_grad: float) -> dict[str, Any]:
        """See :meth:`.LayerWiseZeroOptimizer.state_dict`."""
        self._check_settled()
        return {
            LOSS_SCALER: self.scaling.scaler,
            "dynamic_loss_scale": self.scaling.is_dynamic,
            "overflow": self.scaling.overflow,
            CLIP_GRAD: clip_grad,
            ZERO_STAGE: self.settings.stage,
            DS_VERSION: deepspeed_version,
            **to_state_dict(self.owned.record(to_save=True), self.header(), self.settings.tp_size),
        }

    def _check_settled(self) -> None:
        self.offloading.check_not_offloaded()
        self.guard.check_places()
        self.guard.check_names()
        self.interrupted.check()

    # --- in

    def open_regular(self, folder: Path) -> RegularCheckpoint | PipelineCheckpoint:
        """The regular checkpoint in ``folder``, as far as this rank may need it."""
        if pipeline.is_pipeline(self.module):
            return PipelineCheckpoint(
                folder, rank=self.owned.rank, pipeline_stage=self.settings.mp_rank
            )
        return RegularCheckpoint(folder, rank=self.owned.rank, mp_rank=self.settings.mp_rank)

    def prepare_load(
        self, folder: Path, *, universal: bool, states: bool, masters: bool, strict: bool
    ) -> Found:
        """Open the checkpoint in ``folder``, check every byte, and find what :meth:`finish_load`
        will take over.

        The world size, the layout and the bucket size that it was saved with may be others. Nothing
        is written yet.

        Args:
            universal: whether it is a universal checkpoint, of which the engine loads no weights.
            states, masters: whether optimizer states, and float32 weights, are wanted.
            strict: whether every parameter must be in it.

        Raises:
            LayerWiseError: on every rank, if any rank finds something missing or wrong.
        """
        return self._find(
            lambda: UniversalCheckpoint(folder) if universal else self.open_regular(folder),
            folder,
            universal=universal,
            states=states,
            masters=masters,
            strict=strict,
        )

    def _find(
        self,
        open_it: Callable[[], Any],
        folder: Path,
        *,
        universal: bool,
        states: bool,
        masters: bool,
        strict: bool,
    ) -> Found:
        self.offloading.reload()
        config, planned = self.config, self.planned
        of_all_stages = pipeline.names_of_all_stages(self.module, self.settings.model_group)
        with comm.errors_on_all_ranks(None), naming(folder):
            opened = open_it()
            # A regular checkpoint names what is not trained in the file of the model, which the
            # engine reads later.
            saved = Renamed(opened, config.rename, use_all=universal)
            if isinstance(opened, ShardedCheckpoint):
                saved = Renamed(saved, opened.wrapped)
            check_shapes(planned.saved_shapes, saved.header.shapes)
            groups, own = saved.header.param_groups, self.optimizer.param_groups
            if states and groups is not None and len(groups) != len(own):
                raise LayerWiseError(
                    f"{folder} has {len(groups)} parameter groups, this run {len(own)}; make as "
                    "many, empty ones count, or load with load_optimizer_states=False"
                )
            if states:
                self.scaling.check(saved.header.loss_scaler)
                check_accuracy(
                    planned.routes,
                    planned.specs,
                    self._resumption(saved.header).after(),
                    told=(
                        f"with what the parameter groups of {folder} go on with "
                        f"(layerwise.on_hyper_change is {config.on_hyper_change!r}), "
                    ),
                )
            mine = self.owned.record()
            plan = plan_load(
                mine,
                saved,
                self.owned.rule_records(),
                masters=masters,
                states=states,
                on_missing_state=config.on_missing_state,
                on_optimizer_change=config.on_optimizer_change,
            )
            if universal and strict:
                check_names(
                    saved,
                    folder,
                    planned.saved_shapes.keys(),
                    self.module,
                    of_all_stages=of_all_stages,
                )
            # One file has what was trained at its save, which may be frozen now, and nothing else.
            others = (
                find_others(
                    saved,
                    folder,
                    self.module,
                    trained={spec.name for spec in planned.specs},
                    rename=config.rename,
                    strict=strict and not isinstance(opened, OneFile),
                )
                if isinstance(opened, (UniversalCheckpoint, OneFile))
                else {}
            )
            if isinstance(opened, ShardedCheckpoint):
                others = opened.read_others()
            found = Found(folder, saved.header, mine, plan, states, masters, universal, others)
        # Each rank may have read another file, or have its own disk: on all of them it must be the
        # same save.
        which = [f"step {saved.header.step}"]
        if not isinstance(opened, UniversalCheckpoint):
            which += opened.identity()
        with comm.errors_on_all_ranks(None):
            comm.same_on_all_ranks(
                f"the checkpoint in {folder}",
                comm.digest_of(which),
                which,
                group=self.settings.group,
            )
        return found

    @contextmanager
    def loading(self, load: Load) -> Iterator[None]:
        """Own what :meth:`finish_load` is to take over while the engine loads, then let its files
        go.

        Attention logits that were noted of the weights before are forgotten, and so are steps that
        were skipped.
        """
        self.load = load
        self.attention.restart()
        try:
            yield
            self.skipped.restart()
        finally:
            self.load = None

    @contextmanager
    def _saving_whole(self, check: Callable[[], None]) -> Iterator[None]:
        """Make sure that whole parameters can be saved.

        An error of ``check``, or of the state of a rank, is one on all ranks.
        """
        with comm.errors_on_all_ranks(None):
            check()
            self._check_settled()
        with self.saving():
            yield

    def save_file(self, path: Path) -> None:
        """See :meth:`.LayerWiseZeroOptimizer.save_state_dict_to_file`."""
        with self._saving_whole(self._check_one_file):
            single_file_states.save(
                path,
                self.owned.record(to_save=True).pieces,
                self.header(),
                (LOSS_SCALER, self.scaling.scaler),
                self.owned.device,
            )

    def load_file(self, path: Path, *, states: bool, strict: bool) -> None:
        """See :meth:`.LayerWiseZeroOptimizer.load_state_dict_from_file`."""
        with comm.errors_on_all_ranks(None):
            self._check_one_file()
        self._load_whole(
            self._find(
                lambda: OneFile(path),
                path,
                universal=True,
                states=states,
                masters=True,
                strict=strict,
            )
        )

    def sharded_state_dict(self) -> dict[str, Any]:
        """See :meth:`.LayerWiseZeroOptimizer.sharded_state_dict`."""
        with self._saving_whole(self._check_sharded):
            groups = dcp_states.groups_of(
                self.planned.routes, self.optimizer.groups_now(), self.planned.names
            )
            return dcp_states.state_dict(
                self.owned.record(to_save=True).pieces,
                self.planned.saved_shapes,
                self.module,
                groups,
                Renamed.of(self.header(), unwrapped),
                (LOSS_SCALER, self.scaling.scaler),
            )

    def load_sharded(self, checkpoint: Any, *, states: bool, strict: bool) -> None:
        """See :meth:`.LayerWiseZeroOptimizer.load_sharded_state_dict`."""
        with comm.errors_on_all_ranks(None):
            self._check_sharded()
        shapes = self.planned.saved_shapes
        self._load_whole(
            self._find(
                lambda: ShardedCheckpoint(
                    checkpoint,
                    self.owned.rule_records(),
                    others=dcp_states.untrained(self.module, shapes),
                    second=dcp_states.tied(self.module, shapes),
                    rename=self.config.rename,
                    strict=strict,
                ),
                Path(str(checkpoint)),
                universal=True,
                states=states,
                masters=True,
                strict=strict,
            )
        )

    def _load_whole(self, found: Found) -> None:
        """Take over whole parameters, of which the engine loads nothing."""
        with self.loading(Load(found, wants_scheduler=None)):
            self.finish_load()
        self.weights_from_masters()

    def _check_one_file(self) -> None:
        single_file_states.check_uncut(self.module, self.settings.tensor_group)

    def _check_sharded(self) -> None:
        self._check_one_file()
        ranks, groups = comm.size_of(self.settings.group), self.settings.expert_groups.values()
        if any(comm.size_of(group) < ranks for group in groups):
            dcp_states.check_experts(self.module, self.planned.saved_shapes)

    @torch.no_grad()
    def finish_load(self) -> None:
        """Take over what :meth:`prepare_load` found. The engine has loaded the model in between,
        or, from a universal checkpoint, has not and calls for :meth:`weights_from_masters` next.

        Raises:
            LayerWiseError: there is no load under way.
        """
        if self.load is None:
            raise nothing_prepared()
        found, buckets = self.load.take(), range(len(self.planned.layout.buckets))
        # Masters that are the weights, in float32, are copied over them.
        loaded = []
        if self.load.weights_win:
            loaded = [self.owned.values(index).clone() for index in buckets]
        for into, out_of in found.plan.copies:
            into.copy_(out_of)
        # The engine has loaded weights that were rounded to another dtype, or none of what other
        # stages save, or none.
        masters_win = not self.load.weights_win and any(
            (
                found.universal,
                found.header.dtypes != self.planned.layout.dtypes,
                self.planned.saved_elsewhere,
            )
        )
        taken = {into.untyped_storage()._cdata for into, _ in found.plan.copies}
        self.owned.take_back(
            found.own,
            lambda value: value.untyped_storage()._cdata in taken,
            masters_win=masters_win,
        )
        for name, keys in found.plan.restarts.items():
            self.owned.restart(name, keys)
        for name in found.plan.masters_from_model:
            self.owned.master_from_values(name)
        for index, values in enumerate(loaded):
            self.owned.values(index).copy_(values)
            self.owned.follow_values(index)
        if not found.masters:
            self.masters_from_weights()
        self._copy_others(found.others)
        if found.states:
            self._take_over(found.header, wants_scheduler=self.load.wants_scheduler)
            self.interrupted.forget()
        self.restart_step()
        if found.masters and not found.universal and masters_win:
            self.weights_from_masters()
        self._report(found)

    def _copy_others(self, others: Mapping[str, Tensor]) -> None:
        held = self.module.state_dict(keep_vars=True)
        for name, value in others.items():
            held[name].copy_(value.view(held[name].shape))

    def restart_step(self) -> None:
        """Go on with the first micro-batch of the step: the gradients that there are belong to
        other weights.
        """
        self.zero_grad()
        if self.first_step is not None:
            self.first_step.arm()
        self.progress.resume()

    def _resumption(self, header: Header, **scheduler: Any) -> resumed_groups.Resumption:
        # What a config names has its settings there, and not in groups.
        rules = self.owned.rule_records() if self.optimizer.recipes_by_group else {}
        group_of = {}
        for name, names in self.planned.names.items():
            group_of.update(dict.fromkeys(names, self.planned.routes[name].group))
        return resumed_groups.Resumption(
            optimizer=self.optimizer,
            header=header,
            wins=self.config.on_hyper_change,
            otherwise=resumed_groups.otherwise_trained(rules, header.rules, group_of),
            **scheduler,
        )

    def _take_over(self, header: Header, *, wants_scheduler: bool | None) -> None:
        """Take over what is beside the tensors: step count, hyper-parameters, loss scale."""
        self.progress.updates, self.scaling.overflow = header.step, header.overflow
        lines = self._resumption(
            header, scheduler=self.engine().lr_scheduler, goes_on=wants_scheduler
        ).take_over()
        if comm.rank_of(None) == 0:
            recipes = dict.fromkeys(
                self.planned.routes[spec.name].recipe for spec in self.planned.specs
            )
            for line in (*lines, *self.products.changes(recipes, header.fast_dtypes)):
                announce(f"ds_layerwise: {line}")
        self.scaling.take_over(
            header.loss_scaler,
            is_half="float16" in self.planned.layout.dtypes and "float16" in (header.dtypes or ()),
        )

    def _report(self, found: Found) -> None:
        """Say once, for all ranks, what could not be taken over."""
        everywhere: dict[str, str] = {}
        for reasons in comm.gather_objects(found.plan.reasons, group=self.settings.group):
            everywhere.update(reasons)
        self.fresh_states = everywhere
        if self.owned.rank == 0:
            # DeepSpeed's logger is silent below warnings by default, and this must not be missed.
            for line in found.described(everywhere, out_of=len(self.planned.specs)):
                announce(f"ds_layerwise: {line}")
            kept = kept_of(self.planned.routes, self.planned.names)
            for line in converted(found.header, kept, everywhere) if found.states else ():
                announce(f"ds_layerwise: {line}")
            for name, why in everywhere.items():
                logger.debug(f"ds_layerwise: {name}: {why}")

    @torch.no_grad()
    def masters_from_weights(self) -> None:
        """Masters from the model's weights, after only those were loaded."""
        for index in range(len(self.planned.layout.buckets)):
            self.owned.values_to_masters(index)

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        """The model's weights from the masters, on every rank."""
        for index in range(len(self.planned.layout.buckets)):
            self.owned.masters_to_values(index)
            self.param_sync.launch(index)
        self.param_sync.finish()
