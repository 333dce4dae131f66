"""States of one rank in fewer bits than rules get them in: kept so between two updates, and float32
in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.low_bit import (
    chance_of,
    of_codes,
    round_by_chance_,
    scales_of,
    to_codes_,
)
from ds_layerwise.recipes.base.recipe import StateSpec

#: A parameter and one of its states.
Key = tuple[str, str]


class KeptStates:
    """How the states of this rank are kept that are not kept as rules get them.

    Args:
        seed: what chance begins with, where states are rounded by chance.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._specs: dict[Key, StateSpec] = {}
        self._of: dict[str, list[str]] = {}
        self._by_chance: dict[Key, tuple[str, int]] = {}
        self._scales: dict[Key, Tensor] = {}

    def keep(
        self,
        name: str,
        key: str,
        spec: StateSpec,
        value: Tensor,
        *,
        by_chance: tuple[str, int] | None,
    ) -> Tensor:
        """``value``, a state before the first update, as it is kept from now on; of the same shape.

        Args:
            by_chance: the name of the parameter in a checkpoint, and which of its elements this
                rank's first one is, if it is rounded by chance; None if to the nearest.
        """
        if spec.kept_as in (None, spec.dtype):
            return value
        self._specs[name, key] = spec
        self._of.setdefault(name, []).append(key)
        if spec.kept_as == "8bit":
            self._scales[name, key] = scales_of(value.numel(), value.device)
            kept = torch.zeros_like(value, dtype=torch.uint8, memory_format=torch.contiguous_format)
        else:
            if by_chance is not None:
                self._by_chance[name, key] = by_chance
            kept = torch.empty_like(
                value, dtype=torch.bfloat16, memory_format=torch.contiguous_format
            )
        self.write(name, key, kept, value)
        return kept

    def __contains__(self, which: Key) -> bool:
        """Whether a state is kept in another form than a rule gets."""
        return which in self._specs

    def of(self, name: str) -> Sequence[str]:
        """Those states of a parameter that are."""
        return self._of.get(name, ())

    def is_codes(self, name: str, key: str) -> bool:
        """Whether what is kept says nothing without its scales."""
        return (name, key) in self._scales

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What there is beside what is kept: scales."""
        return tuple(self._scales.values())

    def read(self, name: str, key: str, kept: Tensor) -> Tensor:
        """What a rule gets for ``kept``: float32, new memory, the same shape."""
        if (scales := self._scales.get((name, key))) is None:
            return kept.float()
        return of_codes(kept.view(-1), scales, signed=self._specs[name, key].signed).view_as(kept)

    def write(
        self, name: str, key: str, kept: Tensor, value: Tensor, step: int | None = None
    ) -> None:
        """Write ``value`` as it is ``kept``.

        Args:
            step: the number of the update that has made it; None for what none has, and is rounded
                to the nearest.
        """
        if (scales := self._scales.get((name, key))) is not None:
            flat = value.to(kept.device).reshape(-1).float()
            to_codes_(kept.view(-1), scales, flat, signed=self._specs[name, key].signed)
        elif step is not None and (drawn := self._by_chance.get((name, key))) is not None:
            saved_as, first = drawn
            round_by_chance_(
                kept.view(-1), value.reshape(-1), chance_of(self._seed, step, saved_as, key), first
            )
        else:
            kept.copy_(value)
