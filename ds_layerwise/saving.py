"""The hook into the engine's saving.

Note: what is wrapped, and why there
    ``save_checkpoint`` writes a folder bit by bit under its final name, and ``latest`` at the end; here it writes
    aside and the folder is moved into place once every rank has written its part. ``_save_checkpoint``,
    ``_save_moe_checkpoint`` and ``_save_zero_checkpoint`` write the files of one rank: an error in there is raised on
    all ranks, which would wait for that one for ever otherwise. ``_commit_decoupled_checkpoint`` ends a save that runs
    beside the training, and ``destroy`` ends the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_layerwise import comm
from ds_layerwise.checkpoint import staging, universal
from ds_layerwise.checkpoint.manifest import Manifest
from ds_layerwise.errors import LayerwiseError
from ds_layerwise.zero_optimizer import uses_us


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
    if not uses_us(engine):
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
        written = _listed(engine, staged, [own])
    parts = comm.gather_objects(written, group=None)
    if engine.optimizer.config.save_universal:
        _write_universal(engine, save)
    with comm.Alike(None):
        if _writes_folders(engine):
            listed = {name for part in parts for name in part.files}
            rest = [path.name for path in staged.iterdir() if path.is_file() and path.name not in listed]
            # On a disk of this node alone there are the files of its own ranks only.
            here = [part for part in parts if all((staged / name).exists() for name in part.files)]
            staging.commit(save.folder, Manifest.merged([*here, _listed(engine, staged, rest)]))
        if engine.global_rank == 0 and save.latest:
            staging.point(save.save_dir / "latest", save.tag)


def _listed(engine: DeepSpeedEngine, folder: Path, names: list[str]) -> Manifest:
    """The list of files that this rank has written."""
    if engine.optimizer.config.fsync:
        for name in names:
            staging.flush(folder / name)
        for path in {(folder / name).parent for name in names}:
            staging.flush(path)
    return Manifest.of(folder, names)


def _write_universal(engine: DeepSpeedEngine, save: Save) -> None:
    """The same once more in the universal format, each rank a part of the parameters, out of the files just written."""
    folder, regular = save.save_dir / save.universal_tag, staging.staged(save.folder)
    with comm.Alike(None):
        if engine.global_rank == 0:
            staging.begin(folder)
    staged, rank = staging.staged(folder), engine.global_rank
    with comm.Alike(None), _saying_where(save.save_dir):
        saved = engine.optimizer.open_regular(regular)
        names = universal.write_parameters(saved, staged, universal.shares(saved, dist.get_world_size())[rank])
        if rank == 0:
            names += universal.write_common(saved.state_dict(0), staged)
        if engine.optimizer.rank == 0:
            # Every stage of a pipeline has its own.
            model_file = Path(engine._get_ckpt_name(str(regular.parent), regular.name))
            names += universal.write_model(model_file, _not_trained(engine), staged)
        written = _listed(engine, staged, names)
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
    if not uses_us(engine):
        return original(*args, **options)
    with comm.Alike(None), _saying_where(args[0]):
        return original(*args, **options)


def _save_model_file(original: Callable[..., Any], engine: DeepSpeedEngine, *args: Any, **options: Any) -> Any:
    if not uses_us(engine):
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


WRAPS: dict[str, Callable[..., Any]] = {
    "save_checkpoint": _save_whole,
    "_save_checkpoint": _save_model_file,
    "_save_moe_checkpoint": _save_model_file,
    "_save_zero_checkpoint": _raised_alike,
    "_commit_decoupled_checkpoint": _commit_decoupled_checkpoint,
    "destroy": _destroy,
}
