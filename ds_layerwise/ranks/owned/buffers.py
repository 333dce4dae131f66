"""The memory of a Layout and the views into it. Offsets and sizes are in elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ds_layerwise.plan.layout.layout import Bucket, Layout

#: torch's dtypes by their names in a Layout.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` in a Layout: ``str(torch.float32)`` without its prefix."""
    return str(dtype).removeprefix("torch.")


class FlatBuffer:
    """The memory of a Layout: one 1-D tensor per bucket, and views into it.

    Args:
        stored_as: the dtype to allocate for a dtype of the layout; a dtype that is missing stands
            for itself. A gradient buffer has the layout of the parameters, often in another dtype.
        fill: called bucket by bucket with every parameter's name and its view, which is all zeros.
            Memory that it frees makes room for the next bucket.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        stored_as: Mapping[str, torch.dtype] | None = None,
        *,
        fill: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        self.layout = layout
        self._dtypes = DTYPES | dict(stored_as or {})
        self._params: dict[str, Tensor] = {}
        buckets = []
        for bucket in layout.buckets:
            memory = torch.zeros(bucket.numel, dtype=self.dtype(bucket.dtype), device=device)
            buckets.append(memory)
            for slot in bucket.slots:
                view = memory.narrow(0, slot.start - bucket.start, slot.numel)
                self._params[slot.name] = view
                if fill is not None:
                    fill(slot.name, view)
        self.tensors = tuple(buckets)
        """The memory, one tensor per bucket."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that this buffer allocates for the layout's dtype ``name``."""
        return self._dtypes[name]

    def param(self, name: str) -> Tensor:
        """Return the whole parameter ``name`` as a 1-D view."""
        return self._params[name]

    def bucket(self, bucket: Bucket) -> Tensor:
        """Return all shards of ``bucket`` in rank order, 1-D, with padding."""
        return self.tensors[bucket.index]

    def shard(self, bucket: Bucket, rank: int) -> Tensor:
        """Return the shard of ``rank`` in ``bucket`` as a 1-D view, with padding."""
        start, stop = bucket.shard(rank)
        return self.tensors[bucket.index][start - bucket.start : stop - bucket.start]


class OwnShards:
    """The shards of one rank, for runs in which no rank has the memory of a whole bucket."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        shards = []
        for bucket in layout.buckets:
            start, stop = bucket.shard(rank)
            shards.append(torch.zeros(stop - start, dtype=DTYPES[bucket.dtype], device=device))
        self.tensors = tuple(shards)
        """The memory, one tensor per bucket."""

    def shard(self, bucket: Bucket, rank: int) -> Tensor:
        """Return the shard of ``rank``, which must be this one, in ``bucket``, 1-D."""
        if rank != self.rank:
            raise ValueError(f"rank {self.rank} has no shard of rank {rank}")
        return self.tensors[bucket.index]


def lay_in_rows(value: Tensor, rows: Tensor) -> None:
    """Copy 1-D ``value`` into ``rows``, row by row. Elements past the end of ``value`` stay."""
    length = rows.shape[1]
    full, rest = divmod(value.numel(), length)
    rows[:full].copy_(value[: full * length].view(full, length))
    if rest:
        rows[full, :rest].copy_(value[full * length :])


def out_of_rows(rows: Tensor, value: Tensor) -> None:
    """Undo :func:`lay_in_rows`."""
    length = rows.shape[1]
    full, rest = divmod(value.numel(), length)
    value[: full * length].view(full, length).copy_(rows[:full])
    if rest:
        value[full * length :].copy_(rows[full, :rest])


def cut_of(memory: Tensor, bucket: Bucket, rank: int) -> Tensor:
    """Return the cut of ``rank`` as a 1-D view of ``memory``, which is the whole ``bucket``."""
    return memory.narrow(0, rank // bucket.ep_size * bucket.cut_numel, bucket.cut_numel)


class ShardBuffer:
    """The shards of one rank: one 1-D tensor per bucket, as long as the rank's shard.

    Args:
        shards: the memory, one tensor per bucket in index order, which may be views into a
            :class:`FlatBuffer`. None for a bucket whose pieces are in ``apart`` or have another
            form.
        apart: pieces with memory of their own, by parameter name.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        shards: Sequence[Tensor | None],
        apart: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.pieces = tuple(bucket.pieces(rank) for bucket in layout.buckets)
        self._shards = {index: shard for index, shard in enumerate(shards) if shard is not None}
        self._views = dict(apart or {})
        self.tensors = (*self._shards.values(), *self._views.values())
        """The memory: one tensor per bucket, and the separate pieces."""
        for index, shard in self._shards.items():
            self._views.update(self.pieces_of(index, shard))

    def pieces_of(self, index: int, shard: Tensor) -> dict[str, Tensor]:
        """Return the pieces of bucket ``index`` by name, as views of 1-D ``shard``."""
        origin = self.layout.buckets[index].shard(self.rank)[0]
        found = {}
        for piece in self.pieces[index]:
            found[piece.name] = shard.narrow(0, piece.start - origin, piece.numel)
        return found

    def has(self, index: int) -> bool:
        """Tell whether bucket ``index`` is one tensor."""
        return index in self._shards

    def bucket(self, index: int) -> Tensor:
        """Return this rank's shard of bucket ``index``, with padding.

        Raises:
            KeyError: its pieces are separate or have another form.
        """
        return self._shards[index]

    def piece(self, name: str) -> Tensor:
        """Return this rank's piece of the parameter ``name`` as a 1-D view.

        Raises:
            KeyError: this rank has no piece of the parameter.
        """
        return self._views[name]
