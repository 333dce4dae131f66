"""Hooks into the engine's saving.

Note: what is wrapped, and why there
    * ``save_checkpoint`` writes a folder file by file under its final name, and ``latest`` at the
      end. With the hook it writes an incomplete folder. This is moved into place once every rank
      has written its part, and the rank that moves it sees all of them. The paths are those that
      the engine passed to its checkpoint engine.
    * ``_save_checkpoint``, ``_save_moe_checkpoint`` and ``_save_zero_checkpoint`` write the files
      of one rank. An error in there is raised on all ranks, which would otherwise wait for that
      rank for ever.
    * ``_commit_decoupled_checkpoint`` ends a background save, which has a copy of all that it
      writes: within the next step, or when something else needs it. ``destroy`` or the end of the
      script ends the last one.
    * ``_take_model_step`` marks the time in which nothing may be saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import PicklingError
from shutil import disk_usage
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_layerwise.checkpoint import atomic, universal
from ds_layerwise.checkpoint.checkpoint_folder import check_tag
from ds_layerwise.checkpoint.manifest import Manifest, names_in
from ds_layerwise.checkpoint.plain_values import load_safely
from ds_layerwise.checkpoint.reshard import Recut, untrained
from ds_layerwise.engine.checkpoints.save_snapshot import snapshot
from ds_layerwise.engine.checkpoints.stage3_files import (
    as_at_stage_2,
    expert_layers,
    is_cut,
    saving_the_rest,
)
from ds_layerwise.engine.contract.patches import Method, only_ours
from ds_layerwise.errors import ConfigError, LayerWiseError
from ds_layerwise.instance_patches import patch
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.step_state import Call
from ds_layerwise.zero.checkpoint import disks
from ds_layerwise.zero.checkpoint.disks import Save
from ds_layerwise.zero.optimizer import uses_us

#: The background saves that are not committed, in their order, by engines. These are kept alive
#: until then.
unfinished: dict[DeepSpeedEngine, Save] = {}


def _save_whole(
    original: Method,
    engine: DeepSpeedEngine,
    save_dir: str,
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    **options: Any,
) -> Any:
    """Save a checkpoint; every rank must call this. Its folder, and the pointer to it, are in place
    only when all ranks have written, and every file is listed with its checksum.

    Raises:
        LayerWiseError: on every rank, if any rank cannot write its part.
    """
    optimizer = engine.optimizer
    writer = engine.checkpoint_engine
    lacks_frozen = options.get("exclude_frozen_parameters")
    with comm.errors_on_all_ranks():
        if not save_dir:
            raise ConfigError(f"save_dir must be a non-empty string, got {save_dir!r}")
        optimizer.interrupted.check()
        # A background save must not depend on a later change of the working directory.
        place = Path(save_dir).absolute()
        tag = check_tag(f"global_step{engine.global_steps}" if tag is None else tag)
        _check_kind(place / tag, is_universal=False)
        if optimizer.config.save_universal:
            if is_cut(engine) and lacks_frozen:
                raise LayerWiseError(
                    "exclude_frozen_parameters is true, and a universal checkpoint of ZeRO stage 3 "
                    "takes frozen parameters from the file that would lack them; leave it out, or "
                    "set layerwise.save_universal to false"
                )
            _check_kind(place / f"{tag}_universal", is_universal=True)
    comm.same_on_all_ranks("the checkpoint's tag", [tag], group=None)
    commit_decoupled(engine)
    optimizer.checkpointing.begin_save()
    with ExitStack() as undo:
        save = disks.begin(
            place, tag, latest=save_latest, own_disks=engine.use_node_local_storage()
        )
        if not writer.is_decoupled():
            # The process of a background save may still write. The next save waits for it and then
            # removes its files.
            undo.callback(_abandon, save)
        undo.callback(_release, writer)
        optimizer.checkpointing.save_id = save.save_id
        with _recorded(writer) as written:
            _choose_writer(engine, save)
            state = {**(client_state or {}), **expert_layers(engine)}
            with (
                optimizer.checkpoint_event(),
                saving_the_rest(engine, with_frozen=not lacks_frozen),
                as_at_stage_2(engine),
            ):
                done = original(str(place), tag + atomic.INCOMPLETE, state, False, **options)
        save = replace(save, written=tuple(written))
        if writer.is_decoupled():
            # A background save is committed before the next step, or at the end of the script.
            unfinished[engine] = save
        else:
            _commit(engine, save)
        undo.pop_all()
    return done


def _save_16bit_model(original: Method, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    """Save the weights in one file, or raise where no rank has them all."""
    engine.optimizer.checkpointing.check_on_one_rank()
    return original(*args, **options)


def _put_together(original: Method, engine: DeepSpeedEngine) -> Any:
    """Put whole weights together of those that AutoTP has cut, as a Trainer's save does. DeepSpeed
    leaves copies in place of the parameters' memory, which they get back.
    """
    engine.optimizer.checkpoint_event_prologue()
    places = [(param, param.data) for param in engine.module.parameters()]
    try:
        return original()
    finally:
        for param, place in places:
            param.data = place


def _take_model_step(original: Method, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    with engine.optimizer.progress.state.engine_steps():
        result = original(*args, **options)
    engine.optimizer.reports.write()
    return result


def _check_kind(folder: Path, *, is_universal: bool) -> None:
    """Refuse to replace a checkpoint by one of the other kind that has the same tag.

    Raises:
        LayerWiseError: ``folder`` holds one of the other kind.
    """
    if universal.is_universal(folder) is is_universal:
        return
    if any(folder.glob("zero/*")) or any(folder.glob("*_states.pt")):
        there, new = ("regular", "universal") if is_universal else ("universal", "regular")
        raise LayerWiseError(
            f"{folder} holds a {there} checkpoint, and this save would put a {new} one there; "
            "choose another tag, or remove it"
        )


@contextmanager
def _recorded(checkpoint_engine: Any) -> Iterator[Iterable[Path]]:
    """Collect the paths of the files that the engine writes into existing folders. Data that is
    written later is copied.
    """
    original = checkpoint_engine.save
    is_decoupled = checkpoint_engine.is_decoupled()
    # A dict, because a file may be written twice.
    paths: dict[Path, None] = {}

    def save(state_dict: Any, path: str) -> Any:
        done = original(snapshot(state_dict) if is_decoupled else state_dict, path)
        paths[Path(path)] = None
        return done

    with patch(checkpoint_engine, save=save, makedirs=lambda path, exist_ok=False: None) as undo:
        if is_decoupled:
            # Otherwise the engine would copy what is copied here.
            undo.push(patch(checkpoint_engine, preserves_storage_sharing=lambda: False))
            if (size := getattr(checkpoint_engine, "checkpoint_size", None)) is not None:
                # Computing the size takes collectives, and a rank that cannot write does not reach
                # them.
                size.set_pre_size(0)
                size.set_post_size(0)
        yield paths


def _model_file(engine: DeepSpeedEngine) -> str:
    with as_at_stage_2(engine):
        return Path(engine._get_ckpt_name("", "")).name


def _choose_writer(engine: DeepSpeedEngine, save: Save) -> None:
    """Choose one rank per disk to write each part of the model.

    On node-local disks the engine goes by local ranks, so that only some parts of a model that is
    cut are written. With a ``checkpoint.writer``, it lets all ranks write one file at the same
    time.
    """
    if engine.has_moe_layers and not is_cut(engine):
        # With files of experts, the engine goes by ranks within expert groups.
        return
    names = comm.gather_objects(_model_file(engine), group=None)
    rank = save.rank
    writer = min(other for other in save.here if names[other] == names[rank])
    engine.save_non_zero_checkpoint = rank == writer


def _abandon(save: Save) -> None:
    """Remove the files of a failed save, which may have filled the disk."""
    if save.is_owner:
        if not (len(set(save.owners)) > 1 and atomic.save_ids(save.folder)[1] == save.save_id):
            # Otherwise the save is complete here, and may be in place on other disks.
            atomic.abandon(save.folder)
        atomic.abandon(save.save_dir / save.universal_tag)


def _release(writer: Any) -> None:
    """Release the file of a fast writer of DeepSpeed that has failed. It would refuse every later
    file.
    """
    factory: Any = getattr(writer, "_writer", None)
    if getattr(factory, "_writer", None) is not None:
        # It may fail again, as on a full disk.
        with Attempt():
            factory._writer.close()
        factory._writer = None


def _commit(engine: DeepSpeedEngine, save: Save) -> None:
    """List the files, move the save into place and point to it. All ranks have written
    their part.
    """
    folder = atomic.incomplete_folder(save.folder)
    owns = save.is_owner
    here = save.here
    with comm.errors_on_all_ranks():
        names = [path.relative_to(folder).as_posix() for path in save.written]
        written = _listed(engine, folder, names)
        needed = [_model_file(engine)]
        if engine.save_zero_checkpoint:
            needed.append(Path(engine._get_zero_ckpt_name("", "")).name)
    everyone = comm.gather_objects((written, needed), group=None)
    parts = {rank: everyone[rank][0] for rank in here}
    with comm.errors_on_all_ranks():
        if owns:
            needs = {rank: everyone[rank][1] for rank in here}
            disks.check_arrived(save.folder, save.save_id, parts, needs)
    if engine.optimizer.config.save_universal:
        _write_universal(engine, save)
    with comm.errors_on_all_ranks():
        if owns:
            files = dict(Manifest.merged(parts.values()).files)
            files |= _listed(engine, folder, sorted(set(names_in(folder)) - files.keys())).files
            atomic.seal(save.folder, Manifest(files, save.save_id))
    _publish(engine, save)


def _publish(engine: DeepSpeedEngine, save: Save) -> None:
    """Move a save that is complete on every disk into place, and point to it.

    If this stops before the save is in place on all disks, a load completes it.
    """
    owns = save.is_owner
    has_twin = engine.optimizer.config.save_universal and engine.global_rank == 0
    with comm.errors_on_all_ranks():
        if has_twin:
            atomic.publish(save.save_dir / save.universal_tag)
        if owns:
            atomic.publish(save.folder)
    with comm.errors_on_all_ranks():
        if save.latest and has_twin:
            atomic.point(save.save_dir / universal.LATEST, save.universal_tag)
        if save.latest and owns:
            atomic.point(save.save_dir / "latest", save.tag)


def _listed(engine: DeepSpeedEngine, folder: Path, names: list[str]) -> Manifest:
    """Return the list of the files ``names``, which this rank has written.

    Raises:
        LayerWiseError: one of them is missing.
    """
    if gone := [name for name in names if not (folder / name).is_file()]:
        raise LayerWiseError(
            f"{folder / gone[0]} is missing before this save is complete: it was removed, or never "
            "written; what was saved before is still there"
        )
    if engine.optimizer.config.fsync:
        for name in names:
            atomic.flush(folder / name)
        for parent in {(folder / name).parent for name in names}:
            atomic.flush(parent)
    return Manifest.of(folder, names)


def _write_universal(engine: DeepSpeedEngine, save: Save) -> None:
    """Also save in the universal format, complete but not in place yet. Each rank converts a part
    of the parameters from the files just written.
    """
    folder = save.save_dir / save.universal_tag
    regular = atomic.incomplete_folder(save.folder)
    incomplete = atomic.incomplete_folder(folder)
    rank = engine.global_rank
    optimizer = engine.optimizer
    with comm.errors_on_all_ranks():
        if rank == 0:
            atomic.begin(folder)
    with comm.errors_on_all_ranks(), _saying_where(save.save_dir):
        parts = optimizer.checkpointing.open_folder(regular, whole=True)
        saved = Recut(parts, {})
        shapes = saved.header.shapes
        # The largest first, in the same order on all ranks.
        order = sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))
        share = order[rank :: dist.get_world_size()]
        names = universal.write_parameters(saved, incomplete, share)
        if rank == 0:
            names += universal.write_common(parts[0], saved.header, incomplete)
        if optimizer.rank == 0:
            # Every pipeline stage, and every part, has a model file of its own.
            model_file = regular / _model_file(engine)
            others: dict[str, Any] = {}
            if is_cut(engine):
                others = load_safely(model_file, with_objects=True)["module"]
            elif len(parts) == 1:
                others |= untrained(engine.module, optimizer._params.values())
            elif optimizer.settings.tp_rank == 0:
                others |= optimizer.checkpointing.rest_of(regular, saved, parts, {})
            names += universal.write_model(model_file, others, incomplete)
        written = _listed(engine, incomplete, names)
    everyone = comm.gather_objects(written, group=None)
    with comm.errors_on_all_ranks():
        if rank == 0:
            disks.check_seen(incomplete, dict(enumerate(everyone)))
            atomic.seal(folder, replace(Manifest.merged(everyone), save_id=save.save_id))


@contextmanager
def _saying_where(save_dir: str | Path) -> Iterator[None]:
    """Replace the error of torch's writer on a full disk, which names neither file nor reason, by
    our own.
    """
    try:
        yield
    except LayerWiseError:
        raise
    except (AttributeError, TypeError, PicklingError) as e:
        # From Python 3.13 on, the second.
        if "pickle" not in str(e) and "local object" not in str(e):
            raise
        raise LayerWiseError(
            "the checkpoint cannot be written: client_state or the module's state_dict has a value "
            f"that cannot be saved ({e}); leave it out"
        ) from e
    except RuntimeError as e:
        raise LayerWiseError(
            f"the checkpoint cannot be written to {save_dir}, which has "
            f"{disk_usage(save_dir).free} bytes left: {str(e).partition(chr(10))[0]}; what was "
            "saved before is still there"
        ) from e


def _raised_on_all_ranks(
    original: Method, _: DeepSpeedEngine, save_dir: str, *args: Any, **options: Any
) -> Any:
    with comm.errors_on_all_ranks(), _saying_where(save_dir):
        return original(save_dir, *args, **options)


def _save_model_file(original: Method, engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    # The engine saves the frozen parameters that zero_to_fp32.py needs only if gradients are
    # partitioned.
    with patch(engine, zero_optimization_partition_gradients=lambda: True):
        return _raised_on_all_ranks(original, engine, *args, **options)


def _commit_decoupled_checkpoint(_: Method, engine: DeepSpeedEngine) -> None:
    # The engine calls this at the start of a step, and the optimizer when all ranks have agreed on
    # it. Before that, others may wait in a reduction for a rank whose backward pass an error ended.
    if engine.optimizer.progress.state.call is Call.RUNS:
        commit_decoupled(engine)


def commit_decoupled(engine: DeepSpeedEngine) -> None:
    """End a pending background save, or one that failed before its writer had all data."""
    if not uses_us(engine):
        return
    writer: Any = engine.checkpoint_engine
    save = unfinished.pop(engine, None)
    if save is None and writer.get_commit_info() is None:
        return
    with ExitStack() as undo:
        if save is not None:
            undo.callback(_abandon, save)
        with comm.errors_on_all_ranks():
            try:
                writer.commit(writer.get_commit_info())
            except (AssertionError, EOFError, OSError, RuntimeError, ValueError) as e:
                raise LayerWiseError(
                    f"the process that writes checkpoints beside the training has failed ({e}), "
                    "for which it gives the reason above; what was saved before is still there; "
                    "start the run again to save, or train without checkpoint.writer.decoupled"
                ) from e
            finally:
                writer.commit_info = None
        if save is not None:
            _commit(engine, save)
        undo.pop_all()


def _destroy(original: Method, engine: DeepSpeedEngine) -> Any:
    """End a background save, then destroy the engine."""
    commit_decoupled(engine)
    return original()


WRAPS = {
    "destroy": _destroy,
    **only_ours(
        uses_us,
        {
            "_take_model_step": _take_model_step,
            "save_checkpoint": _save_whole,
            "_save_checkpoint": _save_model_file,
            "_save_moe_checkpoint": _save_model_file,
            "_save_zero_checkpoint": _raised_on_all_ranks,
            "_commit_decoupled_checkpoint": _commit_decoupled_checkpoint,
            "save_16bit_model": _save_16bit_model,
            "_replace_module_consolidated_state_dict": _put_together,
        },
    ),
}
