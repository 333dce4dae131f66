"""Checkpoints of ``torch.distributed.checkpoint``: masters and states by name, whole in the file.

Under ``model``, a master by the name of its parameter, float32; under ``optim.state``, a state by
that and its own. Both as torch's ``get_state_dict`` lays them out for FSDP2.
``ds_layerwise.header`` is what only this package asks for.

Note: who writes what
    Each rank hands over what it has. Of a tensor of the whole shape those are some boxes, into
    which :func:`boxes` cuts a range of elements. torch asks a tensor for its boxes by three methods
    of its ``_Checkpointable``, and nothing is sent between ranks.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader

from ds_layerwise.checkpoint.files.manifest import leads_out
from ds_layerwise.checkpoint.files.safe_load import UNREADABLE, naming
from ds_layerwise.checkpoint.formats.headers import Beside
from ds_layerwise.checkpoint.new_names import new_names
from ds_layerwise.checkpoint.record import Header, PieceRecord, RuleRecord
from ds_layerwise.errors import LayerWiseError

T = TypeVar("T")

#: The names in the file of weights, states, and the header beside them.
MODEL = "model"
STATE = "optim.state"
HEADER = "ds_layerwise.header"

#: The beginning of :data:`HEADER` in the paths that torch keeps.
_OWN = ("ds_layerwise",)

#: Parts of names that come from wrappers of modules.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")

#: The state that counts steps.
_COUNT = "step"

_UNKNOWN = RuleRecord("unknown", (), None)


def unwrapped(name: str) -> str:
    """Return ``name`` as torch's ``get_state_dict`` has it, without the parts that compiling and
    recomputing put into it.
    """
    return _WRAPPERS.sub("", name)


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements ``[start, stop)`` of a tensor of ``shape`` into boxes, in ascending order of
    elements.

    Yields:
        The start and the length of each box along every axis. A box is a range of elements in
        memory; of n axes there are at most 2n - 1.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first = start // inner
    last = (stop - 1) // inner
    if first == last:
        for offset, size in boxes(shape[1:], start - first * inner, stop - first * inner):
            yield (first, *offset), (1, *size)
        return
    full = -(-start // inner)
    end = stop // inner
    if start < full * inner:
        yield from boxes(shape, start, full * inner)
    if full < end:
        yield (full, *(0 for _ in shape[1:])), (end - full, *shape[1:])
    if end * inner < stop:
        yield from boxes(shape, end * inner, stop)


class Piece(Tensor):
    """A tensor of the shape of a whole parameter, of which this rank has some elements; for
    checkpoints alone.

    Args:
        held: 1-D, the elements of the flattened whole from ``start`` on. Not copied.
        may_be_read_into: whether torch may fill it from a file.
    """

    held: Tensor
    start: int
    may_be_read_into: bool

    @staticmethod
    def __new__(
        cls, held: Tensor, start: int, shape: Sequence[int], *, may_be_read_into: bool = False
    ) -> Piece:
        """A tensor without memory of its own."""
        made: Piece = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=held.dtype, device=held.device
        )
        made.held = held
        made.start = start
        made.may_be_read_into = may_be_read_into
        return made

    def __init__(
        self, held: Tensor, start: int, shape: Sequence[int], *, may_be_read_into: bool = False
    ) -> None:
        """Do nothing: ``__new__`` has set all."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Say how much of a tensor it is."""
        return f"Piece({self.held.numel()} of {tuple(self.shape)} from {self.start})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute with a part.

        Raises:
            LayerWiseError: always.
        """
        raise LayerWiseError(
            f"{func} of a tensor of which this rank has a part: sharded_state_dict() is for "
            "torch.distributed.checkpoint.save(), which writes parts; async_save() would copy them"
        )

    def _chunks(self) -> list[ChunkStorageMetadata]:
        stop = self.start + self.held.numel()
        found = []
        for offset, size in boxes(self.shape, self.start, stop):
            found.append(ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(size)))
        return found

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the boxes that torch is to write."""
        properties = TensorProperties(dtype=self.dtype)
        items = []
        for chunk in self._chunks():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that torch is to read.

        Raises:
            LayerWiseError: it is live memory, which a read that fails would leave half new.
        """
        if not self.may_be_read_into:
            raise LayerWiseError(
                "sharded_state_dict() is for torch.distributed.checkpoint.save(); load with "
                "engine.optimizer.load_sharded_state_dict(checkpoint), which checks everything "
                "first"
            )
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of one box."""
        first = 0
        for chunk in self._chunks():
            if chunk.offsets == index.offset:
                return self.held[first : first + chunk.sizes.numel()].view(chunk.sizes)
            first += chunk.sizes.numel()
        raise LayerWiseError(f"{index.fqn}: there is no box at {index.offset} of it")


