"""The agreement of all ranks before a step changes anything, in the small all-reduce that the norm
takes anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ds_layerwise.ranks.comm import comm


class Agreement:
    """Sums over all ranks of a model, one rank's error raised on all of them, and who is left out
    of an update.

    Args:
        ep_size: the number of ranks in a row with other experts under a parameter's name; in model
            order.
        group: ranks with the same part of the model.
        model_group: ranks with its other parts; None where the model is whole on each.
        tensor_group: ranks with parts of the same parameters, which are updated together.
        tied: parameters that other stages of a pipeline hold, too, and the ranks of those stages.
    """

    def __init__(
        self,
        ep_size: Mapping[str, int],
        *,
        group: comm.Group,
        model_group: comm.Group,
        tensor_group: comm.Group,
        tied: Sequence[tuple[str, comm.Group]],
    ) -> None:
        self._groups = [group] if model_group is None else [group, model_group]
        self._tensor_group = tensor_group
        self._tied = tied
        rank = comm.rank_of(group)
        self._place: dict[str, int] = {}
        self._numel = 0
        for name, count in ep_size.items():
            self._place[name] = self._numel + rank % count
            self._numel += count

    def reach(
        self, values: Tensor, error: Exception | None, idle: Collection[str]
    ) -> tuple[list[float], frozenset[str]]:
        """Sum ``values`` over all ranks. Every rank must call this at the same point, with an error
        or without.

        Args:
            values: 1-D, on the device of collectives.
            error: what this rank has found, and cannot go on with.
            idle: the parameters that are frozen on this rank and got no gradient here in the whole
                step.

        Returns:
            The sums, and the parameters that are idle on every rank that holds them.

        Raises:
            Exception: this rank has an error.
            LayerWiseError: another rank has one.
        """
        flags = []
        for flag in (error is not None, bool(idle)):
            flags.append(values.new_full((), float(flag)))
        sums = torch.stack([*values, *flags])
        self.sum_over_everyone(sums)
        *summed, failed, frozen = sums.tolist()
        if failed:
            comm.raise_on_all_ranks(error, group=None)
        return summed, self._idle_everywhere(idle, values.device) if frozen else frozenset()

    def sum_over_everyone(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all ranks of a model, which all call this; ``values``
        are overwritten.
        """
        for group in self._groups:
            comm.sum_over_ranks(values, group=group)
        return values

    def _idle_everywhere(self, idle: Collection[str], device: torch.device) -> frozenset[str]:
        """Return the parameters of ``idle`` that are idle wherever they, or tensor shards of them,
        are updated.
        """
        trained = torch.zeros(self._numel, dtype=torch.int32, device=device)
        for name, place in self._place.items():
            if name not in idle:
                trained[place] = 1
        comm.sum_over_ranks(trained, group=self._groups[0])
        if self._tensor_group is not None:
            comm.sum_over_ranks(trained, group=self._tensor_group)
        for name, group in self._tied:
            place = self._place[name]
            comm.sum_over_ranks(trained[place : place + 1], group=group)
        counts = trained.tolist()
        return frozenset(name for name in idle if not counts[self._place[name]])
