"""The memory of a Layout and the views into it. Offsets and sizes are in elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ds_layerwise.plan.layout.layout import Bucket, Layout, Piece

#: The names that a Layout uses for dtypes, and what they mean to torch.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in a Layout: ``str(torch.float32)`` without its prefix."""
    return str(dtype).removeprefix("torch.")


class FlatBuffer:
    """One 1-D tensor a bucket of a Layout, and views into it.

    Args:
        stored_as: the dtype to allocate for each dtype of the layout; the layout's own where
            missing. A buffer of gradients follows the layout of the parameters, often in another
            dtype.
        fill: called with every parameter's name and its view, which is full of zeros, bucket by
            bucket: what it lets go of makes room for the next bucket.
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
        self._dtypes = {name: (stored_as or {}).get(name, DTYPES[name]) for name in layout.dtypes}
        self._buckets: list[Tensor] = []
        self._params: dict[str, Tensor] = {}
        for bucket in layout.buckets:
            memory = torch.zeros(bucket.numel, dtype=self._dtypes[bucket.dtype], device=device)
            self._buckets.append(memory)
            for slot in bucket.slots:
                view = self._params[slot.name] = memory[
                    slot.start - bucket.start : slot.stop - bucket.start
                ]
                if fill is not None:
                    fill(slot.name, view)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory: one tensor a bucket."""
        return tuple(self._buckets)

    def dtype(self, name: str) -> torch.dtype:
        """What this buffer stores the layout's dtype ``name`` as."""
        return self._dtypes[name]

    def param(self, name: str) -> Tensor:
        """The whole parameter ``name``, 1-D, a view."""
        return self._params[name]

    def bucket(self, bucket: Bucket) -> Tensor:
        """All shards of ``bucket``, rank after rank, 1-D, a view; padding included."""
        return self._buckets[bucket.index]

    def shard(self, bucket: Bucket, rank: int) -> Tensor:
        """The shard of ``rank`` in ``bucket``, 1-D, a view; padding included."""
        start, stop = bucket.shard(rank)
        return self._buckets[bucket.index][start - bucket.start : stop - bucket.start]


def cut_of(memory: Tensor, bucket: Bucket, rank: int) -> Tensor:
    """The cut of ``rank`` in ``memory``, the whole of ``bucket``, 1-D, a view."""
    start = rank // bucket.ep_size * bucket.cut_numel
    return memory[start : start + bucket.cut_numel]


class ShardBuffer:
    """What one rank holds of each bucket: one 1-D tensor a bucket, as long as the rank's shard.

    Args:
        shards: the memory, one tensor a bucket in index order. May be views into a
            :class:`FlatBuffer`. Empty where all pieces of the bucket are in ``apart``, None where
            what it holds has another form.
        apart: by parameter name, pieces with memory of their own.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        shards: Sequence[Tensor | None],
        apart: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._shards, self._views = tuple(shards), dict(apart or {})
        self._memory = (
            *(shard for shard in self._shards if shard is not None),
            *self._views.values(),
        )
        self.pieces: tuple[tuple[Piece, ...], ...] = tuple(
            bucket.pieces(rank) for bucket in layout.buckets
        )
        for bucket, pieces, shard in zip(layout.buckets, self.pieces, self._shards, strict=True):
            origin = bucket.shard(rank)[0]
            for piece in pieces:
                if shard is not None and piece.name not in self._views:
                    self._views[piece.name] = shard[
                        piece.start - origin : piece.start - origin + piece.numel
                    ]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory: one tensor a bucket, and those apart."""
        return self._memory

    def bucket(self, index: int) -> Tensor:
        """This rank's shard of bucket ``index``, padding included; empty where its pieces are
        apart.

        Raises:
            KeyError: what it holds has another form.
        """
        shard = self._shards[index]
        if shard is None:
            raise KeyError(index)
        return shard

    def piece(self, name: str) -> Tensor:
        """What this rank holds of parameter ``name``, 1-D, a view.

        Raises:
            KeyError: this rank holds nothing of it.
        """
        return self._views[name]
