"""The forms in which states are stored between updates. A form opens to the tensor that a rule
updates, and closes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_layerwise.optimizers.dtypes import (
    chance_of,
    of_codes,
    round_by_chance_,
    scales_of,
    to_codes_,
)
from ds_layerwise.optimizers.recipe import StateSpec


class Form:
    """A tensor that rules update as it is stored."""

    fixed = True
    """True if rules always find it in one place."""
    is_live = True
    """True if :meth:`read` returns the stored memory; False if that means nothing by itself."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        """The stored form, on the device or the host."""
        self.opened = memory
        """The tensor that rules update."""

    def move(self, memory: Tensor) -> None:
        """Store it in other ``memory``, to which it has been copied."""
        self.memory = self.opened = memory
        self.fixed = False

    def open(self, here: Tensor) -> None:
        """Begin an update. The stored form is in ``here``, which is its memory or a copy on the
        device.
        """
        self.opened = here

    def close(self, step: int) -> None:
        """Store :attr:`opened` where it was opened, after the update number ``step`` of the run."""

    def forget(self) -> None:
        """End an update, also one that has failed."""
        self.opened = self.memory

    def read(self) -> Tensor:
        """Return the stored memory, or a float32 copy if that means nothing by itself."""
        return self.memory

    def write(self, value: Tensor) -> None:
        """Store ``value``, of as many elements, rounded to nearest."""
        self.memory.copy_(value.view_as(self.memory))

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All memory of the stored form."""
        return (self.memory,)


class Chance(NamedTuple):
    """The random numbers of a state that is rounded by chance."""

    seed: int
    saved_as: str
    """The name of its parameter in a checkpoint."""
    key: str
    first: int
    """The number of its first element in the parameter."""


class InBfloat16(Form):
    """A float32 state that is stored in bfloat16.

    Args:
        value: the initial state.
        chance: the numbers for stochastic rounding of updates; None to round to nearest.
    """

    fixed = False

    def __init__(self, value: Tensor, chance: Chance | None) -> None:
        super().__init__(_zeros(value, torch.bfloat16))
        self._chance = chance
        self.write(value)

    def open(self, here: Tensor) -> None:
        """Make a float32 copy."""
        self._here = here
        self.opened = here.float()

    def close(self, step: int) -> None:
        """Round the state."""
        if self._chance is None:
            self._here.copy_(self.opened)
        else:
            seed, saved_as, key, first = self._chance
            chance = chance_of(seed, step, saved_as, key)
            round_by_chance_(self._here.view(-1), self.opened.reshape(-1), chance, first)


class In8Bits(Form):
    """A float32 state that is stored as 8-bit codes, with a scale for each block of them.

    Args:
        value: the initial state.
        signed: True if the state may have negative values.
    """

    fixed = is_live = False

    def __init__(self, value: Tensor, *, signed: bool) -> None:
        super().__init__(_zeros(value, torch.uint8))
        self._scales = scales_of(value.numel(), value.device)
        self._signed = signed
        self.write(value)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The codes and the scales."""
        return self.memory, self._scales

    def open(self, here: Tensor) -> None:
        """Decode it to float32."""
        self._here = here
        self.opened = self._decoded(here)

    def close(self, step: int) -> None:
        """Encode the state."""
        self._encode(self._here, self.opened)

    def read(self) -> Tensor:
        """Return the state as float32, in new memory."""
        return self._decoded(self.memory)

    def write(self, value: Tensor) -> None:
        """Store ``value``."""
        self._encode(self.memory, value.to(self.memory.device))

    def _decoded(self, codes: Tensor) -> Tensor:
        return of_codes(codes.view(-1), self._scales, signed=self._signed).view_as(codes)

    def _encode(self, codes: Tensor, value: Tensor) -> None:
        to_codes_(codes.view(-1), self._scales, value.reshape(-1).float(), signed=self._signed)


def form_of(spec: StateSpec, value: Tensor, chance: Chance | None) -> Form:
    """Return the form of ``spec`` that stores the initial state ``value``."""
    if spec.kept_as in (None, spec.dtype):
        return Form(value)
    if spec.kept_as == "8bit":
        return In8Bits(value, signed=spec.signed)
    return InBfloat16(value, chance)


def _zeros(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(value, dtype=dtype, memory_format=torch.contiguous_format)
