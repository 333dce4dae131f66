"""Masters and states as ``torch.distributed.checkpoint`` has them: by name, whole in the file, each
part by its owner.

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

#: What the file calls weights, states, and what is beside them.
MODEL, STATE, HEADER = "model", "optim.state", "ds_layerwise.header"

#: Where :data:`HEADER` begins, as torch has it beside its name.
_OWN = ("ds_layerwise",)

#: What wrappers of modules put into names.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")

#: The state that counts steps.
_COUNT = "step"


def unwrapped(name: str) -> str:
    """``name`` as torch's ``get_state_dict`` has it, without what compiling and recomputing put
    into it.
    """
    return _WRAPPERS.sub("", name)


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements ``[start, stop)`` of a tensor of ``shape`` into boxes, in ascending order of
    elements.

    Returns:
        Of each, where it begins along every axis, and how long it is. Each is a range of elements
        in memory; of n axes there are at most 2n - 1.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for offset, size in boxes(shape[1:], start - first * inner, stop - first * inner):
            yield (first, *offset), (1, *size)
        return
    full, end = -(-start // inner), stop // inner
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
        made.held, made.start, made.may_be_read_into = held, start, may_be_read_into
        return made

    def __init__(
        self, held: Tensor, start: int, shape: Sequence[int], *, may_be_read_into: bool = False
    ) -> None:
        """All is done."""

    def __repr__(self) -> str:  # type: ignore[override]
        """What it is."""
        return f"Piece({self.held.numel()} of {tuple(self.shape)} from {self.start})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing can be computed with a part.

        Raises:
            LayerWiseError: always.
        """
        raise LayerWiseError(
            f"{func} of a tensor of which this rank has a part: sharded_state_dict() is for "
            "torch.distributed.checkpoint.save(), which writes parts; async_save() would copy them"
        )

    def _boxes(self) -> list[tuple[torch.Size, torch.Size]]:
        return [
            (torch.Size(offset), torch.Size(size))
            for offset, size in boxes(self.shape, self.start, self.start + self.held.numel())
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What torch is to write of it."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=size),
                    properties=properties,
                    size=self.shape,
                ),
            )
            for offset, size in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What torch is to read of it.

        Raises:
            LayerWiseError: it is live memory, which a read that fails would leave half new.
        """
        if not self.may_be_read_into:
            raise LayerWiseError(
                "sharded_state_dict() is for torch.distributed.checkpoint.save(); load with "
                "engine.optimizer.load_sharded_state_dict(checkpoint), which checks everything "
                "first"
            )
        return [ChunkStorageMetadata(offsets=offset, sizes=size) for offset, size in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The memory of one box."""
        first = 0
        for offset, size in self._boxes():
            if offset == index.offset:
                return self.held[first : first + math.prod(size)].view(size)
            first += math.prod(size)
        raise LayerWiseError(f"{index.fqn}: there is no box at {index.offset} of it")


