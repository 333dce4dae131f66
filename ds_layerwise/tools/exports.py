"""Copies of checkpoints in other formats, without an engine: the universal one, and the weights as
safetensors files in the layout of Hugging Face.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ds_layerwise.checkpoint import atomic, universal
from ds_layerwise.checkpoint.checkpoint_folder import (
    ModelFile,
    Reading,
    check_bytes,
    check_target,
    find,
    refuse_stages,
)
from ds_layerwise.checkpoint.manifest import Manifest
from ds_layerwise.checkpoint.regular import RegularCheckpoint, refuse_parts
from ds_layerwise.checkpoint.user_files import others_in
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools.hf_names import SHARED, NamedWeights
from ds_layerwise.tools.verify import Contents

#: The values of ``dtype``.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

#: Hugging Face's files of a model, its tokenizer and its processor, which lie beside weights.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

#: What the names of PEFT's parameters have: those of adapters, of what they wrap, and of prompts.
_PEFT = re.compile(r"\.(lora|vera|oft|ia3|hada)_|\.(base_layer|modules_to_save)\.|prompt_encoder\.")

#: The names of Hugging Face's files of weights. Existing ones would count as part of the new ones.
WEIGHTS = (INDEX, "model.safetensors", "model-*-of-*.safetensors")


def to_universal(path: Path, out: Path, reading: Reading, *, overwrite: bool) -> str:
    """Write the regular checkpoint at ``path`` as the universal one ``out``, which appears
    atomically.

    It needs memory for the states of one parameter for each worker, if these have several pieces;
    else none.

    Args:
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
    refuse_stages(source)
    refuse_parts(source)
    check_target(out, source, overwrite=overwrite, replaceable=universal.is_universal(out))
    check_bytes(source, reading)
    saved = RegularCheckpoint(source)
    saved.open_all()
    model = ModelFile.read(source, trust=reading.trust)
    if model is None:
        raise LayerWiseError(
            f"{source} has no model file, so its frozen parameters and buffers are lost"
        )
    header = saved.header
    folder = atomic.incomplete_folder(out)

    def write(name: str) -> Manifest:
        try:
            return Manifest.of(folder, universal.write_parameters(saved, folder, [name]))
        except RuntimeError as e:
            # torch.save raises this on a full disk.
            raise LayerWiseError(
                f"{folder / 'zero' / name} cannot be written: {str(e).splitlines()[0]}"
            ) from e

    sized = [
        (name, 4 * math.prod(shape) * len(header.keys(name)))
        for name, shape in header.shapes.items()
    ]
    try:
        atomic.begin(out)
        parts = reading.in_parallel(write, sized, "write")
        rest = universal.write_common(saved, header, folder)
        rest += universal.write_model(model.path, model.others(header.shapes), folder)
        atomic.commit(out, Manifest.merged([*parts, Manifest.of(folder, rest)]))
    finally:
        atomic.abandon(out)
    atomic.point(out.parent / universal.LATEST, out.name)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return f"{out}: {len(sized)} parameters with their states, {size} bytes, from {source}"


def consolidate(
    path: Path,
    out: Path,
    reading: Reading,
    *,
    dtype: str,
    max_shard_bytes: int,
    overwrite: bool,
    config: Path | None,
) -> list[str]:
    """Write the float32 weights at ``path``, frozen parameters and buffers to ``out``.

    It needs memory for the parameters of one file that have several pieces, or another dtype than
    ``dtype``; else none.

    Args:
        out: one file, if it has the name of one; else a folder of files with at most
            ``max_shard_bytes``, or one tensor, each.
        dtype: a key of :data:`DTYPES`, for all floating-point tensors.
        overwrite: True to replace the weights of an earlier result, or of a Hugging Face model, at
            ``out``. Other files there stay.
        config: Hugging Face's config, or a folder with it, to lay beside the weights; a single file
            has none.

    Returns:
        Lines about what was written.

    Raises:
        LayerWiseError: there is no checkpoint, it is damaged, a weight does not fit ``dtype``, or
            ``out`` cannot be written.
    """
    source = find(path)
    one_file = out.suffix == SUFFIX
    refuse_stages(source)
    refuse_parts(source)
    has_weights = any((out / name).exists() for name in WEIGHTS[:2])
    check_target(
        out, source, overwrite=overwrite, replaceable=out.is_file() if one_file else has_weights
    )
    beside = {}
    if not one_file:
        beside = _beside(source, out, config)
    elif config is not None:
        raise LayerWiseError(
            f"--config lays a config beside weights, and {out} is one file; name a folder"
        )
    check_bytes(source, reading)
    own_config = beside.get(CONFIG, out / CONFIG)
    weights = NamedWeights(Contents(source, trust=reading.trust), own_config)
    sizes = weights.sizes(DTYPES[dtype])
    total = sum(sizes.values())
    of_peft = next(filter(_PEFT.search, sizes), None)
    if of_peft and own_config.exists():
        raise LayerWiseError(
            f"{source} has a PEFT model's names, such as {of_peft}, which from_pretrained does not "
            f"find in the model of {own_config}: load the adapter that the "
            f"run saved with peft and merge it there, or write all tensors to a file *{SUFFIX}"
        )
    with reading.bars("write", total) as done:
        if one_file:
            out.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_whole(out, partial(_write, weights, list(sizes), DTYPES[dtype]))
            done(total)
        else:
            _write_folder(weights, sizes, DTYPES[dtype], out, beside, max_shard_bytes, done)
    lines = [f"{out}: {len(sizes)} tensors, {total} bytes in {dtype}, from {source}"]
    if beside:
        first, *_ = beside.values()
        files = ", ".join(path.name for path in beside.values())
        lines.append(f"beside them, from {first.parent}: {files}")
    elif not (one_file or of_peft or own_config.exists()):
        lines.append(
            f"no {CONFIG} lay beside the checkpoint, and from_pretrained needs one: name it with "
            "--config"
        )
    if weights.unknown:
        lines.append(
            f"{weights.unknown} and others keep the names of AutoEP, which from_pretrained does "
            f"not find: they are renamed where {CONFIG} has one of the kinds {', '.join(SHARED)}"
        )
    if of_peft:
        lines.append(
            f"these are a PEFT model's names, such as {of_peft}: from_pretrained does not find "
            "them; load the adapter that the run saved with peft, and merge it there"
        )
    return lines


