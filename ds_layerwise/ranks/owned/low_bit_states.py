"""The states of one rank that have 8 or 16 bits between updates and are float32 during updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.base.low_bit import (
    chance_of,
    of_codes,
    round_by_chance_,
    scales_of,
    to_codes_,
)
from ds_layerwise.optimizers.base.recipe import StateSpec


class LowBitStates:
    """The states of this rank that are stored in fewer bits than their rules use.

    Args:
        seed: the seed of stochastic rounding.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._signed: dict[tuple[str, str], bool] = {}
        self._keys: dict[str, list[str]] = {}
        self._by_chance: dict[tuple[str, str], tuple[str, int]] = {}
        self._scales: dict[tuple[str, str], Tensor] = {}

    def keep(
        self,
        name: str,
        key: str,
        spec: StateSpec,
        value: Tensor,
        *,
        by_chance: tuple[str, int] | None,
    ) -> Tensor:
        """Return the initial state ``value`` in its stored form, of the same shape.

        Args:
            by_chance: for stochastic rounding, the parameter's name in a checkpoint and the offset
                of this rank's first element in it; None to round to nearest.
        """
        if spec.kept_as in (None, spec.dtype):
            return value
        self._signed[name, key] = spec.signed
        self._keys.setdefault(name, []).append(key)
        dtype = torch.bfloat16
        if spec.kept_as == "8bit":
            dtype = torch.uint8
            self._scales[name, key] = scales_of(value.numel(), value.device)
        elif by_chance is not None:
            self._by_chance[name, key] = by_chance
        kept = torch.zeros_like(value, dtype=dtype, memory_format=torch.contiguous_format)
        self.write(name, key, kept, value)
        return kept

    def __contains__(self, which: tuple[str, str]) -> bool:
        """Tell whether a state, given by parameter and name, is stored in fewer bits than its rule
        uses.
        """
        return which in self._signed

    def of(self, name: str) -> Sequence[str]:
        """Return the names of the states of a parameter that are stored in fewer bits."""
        return self._keys.get(name, ())

    def is_codes(self, name: str, key: str) -> bool:
        """Tell whether a state is stored as codes, which mean nothing without their scales."""
        return (name, key) in self._scales

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The memory of the scales."""
        return tuple(self._scales.values())

    def read(self, name: str, key: str, kept: Tensor) -> Tensor:
        """Return the stored state ``kept`` as float32, in new memory of the same shape."""
        if not self.is_codes(name, key):
            return kept.float()
        scales = self._scales[name, key]
        signed = self._signed[name, key]
        return of_codes(kept.view(-1), scales, signed=signed).view_as(kept)

    def write(
        self, name: str, key: str, kept: Tensor, value: Tensor, step: int | None = None
    ) -> None:
        """Store ``value`` in ``kept``.

        Args:
            step: the number of the update that made ``value``; None to round to nearest.
        """
        if self.is_codes(name, key):
            flat = value.to(kept.device).reshape(-1).float()
            to_codes_(kept.view(-1), self._scales[name, key], flat, signed=self._signed[name, key])
        elif step is not None and (name, key) in self._by_chance:
            saved_as, first = self._by_chance[name, key]
            chance = chance_of(self._seed, step, saved_as, key)
            round_by_chance_(kept.view(-1), value.reshape(-1), chance, first)
        else:
            kept.copy_(value)
