"""The memory of a Layout and the views into it. Offsets and sizes are in elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from ds_layerwise.plan.layout.layout import Bucket, Layout
from ds_layerwise.ranks.owned.weight_writes import rounds_elsewhere

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
        self.params: dict[str, Tensor] = {}
        """Whole parameters as 1-D views, by name."""
        dtypes = DTYPES | dict(stored_as or {})
        buckets = []
        for bucket in layout.buckets:
            memory = torch.zeros(bucket.numel, dtype=dtypes[bucket.dtype], device=device)
            buckets.append(memory)
            for slot in bucket.slots:
                view = memory.narrow(0, slot.start - bucket.start, slot.numel)
                self.params[slot.name] = view
                if fill is not None:
                    fill(slot.name, view)
        self.tensors = tuple(buckets)
        """The memory, one tensor per bucket: its shards in rank order, 1-D, with padding."""

    def shard(self, bucket: Bucket, rank: int) -> Tensor:
        """Return the shard of ``rank`` in ``bucket`` as a 1-D view, with padding."""
        start, stop = bucket.shard(rank)
        return self.tensors[bucket.index][start - bucket.start : stop - bucket.start]

    def cut(self, bucket: Bucket, rank: int) -> Tensor:
        """Return the cut of ``rank`` in ``bucket`` as a 1-D view, with padding."""
        cut = bucket.cut_numel
        return self.tensors[bucket.index].narrow(0, rank // bucket.ep_size * cut, cut)

    def shards(self, rank: int) -> ShardBuffer:
        """Return the shards of ``rank``, in this memory."""
        return ShardBuffer(self.layout, rank, [self.shard(b, rank) for b in self.layout.buckets])


class ParamViews:
    """The trained parameters, which move into a buffer. At ZeRO
    stage 3, ``ParamCuts`` takes its place.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], layout: Layout, device: torch.device
    ) -> None:
        self._params = params
        self._places: dict[str, Tensor] = {}
        self.values = FlatBuffer(layout, device, fill=self._move_in)
        self.tensors = self.values.tensors
        """The memory, one tensor per bucket."""

    def _move_in(self, name: str, place: Tensor) -> None:
        """Move a parameter to ``place`` and free the memory that it had."""
        param = self._params[name]
        self._places[name] = place.view(param.shape).copy_(param.data)
        param.data = self._places[name]

    def misplaced(self) -> str | None:
        """Return the name of the first parameter that is no longer in its place; None if
        all are.
        """
        for name, param in self._params.items():
            place = self._places[name]
            if param.data_ptr() != place.data_ptr() or param.dtype != place.dtype:
                return name
        return None

    def take_away(self) -> None:
        """Let no parameter have its memory: whoever uses one meets an error of its shape."""
        for param in self._params.values():
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)

    def put_back(self) -> None:
        """Undo :meth:`take_away`."""
        for name, place in self._places.items():
            if not self._params[name].numel():
                self._params[name].data = place

    def write(self, name: str, value: Tensor) -> None:
        """Set a whole parameter."""
        self._params[name].data.copy_(value.view(self._places[name].shape))

    def whole(self, name: str) -> Tensor:
        """Return the values of a parameter, 1-D."""
        return self._params[name].detach().reshape(-1)

    def follow_persistent(self) -> None:
        """Do nothing: all parameters stay whole."""

    release = fetch_persistent = follow_persistent


def lay_in_rows(value: Tensor, rows: Tensor) -> None:
    """Copy 1-D ``value`` into ``rows``, row by row. Elements past the end of ``value`` stay."""
    for row, part in _by_row(rows, value):
        row.copy_(part)


def out_of_rows(rows: Tensor, value: Tensor) -> None:
    """Undo :func:`lay_in_rows`."""
    for row, part in _by_row(rows, value):
        part.copy_(row)


def _by_row(rows: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the full ``rows``, and what is filled of the next, each with its part of ``value``."""
    length = rows.shape[1]
    full, rest = divmod(value.numel(), length)
    parts = [(rows[:full], value[: full * length].view(full, length))]
    if rest:
        parts.append((rows[full, :rest], value[full * length :]))
    return parts


class ShardBuffer:
    """The shards of one rank: one 1-D tensor per bucket, as long as the rank's shard.

    Args:
        shards: the memory, one tensor per bucket in index order, which may be views into a
            :class:`FlatBuffer`. All views of one are made before the next is asked for.

    Note: shards that are masters
        At ZeRO stage 3 the 16-bit weights of most matrices are in cuts alone, and the shards of
        their owners are the float32 masters. Weights that a script has written are beside them
        until the next update: the old ones may come back before it.
    """

    def __init__(self, layout: Layout, rank: int, shards: Iterable[Tensor]) -> None:
        self.layout = layout
        self.rank = rank
        self.pieces = tuple(bucket.pieces(rank) for bucket in layout.buckets)
        self._views: dict[str, Tensor] = {}
        self.weights: list[Tensor] = []
        """The shards that are weights, and not masters of 16-bit ones."""
        tensors = []
        for bucket, shard in zip(layout.buckets, shards, strict=True):
            tensors.append(shard)
            if shard.dtype == DTYPES[bucket.dtype]:
                self.weights.append(shard)
            origin = bucket.shard(rank)[0]
            for piece in self.pieces[bucket.index]:
                self._views[piece.name] = shard.narrow(0, piece.start - origin, piece.numel)
        self.tensors = tuple(tensors)
        """The memory, one tensor per bucket, with padding."""
        self.written: dict[str, Tensor] = {}
        """The weights that came from cuts to shards that are their masters, by parameter: 1-D."""

    def settle(self) -> None:
        """Forget weights to which their masters round."""
        for name, value in list(self.written.items()):
            in_mxfp8 = self.layout.bucket_of(name).in_mxfp8
            if not rounds_elsewhere(self._views[name], value, in_mxfp8=in_mxfp8):
                del self.written[name]

    def take_written(self) -> None:
        """Set masters to the weights that came."""
        while self.written:
            name, value = self.written.popitem()
            self._views[name].copy_(value)

    def piece(self, name: str) -> Tensor:
        """Return this rank's piece of the parameter ``name`` as a 1-D view.

        Raises:
            KeyError: this rank has no piece of the parameter.
        """
        return self._views[name]


def new_shards(
    layout: Layout,
    rank: int,
    device: torch.device,
    dtype_of: Callable[[Bucket], str],
) -> ShardBuffer:
    """Return the shards of ``rank`` in memory of their own, all zeros, for a run in which no rank
    has the memory of a whole bucket. Those of another dtype than their parameters have no padding
    at their end.

    Args:
        dtype_of: returns the layout's name of the dtype of the shards of a bucket; by default that
            of its parameters.
    """
    shards = []
    for bucket in layout.buckets:
        dtype = dtype_of(bucket)
        start, stop = bucket.shard(rank)
        numel = stop - start if dtype == bucket.dtype else bucket.filled_numel(rank)
        shards.append(torch.zeros(numel, dtype=DTYPES[dtype], device=device))
    return ShardBuffer(layout, rank, shards)
