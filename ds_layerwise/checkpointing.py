"""The hook into the engine's saving and loading.

Note: what is wrapped, and why there
    ``save_checkpoint`` writes a folder bit by bit under its final name, and ``latest`` at the end; here it writes
    aside and the folder is moved into place once every rank has written its part. ``_save_checkpoint`` and
    ``_save_zero_checkpoint`` write the files of one rank: an error in there is raised on all ranks, which would wait
    for that one for ever otherwise. ``_commit_decoupled_checkpoint`` ends a save that runs beside the training.
    ``load_checkpoint`` decides by what a folder holds how to load it, and refuses what must be refused while nothing
    has been touched; the engine's own ``_load_zero_checkpoint`` refuses every other world size.
    ``load_module_state_dict`` is where the model's file has been read and nothing of it has been taken over yet.
    ``_get_all_ckpt_names`` does not know how files of ZeRO-3 are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import deepspeed.comm as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_layerwise import comm
from ds_layerwise.checkpoint import staging, universal
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest
from ds_layerwise.checkpoint.names import new_names
from ds_layerwise.checkpoint.regular import RegularCheckpoint, load_safely
from ds_layerwise.errors import LayerwiseError
from ds_layerwise.zero_optimizer import LayerWiseZeroOptimizer


def _is_ours(engine: DeepSpeedEngine) -> bool:
    return isinstance(engine.optimizer, LayerWiseZeroOptimizer)


# --- saving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """A save under way."""

    save_dir: Path
    tag: str
    latest: bool

    @property
    def folder(self) -> Path:
        """What it becomes; it is written beside it."""
        return self.save_dir / self.tag

    @property
    def universal_tag(self) -> str:
        """Under which ``layerwise.save_universal`` writes the same."""
        return f"{self.tag}_universal"


def _save_whole(original: Callable[..., Any], engine: DeepSpeedEngine, save_dir: str, tag: object = None,
                client_state: Mapping[str, Any] | None = None, save_latest: bool = True, **options: Any) -> Any:
    client_state = {} if client_state is None else client_state
    if not _is_ours(engine):
        return original(save_dir, tag, client_state, save_latest, **options)
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    comm.check_alike("the checkpoint's tag", tag, [tag], group=None)
    _commit_decoupled(engine)
    save = Save(Path(save_dir), tag, save_latest)
    with ExitStack() as undo:
        with comm.Alike(None):
            undo.callback(_abandon, engine, save)
            if _writes_folders(engine):
                staging.begin(save.folder)
        done = original(save_dir, tag + staging.INCOMPLETE, client_state, False, **options)
        if engine.checkpoint_engine.is_decoupled():
            # It goes on beside the training; the engine commits it before the next step.
            engine._layerwise_save = save
        else:
            _commit(engine, save)
        undo.pop_all()
    return done


def _writes_folders(engine: DeepSpeedEngine) -> bool:
    """Whether this rank makes and moves folders: one rank does, or one a node where nodes have their own disks."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return bool(rank == 0)


def _abandon(engine: DeepSpeedEngine, save: Save) -> None:
    """Clear away what a failed save has written, which may be what fills the disk."""
    if _writes_folders(engine):
        staging.abandon(save.folder)
        staging.abandon(save.save_dir / save.universal_tag)


def _commit(engine: DeepSpeedEngine, save: Save) -> None:
    """List what was written, move it into place and point to it. All ranks have written their part."""
    staged = staging.staged(save.folder)
    own = Path(engine._get_zero_ckpt_name(str(staged.parent), staged.name)).name
    with comm.Alike(None):
        written = Manifest.of(staged, [own])
    parts = comm.gather_objects(written, group=None)
    if engine.optimizer.config.save_universal:
        _write_universal(engine, save)
    with comm.Alike(None):
        if _writes_folders(engine):
            listed = {name for part in parts for name in part.files}
            rest = [path.name for path in staged.iterdir() if path.is_file() and path.name not in listed]
            # On a disk of this node alone there are the files of its own ranks only.
            here = [part for part in parts if all((staged / name).exists() for name in part.files)]
            staging.commit(save.folder, Manifest.merged([*here, Manifest.of(staged, rest)]))
        if engine.global_rank == 0 and save.latest:
            staging.point(save.save_dir / "latest", save.tag)


