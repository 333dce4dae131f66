"""Checkpoints of ``torch.distributed.checkpoint``: masters and states by name, each whole in the
file.

Under ``model`` there are the float32 masters by parameter name; under ``optim.state``, the states
by parameter name and state name. Both have the layout of torch's ``get_state_dict`` for FSDP2.
``ds_layerwise.header`` has the values that only this package reads.

Note: which rank writes what
    Each rank passes its own elements. In a tensor of the whole shape these are some boxes, into
    which :func:`boxes` cuts a range of elements. torch asks a tensor for its boxes through three
    methods of its ``_Checkpointable``, and nothing is sent between ranks.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from ds_layerwise.checkpoint.manifest import leads_out
from ds_layerwise.checkpoint.new_names import new_names
from ds_layerwise.checkpoint.plain_values import UNREADABLE, naming
from ds_layerwise.checkpoint.record import Header, PieceRecord, Pieces, RuleRecord
from ds_layerwise.checkpoint.single_file import Beside
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.recipe import Shape

#: The names of weights, states, and the header in the file.
MODEL = "model"
STATE = "optim.state"
HEADER = "ds_layerwise.header"

#: The beginning of :data:`HEADER` in the paths that torch stores.
_OWN = ("ds_layerwise",)

#: The parts of names that come from wrappers of modules.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")

#: The state that counts steps.
_COUNT = "step"


def unwrapped(name: str) -> str:
    """Return ``name`` as in torch's ``get_state_dict``, without the parts that torch.compile and
    activation checkpointing add.
    """
    return _WRAPPERS.sub("", name)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut the elements ``[start, stop)`` of a tensor of ``shape`` into boxes, in ascending order of
    elements.

    Yields:
        The start and the length of each box along every axis. A box is a contiguous range in
        memory; with n axes there are at most 2n - 1 boxes.
    """
    if not shape and start < stop:
        yield (), ()
        return
    while start < stop:
        # The longest box from here on: its rows are whole along the axes after ``axis``.
        inner = math.prod(shape)
        rest = start
        offset = []
        for length in shape:
            inner //= length
            row, rest = divmod(rest, inner)
            offset.append(row)
            if not rest and inner <= stop - start:
                break
        rows = min((stop - start) // inner, length - row)
        after = shape[len(offset) :]
        yield (*offset, *(0 for _ in after)), (*(1 for _ in offset[1:]), rows, *after)
        start += rows * inner


def path_of(name: str, key: str) -> str:
    """Return the name in the file of a state of a parameter; of its weights for the empty key."""
    if key:
        return f"{STATE}.{name}.{key}"
    return f"{MODEL}.{name}"


class PieceTensor(Tensor):
    """A tensor with the shape of a whole parameter, of which this rank has some elements. It is
    only for checkpoints.

    Args:
        held: 1-D, the elements of the flattened whole from ``start`` on. Not copied.
        may_be_read_into: True if torch may fill it from a file.
    """

    held: Tensor
    start: int
    may_be_read_into: bool

    @staticmethod
    def __new__(
        cls, held: Tensor, start: int, shape: Sequence[int], *, may_be_read_into: bool = False
    ) -> PieceTensor:
        """Make a tensor without memory of its own."""
        made: PieceTensor = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=held.dtype, device=held.device
        )
        made.held = held
        made.start = start
        made.may_be_read_into = may_be_read_into
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text with the range of elements that it holds."""
        return f"PieceTensor({self.held.numel()} of {tuple(self.shape)} from {self.start})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise an error: a part cannot be computed with.

        Raises:
            LayerWiseError: always.
        """
        raise LayerWiseError(
            f"{func} is not possible on a tensor of sharded_state_dict(), of which this rank has "
            "only a part: pass the dict to torch.distributed.checkpoint.save(), which writes the "
            "parts; async_save() would copy them"
        )

    def _chunks(self) -> list[ChunkStorageMetadata]:
        found = boxes(self.shape, self.start, self.start + self.held.numel())
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in found
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return the boxes that torch writes."""
        properties = TensorProperties(dtype=self.dtype)
        items = []
        for chunk in self._chunks():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that torch reads.

        Raises:
            LayerWiseError: it is live memory; a read that fails half-way would leave it half new.
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
        raise LayerWiseError(f"{index.fqn}: this rank has no part at offset {index.offset}")


def held_of(value: Tensor) -> tuple[Tensor, int]:
    """Return this rank's elements of a tensor of the file, and the number of the first one."""
    if isinstance(value, PieceTensor):
        return value.held, value.start
    return value, 0


def _listed_in(folder: Path) -> Metadata:
    """Return the list of tensors in ``folder``.

    Raises:
        Exception: it is missing or damaged.
    """
    path = folder / ".metadata"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    with path.open("rb") as file:
        # The C version allocates as many objects as a file claims to have.
        found: Metadata = pickle._Unpickler(file).load()
    for name in {info.relative_path for info in found.storage_data.values()}:
        if leads_out(name) or not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is not a file")
    return found


