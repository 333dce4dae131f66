"""Hooks into the engine's loading.

Note: what is wrapped, and why there
    * ``load_checkpoint`` chooses the way to load a folder by its content, and refuses bad
      checkpoints before anything is changed. The engine's own ``_load_zero_checkpoint`` refuses
      every other world size.
    * ``load_module_state_dict`` is the point at which the model's file has been read and nothing of
      it has been loaded yet.
    * ``_get_all_ckpt_names`` does not know the file names of ZeRO-3, and treats a folder's name as
      a pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from ds_layerwise.checkpoint import atomic, universal
from ds_layerwise.checkpoint.checkpoint_folder import (
    MODEL_FILE,
    ZERO3_MODEL_FILE,
    manifest_of,
    num_expert_layers,
    refuse_stages,
    shapes_in,
)
from ds_layerwise.checkpoint.manifest import FILE_NAME
from ds_layerwise.checkpoint.new_names import bare, check_names, new_names
from ds_layerwise.checkpoint.plain_values import check_kind, load_safely, naming
from ds_layerwise.checkpoint.record import fits
from ds_layerwise.checkpoint.regular import mp_size, parts_in
from ds_layerwise.engine.checkpoints.saving import commit_decoupled
from ds_layerwise.engine.checkpoints.stage3_files import as_at_stage_2, is_cut, load_cuts
from ds_layerwise.engine.contract.patches import Method, only_ours
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.instance_patches import patch
from ds_layerwise.parallel import pipeline
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.param_cuts import whole_shapes
from ds_layerwise.zero.checkpoint import disks, whole_states
from ds_layerwise.zero.checkpoint.checkpointing import Load
from ds_layerwise.zero.optimizer import uses_us


def _load_checked(
    original: Method,
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    """Load a checkpoint of any number of ranks, regular or universal; every rank must call this.
    Files are checked by their checksums first.

    Raises:
        LayerWiseError: on every rank, if any rank finds a file missing or damaged, or one that does
            not fit this run.
    """
    # A background save is the newest checkpoint, and may be the one to load.
    commit_decoupled(engine)
    tag = _agreed_tag(engine, Path(load_dir), tag)
    if tag is None:
        # The engine would look for the pointer again, and on some rank there may be one by now.
        return _nothing_loaded(engine, load_dir)
    folder = Path(load_dir, tag)
    states = load_optimizer_states and not load_module_only
    masters = pipeline.lacks_files(engine.module)
    is_universal, masters_only = _checked(engine, folder, custom_load_fn, states=states or masters)
    masters |= masters_only
    checkpointing = engine.optimizer.checkpointing
    load = Load()
    if states or masters:
        load = checkpointing.prepare_load(
            folder,
            partial(checkpointing.open_folder, folder),
            states=states,
            strict=load_module_strict,
            masters=masters or engine.zero_load_from_fp32_weights(),
            masters_only=masters_only,
        )
    load.wants_scheduler = load_lr_scheduler_states and not load_module_only
    load.weights_win = custom_load_fn is not None
    reads_experts = engine.optimizer.settings.reads_experts and num_expert_layers(folder) > 0
    load.has_whole_experts = engine.has_moe_layers and not reads_experts
    with (
        engine.optimizer.checkpoint_event(),
        checkpointing.loading(load),
        _as_before(engine, universal=is_universal),
        as_at_stage_2(engine),
    ):
        _check_first(engine, load_dir, tag, universal=is_universal, strict=load_module_strict)
        experts = _expert_loading(engine, load)
        with _pipeline_loading(engine.module, load), experts, _alone(load):
            done = original(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states and (load_module_only or load.wants_scheduler),
                load_module_only,
                custom_load_fn,
            )
        checkpointing.follow_schedule(load)
        if not (states or masters):
            checkpointing.restart_step()
        elif load.plan is not None:
            # The engine has not looked for masters.
            checkpointing.finish_load()
        return done


def _has_masters_only(engine: DeepSpeedEngine, folder: Path) -> bool:
    """Return True if the engine reads only from the optimizer's files in ``folder`` what was
    trained: the model's file lacks all of it, or experts, and this engine reads no files of these;
    or it has another number of tensor-parallel parts. A file that cannot be read says nothing.
    Every rank must call this at the same point.
    """
    with comm.errors_on_all_ranks():
        settings = engine.optimizer.settings
        is_pipeline = pipeline.is_pipeline(engine.module)
        found = not (settings.reads_experts or is_pipeline) and num_expert_layers(folder) > 0
        path = folder / MODEL_FILE.format(mp_rank=0)
        with suppress(LayerWiseError), naming(path):
            content = load_safely(path, with_objects=True)
            trained = set(map(bare, shapes_in(content)))
            module = content["module"]
            # A pipeline has its layers in files of their own.
            if trained and module is not None and trained.isdisjoint(map(bare, module)):
                found = True
        with suppress(LayerWiseError):
            parts = parts_in(folder) if is_pipeline else mp_size(folder)
            found = found or parts != settings.tp_size
    return any(comm.gather_objects(found, group=None))


def _check_first(
    engine: DeepSpeedEngine, load_dir: str, tag: str, *, universal: bool, strict: bool
) -> None:
    """Check for errors that the engine would find only after it has loaded half of the model, also
    in what it reads of the model's file after that.

    Raises:
        LayerWiseError: on every rank, if a file of any is missing, damaged or does not fit.
    """
    folder = Path(load_dir, tag)
    with comm.errors_on_all_ranks():
        # A pipeline with experts has no files of layers.
        has_layers = pipeline.is_pipeline(engine.module) and not engine.has_moe_layers
        # Nothing is read of the layers of another number of parts.
        is_recut = engine.optimizer.checkpointing.load.rest is not None
        if has_layers and not universal and not is_recut:
            _check_layers(engine, folder, strict=strict)
        names = engine._get_all_ckpt_names(load_dir, tag)
        if not names:
            raise LayerWiseError(
                f"{folder} has no mp_rank_00_model_states.pt, from which the number of steps is "
                "read; restore it, or copy it from the checkpoint that was converted"
            )
        try:
            checkpoint = load_safely(Path(names[0]), with_objects=True)
        except LayerWiseError:
            # A client may have stored anything in it. The engine loads it next, at the user's risk.
            return
        with naming(Path(names[0])):
            _check_counts(engine, checkpoint)


def _nothing_loaded(engine: DeepSpeedEngine, load_dir: str) -> tuple[None, None]:
    """Return the engine's result for a folder in which no pointer names a tag.

    Raises:
        LayerWiseError: a universal checkpoint was requested.
    """
    if engine.load_universal_checkpoint():
        raise LayerWiseError(
            f"{Path(load_dir, universal.LATEST)} does not exist; pass the tag of a universal "
            "checkpoint"
        )
    comm.warn(
        f"nothing was loaded: {Path(load_dir, 'latest')} does not exist; pass the tag of a "
        "checkpoint if there is one"
    )
    return None, None


def _checked(
    engine: DeepSpeedEngine, folder: Path, custom_load_fn: object, *, states: bool
) -> tuple[bool, bool]:
    """Finish an interrupted save of ``folder``, and check its files. Return whether it is
    universal, and whether the engine loads no trained weights from it.

    Raises:
        LayerWiseError: on every rank, if a file is missing or differs from the saved one.
    """
    own_disks = engine.use_node_local_storage()
    is_first = (engine.local_rank if own_disks else engine.global_rank) == 0
    with comm.errors_on_all_ranks():
        if is_first:
            atomic.recover(folder)
    if own_disks:
        disks.finish_save(folder, may_move=is_first)
    masters_only = _has_masters_only(engine, folder)
    with comm.errors_on_all_ranks():
        is_universal = _check_files(engine, folder, states=states, all_files=states or masters_only)
    disks.check_one_save(folder)
    masters_only = masters_only or is_universal
    if masters_only and custom_load_fn is not None:
        what = "was saved at ZeRO stage 3, or in another number of tensor-parallel parts"
        if is_universal:
            what = "is a universal checkpoint"
        raise LayerWiseError(
            f"{folder} {what}, and the engine would not call custom_load_fn with its trained "
            "weights; load without it, and change the weights afterwards"
        )
    return is_universal, masters_only


@contextmanager
def _as_before(engine: DeepSpeedEngine, *, universal: bool) -> Iterator[None]:
    """Make the engine read the checkpoint that exists, whatever its config says. If the load fails,
    restore the engine's counts and the scheduler's state.

    This rank may have loaded its own part when another one fails.
    """
    scheduler = engine.lr_scheduler
    counts = {}
    for key in ("global_steps", "global_samples", "skipped_steps"):
        counts[key] = vars(engine)[key]
    # One of the script may fail on one rank alone.
    with comm.errors_on_all_ranks():
        schedule = scheduler.state_dict() if hasattr(scheduler, "state_dict") else None
    with ExitStack() as undo:
        undo.callback(lambda: vars(engine).update(counts))
        if schedule:
            undo.callback(scheduler.load_state_dict, schedule)
        with patch(engine._config, load_universal_checkpoint=universal):
            yield
        undo.pop_all()


@contextmanager
def _alone(load: Load) -> Iterator[None]:
    """Let the engine run the block on each rank without collectives. An error in it is raised on
    all ranks the next time they agree.
    """
    load.alone = True
    with (attempt := Attempt()):
        yield
    load.agree(attempt.error)
    attempt.raise_original()


@contextmanager
def _agreeing(load: Load) -> Iterator[None]:
    """Raise on all ranks if any rank raises in the block, or has failed on its own before it."""
    is_alone = load.alone
    load.alone = False
    with comm.errors_on_all_ranks():
        yield
    load.alone = is_alone


def _expert_loading(engine: DeepSpeedEngine, load: Load) -> ExitStack:
    """Make the engine look for no files of experts if the model's file has them, or only the
    masters are loaded, until the returned stack is closed.
    """
    if load.rest is not None:
        # Each rank reads the first of the files, for what is the same in all.
        undo = patch(engine, has_moe_layers=False, mp_world_size=mp_size(load.folder))
        # DeepSpeed before 0.19.6 asks the mpu for the number of a file.
        if hasattr(engine, "checkpoint_mp_rank"):
            undo.push(patch(engine, checkpoint_mp_rank=0))
        else:
            undo.push(patch(engine, mpu=None))
        return undo
    return patch(engine, has_moe_layers=engine.has_moe_layers and not load.has_whole_experts)


def _pipeline_loading(module: Any, load: Load) -> ExitStack:
    """Make a pipeline look for its layers in the folder of exactly that name, which DeepSpeed may
    treat as a pattern. All ranks agree that layers are loaded before shared layers are sent between
    stages. This holds until the returned stack is closed.
    """
    if not pipeline.is_pipeline(module):
        return ExitStack()
    if load.rest is not None:
        return patch(module, load_state_dir=lambda *args, **options: None)
    path_list = module.ckpt_layer_path_list
    synchronize = module._synchronize_tied_weights

    def agree_first() -> None:
        with _agreeing(load):
            pass
        synchronize()

    return patch(
        module,
        ckpt_layer_path_list=lambda folder, index: path_list(escape(str(folder)), index),
        _synchronize_tied_weights=agree_first,
    )


def _agreed_tag(engine: DeepSpeedEngine, load_dir: Path, tag: object) -> str | None:
    """Return the tag that all ranks load: ``tag``, or if it is None that of a pointer in
    ``load_dir``; None if there is neither.

    If a node died before it wrote its pointer, that pointer is old or missing. The result is then
    the newest tag that all nodes have.

    Raises:
        LayerWiseError: on all ranks, if they would load different checkpoints, or a pointer names
            no folder.
    """
    with comm.errors_on_all_ranks():
        mine: str | None = str(tag)
        if tag is None:
            mine = _latest_tag(load_dir, universal_first=engine.load_universal_checkpoint())
    places = comm.gather_objects((mine, load_dir.absolute()), group=None)
    first, where = places[0]
    for rank, (theirs, there) in enumerate(places):
        if theirs == first:
            continue
        newest = None
        if tag is None and engine.use_node_local_storage():
            newest = disks.newest(load_dir, sorted({other for other, _ in places} - {None}))
        if newest is None:
            raise LayerWiseError(
                f"ranks would load different checkpoints: rank 0 {first!r} in {where}, and rank "
                f"{rank} {theirs!r} in {there} (None: there is no file latest); pass the same tag "
                "to load_checkpoint on all ranks"
            )
        comm.report(
            f"latest is not the same on all nodes; loading {newest!r}, the newest save that all "
            "of them have"
        )
        return newest
    return mine


def _latest_tag(load_dir: Path, *, universal_first: bool) -> str | None:
    """Return the tag that a pointer in ``load_dir`` names; None if there is no pointer.

    Raises:
        LayerWiseError: the pointer names no folder.
    """
    pointer = load_dir / universal.LATEST
    if not universal_first or not pointer.exists():
        pointer = load_dir / "latest"
    if not pointer.exists():
        return None
    tag = atomic.pointed(pointer) if pointer.is_file() else ""
    # A tag may be a path. File systems limit each part to 255 bytes. Unprintable text may have no
    # encoding.
    if not tag or not tag.isprintable() or max(map(len, tag.encode().split(b"/"))) > 255:
        raise LayerWiseError(
            f"{pointer} holds {tag[:40]!r}; write the tag of a checkpoint into it, or pass the tag"
        )
    return tag


def _check_files(engine: DeepSpeedEngine, folder: Path, *, states: bool, all_files: bool) -> bool:
    """Check this rank's part of the files in ``folder`` by their checksums. Return True if the
    checkpoint is universal.

    Args:
        states: True if the folder must have a list of its files.
        all_files: False if the file of the model is all that is loaded.

    Raises:
        LayerWiseError: the folder or a file is missing or differs from the saved one.
    """
    if not folder.is_dir():
        there = "no checkpoint"
        if folder.parent.is_dir():
            tags = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
            there = ", ".join(tags) or there
        raise LayerWiseError(f"{folder} does not exist; {folder.parent} holds {there}")
    is_universal = universal.is_universal(folder)
    is_listed = (folder / FILE_NAME).exists()
    if not any((is_universal, is_listed)) and (folder / ZERO3_MODEL_FILE).exists():
        raise LayerWiseError(
            f"{folder} was saved at ZeRO stage 3 by an optimizer of DeepSpeed, so its model files "
            "hold no weights. Convert AdamW's with `python -m deepspeed.checkpoint.ds_to_universal "
            "--input_folder FOLDER --output_folder NEW` and load NEW. Of any other, write the "
            "weights to a file with the zero_to_fp32.py beside it, and load that into the model "
            "before initialize()"
        )
    if not is_universal:
        _check_parts(engine, folder)
    # DeepSpeed's converter and its other optimizers write no list.
    manifest = None
    if states or is_listed:
        manifest = manifest_of(folder)
    if manifest is None:
        return is_universal
    if not all_files and not is_universal:
        manifest = manifest.only("model_states.pt")
    rank = engine.global_rank
    count = dist.get_world_size()
    if engine.use_node_local_storage():
        count = 1
    manifest.check(folder, rank=rank % count, world_size=count, quiet=rank != 0)
    return is_universal


def _check_parts(engine: DeepSpeedEngine, folder: Path) -> None:
    """Refuse a model that is cut differently from this one, and cannot be cut anew.

    Raises:
        LayerWiseError: it has experts on other stages of a pipeline.
    """
    if not pipeline.is_pipeline(engine.module):
        refuse_stages(folder)
        return
    if not engine.has_moe_layers:
        # Pipeline stages are found by name, but files of experts go by stages.
        return
    saved = num_expert_layers(folder, f"{engine.mpu.get_stage_id():02d}")
    there = mp_size(folder), parts_in(folder), saved
    here = engine.mp_world_size, engine.optimizer.settings.tp_size, len(engine.num_experts)
    if there != here:
        raise LayerWiseError(
            f"{folder} has {saved} layer(s) of experts in this stage of the pipeline, and this run "
            f"has {here[2]}; it has {there[:2]} part(s) of the model and of a stage, this run "
            f"{here[:2]}; cut the pipeline as it was, or load a universal checkpoint of it"
        )


def _load_zero_checkpoint(
    original: Method, engine: DeepSpeedEngine, *args: Any, **options: Any
) -> Any:
    engine.optimizer.checkpointing.finish_load()
    return True


def _load_module_state_dict(
    original: Method,
    engine: DeepSpeedEngine,
    checkpoint: dict[str, Any],
    strict: bool = True,
    custom_load_fn: Any = None,
    **options: Any,
) -> Any:
    """Load the weights in ``checkpoint`` under the names of ``layerwise.rename``, once they fit."""
    checkpointing = engine.optimizer.checkpointing
    load: Load = checkpointing.load
    with _agreeing(load), naming(load.folder):
        if custom_load_fn is None:
            module = checkpoint["module"]
            renamed = new_names(
                module, engine.optimizer.config.rename, use_all=not load.masters_only
            )
            with whole_shapes(engine.module.parameters()):
                values = engine.module.state_dict(keep_vars=True)
                given = {renamed[name]: value for name, value in module.items()}
                if load.has_whole_experts:
                    given |= checkpointing.own_experts(given)
                module = given
                if load.rest is not None:
                    given = dict(load.rest)
                if load.masters_only:
                    # What was trained follows from the masters, which are loaded after it.
                    module = {**values, **given}
                # Frozen parameters appear again in this key, under their checkpoint names.
                checkpoint = {**checkpoint, "module": module, FROZEN_PARAM_FRAGMENTS: None}
                _check_names_and_shapes(engine, "the checkpoint", module, values, strict=strict)
                if load.plan is not None:
                    # The last would become the weights, and the master of the other is trained.
                    for second, first in whole_states.tied(engine.module, module).items():
                        if second in module and not torch.allclose(
                            module[first],
                            module[second].to(module[first]),
                            rtol=0,
                            atol=0,
                            equal_nan=True,
                        ):
                            raise LayerWiseError(
                                f"{first} and {second} are one parameter here, but differ in the "
                                "checkpoint; load it into a model that does not tie them"
                            )
    if is_cut(engine):
        checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: None}
        if custom_load_fn is None:
            checkpoint["module"] = load_cuts(engine, given, checkpoint["module"])
    return original(checkpoint, strict, custom_load_fn, **options)


def _get_all_ckpt_names(
    original: Method, engine: DeepSpeedEngine, checkpoints_path: str, tag: str
) -> Any:
    names = original(escape(str(checkpoints_path)), escape(str(tag)))
    # A universal checkpoint of ZeRO-3 has one file per rank. They differ only in the module.
    of_stage_3 = Path(checkpoints_path, str(tag)).glob("zero_pp_rank_0_mp_rank_*_model_states.pt")
    return names or sorted(map(str, of_stage_3))


def _check_names_and_shapes(
    engine: DeepSpeedEngine,
    what: str,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    strict: bool,
) -> None:
    both = wanted.keys() & saved.keys()
    loaded = {id(wanted[name]) for name in both}
    # The layers of a pipeline have numbers, not names.
    rename = None if pipeline.is_pipeline(engine.module) else engine.optimizer.config.rename
    check_names(
        what,
        saved.keys(),
        # A tied parameter may be loaded by another name.
        {name for name, value in wanted.items() if strict or id(value) not in loaded},
        wanted.keys(),
        rename=rename,
        strict=strict,
        quiet=engine.optimizer.rank != 0,
    )
    for name in both:
        own = wanted[name]
        if not isinstance(own, Tensor) or own.shape == saved[name].shape:
            continue
        # torch loads 1-D values as 0-d ones, and cuts have no shape.
        if not fits(saved[name].shape, own.shape) or own.dim() and not hasattr(own, "ds_tensor"):
            raise LayerWiseError(
                f"{name} is {tuple(saved[name].shape)} in {what}, {tuple(own.shape)} in the model"
            )


def _check_layers(engine: DeepSpeedEngine, folder: Path, *, strict: bool) -> None:
    """Check for errors that loading the layers of this stage would find only half-way.

    Raises:
        LayerWiseError: a layer has no file, the checkpoint has more layers than the model, or names
            or shapes differ.
    """
    module = engine.module
    for index, layer in enumerate(module.forward_funcs):
        if not hasattr(layer, "load_state_dict"):
            continue
        number = module._local_start + index
        paths = module.ckpt_layer_path_list(escape(str(folder)), index)
        grid = engine.mpu
        needed = grid.get_slice_parallel_world_size()
        if len(paths) != needed:
            raise LayerWiseError(
                f"{folder} has {len(paths)} files of layer {number}, and needs {needed}; it was "
                "saved by a model of other layers, in another number of tensor-parallel parts, or "
                "not by a pipeline"
            )
        _check_names_and_shapes(
            engine,
            f"layer {number} of the checkpoint",
            load_safely(Path(paths[grid.get_slice_parallel_rank()])),
            layer.state_dict(keep_vars=True),
            strict=strict,
        )
    last = 0
    for path in folder.glob("layer_*-model_states.pt"):
        last = max(last, int(path.name.split("-")[0].removeprefix("layer_")))
    if strict and last >= module._num_layers:
        raise LayerWiseError(
            f"{folder} has a layer {last}, and the model {module._num_layers} layers; load "
            "what fits with load_module_strict=False"
        )


#: The keys of the model's file that the engine reads after it has loaded the model.
_COUNTS = "dp_world_size", "mp_world_size", "global_steps", "skipped_steps"

#: The names in schedulers' states that depend on torch's version or on a scheduler's options, and
#: that are not needed to load. Private names also differ between versions.
_EITHER_WAY = frozenset(
    ("verbose", "anneal_func", "default_min_lr", "use_beta1", "base_momentums", "max_momentums")
)


def _check_counts(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any]) -> None:
    """Refuse counts that are not numbers, and decide whether the scheduler continues from its
    state.

    Raises:
        ValueError: a count, or a value of the scheduler's state, is of another kind.
    """
    for key in _COUNTS:
        if not isinstance(checkpoint.get(key), int):
            raise ValueError(f"{key} is {checkpoint.get(key)!r:.100}, expected a whole number")
    load: Load = engine.optimizer.checkpointing.load
    scheduler = engine.lr_scheduler
    if scheduler is None or not load.wants_scheduler:
        return
    load.wants_scheduler = _resumes(scheduler, checkpoint.get("lr_scheduler"))
    if not load.wants_scheduler:
        comm.report(
            f"{type(scheduler).__name__} starts afresh, because the checkpoint has no state of a "
            "learning rate scheduler, or that of another one, or of other parameter groups"
        )


def _resumes(scheduler: Any, saved: Any) -> bool:
    """Tell whether ``saved`` is a state of the class of ``scheduler``. torch's schedulers accept
    any, and keep their own values for what is missing.

    A script's scheduler may add an attribute at some event, such as the end of a warm-up. Its state
    then has that attribute in addition to those of this run. One without any state adds none.

    Raises:
        ValueError: a value in it is of another kind than this run's; names it.
    """
    if not hasattr(scheduler, "state_dict"):
        return saved is not None
    own = scheduler.state_dict()
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        return isinstance(saved, type(own))
    names = _names(own)
    there = _names(saved)
    adds_none = type(scheduler).__module__.startswith(("torch.", "deepspeed.")) or not names
    if not names <= there or adds_none and names != there:
        return False
    check_kind(own, saved, "the state of the learning rate scheduler")
    return True


def _names(state: Mapping[str, Any]) -> set[str]:
    """Return the names in ``state`` that are compared, including those of inner schedulers."""
    names: set[str] = set()
    for key, value in state.items():
        if key == "_schedulers":
            for index, inner in enumerate(value):
                names.update(f"{index}.{name}" for name in _names(inner))
        elif key == "base_lrs" and isinstance(value, list):
            # There is one for each parameter group.
            names.add(f"{len(value)} {key}")
        elif not key.startswith("_") and key not in _EITHER_WAY:
            names.add(key)
    return names


WRAPS = only_ours(
    uses_us,
    {
        "load_checkpoint": _load_checked,
        "_load_zero_checkpoint": _load_zero_checkpoint,
        "load_module_state_dict": _load_module_state_dict,
        "_get_all_ckpt_names": _get_all_ckpt_names,
    },
)