def _write_universal(engine: DeepSpeedEngine, save: Save) -> None:
    """The same once more in the universal format, each rank a part of the parameters, out of the files just written."""
    folder, regular = save.save_dir / save.universal_tag, staging.staged(save.folder)
    with comm.Alike(None):
        if engine.use_node_local_storage():
            raise LayerwiseError("layerwise.save_universal needs a disk that all ranks share, and checkpoint."
                                 "use_node_local_storage says there is none; remove one of the two")
        if engine.global_rank == 0:
            staging.begin(folder)
    staged, rank = staging.staged(folder), engine.global_rank
    with comm.Alike(None), _saying_where(save.save_dir):
        saved = RegularCheckpoint(regular, rank=rank)
        names = universal.write_parameters(saved, staged, universal.shares(saved, dist.get_world_size())[rank])
        if rank == 0:
            model_file = Path(engine._get_ckpt_name(str(regular.parent), regular.name))
            names += universal.write_common(saved.state_dict(0), staged, model_file, _not_trained(engine))
        written = Manifest.of(staged, names)
    parts = comm.gather_objects(written, group=None)
    with comm.Alike(None):
        if rank == 0:
            staging.commit(folder, Manifest.merged(parts))
            if save.latest:
                staging.point(save.save_dir / universal.LATEST, save.universal_tag)