def _listed_in(folder: Path) -> Metadata:
    """Return the list of tensors in ``folder``.

    Raises:
        Exception: there is none, or it is damaged.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    with path.open("rb") as file:
        # The one in C makes room for as many objects as a file says that it has.
        found: Metadata = pickle._Unpickler(file).load()
    for name in {info.relative_path for info in found.storage_data.values()}:
        if leads_out(name) or not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is no file of it")
    return found


def _shapes_of_weights(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    start = f"{MODEL}."
    keys = []
    for key in sizes:
        if key.startswith(start):
            keys.append(key)
    return {key.removeprefix(start): sizes[key] for key in keys}


def _sizes_in(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a list.

    Raises:
        ValueError: the list has lost our own.
    """
    sizes = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            sizes[key] = tuple(map(int, entry.size))
    paths = (metadata.planner_data or {}).values()
    if HEADER not in sizes and any(isinstance(path, tuple) and path[:1] == _OWN for path in paths):
        raise ValueError(f"its list has lost {HEADER}")
    return sizes


class ShardedCheckpoint:
    """A checkpoint of ``torch.distributed.checkpoint``, of this package or of FSDP2; see
    :class:`.record.Saved`.

    Values that are no tensors are not read, as torch would run code for them; its list of tensors
    is a pickle.

    Args:
        checkpoint: its folder, or what reads it from elsewhere.
        rules: the optimizers of this run's parameters, whose states those in the file are taken
            for.
        others: by name, what is not trained: frozen parameters and buffers.
        second: further names of parameters to train.
        rename: by names in the file, those of this run, as ``layerwise.rename`` has them.
        strict: whether all of ``others`` must be there.

    Raises:
        LayerWiseError: it is missing or damaged, or has no weights under ``model``; or one of
            ``others`` has another shape, or is not there and must be.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | StorageReader,
        rules: Mapping[str, RuleRecord],
        *,
        others: Mapping[str, Tensor],
        second: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> None:
        self._where = str(checkpoint)
        if isinstance(checkpoint, StorageReader):
            self._where = "the checkpoint"
            self._reader = checkpoint
        else:
            self._reader = FileSystemReader(checkpoint)
        with self._naming(
            "is no checkpoint of torch.distributed.checkpoint that this rank can read"
        ):
            self._metadata = self._read_list(checkpoint)
            self._sizes = _sizes_in(self._metadata)
        shapes = _shapes_of_weights(self._sizes)
        if not shapes:
            raise LayerWiseError(
                f"{self._where} has no weights under {MODEL}; it has "
                f"{', '.join(sorted(self._metadata.state_dict_metadata)[:5])}; save it as "
                "{'model': ..., 'optim': ...}, as torch's get_state_dict() returns the two"
            )
        self.beside: Beside | None = None
        """None in a checkpoint of another package."""
        if HEADER in self._sizes:
            self.beside = self._own_beside()
        self._keys = self._states_of(shapes)
        names = (*rules, *others, *second)
        self.wrapped = {unwrapped(name): name for name in names if unwrapped(name) != name}
        """The names of this run, by names without wrappers, as torch has them."""
        old = {}
        for name, new in new_names(shapes, rename or {}).items():
            old[self.wrapped.get(new, new)] = name
        self._others = self._found_of(others, old, shapes, strict=strict)
        not_own = {old.get(name) for name in second}
        self._shapes = {name: shape for name, shape in shapes.items() if name not in not_own}
        if self.beside is None:
            own_rules = {old[name]: rule for name, rule in rules.items() if name in old}
            trained = self._shapes.keys() - {old.get(name) for name in others}
            self.header = self._header_of(own_rules, trained)
        else:
            own = self.beside.header
            # It says what was trained. What was not is under model alone, and may be trained now.
            self.header = replace(
                own, shapes=self._shapes, rules=self._known(own.rules), kept=self._known(own.kept)
            )

    def _read_list(self, checkpoint: str | os.PathLike[str] | StorageReader) -> Metadata:
        if isinstance(checkpoint, StorageReader):
            return checkpoint.read_metadata()
        return _listed_in(Path(checkpoint))

    def _found_of(
        self,
        others: Mapping[str, Tensor],
        old: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        strict: bool,
    ) -> dict[str, tuple[str, torch.dtype]]:
        """Return the names in the file of those of ``others`` that it has, and their dtypes."""
        for name, value in others.items():
            if name in old and shapes[old[name]] != tuple(value.shape):
                raise LayerWiseError(
                    f"{name}, which is not trained, is {shapes[old[name]]} in {self._where}, "
                    f"{tuple(value.shape)} in the model; load into the model that was saved"
                )
            if name not in old and strict:
                raise LayerWiseError(
                    f"{name}, which is not trained, is not in {self._where}; with strict=False it "
                    "keeps its value"
                )
        return {name: (old[name], value.dtype) for name, value in others.items() if name in old}

    def _states_of(self, names: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
        """Return the states of parameters by name; one name may be the beginning of another."""
        found: dict[str, list[str]] = {}
        for key in self._sizes:
            if not key.startswith(f"{STATE}."):
                continue
            parts = key.removeprefix(f"{STATE}.").split(".")
            for end in range(len(parts) - 1, 0, -1):
                name = ".".join(parts[:end])
                if name in names:
                    found.setdefault(name, []).append(".".join(parts[end:]))
                    break
        return {name: tuple(sorted(keys)) for name, keys in found.items()}

    def _known(self, told: Mapping[str, T]) -> dict[str, T]:
        found = {}
        for name, said in told.items():
            if name in self._shapes:
                found[name] = said
        return found

    def _own_beside(self) -> Beside:
        content = self._empty(HEADER)
        self._read({HEADER: content})
        beside = Beside(content, Path(self._where))
        with naming(Path(self._where)):
            for path, blocks in (beside.sums or {}).items():
                size = self._sizes.get(path)
                saved = sum(last - first for first, (last, _) in blocks.items())
                if size is None or math.prod(size) != saved:
                    raise ValueError(f"its list has {path} as {size}, which was saved otherwise")
        return beside

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Say ``what`` of the checkpoint where reading it leads to an error of torch's."""
        try:
            yield
        except (*UNREADABLE, ImportError) as e:
            raise LayerWiseError(f"{self._where} {what} ({type(e).__name__}: {e})") from e

    def _header_of(self, rules: Mapping[str, RuleRecord], trained: Collection[str]) -> Header:
        """Return the header of a checkpoint that another package wrote."""
        step: int | None = None
        found = {}
        for name, keys in sorted(self._keys.items()):
            if name not in trained:
                continue
            if _COUNT in keys and step is None:
                path = f"{STATE}.{name}.{_COUNT}"
                count = self._empty(path)
                self._read({path: count})
                with self._naming(f"has no number as {path}"):
                    step = int(count)
            rule = rules.get(name, _UNKNOWN)
            if {*rule.state_keys} - {*keys} == {_COUNT}:
                # A count that is missing says no more than that there was a step.
                keys = (*keys, _COUNT)
            found[name] = RuleRecord(rule.family, keys, rule.gradient_average)
        shapes = self._shapes
        return Header(step=step or 0, shapes=shapes, param_groups=None, dtypes=None, rules=found)

    def _read(self, targets: dict[str, Any]) -> None:
        """Fill ``targets``, by their names in the file, by this rank alone.

        Raises:
            LayerWiseError: the file is damaged, or has something of another size, or of other
                values than were saved.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        reader = self._reader
        with self._naming(f"cannot be read at {', '.join(sorted(targets)[:3])}"):
            planner.set_up_planner(targets, self._metadata, is_coordinator=True)
            reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            plans = planner.create_global_plan(
                [reader.prepare_local_plan(planner.create_local_plan())]
            )
            plan = planner.finish_plan(reader.prepare_global_plan(plans)[0])
            reader.read_data(plan, planner).wait()
        if self.beside is not None:
            for path, target in targets.items():
                if isinstance(target, Piece):
                    self.beside.check(path, target.held, target.start)
                else:
                    self.beside.check(path, target)

    def identity(self) -> list[str]:
        """Return lines that are the same for all ranks that read the same save."""
        save = getattr(self._metadata.storage_meta, "save_id", None)
        return [f"save {save}", f"{len(self._sizes)} tensors"]

    def read_others(self) -> dict[str, Tensor]:
        """Return frozen parameters and buffers, by name."""
        read = {}
        for old, _ in self._others.values():
            read[old] = self._empty(f"{MODEL}.{old}")
        if read:
            self._read({f"{MODEL}.{old}": value for old, value in read.items()})
        return {name: read[old].to(dtype) for name, (old, dtype) in self._others.items()}

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """Return one piece, the elements ``[start, stop)`` and those in the same blocks of
        checksums, read into memory of the host.
        """
        shape = self._shapes[name]
        rule = self.header.rules.get(name)
        if self.beside is not None:
            start, stop = self.beside.around(f"{MODEL}.{name}", start, stop)
        held: dict[str, Tensor] = {}
        targets: dict[str, Any] = {}
        for key in ("", *(rule.state_keys if rule is not None else ())):
            if key:
                path = f"{STATE}.{name}.{key}"
            else:
                path = f"{MODEL}.{name}"
            if path not in self._sizes and key == _COUNT:
                held[key] = torch.ones((), dtype=torch.float32, device="cpu")
            elif not key or self._sizes.get(path) == shape != ():
                held[key] = self._empty(path, (stop - start,))
                targets[path] = Piece(held[key], start, shape, may_be_read_into=True)
            else:
                targets[path] = held[key] = self._empty(path)
        self._read(targets)
        master = held.pop("").float()
        return [PieceRecord(name, start, master, held)]

    def _empty(self, path: str, size: tuple[int, ...] | None = None) -> Tensor:
        """Return memory of the host for a tensor of the file, or for ``size`` of it."""
        with self._naming(f"cannot be read at {path}"):
            if size is None:
                size = self._sizes[path]
            properties: Any = self._metadata.state_dict_metadata[path]
            return torch.empty(size, dtype=properties.properties.dtype, device="cpu")
