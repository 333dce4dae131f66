"""The hook into the engine's loading.

Note: what is wrapped, and why there
    ``load_checkpoint`` decides by what a folder holds how to load it, and refuses what must be
    refused while nothing has been touched; the engine's own ``_load_zero_checkpoint`` refuses every
    other world size. ``load_module_state_dict`` is where the model's file has been read and nothing
    of it has been taken over yet. ``_get_all_ckpt_names`` does not know how files of ZeRO-3 are
    called, and takes a folder's name for a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.files.manifest import FILE_NAME
from ds_layerwise.checkpoint.files.safe_load import naming
from ds_layerwise.checkpoint.formats import universal
from ds_layerwise.checkpoint.formats.checkpoint_folder import manifest_of
from ds_layerwise.checkpoint.formats.regular import mp_size
from ds_layerwise.checkpoint.new_names import new_names
from ds_layerwise.engine.loading.model_checks import (
    check_layers,
    check_model,
    check_model_file,
    check_scheduler,
)
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import announce
from ds_layerwise.parallel import pipeline
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.checkpoint import disks
from ds_layerwise.zero.checkpoint.load_request import Load
from ds_layerwise.zero.optimizer import uses_us


def _load_checked(
    original: Callable[..., Any],
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    def load(tag: object) -> Any:
        return original(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )

    if not uses_us(engine):
        return load(tag)
    # What is saved beside the training is the newest, and may be what is to be loaded.
    if engine.checkpoint_engine.is_decoupled():
        engine._commit_decoupled_checkpoint()
    tag = _agreed_tag(engine, Path(load_dir), tag)
    if tag is None:
        # The engine would look once more, and one rank may see a pointer by now.
        if engine.load_universal_checkpoint():
            raise LayerWiseError(
                f"{Path(load_dir, universal.LATEST)} does not exist; pass the tag of a universal "
                "checkpoint"
            )
        if comm.rank_of(None) == 0:
            logger.warning(
                f"ds_layerwise: nothing was loaded: {Path(load_dir, 'latest')} does not exist; "
                "pass the tag of a checkpoint if there is one"
            )
        return None, None
    folder = Path(load_dir, tag)
    states = load_optimizer_states and not load_module_only
    own_disks = engine.use_node_local_storage()
    with comm.Alike(None):
        if (engine.local_rank if own_disks else engine.global_rank) == 0:
            atomic.recover(folder)
    if own_disks:
        disks.finish_save(folder, may_move=engine.local_rank == 0)
    with comm.Alike(None):
        is_universal = _check_files(engine, folder, states=states)
        if is_universal and custom_load_fn is not None:
            raise LayerWiseError(
                f"{folder} is a universal checkpoint, of which no model is loaded, so that "
                "custom_load_fn would not be called; load without it, and change weights after that"
            )
    disks.check_one_save(folder, own_disks=own_disks)
    checkpointing = engine.optimizer.checkpointing
    wanted = Load(
        checkpointing.prepare_load(
            folder,
            universal=is_universal,
            states=states,
            strict=load_module_strict,
            masters=is_universal or engine.zero_load_from_fp32_weights(),
        )
        if is_universal or states
        else None,
        wants_scheduler=load_lr_scheduler_states and not load_module_only,
        weights_win=custom_load_fn is not None,
    )
    with checkpointing.loading(wanted), _read_as(engine, universal=is_universal):
        if is_universal or pipeline.is_pipeline(engine.module):
            with comm.Alike(None):
                if not is_universal:
                    check_layers(engine, folder, strict=load_module_strict)
                check_model_file(engine, load_dir, str(tag))
        with (
            _mapped(engine.checkpoint_engine),
            _literal(engine.module, wanted),
            _counts_of_before(engine),
            _Alone(wanted),
        ):
            done = load(str(tag))
        if not (is_universal or states):
            checkpointing.restart_step()
        return done


@contextmanager
def _read_as(engine: DeepSpeedEngine, *, universal: bool) -> Iterator[None]:
    """Let the engine read what there is, whatever its config says."""
    config, asked = engine._config, engine._config.load_universal_checkpoint
    config.load_universal_checkpoint = universal
    try:
        yield
    finally:
        config.load_universal_checkpoint = asked


class _Alone:
    """Around what the engine does on each rank alone: an error there is raised on all where they
    next agree.
    """

    def __init__(self, load: Load) -> None:
        self._load = load

    def __enter__(self) -> None:
        self._load.alone = True

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if self._load.alone and (error is None or isinstance(error, Exception)):
            comm.raise_alike(error, group=None)


@contextmanager
def _counts_of_before(engine: DeepSpeedEngine) -> Iterator[None]:
    """Give the engine its counts, and its scheduler its state, back if a load fails: this rank may
    have loaded its own when another one fails."""
    before = {
        key: getattr(engine, key) for key in ("global_steps", "global_samples", "skipped_steps")
    }
    scheduler = engine.lr_scheduler if hasattr(engine.lr_scheduler, "state_dict") else None
    schedule = scheduler.state_dict() if scheduler else None
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            vars(engine).update(before)
        if scheduler and not done:
            scheduler.load_state_dict(schedule)


@contextmanager
def _agreeing(load: Load | None) -> Iterator[None]:
    """A block that raises on all ranks if it, or what a rank has done alone before it, raises on
    any.
    """
    load = load or Load(None, wants_scheduler=None)
    load.alone = False
    with comm.Alike(None):
        yield
    load.alone = True


@contextmanager
def _literal(module: Any, load: Load) -> Iterator[None]:
    """Let a pipeline look for its layers in the folder of that name, also where DeepSpeed takes it
    for a pattern, and agree that they are loaded before it sends those that stages share."""
    if pipeline.is_pipeline(module):
        path_list, synchronize = module.ckpt_layer_path_list, module._synchronize_tied_weights

        def agree_first() -> None:
            with _agreeing(load):
                pass
            synchronize()

        module.ckpt_layer_path_list = lambda folder, index: path_list(escape(str(folder)), index)
        module._synchronize_tied_weights = agree_first
    try:
        yield
    finally:
        for name in ("ckpt_layer_path_list", "_synchronize_tied_weights"):
            module.__dict__.pop(name, None)


@contextmanager
def _mapped(checkpoint_engine: Any) -> Iterator[None]:
    """Let DeepSpeed's default engine map the model's file, which it else reads into memory,
    twice.
    """
    if type(checkpoint_engine) is TorchCheckpointEngine:
        checkpoint_engine.load = lambda path, map_location=None: torch.load(
            path, map_location=map_location, mmap=is_zipfile(path), weights_only=False
        )
    try:
        yield
    finally:
        checkpoint_engine.__dict__.pop("load", None)


def _agreed_tag(engine: DeepSpeedEngine, load_dir: Path, tag: object) -> str | None:
    """What all ranks are to load: ``tag``, or where it is None what a pointer in ``load_dir``
    names; None if neither.

    A node that died before it wrote its pointer has an older one, or none; then it is the newest
    that all nodes have.

    Raises:
        LayerWiseError: on all ranks: they would load different checkpoints, or a pointer names no
            folder.
    """
    with comm.Alike(None):
        found = (
            _latest_tag(load_dir, universal_first=engine.load_universal_checkpoint())
            if tag is None
            else str(tag)
        )
        asked = f"{load_dir.absolute()}, where no file latest names a tag"
        if found is not None:
            by = "latest names" if tag is None else "was passed"
            asked = f"{found!r}, which {by}, in {load_dir.absolute()}"
    everyone = comm.gather_objects((found, asked), group=None)
    pointed = {other for other, _ in everyone}
    if (
        tag is None
        and len(pointed) > 1
        and engine.use_node_local_storage()
        and (newest := disks.newest(load_dir, sorted(pointed - {None}))) is not None
    ):
        if comm.rank_of(None) == 0:
            announce(
                f"ds_layerwise: latest is not the same on all nodes; loading {newest!r}, the "
                "newest save that all of them have"
            )
        return newest
    for rank, (other, described) in enumerate(everyone):
        if other != everyone[0][0]:
            raise LayerWiseError(
                f"ranks would load different checkpoints: rank 0 {everyone[0][1]}, and rank {rank} "
                f"{described}; pass one tag to load_checkpoint on all ranks"
            )
    return found


def _latest_tag(load_dir: Path, *, universal_first: bool) -> str | None:
    """The tag that a pointer in ``load_dir`` names; None if there is no pointer.

    Raises:
        LayerWiseError: the pointer names no folder.
    """
    for name in (universal.LATEST, "latest") if universal_first else ("latest",):
        pointer = load_dir / name
        if pointer.exists():
            tag = atomic.pointed(pointer) if pointer.is_file() else ""
            # A tag may be a path; the longest part that a file system takes has 255 bytes.
            if (
                not tag
                or not tag.isprintable()
                or max(len(part.encode()) for part in tag.split("/")) > 255
            ):
                raise LayerWiseError(
                    f"{pointer} {'is empty' if not tag else f'holds {tag[:40]!r}'}; write the tag "
                    "of a checkpoint into it, or pass the tag"
                )
            return tag
    return None


def _check_files(engine: DeepSpeedEngine, folder: Path, *, states: bool) -> bool:
    """Check this rank's part of the files in ``folder`` by their checksums; returns whether it is
    universal.

    Raises:
        LayerWiseError: the folder or a file is missing, or differs from what was saved.
    """
    if not folder.is_dir():
        there = (
            sorted(p.name for p in folder.parent.iterdir() if p.is_dir())
            if folder.parent.is_dir()
            else []
        )
        raise LayerWiseError(
            f"{folder} does not exist; {folder.parent} holds {', '.join(there) or 'no checkpoint'}"
        )
    is_universal = universal.is_universal(folder)
    _check_parts(engine, folder, is_universal=is_universal)
    # DeepSpeed's converter and its other optimizers keep no list.
    manifest = manifest_of(folder) if states or (folder / FILE_NAME).exists() else None
    if manifest is None:
        return is_universal
    if not states and not is_universal:
        manifest = manifest.only(
            name for name in manifest.files if name.endswith("model_states.pt")
        )
    own_disk = engine.use_node_local_storage()
    manifest.check(
        folder,
        rank=0 if own_disk else engine.global_rank,
        world_size=1 if own_disk else dist.get_world_size(),
    )
    return is_universal


_TOGETHER = ", or put them together with DeepSpeed's ds_to_universal.py and load what that writes"


def _check_parts(engine: DeepSpeedEngine, folder: Path, *, is_universal: bool) -> None:
    """Refuse a model that is cut in another way than this one.

    Raises:
        LayerWiseError: it has another number of parts, or a universal checkpoint would have to be
            cut.
    """
    if pipeline.is_pipeline(engine.module):
        # Its stages are found by name.
        return
    here = engine.mp_world_size
    if is_universal and here > 1:
        raise LayerWiseError(
            f"{folder} is a universal checkpoint, which cannot be cut for a model on {here} "
            "tensor-parallel ranks; resume from a regular one"
        )
    # On a disk of this node alone there are only the parts of its own ranks.
    if (
        not is_universal
        and not engine.use_node_local_storage()
        and (pieces := mp_size(folder)) != here
    ):
        raise LayerWiseError(
            f"{folder} holds a model in {pieces} part{'s' * (pieces > 1)}, and this run has it in "
            f"{here}; resume with as many{_TOGETHER if here == 1 else ''}"
        )


def _load_zero_checkpoint(
    original: Callable[..., Any], engine: DeepSpeedEngine, load_dir: str, tag: str, **options: Any
) -> Any:
    if not uses_us(engine):
        return original(load_dir, tag, **options)
    checkpointing = engine.optimizer.checkpointing
    if checkpointing.load is not None:
        # From here on ranks send to each other.
        checkpointing.load.alone = False
        comm.raise_alike(None, group=None)
    checkpointing.finish_load()
    return True


def _load_module_state_dict(
    original: Callable[..., Any],
    engine: DeepSpeedEngine,
    checkpoint: dict[str, Any],
    strict: bool = True,
    custom_load_fn: Any = None,
    **options: Any,
) -> Any:
    load: Load | None = engine.optimizer.checkpointing.load if uses_us(engine) else None
    place = (
        load.found.folder
        if load is not None and load.found is not None
        else Path("the model's file")
    )
    if uses_us(engine):
        with _agreeing(load), naming(place):
            if custom_load_fn is None:
                held = checkpoint["module"]
                renamed = new_names(held, engine.optimizer.config.rename, use_all=True)
                # Frozen parameters are the same once more, by their names in the checkpoint.
                checkpoint = {
                    **checkpoint,
                    "module": {renamed[name]: value for name, value in held.items()},
                    FROZEN_PARAM_FRAGMENTS: None,
                }
                check_model(engine, checkpoint, strict=strict)
            check_scheduler(engine, checkpoint)
    return original(checkpoint, strict, custom_load_fn, **options)


def _get_all_ckpt_names(
    original: Callable[..., Any], engine: DeepSpeedEngine, checkpoints_path: str, tag: str
) -> Any:
    if not uses_us(engine):
        return original(checkpoints_path, tag)
    names = original(escape(str(checkpoints_path)), escape(str(tag)))
    if not names:
        # A universal checkpoint of ZeRO-3 has one file a rank, all alike but for the module.
        names = sorted(
            str(path)
            for path in Path(checkpoints_path, str(tag)).glob(
                "zero_pp_rank_0_mp_rank_*_model_states.pt"
            )
        )
    return names


WRAPS: dict[str, Callable[..., Any]] = {
    "load_checkpoint": _load_checked,
    "_load_zero_checkpoint": _load_zero_checkpoint,
    "load_module_state_dict": _load_module_state_dict,
    "_get_all_ckpt_names": _get_all_ckpt_names,
}