def _write_folder(
    weights: NamedWeights,
    sizes: dict[str, int],
    dtype: torch.dtype,
    out: Path,
    beside: dict[str, Path],
    max_shard_bytes: int,
    done: Callable[[int], object],
) -> None:
    try:
        atomic.begin(out)
        incomplete = atomic.incomplete_folder(out)
        shards = list(_shards(sizes, max_shard_bytes))
        places: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}"
            _write(weights, names, dtype, incomplete / file)
            places |= dict.fromkeys(names, file)
            done(sum(sizes[name] for name in names))
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (incomplete / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for name, companion in beside.items():
            shutil.copyfile(companion, incomplete / name)
        atomic.commit(out, Manifest.of(incomplete), replaces=WEIGHTS)
    finally:
        atomic.abandon(out)


def _beside(source: Path, out: Path, asked: Path | None) -> dict[str, Path]:
    """Find the files that ``from_pretrained`` needs beside the weights, by their names there.

    They come from the folder of the checkpoint ``source``, else from its parent, where a Trainer
    writes them. Those in ``out`` that belong to the user stay as they are.

    Args:
        asked: a config of any name, or a folder with a ``config.json``, to use instead.

    Raises:
        LayerWiseError: ``asked`` has none.
    """
    config = source / CONFIG
    kept: Collection[str] = ()
    if asked is not None:
        config = asked / CONFIG if asked.is_dir() else asked
        if not config.is_file():
            raise LayerWiseError(
                f"{config} is no file; give --config a config.json or a folder with one"
            )
    else:
        if not config.is_file():
            config = source.parent / CONFIG
        if out.is_dir():
            kept = others_in(out, replaces=WEIGHTS)
    if not config.is_file():
        return {}
    found = {CONFIG: config}
    for name in _COMPANIONS:
        path = config.with_name(name)
        if path.is_file() and path != config:
            found[name] = path
    return {name: path for name, path in found.items() if name not in kept}


def _shards(sizes: dict[str, int], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, its in sizes.items():
        if names and size + its > max_bytes:
            yield names
            names = []
            size = 0
        names.append(name)
        size += its
    yield names


def _write(weights: NamedWeights, names: Sequence[str], dtype: torch.dtype, path: Path) -> None:
    tensors = {}
    storages = set()
    for name in names:
        value = _cast(name, weights.weight(name), dtype).contiguous()
        # Copy it: it shares a buffer with another name, and safetensors refuses shared memory.
        if value.untyped_storage().data_ptr() in storages:
            value = value.clone()
        tensors[name] = value
        storages.add(value.untyped_storage().data_ptr())
    metadata = {"format": "pt"}
    for alias, name in weights.aliases.items():
        if name in tensors:
            metadata[alias] = name
    # safetensors makes its files readable only for their owner, whatever the umask.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as e:
        raise LayerWiseError(f"{path} cannot be written: {e}") from e
    path.chmod(mode)
    atomic.flush(path)


def _cast(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if not value.is_floating_point() or value.dtype == dtype:
        return value
    cast = value.to(dtype)
    if not bool((cast.isfinite() | ~value.isfinite()).all()):
        raise LayerWiseError(
            f"{name} has weights beyond {torch.finfo(dtype).max}, the largest number of {dtype}; "
            "write it as bf16 or fp32"
        )
    return cast