def _not_trained(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Frozen parameters and buffers, by the names that the module's ``state_dict`` has for them."""
    seen = {id(param) for param in engine.optimizer._params.values()}
    found: dict[str, Tensor] = {}
    for name, value in engine.module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            found[name] = value
        # The other names of a tied parameter stand for it.
        seen |= {id(value)} if isinstance(value, nn.Parameter) else set()
    return found


@contextmanager
def _saying_where(save_dir: str | Path) -> Iterator[None]:
    """Raise as our own what torch's writer raises on a full disk, which says neither where nor why."""
    try:
        yield
    except LayerwiseError:
        raise
    except RuntimeError as e:
        raise LayerwiseError(f"the checkpoint cannot be written to {save_dir}, which has {disk_usage(save_dir).free} "
                             f"bytes left: {str(e).partition(chr(10))[0]}; what was saved before is still there") from e


def _raised_alike(original: Callable[..., Any], engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    if not _is_ours(engine):
        return original(*args, **options)
    with comm.Alike(None), _saying_where(args[0]):
        return original(*args, **options)


def _save_model_file(original: Callable[..., Any], engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    if not _is_ours(engine):
        return original(*args, **options)
    # The engine saves what zero_to_fp32.py needs of frozen parameters only where gradients are partitioned.
    engine.zero_optimization_partition_gradients = lambda: True
    try:
        return _raised_alike(original, engine, *args, **options)
    finally:
        del engine.zero_optimization_partition_gradients


def _commit_decoupled_checkpoint(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    done = original()
    save: Save | None = engine.__dict__.pop("_layerwise_save", None)
    if save is not None:
        with ExitStack() as undo:
            undo.callback(_abandon, engine, save)
            _commit(engine, save)
            undo.pop_all()
    return done


def _commit_decoupled(engine: DeepSpeedEngine) -> None:
    """End a save that still goes on beside the training."""
    if "_layerwise_save" in engine.__dict__:
        engine._commit_decoupled_checkpoint()


def _destroy(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    _commit_decoupled(engine)
    return original()


# --- loading ---------------------------------------------------------------------------------------------------------


def _load_checked(original: Callable[..., Any], engine: DeepSpeedEngine, load_dir: str, tag: object = None,
                  load_module_strict: bool = True, load_optimizer_states: bool = True,
                  load_lr_scheduler_states: bool = True, load_module_only: bool = False,
                  custom_load_fn: Any = None) -> Any:
    def load(tag: object) -> Any:
        return original(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                        load_module_only, custom_load_fn)

    if not _is_ours(engine):
        return load(tag)
    if tag is None:
        with comm.Alike(None):
            tag = _latest_tag(Path(load_dir), universal_first=engine.load_universal_checkpoint())
    if tag is None:
        return load(tag)
    folder = Path(load_dir, str(tag))
    states = load_optimizer_states and not load_module_only
    with comm.Alike(None):
        if engine.global_rank == 0:
            staging.recover(folder)
    with comm.Alike(None):
        is_universal = _check_files(engine, folder, states=states)
    if is_universal or states:
        engine.optimizer.prepare_load(
            folder, universal=is_universal, states=states, strict=load_module_strict,
            masters=is_universal or engine.zero_load_from_fp32_weights())
    config, asked = engine._config, engine._config.load_universal_checkpoint
    config.load_universal_checkpoint = is_universal
    engine._layerwise_wants_scheduler = load_lr_scheduler_states and not load_module_only
    try:
        if is_universal:
            with comm.Alike(None):
                _check_model_file(engine, load_dir, str(tag))
        return load(str(tag))
    finally:
        engine.optimizer.forget_prepared()
        config.load_universal_checkpoint = asked
        del engine._layerwise_wants_scheduler


def _latest_tag(load_dir: Path, *, universal_first: bool) -> str | None:
    """The tag that a pointer in ``load_dir`` names; None if there is no pointer.

    Raises:
        LayerwiseError: the pointer names no folder.
    """
    for name in ((universal.LATEST, "latest") if universal_first else ("latest",)):
        pointer = load_dir / name
        if pointer.exists():
            tag = pointer.read_bytes().strip().decode(errors="surrogateescape") if pointer.is_file() else ""
            # A tag may be a path; the longest part that a file system takes has 255 bytes.
            if not tag or not tag.isprintable() or max(len(part.encode()) for part in tag.split("/")) > 255:
                raise LayerwiseError(f"{pointer} {'is empty' if not tag else f'holds {tag[:40]!r}'}; write the tag of "
                                     "a checkpoint into it, or pass the tag")
            return tag
    return None


def _check_files(engine: DeepSpeedEngine, folder: Path, *, states: bool) -> bool:
    """Check this rank's part of the files in ``folder`` by their checksums; returns whether it is universal.

    Raises:
        LayerwiseError: the folder or a file is missing, or differs from what was saved.
    """
    if not folder.is_dir():
        there = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
        raise LayerwiseError(f"{folder} does not exist; {folder.parent} holds {', '.join(there) or 'no checkpoint'}")
    is_universal = universal.is_universal(folder)
    if not (folder / FILE_NAME).exists():
        if is_universal or not states:
            # DeepSpeed's converter and its other optimizers keep no list.
            return is_universal
        # Says so if somebody else wrote it.
        RegularCheckpoint(folder)
    manifest = Manifest.read(folder)
    if not states and not is_universal:
        manifest = manifest.only(name for name in manifest.files if name.endswith("_model_states.pt"))
    own_disk = engine.use_node_local_storage()
    manifest.check(folder, rank=0 if own_disk else engine.global_rank,
                   world_size=1 if own_disk else dist.get_world_size())
    return is_universal


def _load_zero_checkpoint(original: Callable[..., Any], engine: DeepSpeedEngine, load_dir: str, tag: str,
                          **options: Any) -> Any:
    if not _is_ours(engine):
        return original(load_dir, tag, **options)
    engine.optimizer.finish_load()
    return True


def _load_module_state_dict(original: Callable[..., Any], engine: DeepSpeedEngine, checkpoint: dict[str, Any],
                            strict: bool = True, custom_load_fn: Any = None, **options: Any) -> Any:
    if _is_ours(engine) and custom_load_fn is None:
        with comm.Alike(None):
            held = checkpoint["module"]
            renamed = new_names(held, engine.optimizer.config.rename, use_all=True)
            checkpoint["module"] = {renamed[name]: value for name, value in held.items()}
            _check_model(engine, checkpoint, strict=strict)
            # The same once more, by the names of the checkpoint and of what was frozen when it was saved.
            checkpoint[FROZEN_PARAM_FRAGMENTS] = None
    return original(checkpoint, strict, custom_load_fn, **options)


def _check_model(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
    """Find what loading the module and the scheduler would only find when half of it is done.

    Raises:
        LayerwiseError: names or shapes differ, or there is no state for the scheduler.
    """
    found, wanted = checkpoint["module"], engine.module.state_dict(keep_vars=True)
    for what, names in (("lacks", wanted.keys() - found.keys()), ("has", found.keys() - wanted.keys())):
        if strict and names:
            raise LayerwiseError(f"the checkpoint {what} {', '.join(sorted(names)[:5])}{' and more' * (len(names) > 5)}"
                                 f", which the model {'has' if what == 'lacks' else 'lacks'}; rename it with "
                                 "layerwise.rename, or load what fits with load_module_strict=False")
    for name in wanted.keys() & found.keys():
        if isinstance(wanted[name], Tensor) and wanted[name].shape != found[name].shape:
            raise LayerwiseError(f"{name} is {tuple(found[name].shape)} in the checkpoint, "
                                 f"{tuple(wanted[name].shape)} in the model")
    _check_scheduler(engine, checkpoint)


def _check_scheduler(engine: DeepSpeedEngine, checkpoint: Mapping[str, Any]) -> None:
    if engine.lr_scheduler is not None and engine._layerwise_wants_scheduler and not checkpoint.get("lr_scheduler"):
        raise LayerwiseError("the checkpoint holds no state of a learning rate scheduler, and this run has one; load "
                             "with load_lr_scheduler_states=False to start the schedule afresh")


def _check_model_file(engine: DeepSpeedEngine, load_dir: str, tag: str) -> None:
    """Find what is wrong with the model's file of a universal checkpoint, of which the engine loads no weights.

    Raises:
        LayerwiseError: there is none, or it has no state for the scheduler.
    """
    names = engine._get_all_ckpt_names(load_dir, tag)
    if not names:
        raise LayerwiseError(f"{Path(load_dir, tag)} holds no mp_rank_00_model_states.pt, which says how many steps "
                             "were taken; copy it there from the checkpoint that was converted")
    try:
        checkpoint = load_safely(Path(names[0]))
    except LayerwiseError:
        # A client may have put anything into it; the engine loads it next, and that is the user's decision.
        return
    _check_scheduler(engine, checkpoint)


def _get_all_ckpt_names(original: Callable[..., Any], engine: DeepSpeedEngine, checkpoints_path: str,
                        tag: str) -> Any:
    names = original(checkpoints_path, tag)
    if not names and _is_ours(engine):
        # A universal checkpoint of ZeRO-3 has one file a rank, all alike but for the module.
        names = sorted(str(path) for path in Path(checkpoints_path, str(tag)).glob(
            "zero_pp_rank_0_mp_rank_*_model_states.pt"))
    return names


WRAPS: dict[str, Callable[..., Any]] = {
    "save_checkpoint": _save_whole,
    "_save_checkpoint": _save_model_file,
    "_save_zero_checkpoint": _raised_alike,
    "_commit_decoupled_checkpoint": _commit_decoupled_checkpoint,
    "destroy": _destroy,
    "load_checkpoint": _load_checked,
    "_load_zero_checkpoint": _load_zero_checkpoint,
    "load_module_state_dict": _load_module_state_dict,
    "_get_all_ckpt_names": _get_all_ckpt_names,
}
