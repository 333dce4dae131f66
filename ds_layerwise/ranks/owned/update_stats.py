"""How far updates move weights, and how long momenta are, by optimizer: looked at while masters are
where they work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.rule import State
from ds_layerwise.ranks.owned.reductions import sum_of_squares

#: The states that a rule may keep its momentum in; the first that it has counts.
_MOMENTA = ("momentum_buffer", "exp_avg")


class Watch:
    """Adds up over one update what it is told of each rule's parameters, and then over all ranks of
    a model.

    Args:
        rules: the names of all rules of the model, the same on every rank.
        update_rms, momentum_norm: what is asked for.
        counted_elsewhere: parameters that another rank of the same model has, too, and counts.
        sum_over_ranks: adds up a tensor over all ranks of a model, in place.
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
        self._update_rms, self._momentum_norm = update_rms, momentum_norm
        self._elsewhere, self._sum_over_ranks, self._device = (
            counted_elsewhere,
            sum_over_ranks,
            device,
        )
        self.restart()

    def restart(self) -> None:
        """Forget what was added up."""
        # Of changes and of momenta: the sum of squares, and how many elements there are of them.
        self._squares: dict[tuple[str, str], list[Tensor]] = {}
        self._numels: dict[tuple[str, str], int] = {}

    def before(self, names: Sequence[str], params: Sequence[Tensor]) -> list[Tensor]:
        """What :meth:`after` compares with: copies of masters that are about to be updated."""
        return [
            param.clone()
            for name, param in zip(names, params, strict=True)
            if self._update_rms and name not in self._elsewhere
        ]

    def after(
        self,
        rule: str,
        names: Sequence[str],
        before: list[Tensor],
        params: Sequence[Tensor],
        states: Sequence[State],
    ) -> None:
        """Take note of an update by the rule of that name; ``before`` is overwritten."""
        counted = [i for i, name in enumerate(names) if name not in self._elsewhere]
        if before:
            torch._foreach_sub_(before, [params[i] for i in counted])
            self._add("update", rule, before)
        if self._momentum_norm:
            momenta = [
                next((states[i][key] for key in _MOMENTA if key in states[i]), None)
                for i in counted
            ]
            self._add("momentum", rule, [each for each in momenta if each is not None])

    def _add(self, what: str, rule: str, values: list[Tensor]) -> None:
        flat = [value.reshape(-1) for value in values]
        self._squares.setdefault((what, rule), []).append(sum_of_squares(flat, self._device))
        self._numels[what, rule] = self._numels.get((what, rule), 0) + sum(
            value.numel() for value in flat
        )

    def settle(self, *, failed: bool = False) -> dict[str, float]:
        """What the ranks have together, by name. Every rank of the world must call this at the same
        point.

        Args:
            failed: whether the update ended on this rank before its time: then no rank has
                anything.
        """
        keys = [(what, rule) for what in ("update", "momentum") for rule in self._rules]
        none = torch.zeros((), dtype=widest_float(), device=self._device)
        squares = [
            torch.stack(self._squares[key]).sum() if key in self._squares else none for key in keys
        ]
        # Filled on the device: a copy would wait for it.
        numels = [
            torch.full_like(none, number)
            for number in (*(self._numels.get(key, 0) for key in keys), failed)
        ]
        sums = torch.stack([*squares, *numels])
        self._sum_over_ranks(sums)
        self.restart()
        *found, any_failed = sums.tolist()
        told: dict[str, float] = {}
        for (what, rule), square, numel in zip(
            keys, found[: len(keys)], found[len(keys) :], strict=True
        ):
            if numel and not any_failed:
                told[f"{what}_{'rms' if what == 'update' else 'norm'}_{rule}"] = math.sqrt(
                    square / numel if what == "update" else square
                )
        return told
