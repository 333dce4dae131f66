"""The transfer of updated parameters from owners to the cuts that ZeRO stage 3 keeps on all ranks,
and of written cuts back to the owners.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

import torch
from torch import Tensor

from ds_layerwise.errors import StepError, few
from ds_layerwise.plan.layout.transfer_plan import begun_backwards, param_names
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.owned.buffers import ShardBuffer, out_of_rows
from ds_layerwise.ranks.owned.weight_writes import check_same, differs, rounds_elsewhere
from ds_layerwise.ranks.sync.param_cuts import ParamCuts
from ds_layerwise.ranks.sync.transfer import Transfer


class CutSync:
    """Sends the parameters that owners have updated to every rank's cuts, in rounds.

    Parameters that are split by element are not sent: their cuts are the shards.

    Args:
        values: this rank's shards.
        cuts: this rank's cuts of parameters.
        groups: the ranks that have the cuts.
        ep_size: the number of consecutive ranks that hold different experts, by parameter.
    """

    def __init__(
        self,
        values: ShardBuffer,
        cuts: ParamCuts,
        *,
        groups: comm.Groups,
        ep_size: Mapping[str, int],
    ) -> None:
        self._values = values
        self._all_cuts = cuts
        self._group = groups[1]
        self._ep_size = ep_size
        buckets = values.layout.buckets
        self._names = names = param_names(buckets)
        self._transfer = Transfer(
            values.rank,
            begun_backwards(buckets, by_param=True),
            group_of=groups.__getitem__,
            cut_of=lambda number: cuts.of(names[number]),
            shard_of=values.tensors.__getitem__,
            device=values.tensors[0].device,
        )

    # --- owners to cuts

    def launch(self, index: int) -> None:
        """Start to send bucket ``index``. Its shards must not be written until :meth:`finish`."""
        if not self._transfer.launched:
            # Parameters that are whole now have old values.
            self._all_cuts.release()
        with profiled("gather"):
            self._transfer.launch(index)

    def finish(self) -> None:
        """Wait for all pending rounds, and make persistent parameters whole."""
        if self._transfer.launched:
            self._transfer.finish()
            self._all_cuts.take_note()
            self._all_cuts.fetch_persistent()

    #: DeepSpeed may fetch any cut after a step.
    leave_pending = finish

    def remove_hooks(self) -> None:
        """Do nothing: this class has no hooks."""

    # --- cuts to owners

    def written(self) -> Tensor:
        """See :meth:`.ParamCuts.written`."""
        return self._all_cuts.written()

    def fetch(self, indices: Collection[int] | None = None) -> None:
        """Let owners have the cuts of the buckets ``indices``, None for all: in their shards, or
        in ``written`` of these if they are masters. Every rank must call this at the same point.
        """

        def take(number: int, rows: Tensor, own: Tensor) -> None:
            if rows.dtype != own.dtype:
                own = torch.empty_like(own, dtype=rows.dtype)
                self._values.written[self._names[number]] = own
            out_of_rows(rows, own)

        self._transfer.all_to_owners(take=take, only=indices, pending=1)
        if indices is None:
            self._all_cuts.take_note()

    def follow_writes(self, name: str | None = None) -> None:
        """Let owners have what somebody has written into the cuts of ``name``, None for all, since
        they were sent. Every rank must call this at the same point.
        """
        if name is not None:
            # To send a bucket is cheaper than to look for writes.
            self._all_cuts.follow_persistent()
            self.fetch([self._values.layout.bucket_of(name).index])
            self._values.settle()
        elif comm.sum_over_ranks(self.written().float(), group=self._group):
            self.take_over()

    def take_over(self) -> None:
        """Do what :meth:`follow_writes` does where something was written on any rank.

        Raises:
            StepError: ranks have written different values into what stays whole.
        """
        check_same(self._all_cuts.persistent(), self._ep_size, self._group)
        self._all_cuts.follow_persistent()
        self.fetch()
        self._values.settle()

    def reload(self) -> None:
        """Do what :meth:`take_over` does, and let parameters that stay whole have what was written
        into their cuts.
        """
        self.take_over()
        self._all_cuts.release()
        self._all_cuts.fetch_persistent()

    def search(self) -> None:
        """Compare all cuts with the values that their owners have. Every rank must call this at the
        same point.

        Raises:
            StepError: on every rank, if a cut has other values, or ranks have different values of
                what stays whole.
        """
        check_same(self._all_cuts.persistent(), self._ep_size, self._group)
        lost = []

        def compare(number: int, rows: Tensor, own: Tensor) -> None:
            name = self._names[number]
            own = self._values.written.get(name, own)
            value = torch.empty_like(own, dtype=rows.dtype)
            out_of_rows(rows, value)
            if own.dtype == rows.dtype:
                is_lost = bool(differs(value, own).any())
            else:
                in_mxfp8 = self._values.layout.bucket_of(name).in_mxfp8
                is_lost = rounds_elsewhere(own, value, in_mxfp8=in_mxfp8)
            if is_lost:
                lost.append(name)

        self._transfer.all_to_owners(take=compare, pending=1)
        if names := sorted(chain(*comm.gather_objects(lost, group=self._group))):
            raise StepError(
                f"{few(names)} was written into the cuts of ZeRO stage 3 in a way that shows "
                "nowhere, and would be lost; call engine.optimizer.reload_weights() on all ranks "
                "after such a write, or write under deepspeed.zero.GatheredParameters with a "
                "modifier_rank"
            )
