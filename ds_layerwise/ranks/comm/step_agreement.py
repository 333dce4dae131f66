"""The agreement of all ranks before a step changes anything, in the small all-reduce that the norm
needs anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ds_layerwise.ranks.comm import comm


class Agreement:
    """Sums over all ranks of a model. It also raises the error of one rank on all ranks, and finds
    the parameters to leave out of an update.

    Args:
        names: a name for each of the consecutive ranks that hold different experts under a
            parameter's; in model order.
        rank: the number of this rank among those.
        group: the ranks with the same part of the model.
        model_group: the ranks with its other parts; None if each rank has the whole model.
        tensor_group: the ranks with parts of the same parameters, which are updated together.
        tied: the parameters that other pipeline stages also hold, with the ranks of those stages.
    """

    def __init__(
        self,
        names: Mapping[str, Sequence[str]],
        rank: int,
        *,
        group: comm.Group,
        model_group: comm.Group,
        tensor_group: comm.Group,
        tied: Sequence[tuple[str, comm.Group]],
    ) -> None:
        self._groups = [group] if model_group is None else [group, model_group]
        self._tensor_group = tensor_group
        self._tied = tied
        self._place: dict[str, int] = {}
        self._numel = 0
        for name, others in names.items():
            self._place[name] = self._numel + rank % len(others)
            self._numel += len(others)

    def reach(
        self, values: Tensor, error: Exception | None, idle: Collection[str]
    ) -> tuple[list[float], frozenset[str]]:
        """Sum ``values`` over all ranks. Every rank must call this at the same point, with or
        without an error.

        Args:
            values: 1-D, on the device of collectives.
            error: the error that stops this rank, if any.
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
            comm.raise_on_all_ranks(error)
        return summed, self._idle_everywhere(idle, values.device) if frozen else frozenset()

    def sum_over_everyone(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over all ranks of a model, which must all call this.
        ``values`` are overwritten.
        """
        for group in self._groups:
            comm.sum_over_ranks(values, group=group)
        return values

    def _idle_everywhere(self, idle: Collection[str], device: torch.device) -> frozenset[str]:
        """Return the parameters of ``idle`` that are idle on all ranks that update them or their
        tensor shards.
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
