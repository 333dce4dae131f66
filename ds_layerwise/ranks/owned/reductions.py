"""Sums over many tensors of a rank, in few operations and without a copy of a whole tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import LONGER_ON_DEVICE, widest_float
from ds_layerwise.plan.layout.layout import Layout, Piece
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer, ShardBuffer

#: The number of elements per norm operation.
_SQUARED_AT_A_TIME = 1 << 22


def sum_of_squares(
    views: Sequence[Tensor], device: torch.device, *, divide_by: float = 1.0
) -> Tensor:
    """Return the sum of the squares of all elements of the 1-D ``views``, divided by ``divide_by``:
    0-d, float64 if the device has it.

    Finite float32 values cannot overflow it, and the way parameters are cut does not change the
    norm rounded to float32.
    """
    wide = widest_float()
    most = _SQUARED_AT_A_TIME * LONGER_ON_DEVICE ** (device.type != "cpu")
    parts: list[Tensor] = []
    for view in views:
        # Each part may be copied to the wide dtype.
        parts += [view] if view.numel() <= most else torch.split(view, most)
    if not parts:
        return torch.zeros((), dtype=wide, device=device)
    norms: list[Tensor] = []
    if divide_by == 1 and torch.bfloat16 not in {part.dtype for part in parts}:
        norms += torch._foreach_norm(parts, 2, wide)
        parts = []
    for together in _by_numel(parts, most):
        memory = torch.empty(sum(map(Tensor.numel, together)), dtype=torch.float32, device=device)
        copies = torch.split(memory, [part.numel() for part in together])
        torch._foreach_copy_(copies, together)
        memory.div_(divide_by)
        norms += torch._foreach_norm(copies, 2, wide)
    return torch.stack(norms).square().sum()


def _by_numel(parts: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield ``parts`` in order, as many at a time as have ``most`` elements; at least one."""
    together: list[Tensor] = []
    numel = 0
    for part in parts:
        if together and numel + part.numel() > most:
            yield together
            together, numel = [], 0
        together.append(part)
        numel += part.numel()
    if together:
        yield together


