"""The list of a checkpoint's files and checksums: the last file written into its folder, and the
first that a load checks.

Note: the source of the checksums
    ``torch.save`` writes a zip archive, whose directory has the CRC-32 of every record. The list
    takes these over, so that tensors are not read again; only the bytes between the large records
    are read. A file of another kind is read as a whole. Every byte of every file is in exactly one
    range of the list.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile

import torch

from ds_layerwise.checkpoint.plain_values import check_format, naming
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import LONG_LOAD, progress

#: The name of the list in a checkpoint folder. DeepSpeed's tools look for other suffixes and ignore
#: it.
FILE_NAME = "layerwise_manifest.json"

#: The file that identifies the save in its folder, until the folder is complete.
SIGNATURE = "layerwise_save"

#: The files of this package that are in no list.
MARKS = (FILE_NAME, SIGNATURE)

FORMAT = 1

#: Records of at least this many bytes have a range of their own.
_LARGE = 1 << 16

#: The number of bytes to read at a time; it fits into a processor's cache.
_READ = 1 << 20


@dataclass(frozen=True)
class ByteRange:
    """``size`` bytes of a file from offset ``start``, and their CRC-32."""

    start: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint by path within its folder, each divided into consecutive ranges."""

    files: Mapping[str, tuple[ByteRange, ...]]
    save_id: str = ""
    """The identifier of the save, the same on all disks that it wrote to; empty if it has none."""

    @classmethod
    def of(cls, folder: Path, names: Iterable[str] | None = None) -> Manifest:
        """Return the manifest of the files ``names`` in ``folder``, or of all files in it."""
        if names is None:
            names = names_in(folder)
        return cls({name: tuple(_ranges(folder / name)) for name in names})

    @classmethod
    def merged(cls, parts: Iterable[Manifest]) -> Manifest:
        """Return one list of all ``parts``."""
        files: dict[str, tuple[ByteRange, ...]] = {}
        for part in parts:
            files.update(sorted(part.files.items()))
        return cls(files)

    def write(self, folder: Path) -> None:
        """Write the list into ``folder``."""
        files = {}
        for name, ranges in self.files.items():
            files[name] = [[r.size, r.crc32] for r in ranges]
        save = {"id": self.save_id, "digest": _digest(self.save_id)}
        content = {"format": FORMAT, "digest": _digest(files), "save": save, "files": files}
        (folder / FILE_NAME).write_text(json.dumps(content, separators=(",", ":")))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the list in ``folder``.

        Raises:
            LayerWiseError: it is missing, damaged, or in a newer format.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise LayerWiseError(
                f"{path} is {'not a file' if path.exists() else 'missing'}: the save was never "
                "finished, or files were lost since; load another checkpoint"
            )
        with naming(path):
            content = json.loads(path.read_text())
            files = content["files"]
            check_format(content["format"], FORMAT, path)
            if _digest(files) != content["digest"]:
                raise ValueError("its own digest does not match")
            if outside := sorted(filter(leads_out, files)):
                raise ValueError(f"it lists {outside[0]!r}, which is outside of the folder")
            if unknown := content.keys() - {"format", "digest", "save", "files"}:
                raise ValueError(f"it has an entry {min(unknown)!r}, which no save writes")
            save_id = content["save"]["id"]
            if _digest(save_id) != content["save"]["digest"]:
                raise ValueError("the digest of its save does not match")
            return cls({name: tuple(_placed(of)) for name, of in files.items()}, str(save_id))

    def check(
        self, folder: Path, *, rank: int = 0, world_size: int = 1, quiet: bool = False
    ) -> None:
        """Compare a part of the list with the files. All ranks together check all of it, each byte
        once.

        Args:
            quiet: True for no progress bar, however long it takes.

        Raises:
            LayerWiseError: a file is missing, or has another length or other bytes; names it.
        """
        total = sum(map(self.size_of, self.files))
        seen = 0
        with progress("check", total // world_size, quiet=quiet, delay=LONG_LOAD) as done:
            for name, ranges in self.files.items():
                mine = []
                for byte_range in ranges:
                    # An empty range at the end starts where all bytes end.
                    if min(seen * world_size // max(total, 1), world_size - 1) == rank:
                        mine.append(byte_range)
                    seen += byte_range.size
                if mine:
                    check_file(folder / name, self.size_of(name), _reported(mine, done))

    def differing(self, folder: Path) -> list[str]:
        """Return a line for each file that is missing in ``folder`` or differs. To read little,
        large ranges are compared through the rest of the file, in which ``torch.save`` stores their
        checksums.
        """
        lines = []
        for name, ranges in self.files.items():
            small = []
            for byte_range in ranges:
                if byte_range.size <= _READ:
                    small.append(byte_range)
            try:
                check_file(folder / name, self.size_of(name), small)
            except (LayerWiseError, OSError) as e:
                lines.append(str(e))
        return lines

    def size_of(self, name: str) -> int:
        """Return the number of bytes of the file ``name``."""
        return self.files[name][-1].start + self.files[name][-1].size

    def only(self, ending: str) -> Manifest:
        """Return the manifest of the files whose names end so."""
        return Manifest({name: of for name, of in self.files.items() if name.endswith(ending)})


def _reported(ranges: Iterable[ByteRange], done: Callable[[int], object]) -> Iterator[ByteRange]:
    """Yield ``ranges``, and call ``done`` with the size of each when the next one is wanted."""
    for byte_range in ranges:
        yield byte_range
        done(byte_range.size)


def names_in(folder: Path) -> list[str]:
    """Return the paths within ``folder`` of all files that a manifest lists."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in MARKS
    )


def leads_out(name: str) -> bool:
    """Tell whether ``name`` leads out of a folder: it is absolute, or has a part that is empty,
    ``.`` or ``..``.
    """
    return "\0" in name or any(part in ("", ".", "..") for part in name.split("/"))


def _digest(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _placed(ranges: Sequence[tuple[int, int]]) -> Iterator[ByteRange]:
    start = 0
    if not ranges:
        raise ValueError("a file has no range")
    for size, crc32 in ranges:
        if type(size) is not int or size < 0 or type(crc32) is not int:
            raise ValueError(f"{[size, crc32]!r} is not [number of bytes, CRC-32]")
        yield ByteRange(start, size, crc32)
        start += size


def _ranges(path: Path) -> Iterator[ByteRange]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        for record, length, crc32 in _large_records(path, file):
            yield ByteRange(start, record - start, _crc32(file, start, record - start))
            yield ByteRange(record, length, crc32)
            start = record + length
        yield ByteRange(start, size - start, _crc32(file, start, size - start))


def _large_records(path: Path, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Yield ``(start, size, crc32)`` of the large records of a zip archive, in file order."""
    # torch may be set to leave checksums out; the values in their place are not valid.
    if not torch.serialization.get_crc32_options():
        return
    try:
        with ZipFile(path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except (BadZipFile, OSError):
        return
    for entry in entries:
        if entry.file_size >= _LARGE and entry.compress_type == 0:
            file.seek(entry.header_offset + 26)
            lengths = file.read(4)
            start = entry.header_offset + 30
            start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            yield start, entry.file_size, entry.CRC


def _crc32(file: BinaryIO, start: int, size: int) -> int:
    """Return the checksum of ``size`` bytes from offset ``start``; -1 if the file is too short."""
    file.seek(start)
    value = 0
    block = memoryview(bytearray(min(size, _READ)))
    while size > 0:
        count = file.readinto(block[:size])  # type: ignore[attr-defined]
        if not count:
            return -1
        value = zlib.crc32(block[:count], value)
        size -= count
    return value


def check_file(path: Path, size: int, ranges: Iterable[ByteRange]) -> None:
    """Compare the length of a file with ``size``, and ``ranges`` of it with their checksums.

    Raises:
        LayerWiseError: it is missing, or has another length or other bytes; names it.
    """
    if not path.is_file():
        raise LayerWiseError(f"{path} is missing; restore it, or load another checkpoint")
    if path.stat().st_size != size:
        raise LayerWiseError(
            f"{path} has {path.stat().st_size} bytes, {size} were saved; restore it, or load "
            "another checkpoint"
        )
    with path.open("rb") as file:
        for wanted in ranges:
            if _crc32(file, wanted.start, wanted.size) != wanted.crc32:
                raise LayerWiseError(
                    f"{path} is damaged or of another save: its bytes from {wanted.start} to "
                    f"{wanted.start + wanted.size} do not match their checksum; restore it, or "
                    "load another checkpoint"
                )
