"""The conversion of a regular checkpoint to a universal one, without an engine."""

from __future__ import annotations

import math
from pathlib import Path

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.files.manifest import Manifest
from ds_layerwise.checkpoint.formats import universal
from ds_layerwise.checkpoint.formats.checkpoint_folder import (
    Bars,
    ModelFile,
    check_bytes,
    check_target,
    find,
    in_parallel,
)
from ds_layerwise.checkpoint.formats.regular import RegularCheckpoint, refuse_parts
from ds_layerwise.errors import LayerWiseError


def to_universal(
    path: Path, out: Path, *, workers: int, trust: bool, overwrite: bool, bars: Bars
) -> str:
    """Write the regular checkpoint at ``path`` as the universal one ``out``, which appears
    atomically.

    It needs memory for the states of one parameter for each of ``workers``, if these have several
    pieces; else none.

    Args:
        trust: True to let the model's file run code.
        overwrite: True to replace another universal checkpoint at ``out``.

    Returns:
        A line about what was written.

    Raises:
        LayerWiseError: there is no regular checkpoint of this package, it is damaged, or ``out``
            cannot be written.
    """
    source = find(path)
    if universal.is_universal(source):
        raise LayerWiseError(f"{source} is a universal checkpoint already")
    refuse_parts(source)
    check_target(out, source, overwrite=overwrite, replaceable=universal.is_universal(out))
    check_bytes(source, workers=workers, bars=bars)
    saved = RegularCheckpoint(source)
    for rank in range(saved.world_size):
        saved.state_dict(rank)
    model = ModelFile.read(source, trust=trust)
    if model is None:
        raise LayerWiseError(
            f"{source} has no model file, so its frozen parameters and buffers are lost"
        )
    try:
        atomic.begin(out)
        parts = _write(saved, model, atomic.incomplete_folder(out), workers=workers, bars=bars)
        atomic.commit(out, Manifest.merged(parts))
    finally:
        atomic.abandon(out)
    atomic.point(out.parent / universal.LATEST, out.name)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    count = len(saved.header.shapes)
    return f"{out}: {count} parameters with their states, {size} bytes, from {source}"


def _write(
    saved: RegularCheckpoint, model: ModelFile, folder: Path, *, workers: int, bars: Bars
) -> list[Manifest]:
    def write(name: str) -> Manifest:
        try:
            return Manifest.of(folder, universal.write_parameters(saved, folder, [name]))
        except RuntimeError as e:
            # torch.save raises this on a full disk.
            raise LayerWiseError(
                f"{folder / 'zero' / name} cannot be written: {str(e).splitlines()[0]}"
            ) from e

    header = saved.header
    sized = [
        (name, 4 * math.prod(shape) * (1 + len(header.rules[name].state_keys)))
        for name, shape in header.shapes.items()
    ]
    parts = in_parallel(write, sized, what="write", workers=workers, bars=bars)
    rest = universal.write_common(saved.state_dict(0), folder)
    rest += universal.write_model(model.path, model.others(header.shapes), folder)
    return [*parts, Manifest.of(folder, rest)]
