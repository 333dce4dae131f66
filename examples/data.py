"""Text as bytes: the standard library's own source, that of installed packages, or the user's
files, cut into reproducible windows.

A window is a function of the seed and of its number alone. Samples are numbered over all ranks and
micro-batches, so a run of 2 ranks and a run of 1 rank with twice the micro-batch train on the same
windows, and so does a resumed run. Sizes are in bytes, which are the tokens.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAX_BYTES = 1 << 30
"""The most bytes that this example keeps in memory. More is an error: training on a part without a
word would be worse."""

VALIDATION_FRACTION = 20
"""Every 20th file, or the last twentieth of fewer files, is held out."""

INSTALLED = "installed"
"""The path that stands for the source of all packages beside torch: some ten times the standard
library's, and there without a network. A folder of this name is ``./installed``."""

#: Tests, installed packages, and tables of characters and topics: large, and little like code.
NOT_SOURCE = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}


@dataclass(frozen=True)
class Corpus:
    """Two byte tensors, ``(n,)`` uint8 each, and the name of their source."""

    train: Tensor
    validation: Tensor
    source: str


def load_corpus(path: str | None, context: int) -> Corpus:
    """Read the user's file or folder, or without a path the standard library's source.

    Args:
        path: a file, or a folder whose files are all read, hidden ones excepted; INSTALLED.
        context: the model's; each part of the corpus has to hold one window of it and the byte that
            follows.

    Raises:
        ValueError: there is nothing to read, too little for one window, or more than MAX_BYTES.
    """
    files, source = _files(path)
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise ValueError(
            f"{source}: {size:,} bytes, this example reads at most {MAX_BYTES:,}; name a part of it"
        )
    train, validation = _split([file.read_bytes() for file in files])
    for name, part in (("training", train), ("validation", validation)):
        if len(part) <= context:
            raise ValueError(
                f"{source}: {len(part):,} bytes left for {name}, one window takes {context + 1:,}; "
                "use more text or a smaller --context"
            )
    return Corpus(train=_tensor(train), validation=_tensor(validation), source=source)


def _files(path: str | None) -> tuple[list[Path], str]:
    """Return the files that ``path`` stands for, and a name for them."""
    if path is None:
        files = _sources(Path(sysconfig.get_paths()["stdlib"]))
        return files, f"the standard library's {len(files)} source files"
    if path == INSTALLED:
        files = _sources(Path(torch.__file__).parents[1])
        return files, f"{len(files)} source files of installed packages"
    return _user_files(Path(path)), path


def _sources(root: Path) -> list[Path]:
    files = [
        file
        for file in root.rglob("*.py")
        if file.is_file() and not NOT_SOURCE & set(file.relative_to(root).parts[:-1])
    ]
    if not files:
        raise ValueError(f"no Python source under {root}; name a text of your own with --data PATH")
    return _by_relative_path(files, root)


def _user_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--data {path}: no such file or folder")
    found = (file for file in path.rglob("*") if file.is_file())
    files = [
        file
        for file in found
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(f"--data {path}: the folder holds no files")
    return _by_relative_path(files, path)


def _by_relative_path(files: list[Path], root: Path) -> list[Path]:
    # as text: Path sorts by the platform's rules, and the corpus must not depend on them
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _split(texts: list[bytes]) -> tuple[bytes, bytes]:
    if len(texts) >= VALIDATION_FRACTION:
        held_out = texts[VALIDATION_FRACTION - 1 :: VALIDATION_FRACTION]
        kept = [text for i, text in enumerate(texts) if (i + 1) % VALIDATION_FRACTION]
        return b"".join(kept), b"".join(held_out)
    everything = b"".join(texts)
    cut = len(everything) - len(everything) // VALIDATION_FRACTION
    return everything[:cut], everything[cut:]


def _tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def training_windows(tokens: Tensor, *, seed: int, first: int, size: int, context: int) -> Tensor:
    """Return the samples ``first`` to ``first + size - 1`` of an endless, seeded sequence.

    Returns:
        ``(size, context + 1)`` int64: inputs are all but the last column, targets all but the
        first.
    """
    generators = (np.random.default_rng([seed, sample]) for sample in range(first, first + size))
    starts = np.array([generator.integers(len(tokens) - context) for generator in generators])
    return _cut(tokens, starts, context)


def validation_windows(
    tokens: Tensor, *, rank: int, world_size: int, size: int, context: int, total: int = 64
) -> Iterator[Tensor]:
    """Yield this rank's part of ``total`` evenly spaced windows: the same set at any world size.

    Yields:
        ``(at most size, context + 1)`` int64; nothing on ranks beyond ``total``.
    """
    starts = np.linspace(0, len(tokens) - context - 1, total).astype(int)[rank::world_size]
    for i in range(0, len(starts), size):
        yield _cut(tokens, starts[i : i + size], context)


def _cut(tokens: Tensor, starts: np.ndarray, context: int) -> Tensor:
    return torch.stack([tokens[start : start + context + 1] for start in starts]).long()