def _listed_in(folder: Path) -> Metadata:
    """The list of tensors in ``folder``.

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
        self._reader = (
            checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
        )
        self._where = "the checkpoint" if isinstance(checkpoint, StorageReader) else str(checkpoint)
        with self._naming(
            "is no checkpoint of torch.distributed.checkpoint that this rank can read"
        ):
            self._metadata: Metadata = (
                self._reader.read_metadata()
                if isinstance(checkpoint, StorageReader)
                else _listed_in(Path(checkpoint))
            )
            self._sizes = {
                key: tuple(map(int, each.size))
                for key, each in self._metadata.state_dict_metadata.items()
                if isinstance(each, TensorStorageMetadata)
            }
            paths = (self._metadata.planner_data or {}).values()
            if HEADER not in self._sizes and any(
                path[:1] == _OWN for path in paths if isinstance(path, tuple)
            ):
                raise ValueError(f"its list has lost {HEADER}")
        shapes = {
            key.removeprefix(f"{MODEL}."): size
            for key, size in self._sizes.items()
            if key.startswith(f"{MODEL}.")
        }
        if not shapes:
            raise LayerWiseError(
                f"{self._where} has no weights under {MODEL}; it has "
                f"{', '.join(sorted(self._metadata.state_dict_metadata)[:5])}; save it as "
                "{'model': ..., 'optim': ...}, as torch's get_state_dict() returns the two"
            )
        self.beside: Beside | None = None
        """None of what another package wrote."""
        if HEADER in self._sizes:
            self.beside = self._own_beside()
        self._keys = self._states_of(shapes)
        self.wrapped = {
            unwrapped(name): name for name in (*rules, *others, *second) if unwrapped(name) != name
        }
        """By name without wrappers, as torch has it, what this run calls a parameter."""
        renamed = {
            old: self.wrapped.get(new, new) for old, new in new_names(shapes, rename or {}).items()
        }
        rules = {old: rules[new] for old, new in renamed.items() if new in rules}
        self._others = self._found_of(
            others, {new: old for old, new in renamed.items()}, shapes, strict=strict
        )
        self._shapes = {old: shape for old, shape in shapes.items() if renamed[old] not in second}
        if self.beside is not None:
            own = self.beside.header
            # It says what was trained. What was not is under model alone, and may be trained now.
            self.header = replace(
                own, shapes=self._shapes, rules=self._known(own.rules), kept=self._known(own.kept)
            )
        else:
            self.header = self._header_of(
                rules, {old for old in self._shapes if renamed[old] not in others}
            )

    def _found_of(
        self,
        others: Mapping[str, Tensor],
        old: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        strict: bool,
    ) -> dict[str, tuple[str, torch.dtype]]:
        """By name, what the file calls each of ``others`` that it has, and this run's dtype of
        it.
        """
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
        """By name of a parameter, the states of it; one name may be the beginning of another."""
        found: dict[str, list[str]] = {}
        for key in self._sizes:
            if key.startswith(f"{STATE}."):
                parts = key.removeprefix(f"{STATE}.").split(".")
                ends = (
                    end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in names
                )
                if (end := next(ends, None)) is not None:
                    found.setdefault(".".join(parts[:end]), []).append(".".join(parts[end:]))
        return {name: tuple(sorted(keys)) for name, keys in found.items()}

    def _known(self, told: Mapping[str, T]) -> dict[str, T]:
        return {name: said for name, said in told.items() if name in self._shapes}

    def _own_beside(self) -> Beside:
        content = self._empty(HEADER)
        self._read({HEADER: content})
        beside = Beside(content, Path(self._where))
        with naming(Path(self._where)):
            for path, blocks in (beside.sums or {}).items():
                size = self._sizes.get(path)
                if size is None or math.prod(size) != sum(
                    last - first for first, (last, _) in blocks.items()
                ):
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
        """What is known of a checkpoint that this package did not write."""
        counted = sorted(
            name for name, keys in self._keys.items() if _COUNT in keys and name in trained
        )
        step = 0
        if counted:
            path = f"{STATE}.{counted[0]}.{_COUNT}"
            self._read({path: (count := self._empty(path))})
            with self._naming(f"has no number as {path}"):
                step = int(count)
        return Header(
            step=step,
            shapes=self._shapes,
            param_groups=None,
            dtypes=None,
            rules={
                name: RuleRecord(
                    rules[name].family if name in rules else "unknown",
                    self._with_count(keys, rules.get(name)),
                    rules[name].gradient_average if name in rules else None,
                )
                for name, keys in self._keys.items()
                if name in trained
            },
        )

    @staticmethod
    def _with_count(keys: tuple[str, ...], rule: RuleRecord | None) -> tuple[str, ...]:
        """``keys``, and a count of steps if that is all that a rule of this run has beyond them: it
        says no more then than that there was a step."""
        return (
            (*keys, _COUNT)
            if rule is not None and {*rule.state_keys} - {*keys} == {_COUNT}
            else keys
        )

    def _read(self, targets: dict[str, Any]) -> None:
        """Fill ``targets``, by their names in the file, by this rank alone.

        Raises:
            LayerWiseError: the file is damaged, or has something of another size, or of other
                values than were saved.
        """
        planner, reader = DefaultLoadPlanner(flatten_state_dict=False), self._reader
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
                values, start = (
                    (target.held, target.start) if isinstance(target, Piece) else (target, 0)
                )
                self.beside.check(path, values, start)

    def identity(self) -> list[str]:
        """What is the same for all ranks that read the same save."""
        return [
            f"save {getattr(self._metadata.storage_meta, 'save_id', None)}",
            f"{len(self._sizes)} tensors",
        ]

    def read_others(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers, by name."""
        read = {old: self._empty(f"{MODEL}.{old}") for old, _ in self._others.values()}
        if read:
            self._read({f"{MODEL}.{old}": value for old, value in read.items()})
        return {name: read[old].to(dtype) for name, (old, dtype) in self._others.items()}

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """One piece, the elements ``[start, stop)`` and what has a checksum with them, read into
        memory of the host.
        """
        shape, rule = self._shapes[name], self.header.rules.get(name)
        if self.beside is not None:
            start, stop = self.beside.around(f"{MODEL}.{name}", start, stop)
        held: dict[str, Tensor] = {}
        targets: dict[str, Any] = {}
        for key in ("", *(rule.state_keys if rule is not None else ())):
            path = f"{STATE}.{name}.{key}" if key else f"{MODEL}.{name}"
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
        """Memory of the host for a tensor of the file, or for ``size`` of it."""
        with self._naming(f"cannot be read at {path}"):
            found = self._metadata.state_dict_metadata[path]
            dtype = (
                found.properties.dtype
                if isinstance(found, TensorStorageMetadata)
                else torch.float32
            )
            return torch.empty(
                self._sizes[path] if size is None else size, dtype=dtype, device="cpu"
            )