class ReducedGradients(ShardBuffer):
    """The gradients of one rank, float32, or as they have arrived as long as nothing is added.

    A shard in the gradient buffer, which accumulates in float32, shares its memory. Any other has
    memory from :meth:`allocate` to :meth:`free`, in one of two dtypes. Its storage stays the same,
    so views of it, once made, are valid whenever it has memory in their dtype. Otherwise they must
    not be used.

    Args:
        grads: the gradient buffer; None if there is none.
        device: the device of the memory.
        kept_as: the dtype in which sums arrive, by bucket, see :func:`.forecast.kept_dtypes`; None
            for float32.
    """

    divide_by = 1.0
    """The gradients divided by this are the averages over ranks."""
    stays = False
    """True to keep their own memory between steps, for captured updates that have its address."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        grads: FlatBuffer | None,
        device: torch.device,
        kept_as: Sequence[str] | None = None,
    ) -> None:
        self._apart: dict[int, torch.UntypedStorage] = {}
        self.add_lanes(None, ())
        super().__init__(layout, rank, self._make(layout, rank, grads, device))
        self.kept: ShardBuffer = self
        """The same memory in the dtype in which sums arrive."""
        if kept_as is not None:
            self.kept = ShardBuffer(layout, rank, self._make_kept(kept_as))

    def _make(
        self, layout: Layout, rank: int, grads: FlatBuffer | None, device: torch.device
    ) -> Iterator[Tensor]:
        """Yield the shards, one per bucket. One of them has memory of its own at a time, for its
        views.
        """
        for bucket in layout.buckets:
            if grads is not None and grads.tensors[bucket.index].dtype == torch.float32:
                yield grads.shard(bucket, rank).detach()
                continue
            start, stop = bucket.shard(rank)
            numel = bucket.sums_numel(rank) if grads is None else stop - start
            shard = torch.empty(numel, dtype=torch.float32, device=device)
            self._apart[bucket.index] = shard.untyped_storage()
            yield shard
            self.free()

    def _make_kept(self, kept_as: Sequence[str]) -> Iterator[Tensor]:
        """Yield the shards in the dtype in which sums arrive, as :meth:`_make` does."""
        for index, (shard, dtype) in enumerate(zip(self.tensors, kept_as, strict=True)):
            if index in self._apart:
                self._apart[index].resize_(shard.nbytes)
            yield shard.view(DTYPES[dtype])[: shard.numel()]
            self.free()

    def allocate(self, index: int) -> Tensor:
        """Return this rank's shard of bucket ``index``, uninitialized if it had no memory: in the
        dtype in which sums arrive, or in float32 if it has been widened. Without gradient
        buffer it has :meth:`.Bucket.sums_numel` elements.
        """
        storage = self._apart.get(index)
        if storage is not None and not storage.nbytes():
            storage.resize_(self.kept.tensors[index].nbytes)
        return self.now(index)

    def widen(self, index: int) -> Tensor:
        """Return the same, float32."""
        kept = self.allocate(index)
        shard = self.tensors[index]
        if kept.dtype != torch.float32:
            copy = kept.float()
            shard.untyped_storage().resize_(shard.nbytes)
            shard.copy_(copy)
        return shard

    def now(self, index: int) -> Tensor:
        """Return this rank's shard of bucket ``index`` in the dtype that its memory has now."""
        kept = self.kept.tensors[index]
        return kept if kept.untyped_storage().nbytes() == kept.nbytes else self.tensors[index]

    def piece(self, name: str) -> Tensor:
        """See :meth:`.ShardBuffer.piece`; in the dtype that its memory has now."""
        kept = self.kept._views[name]
        same = kept.dtype == self.now(self.layout.bucket_of(name).index).dtype
        return kept if same else self._views[name]

    def free(self) -> None:
        """Free the memory of all shards that have their own, unless it :attr:`stays`."""
        if self.stays:
            return
        for storage in self._apart.values():
            # Memory that numpy has seen cannot be freed.
            if storage.nbytes() and storage.resizable():
                storage.resize_(0)

    def add_lanes(self, lanes: comm.Group, names: Iterable[str]) -> None:
        """Let the gradients of ``names`` be averages over the ranks of ``lanes``, too."""
        self._lanes = lanes
        self._partial = dict.fromkeys(names)

    def average_over_lanes(self, name: str | None = None) -> None:
        """Average those gradients, or that of ``name`` if it is one. Every rank of the lanes must
        call this, and may do so again when more has been added.
        """
        for each in self._partial:
            view = self._views[each]
            if name in (None, each) and view.untyped_storage().nbytes():
                self.widen(self.layout.bucket_of(each).index)
                comm.sum_over_ranks(view, group=self._lanes).div_(comm.size_of(self._lanes))

    def average_(self, index: int) -> Sequence[Piece]:
        """Divide bucket ``index`` in place, to the averages over ranks, and return its pieces; none
        if it is kept as it arrived.
        """
        if self.now(index).dtype != torch.float32:
            return ()
        if self.divide_by != 1:
            self.tensors[index].div_(self.divide_by)
        return self.pieces[index]

    def average(self, name: str) -> Tensor:
        """Return a copy of :meth:`piece`, averaged, float32."""
        return self.piece(name).float() / self.divide_by

    def sum_of_squares(self, *, leave_out: Collection[str] = ()) -> Tensor:
        """Return :func:`sum_of_squares` of the averages of all parameters.

        Args:
            leave_out: the parameters that do not count.
        """
        return sum_of_squares(
            self._parts(leave_out), self.tensors[0].device, divide_by=self.divide_by
        )

    def number_of_zeros(self, *, leave_out: Collection[str]) -> Tensor:
        """Count the elements that are zero: 0-d, in the widest float of the device. NaN does not
        count.

        Args:
            leave_out: the parameters that do not count.
        """
        zeros = torch.zeros((), dtype=torch.int64, device=self.tensors[0].device)
        for part in self._parts(leave_out):
            zeros += part.numel() - torch.count_nonzero(part)
        return zeros.to(widest_float())

    def _parts(self, leave_out: Collection[str]) -> list[Tensor]:
        found = []
        for name in self._views:
            if name not in leave_out:
                found.append(self.piece(name))
        return found
