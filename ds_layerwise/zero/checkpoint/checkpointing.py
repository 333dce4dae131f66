"""The optimizer's side of saves and loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import CLIP_GRAD, DS_VERSION, ZERO_STAGE
from deepspeed.git_version_info import version as deepspeed_version
from deepspeed.moe.utils import is_moe_param
from torch import Tensor, nn

from ds_layerwise.checkpoint.dcp import ShardedCheckpoint, unwrapped
from ds_layerwise.checkpoint.new_names import LENIENT, Renamed, check_names, first_expert, place_of
from ds_layerwise.checkpoint.plain_values import READABLE, naming
from ds_layerwise.checkpoint.record import WITHIN_STEP, Header, RuleRecord, Saved, weights_in
from ds_layerwise.checkpoint.regular import RegularCheckpoint, parts_in, to_state_dict
from ds_layerwise.checkpoint.reshard import (
    Copy,
    LoadPlan,
    Recut,
    check_shapes,
    find_others,
    in_model_file,
    plan_load,
    untrained,
)
from ds_layerwise.checkpoint.single_file import OneFile
from ds_layerwise.checkpoint.universal import UniversalCheckpoint, is_universal
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import announce
from ds_layerwise.parallel import pipeline
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.ranks.sync.param_cuts import whole_shapes, write_cut
from ds_layerwise.routing.routes import Routes
from ds_layerwise.routing.tensor_marks import cuts_of
from ds_layerwise.zero.checkpoint import resumed_groups, whole_states
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.setup.rate_checks import check_accuracy
from ds_layerwise.zero.step.param_guard import Guard


@dataclass
class Load:
    """A load of a checkpoint that is complete and fits. Nothing of it has been loaded yet.

    :class:`.checkpointing.Checkpointing` holds it while the engine loads, and one without a plan
    otherwise.
    """

    folder: Path = Path("the model's file")
    """The checkpoint, or without a plan what errors say in its place."""
    header: Any = None
    plan: LoadPlan | None = None
    """None if only the model is wanted, and after the load."""
    states: bool = False
    masters: bool = False
    universal: bool = False
    masters_only: bool = False
    """True if the engine loads no trained weights."""
    others: Sequence[tuple[Any, Tensor]] = ()
    """The copies of frozen parameters and buffers that the engine does not load."""
    rest: Mapping[str, Tensor] | None = None
    """This run's frozen parameters and buffers in the model's files, if these have another number
    of tensor-parallel parts; else None.
    """
    wants_scheduler: bool | None = None
    """True if the learning rate scheduler continues from the checkpoint; False if it starts afresh;
    None if the checkpoint never has its state, and the script restores it.
    """
    weights_win: bool = False
    """True if the user loads the model, so that masters are set from those weights and not from the
    checkpoint.
    """

    has_whole_experts: bool = False
    """True if the model's file has the experts that this run has spread over ranks."""
    alone: bool = False
    """True while an error of this rank has not been agreed on by all ranks."""

    def agree(self, error: Exception | None = None) -> None:
        """Raise ``error`` of any rank on all ranks, which communicate from here on."""
        if self.alone:
            self.alone = False
            comm.raise_on_all_ranks(error)


def recorded(routes: Routes) -> tuple[dict[str, RuleRecord], dict[str, dict[str, str]]]:
    """Return the optimizers of ``routes`` as a checkpoint stores them, and the dtypes of states
    stored in fewer bits than float32; both by name.
    """
    rules: dict[str, RuleRecord] = {}
    kept: dict[str, dict[str, str]] = {}
    for name, route in routes.items():
        recipe = route.recipe
        states = route.states(1)
        rules[name] = RuleRecord(
            recipe.family,
            tuple(sorted(states)),
            recipe.gradient_average,
            route.meaning,
            recipe.scale,
        )
        for key, spec in states.items():
            if spec.kept_as:
                kept.setdefault(name, {})[key] = str(spec.kept_as)
    return rules, kept