def _sizes_in(metadata: Metadata) -> dict[str, Shape]:
    """Return the shapes of the tensors in a list.

    Raises:
        ValueError: the list lacks the tensor of this package.
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
    """A checkpoint of ``torch.distributed.checkpoint``, from this package or FSDP2; see
    :class:`.record.Saved`.

    Values that are not tensors are not read, because torch would run code for them; its list of
    tensors is a pickle.

    Args:
        checkpoint: its folder, or a reader for another storage.
        rules: the optimizers of this run's parameters; states in the file are assumed to be theirs.
        names: all names in the model of this run.
        rename: the names of this run by names in the file, as in ``layerwise.rename``.

    Raises:
        LayerWiseError: it is missing or damaged, or has no weights under ``model``.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | StorageReader,
        rules: Mapping[str, RuleRecord],
        *,
        names: Iterable[str],
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self._where = str(checkpoint)
        with self._naming(
            "is not a checkpoint of torch.distributed.checkpoint that this rank can read"
        ):
            if isinstance(checkpoint, StorageReader):
                self._where = "the checkpoint"
                self._reader = checkpoint
                self._metadata = checkpoint.read_metadata()
            else:
                self._reader = FileSystemReader(checkpoint)
                self._metadata = _listed_in(Path(checkpoint))
            self._sizes = _sizes_in(self._metadata)
        save = getattr(self._metadata.storage_meta, "save_id", None)
        self.save_id = f"{save} of {len(self._sizes)} tensors"
        shapes = self._below(MODEL)
        if not shapes:
            raise LayerWiseError(
                f"{self._where} has no weights under {MODEL}; it has "
                f"{', '.join(sorted(self._metadata.state_dict_metadata)[:5])}; save it as "
                "{'model': ..., 'optim': ...}, as torch's get_state_dict() returns the two"
            )
        self.beside: Beside | None = None
        """None in a checkpoint of another package."""
        self.wrapped = {unwrapped(name): name for name in names if unwrapped(name) != name}
        """The names in this run, by their names without wrappers, which torch uses."""
        if HEADER in self._sizes:
            self.beside = self._own_beside()
            # The header lists the parameters that were trained. Others are only under model, and
            # may be trained now.
            self.header = replace(self.beside.header, shapes=shapes)
        else:
            assumed = {}
            for name, new in new_names(shapes, rename or {}).items():
                if (new := self.wrapped.get(new, new)) in rules:
                    assumed[name] = rules[new]
            self.header = self._header_of(shapes, assumed)

    def _below(self, top: str) -> dict[str, Shape]:
        """Return the shapes of the tensors under ``top``, by their names there."""
        found = {}
        for path, size in self._sizes.items():
            if path.startswith(f"{top}."):
                found[path.removeprefix(f"{top}.")] = size
        return found

    def _own_beside(self) -> Beside:
        content = self._empty(HEADER)
        self._read({HEADER: content})
        beside = Beside(content, Path(self._where))
        with naming(Path(self._where)):
            for path, blocks in beside.sums.items():
                size = self._sizes.get(path)
                saved = sum(last - first for first, (last, _) in blocks.items())
                if size is None or math.prod(size) != saved:
                    raise ValueError(
                        f"its list gives {path} the shape {size}, but {saved} elements were saved"
                    )
        return beside

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Replace an error of torch from reading by one that names ``what`` in the checkpoint."""
        try:
            yield
        except UNREADABLE as e:
            raise LayerWiseError(f"{self._where} {what} ({type(e).__name__}: {e})") from e

    def _header_of(self, shapes: dict[str, Shape], rules: Mapping[str, RuleRecord]) -> Header:
        """Return the header of a checkpoint of another package."""
        # One name may be a prefix of another.
        states: dict[str, list[str]] = {}
        for state in self._below(STATE):
            name, _, _ = state.rpartition(".")
            while name and name not in shapes:
                name, _, _ = name.rpartition(".")
            states.setdefault(name, []).append(state.removeprefix(f"{name}."))
        step = None
        found = {}
        for name in sorted(rules.keys() & states.keys()):
            rule = rules[name]
            keys = states[name]
            if _COUNT in keys and step is None:
                path = path_of(name, _COUNT)
                count = self._empty(path)
                self._read({path: count})
                with self._naming(f"has no number as {path}"):
                    step = int(count)
            if {*rule.state_keys} - {*keys} == {_COUNT}:
                # A missing count only means that at least one step was made.
                keys.append(_COUNT)
            found[name] = RuleRecord(rule.family, tuple(sorted(keys)), rule.gradient_average)
        return Header(step=step or 0, shapes=shapes, rules=found)

    def _read(self, targets: dict[str, Any]) -> None:
        """Fill ``targets``, by their names in the file, on this rank alone.

        Raises:
            LayerWiseError: the file is damaged, or has a tensor of another size or with other
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
                self.beside.check(path, *held_of(target))

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """Return one piece: the elements ``[start, stop)`` and the rest of their checksum blocks,
        read into host memory.
        """
        shape = self.header.shapes[name]
        if self.beside is not None:
            start, stop = self.beside.around(path_of(name, ""), start, stop)
        held: dict[str, Tensor] = {}
        targets: dict[str, Any] = {}
        for key in self.header.keys(name):
            path = path_of(name, key)
            if path not in self._sizes and key == _COUNT:
                held[key] = torch.ones((), dtype=torch.float32, device="cpu")
            elif not key or self._sizes.get(path) == shape != ():
                held[key] = self._empty(path, (stop - start,))
                targets[path] = PieceTensor(held[key], start, shape, may_be_read_into=True)
            else:
                targets[path] = held[key] = self._empty(path)
        self._read(targets)
        return [PieceRecord(name, start, held.pop(""), held)]

    def _empty(self, path: str, size: Shape | None = None) -> Tensor:
        """Return host memory for a tensor of the file, or for ``size`` of it."""
        with self._naming(f"cannot be read at {path}"):
            if size is None:
                size = self._sizes[path]
            properties: Any = self._metadata.state_dict_metadata[path]
            return torch.empty(size, dtype=properties.properties.dtype, device="cpu")
