"""The sizes of updates and momenta by optimizer, measured where the masters are during the
update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.recipe import State
from ds_layerwise.ranks.owned.reductions import sum_of_squares

#: The states that may hold a rule's momentum. The first one that the rule has is used.
_MOMENTA = ("momentum_buffer", "exp_avg")


class UpdateStats:
    """The sums of squares of one update, by rule, over the ranks of a model.

    Args:
        rules: the names of all rules of the model, the same on every rank.
        update_rms, momentum_norm: True to compute that statistic.
        counted_elsewhere: parameters that another rank of the same model also has and counts.
        sum_over_ranks: sums a tensor over all ranks of a model, in place.
    """

    def __init__(
        self,
        rules: Collection[str],
        *,
        update_rms: bool,
        momentum_norm: bool,
        counted_elsewhere: Collection[str],
        sum_over_ranks: Callable[[Tensor], object],
        device: torch.device,
    ) -> None:
        self._rules = sorted(rules)
        self._update_rms = update_rms
        self._momentum_norm = momentum_norm
        self._elsewhere = counted_elsewhere
        self._sum_over_ranks = sum_over_ranks
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Reset the sums."""
        # The sums of squares, and the numbers of elements, of changes and of momenta.
        self._squares: dict[tuple[str, str], list[Tensor]] = {}
        self._numels: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def around(
        self, rule: str, names: Sequence[str], params: Sequence[Tensor], states: Sequence[State]
    ) -> Iterator[None]:
        """Enclose an update by the rule of that name, and add it to the sums."""
        counted = [i for i, name in enumerate(names) if name not in self._elsewhere]
        masters = [params[i] for i in counted]
        changes = [master.clone() for master in masters] if self._update_rms else []
        yield
        if changes:
            torch._foreach_sub_(changes, masters)
            self._add("update", rule, changes)
        if self._momentum_norm:
            momenta = []
            for i in counted:
                for key in _MOMENTA:
                    if key in states[i]:
                        momenta.append(states[i][key])
                        break
            self._add("momentum", rule, momenta)

    def _add(self, kind: str, rule: str, values: list[Tensor]) -> None:
        flat = [value.reshape(-1) for value in values]
        self._squares.setdefault((kind, rule), []).append(sum_of_squares(flat, self._device))
        self._numels[kind, rule] += sum(value.numel() for value in flat)

    def settle(self, *, failed: bool = False) -> dict[str, float]:
        """Return the statistics over all ranks, by name. Every rank of the world must call this at
        the same point.

        Args:
            failed: True if the update failed on this rank. Then no rank gets statistics.
        """
        keys = list(product(("update", "momentum"), self._rules))
        none = torch.zeros((), dtype=widest_float(), device=self._device)
        # Fill on the device: a copy would make the host wait for it.
        sums = [torch.full_like(none, failed)]
        for key in keys:
            squares = self._squares.get(key)
            sums.append(torch.stack(squares).sum() if squares else none)
            sums.append(torch.full_like(none, self._numels[key]))
        total = torch.stack(sums)
        self._sum_over_ranks(total)
        self.restart()
        any_failed, *rest = total.tolist()
        stats = {}
        for (kind, rule), square, numel in zip(keys, rest[::2], rest[1::2], strict=True):
            if numel and not any_failed:
                is_update = kind == "update"
                name = f"update_rms_{rule}" if is_update else f"momentum_norm_{rule}"
                stats[name] = math.sqrt(square / numel if is_update else square)
        return stats