def converted(
    header: Header, now: Mapping[str, Mapping[str, str]], fresh: Iterable[str]
) -> list[str]:
    """Return a line for each kind of state that was saved in another dtype than ``now``.

    Args:
        fresh: the parameters that do not continue from the checkpoint.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for name in header.rules.keys() - set(fresh):
        kept = header.kept.get(name, {})
        kept_now = now.get(name, {})
        for key in {*kept, *kept_now}:
            before = kept.get(key, "float32")
            after = kept_now.get(key, "float32")
            if before != after:
                counts[key, before, after] += 1
    return [
        f"{key} of {count} parameters was converted from {before!r} in the checkpoint to "
        f"{after!r} in this run"
        for (key, before, after), count in sorted(counts.items())
    ]


def check_tied(saved: Saved, folder: Path, here: Container[str], model: nn.Module) -> None:
    """Refuse two values for a parameter that ``model`` ties.

    Args:
        here: the names that parameters are trained under.
    """
    shapes = saved.header.shapes
    for second, first in whole_states.tied(model, here).items():
        # All ranks have the same two values, which may be large, so one rank compares them.
        if comm.rank_of(None) or not {first, second} <= shapes.keys():
            continue
        one, other = (weights_in(saved, name, shapes[name]) for name in (first, second))
        # DeepSpeed's converter may store the rounded master of the parameter under its second name.
        if not any(torch.equal(one.to(dtype).to(other.dtype), other) for dtype in DTYPES.values()):
            raise LayerWiseError(
                f"{first} and {second} are one parameter here, but differ in the checkpoint in "
                f"{folder}; load it into a model that does not tie them, or with {LENIENT}, which "
                f"uses {first}"
            )


class Checkpointing:
    """Saves and loads the state of a run; the world size, layout and bucket size may change in
    between.

    Args:
        offloading, guard: checks that a save needs.
        restart_step: restarts the current step at its first micro-batch, with new weights.
    """

    def __init__(
        self,
        run: RunState,
        *,
        offloading: Offloading,
        guard: Guard,
        restart_step: Callable[[], None],
    ) -> None:
        self._run = run
        planned = run.planned
        self._rules, self._kept = recorded(planned.saved_routes)
        self._weights_in = (*planned.layout.buffers, *filter(None, [run.config.param_wire]))
        params = run.model.named_parameters(remove_duplicate=False)
        self._cuts = cuts_of(params, planned.names, run.settings.tp_size)
        if run.config.save_universal and run.settings.tp_size > 1:
            with comm.errors_on_all_ranks():
                self._check_rest(run.settings.tp_size)
        self._offloading = offloading
        self._guard = guard
        self.restart_step = restart_step
        self.fresh_states: dict[str, str] = {}
        """The parameters whose optimizer state did not come from the loaded checkpoint, each with
        the reason.
        """
        self.load = Load()
        self.save_id = ""
        """The identifier of the save that began last, the same on all ranks."""
        self._has_warned = False

    # --- saves

    def begin_save(self) -> None:
        """Check that a save can be made. Warn if it is within a step, because it will not contain
        gradients.

        Raises:
            LayerWiseError: on every rank, if any rank is inside an update, or ranks are at
                different steps.
        """
        with comm.errors_on_all_ranks():
            # Build the header first: a value that cannot be read back is found before anything is
            # written.
            header = self.header()
        steps = [f"steps {self._run.engine().global_steps}", f"updates {header.step}"]
        comm.same_on_all_ranks("the step of save_checkpoint()", steps, group=None)
        if header.repeats and not self._has_warned:
            self._has_warned = True
            comm.warn(
                f"saved {WITHIN_STEP}: the checkpoint holds what the last update has left, and a "
                "resumed run repeats the step from its first micro-batch"
            )

    def header(self) -> Header:
        """Return the part of a checkpoint that is not tensors."""
        run = self._run
        planned = run.planned
        shapes = planned.saved_shapes
        for name in planned.saved_elsewhere:
            shapes.pop(name, None)
        scaler = run.scaling.scaler
        if type(scaler) not in READABLE:
            raise LayerWiseError(
                f"loss_scaler is a {type(scaler).__qualname__}, an object that only "
                "code could restore, which a checkpoint cannot hold; keep DeepSpeed's own"
            )
        return Header(
            step=run.progress.state.updates,
            num_parts=run.settings.tp_size,
            cuts=self._cuts,
            repeats=WITHIN_STEP * run.progress.is_within_step(),
            shapes=shapes,
            rules=self._rules,
            dtypes=self._weights_in,
            kept=self._kept,
            fast_dtypes=run.products.fast,
            param_groups=resumed_groups.described(run.optimizer.param_groups),
            configured=resumed_groups.described(run.optimizer.configured),
            loss_scaler=scaler,
            overflow=run.scaling.overflow,
        )

    def state_dict(self, *, clip_grad: float) -> dict[str, Any]:
        """See :meth:`.LayerWiseZeroOptimizer.state_dict`."""
        self._check_settled()
        run = self._run
        return {
            "dynamic_loss_scale": run.scaling.scaler.dynamic,
            CLIP_GRAD: clip_grad,
            # DeepSpeed's scripts merge pieces by name and position only up to stage 2.
            ZERO_STAGE: min(run.settings.stage, 2),
            DS_VERSION: deepspeed_version,
            **to_state_dict(
                run.owned.record(to_save=True),
                self.header(),
                run.planned.layout,
                run.rank,
                names=run.planned.names,
                lanes=(run.settings.lanes, run.settings.expert_rank % run.settings.lanes),
                save_id=self.save_id,
            ),
        }

    def _check_settled(self) -> None:
        self._offloading.check_not_offloaded()
        self._guard.check_places()
        self._guard.check_names()
        self._run.interrupted.check()

    # --- loads

    def open_folder(self, folder: Path, *, whole: bool = False) -> list[Any]:
        """Open the checkpoint in ``folder``, as far as this rank may need it: of a regular one its
        part of the model, or all parts if there are not as many, or ``whole`` is set.
        """
        if is_universal(folder):
            return [UniversalCheckpoint(folder)]
        run = self._run
        count = parts_in(folder)
        numbers = [run.settings.mp_rank]
        if whole or count != run.settings.tp_size:
            numbers = list(range(count))
        of_stages = count * pipeline.is_pipeline(run.model)
        return [
            RegularCheckpoint(folder, rank=run.rank, mp_rank=number, parts_of_stages=of_stages)
            for number in numbers
        ]

    def prepare_load(
        self,
        folder: Path,
        open_it: Callable[[], Sequence[Any]],
        *,
        states: bool,
        masters: bool = True,
        masters_only: bool = True,
        strict: bool,
    ) -> Load:
        """Open the checkpoint in ``folder``, check every byte, and find everything that
        :meth:`finish_load` will load.

        The checkpoint's world size, layout and bucket size may differ from this run's. Nothing is
        changed yet.

        Args:
            open_it: opens it, and returns all parts of the model, or one.
            states, masters: True to load optimizer states, and float32 weights.
            masters_only: True if the engine loads no trained weights from it.
            strict: True if every parameter must be in it.

        Raises:
            LayerWiseError: on every rank, if any rank finds something missing or wrong.
        """
        self._offloading.reload()
        run = self._run
        config, planned = run.config, run.planned
        of_all_stages = pipeline.names_of_all_stages(
            run.model, planned.saved_shapes, run.settings.stage_group
        )
        shapes = whole_shapes(run.model.parameters())
        with comm.errors_on_all_ranks(), naming(folder), shapes:
            parts = open_it()
            universal = not isinstance(parts[0], RegularCheckpoint)
            saved = self._as_here(parts, universal=universal)
            check_shapes(planned.saved_shapes, saved.header.shapes)
            if states:
                self._check_groups(folder, saved.header)
            others: list[Copy] = []
            rest = None
            if masters_only:
                here = planned.saved_shapes.keys()
                in_file = self._in_file(folder, saved, parts, universal=universal)
                others, lacking = find_others(
                    saved, run.model, trained=run.params.values(), in_file=in_file
                )
                if isinstance(parts[0], OneFile):
                    # It has what was trained at its save, which may be frozen now, and nothing
                    # else.
                    lacking = set()
                needed = here | lacking
                if not universal:
                    # The engine loads the others from there.
                    needed -= in_file.keys()
                    if isinstance(saved, Recut):
                        rest = in_file
                check_names(
                    f"the checkpoint in {folder}",
                    saved.header.shapes.keys(),
                    needed,
                    of_all_stages,
                    rename=None if pipeline.is_pipeline(run.model) else config.rename,
                    strict=strict,
                    quiet=run.rank != 0,
                )
                # A sharded checkpoint has one value under both names.
                if strict and not isinstance(parts[0], ShardedCheckpoint):
                    check_tied(saved, folder, here, run.model)
            mine = run.owned.record()
            plan = plan_load(mine, saved, self._rules, config, masters=masters, states=states)
        # Each rank may have read its own file or disk, so compare: all ranks must have the same
        # save.
        which = [f"step {saved.header.step}"]
        for part in parts:
            which.append(f"save {part.save_id}")
        with comm.errors_on_all_ranks():
            comm.same_on_all_ranks(f"the checkpoint in {folder}", which, group=run.settings.group)
        return Load(
            folder,
            saved.header,
            plan,
            states,
            masters,
            universal,
            masters_only,
            others,
            rest,
        )

    def _as_here(self, parts: Sequence[Any], *, universal: bool) -> Saved:
        """Return an opened checkpoint by this run's names, in this run's part of the model.

        Args:
            parts: the checkpoints of all parts of the model, or one.
            universal: True if all names of the checkpoint are in it.
        """
        run = self._run
        # The names of frozen parameters of a regular checkpoint are in the model's file, which the
        # engine reads later.
        renamed = [Renamed(part, run.config.rename, use_all=universal) for part in parts]
        if isinstance(parts[0], ShardedCheckpoint):
            return Renamed(renamed[0], parts[0].wrapped)
        if renamed[0].header.num_parts == run.settings.tp_size:
            return renamed[0]
        return Recut(renamed, self._cuts, run.settings.tp_rank, run.settings.tp_size)

    def _in_file(
        self, folder: Path, saved: Saved, parts: Sequence[Any], *, universal: bool
    ) -> dict[str, Tensor]:
        """Return the frozen parameters and buffers in the model's file, by new names; in this run's
        part of the model, if that is known."""
        run = self._run
        rename = run.config.rename
        if universal:
            found = in_model_file(folder, rename)
            for name in self._cuts:
                # It is whole elsewhere.
                found.pop(name, None)
            return found
        if isinstance(saved, Recut):
            return self.rest_of(folder, saved, parts, rename)
        return in_model_file(folder, rename, parts[0].header.shapes, run.settings.mp_rank)

    def rest_of(
        self,
        folder: Path,
        saved: Recut,
        parts: Sequence[RegularCheckpoint],
        rename: Mapping[str, str],
    ) -> dict[str, Tensor]:
        """Return the frozen parameters and buffers in the model's files of ``parts``, in the part
        of the model that ``saved`` is, by new names.

        Raises:
            LayerWiseError: parts have different ones, and are no pieces of a whole one.
        """
        self._check_rest(len(parts))
        files = []
        for number, part in enumerate(parts):
            files.append(in_model_file(folder, rename, part.header.shapes, number))
        trained = saved.header.shapes
        rest = {}
        for name in (
            files[0].keys() - trained.keys() - whole_states.tied(self._run.model, trained).keys()
        ):
            rest[name] = saved.cut_anew(name, [file[name] for file in files])
        return rest

    def _check_rest(self, count: int) -> None:
        """Refuse what cannot be put together, or cut into other parts: pieces of several runs that
        differ between ranks, and what is not trained in a pipeline, whose layers have files of
        their own.

        Raises:
            LayerWiseError: names it.
        """
        for name, cut in self._cuts.items():
            if cut is None:
                raise LayerWiseError(
                    f"{name} is not cut into pieces along one axis, equal ones if in several runs, "
                    f"and cannot be put together of {count} tensor-parallel parts; save without "
                    "layerwise.save_universal"
                )
        model = self._run.model
        if not pipeline.is_pipeline(model):
            return
        for name in untrained(model, self._run.params.values()):
            raise LayerWiseError(
                f"{name} of a pipeline is not trained, and cannot be put together of {count} "
                "tensor-parallel parts, or cut into others; train it, keep it out of the "
                f"state_dict, or resume with {count} parts, and save without "
                "layerwise.save_universal"
            )

    def _check_groups(self, folder: Path, header: Header) -> None:
        """Check that the parameter groups and the loss scale of this run can continue from the
        checkpoint.
        """
        run = self._run
        own = run.optimizer.param_groups
        if header.param_groups is not None and len(header.param_groups) != len(own):
            raise LayerWiseError(
                f"{folder} has {len(header.param_groups)} parameter groups, this run {len(own)}; "
                "make as many, empty ones count, or load with load_optimizer_states=False"
            )
        run.scaling.check(header.loss_scaler)
        settings = run.optimizer.groups_now()
        for group, (values, *_) in zip(settings, self._resumed(header), strict=False):
            group |= {key: values[key] for key in group.keys() & values.keys()}
        check_accuracy(
            run.planned.routes,
            settings,
            told=(
                f"with the parameter groups that continue from {folder} "
                f"(layerwise.on_hyper_change is {run.config.on_hyper_change!r}), "
            ),
        )

    def own_experts(self, module: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of the stacks of experts in ``module``, by name."""
        run = self._run
        found = {}
        for name, names in run.planned.names.items():
            if name in module and names.count(name) > 1:
                _, before = place_of(names, run.settings.expert_rank)
                found[name] = module[name].chunk(len(names))[before]
        return found

    @contextmanager
    def loading(self, load: Load) -> Iterator[None]:
        """Hold the input of :meth:`finish_load` while the engine loads, then close its files.
        Weights that came without masters are what later ones are sent as.
        """
        self.load = load
        try:
            yield
            if not load.masters:
                self.round_weights()
        finally:
            self.load = Load()

    def _begin_whole(self, *, sharded: bool) -> None:
        """Check that whole parameters can be saved; an error of any rank is raised on all ranks."""
        with comm.errors_on_all_ranks():
            self._check_whole(sharded=sharded)
            self._check_settled()
        self.begin_save()

    def check_on_one_rank(self) -> None:
        """Refuse a model that no rank has whole. Every rank must call this at the same point.

        Raises:
            LayerWiseError: on every rank.
        """
        run = self._run
        has_other_experts = max(run.groups) > 1
        if has_other_experts or run.settings.tensor_group or pipeline.is_pipeline(run.model):
            raise LayerWiseError(
                "save_16bit_model() would write what one rank has, and experts, tensor parallelism "
                "or a pipeline spread this model over ranks; use engine.save_checkpoint(), and "
                "`ds-layerwise consolidate` on that, or on a universal checkpoint of it"
            )

    def _check_whole(self, *, sharded: bool) -> None:
        """Refuse a model of which no rank trains whole parameters, and frozen experts, of which
        ranks have different ones under the same names.

        Raises:
            LayerWiseError: tensor or pipeline parallelism has cut it; or names such an expert.
        """
        run = self._run
        if run.settings.tensor_group is not None or pipeline.is_pipeline(run.model):
            raise LayerWiseError(
                "a file of whole parameters needs them on the ranks that train them, and tensor or "
                "pipeline parallelism has cut this model; save a checkpoint with "
                "engine.save_checkpoint()"
            )
        if not sharded or max(run.groups) == 1:
            return
        for name, own in untrained(run.model, run.params.values()).items():
            if is_moe_param(own) or first_expert(name) is not None:
                raise LayerWiseError(
                    f"{name} belongs to an expert and is not trained: ranks have different ones "
                    "under this name, which a sharded checkpoint cannot tell apart; train it, or "
                    "use engine.save_checkpoint() and engine.load_checkpoint()"
                )

    def save_file(self, path: Path) -> None:
        """See :meth:`.LayerWiseZeroOptimizer.save_state_dict_to_file`."""
        self._begin_whole(sharded=False)
        run = self._run
        record = run.owned.record(to_save=True)
        whole_states.save_one_file(path, record, self.header(), run.device)

    def load_file(self, path: Path, **options: bool) -> None:
        """See :meth:`.LayerWiseZeroOptimizer.load_state_dict_from_file`."""
        self._load_whole(path, lambda: [OneFile(path)], sharded=False, **options)

    def sharded_state_dict(self) -> dict[str, Any]:
        """See :meth:`.LayerWiseZeroOptimizer.sharded_state_dict`."""
        self._begin_whole(sharded=True)
        run = self._run
        planned = run.planned
        return whole_states.state_dict(
            run.owned.record(to_save=True),
            planned.saved_shapes,
            run.model,
            run.params.values(),
            whole_states.groups_of(planned.routes, run.optimizer.groups_now(), planned.names),
            Renamed.of(self.header(), unwrapped),
        )

    def load_sharded(self, checkpoint: Any, **options: bool) -> None:
        """See :meth:`.LayerWiseZeroOptimizer.load_sharded_state_dict`."""
        run = self._run

        def open_it() -> list[ShardedCheckpoint]:
            names = pipeline.names_of_all_stages(run.model, self._rules, None)
            return [
                ShardedCheckpoint(checkpoint, self._rules, names=names, rename=run.config.rename)
            ]

        self._load_whole(Path(str(checkpoint)), open_it, sharded=True, **options)

    def _load_whole(
        self, path: Path, open_it: Callable[[], Sequence[Any]], *, sharded: bool, **options: bool
    ) -> None:
        """Load whole parameters from a file of which the engine loads nothing."""
        with comm.errors_on_all_ranks():
            self._check_whole(sharded=sharded)
        load = self.prepare_load(path, open_it, **options)
        with self.loading(load):
            self.finish_load()
        self.weights_from_masters()

    @torch.no_grad()
    def finish_load(self) -> None:
        """Load everything that :meth:`prepare_load` found. In between, the engine has loaded the
        model, except from a universal checkpoint; there it calls :meth:`weights_from_masters` next.

        Raises:
            LayerWiseError: no load has begun.
        """
        load = self.load
        load.agree()
        plan = load.plan
        if plan is None:
            raise LayerWiseError(
                "finish_load() without prepare_load(): load through engine.load_checkpoint()"
            )
        load.plan = None
        run = self._run
        owned = run.owned
        # At stage 3, the engine has loaded the model into cuts.
        run.param_sync.fetch()
        # A load of float32 masters that share memory with the weights overwrites these, so keep
        # copies.
        loaded = [shard.clone() for shard in run.shards.weights if load.weights_win]
        plan.copy(quiet=comm.rank_of(None) != 0)
        # The engine may have loaded no weights, weights rounded to another dtype, or maybe not
        # those of a module that layers of a pipeline share; the same on all ranks.
        masters_win = not load.weights_win and (
            load.masters_only
            or self._rounds_otherwise(load.header)
            or bool(pipeline.shared_modules(run.model))
        )
        owned.take_back(plan.loaded, masters_win=masters_win)
        for name, keys in plan.restarts.items():
            owned.restart(name, keys)
        if load.weights_win:
            torch._foreach_copy_(run.shards.weights, loaded)
            owned.follow_weights()
        run.shards.settle()
        if not load.masters:
            self.masters_from_weights()
        for own, value in load.others:
            if hasattr(own, "ds_tensor"):
                write_cut(own, value.reshape(-1))
            else:
                own.copy_(value.view(own.shape))
        if load.states:
            self._take_over(load.header, load.wants_scheduler)
            run.interrupted.forget()
        self.restart_step()
        if load.masters and not load.universal and masters_win:
            self.weights_from_masters()
        self._report(load, plan.reasons)

    def _rounds_otherwise(self, header: Header) -> bool:
        """Tell whether this run may round masters to other weights than the saved run."""
        if header.dtypes != self._weights_in:
            return True
        # Whether a matrix is rounded to MXFP8 depends on its optimizer.
        in_mxfp8 = self._run.config.param_wire is not None
        return in_mxfp8 and not self._rules.items() <= header.rules.items()

    def _resumed(self, header: Header, *schedule: Any) -> list[resumed_groups.ResumedGroup]:
        run = self._run
        if header.param_groups is None:
            return resumed_groups.after_another(run.optimizer, header, *schedule)
        group_of = {}
        for name, route in run.planned.saved_routes.items():
            # A rate that an override sets is the config's, whatever a group has.
            if route.lr is None or run.optimizer.recipes_by_group:
                group_of[name] = route.group
        otherwise = resumed_groups.otherwise_trained(self._rules, header.rules, group_of)
        return resumed_groups.resumed(
            run.optimizer, header, run.config.on_hyper_change, otherwise, *schedule
        )

    def _take_over(self, header: Header, wants_scheduler: bool | None) -> None:
        """Load the part that is not tensors: step count, hyper-parameters, loss scale."""
        run = self._run
        planned = run.planned
        run.progress.state.updates = header.step
        run.scaling.overflow = header.overflow
        scheduler = run.engine().lr_scheduler
        goes_on = None if scheduler is None else wants_scheduler
        groups = self._resumed(header, scheduler, goes_on)
        lines = resumed_groups.take_over(groups, run.optimizer, goes_on and scheduler)
        for line in (*lines, *run.products.changes(planned.recipes, header.fast_dtypes)):
            comm.report(line)
        run.scaling.take_over(
            header.loss_scaler,
            is_half="float16" in planned.layout.buffers and "float16" in (header.dtypes or ()),
        )

    def follow_schedule(self, load: Load) -> None:
        """Set the rates of all groups to those of a schedule that goes on, if ``load`` takes no
        states; those set the rates with all else in the groups.
        """
        if load.states:
            return
        run = self._run
        rates = resumed_groups.rates_of(run.engine().lr_scheduler, load.wants_scheduler)
        for group, lr in zip(run.optimizer.param_groups, rates):
            resumed_groups.set_value(group, "lr", lr)

    def _report(self, load: Load, mine: Mapping[str, str]) -> None:
        """Report once, for all ranks, everything that could not be loaded."""
        run = self._run
        everywhere: dict[str, str] = {}
        for reasons in comm.gather_objects(mine, group=run.settings.group):
            everywhere.update(reasons)
        self.fresh_states = everywhere
        if run.rank != 0:
            return
        lines = []
        if load.states and load.header.repeats:
            lines.append(
                f"{load.folder} was saved {load.header.repeats}: no gradients are loaded, and "
                "training continues with the first micro-batch of that step"
            )
        if everywhere:
            counts = ", ".join(
                f"{count} x {why}" for why, count in sorted(Counter(everywhere.values()).items())
            )
            lines.append(
                f"{len(everywhere)} of {len(run.planned.specs)} parameters have other optimizer "
                f"states than in {load.folder}: {counts}; the other parameters go on with theirs"
            )
        if load.states:
            lines += converted(load.header, self._kept, everywhere)
        # Printed, because DeepSpeed's logger shows only warnings by default, and this must not be
        # missed.
        for line in lines:
            announce(f"ds_layerwise: {line}")

    @torch.no_grad()
    def masters_from_weights(self) -> None:
        """Set the masters from the model's weights, after a load of the weights alone."""
        self.load.agree()
        self._run.param_sync.fetch()
        self._run.shards.take_written()
        for masters in self._run.owned.masters:
            masters.take_values()

    def round_weights(self) -> None:
        """Let weights that owners have not sent be what later ones are sent as."""
        if self._run.config.param_wire is not None:
            self.weights_from_masters()

    @torch.no_grad()
    def weights_from_masters(self) -> None:
        """Set the model's weights from the masters, on every rank."""
        run = self._run
        run.shards.written.clear()
        for masters in run.owned.masters:
            masters.to_values()
        run.send(range(len(run.planned.layout.buckets)))
