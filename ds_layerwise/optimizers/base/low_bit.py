"""States that are stored in fewer bits than float32 between updates: their settings and formats,
bfloat16, optionally with stochastic rounding, and 8-bit codes. Rules get them as float32.

The random numbers are a hash of the value's place and step, so they are the same for any number of
ranks and after a resume, and do not use torch's generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.dtypes import SCALED, StateDtype
from ds_layerwise.optimizers.base.recipe import Recipe

#: The largest fraction of itself that a low-bit average may keep in a step, so that 8 bits of
#: precision can represent its changes: a new value that differs by a quarter of the average then
#: moves it by half of the resolution of bfloat16.
MOST_KEPT = 1 - 2**-6

#: The number of elements per operation, which takes about 60 bytes of memory for each.
_AT_A_TIME = 1 << 20


class KeptStates(Recipe):
    """A recipe with a field for each state that may be stored in fewer bits."""

    stochastic_rounding: bool = False
    """Use stochastic rounding for bfloat16 states, so that small changes add up."""

    def check(self, device: torch.device | None) -> None:
        """Refuse "8bit" without torchao.

        Raises:
            ConfigError: names the setting.
        """
        if "8bit" in self.low_bit_dtypes().values():
            torchao_maps()


class KeptMomentum(KeptStates):
    """A recipe with a ``momentum_buffer``."""

    momentum_dtype: StateDtype = "float32"
    """The dtype of the momentum between updates."""


class KeptAverage(KeptStates):
    """A recipe with an ``exp_avg``."""

    exp_avg_dtype: StateDtype = "float32"
    """The dtype of the average of gradients."""


class KeptMoments(KeptAverage):
    """A recipe with an ``exp_avg`` and an ``exp_avg_sq``."""

    exp_avg_sq_dtype: StateDtype = "float32"
    """The dtype of the average of squared gradients."""


def chance_of(*what: object) -> int:
    """Return a 64-bit seed for ``what``, the same in every process."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def round_by_chance_(
    into: Tensor,
    values: Tensor,
    chance: int,
    first: int,
) -> None:
    """Round each value to one of its two bfloat16 neighbours, so that the mean over all seeds is
    the value.

    Values that are not finite are rounded as usual.

    Args:
        into: 1-D bfloat16, written.
        values: float32, of the same length.
        chance: see :func:`chance_of`.
        first: the number of the first element in its parameter; each element has a random number of
            its own.
    """
    for start in range(0, values.numel(), _AT_A_TIME):
        some = values[start : start + _AT_A_TIME]
        drawn = torch.arange(first + start, first + start + some.numel(), device=some.device)
        # The finaliser of splitmix64; shifts keep the sign here.
        drawn.mul_(-7046029254386353131).add_(chance)
        drawn.bitwise_xor_(drawn >> 30).mul_(-4658895280553007687)
        drawn.bitwise_xor_(drawn >> 27).mul_(-7723592293110705685)
        drawn = drawn >> 48 & 0xFFFF
        bits = (some.view(torch.int32) + drawn.to(torch.int32)) >> 16
        plain = some.to(torch.bfloat16).view(torch.int16)
        place = into[start : start + _AT_A_TIME].view(torch.int16)
        place.copy_(torch.where(some.isfinite(), bits.to(torch.int16), plain))


def scales_of(numel: int, device: torch.device) -> Tensor:
    """Return the scales of ``numel`` codes, for a state of zeros."""
    return torch.zeros(-(-numel // SCALED), dtype=torch.float32, device=device)


def to_codes_(
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    *,
    signed: bool,
) -> None:
    """Write ``values`` as 8-bit codes of torchao's dynamic map, each block of 256 divided by its
    largest value.

    Encoding the result of :func:`of_codes` gives the same codes. If no value is negative, values
    above 0 stay above 0: a second moment of 0 beside a non-zero first moment would divide by eps.

    Args:
        codes: 1-D uint8, written.
        scales: float32, one per 256 codes, written.
        values: float32, as many as codes. A value that is not finite makes its block NaN.
    """
    maps = torchao_maps()
    levels = _levels(signed, values.device)
    for run, of in _runs(values.numel()):
        some = values[run]
        blocks = _padded(some).view(-1, SCALED)
        largest = torch.linalg.vector_norm(blocks, float("inf"), dim=-1)
        scales[of].copy_(torch.where(largest.isfinite(), largest, torch.nan))
        divisors = torch.where(largest > 0, largest, 1).unsqueeze(-1)
        of_one = (blocks / divisors).view(-1)[: some.numel()]
        found = maps.quantize_8bit_with_qmap(of_one, levels)
        if not signed:
            found = torch.where((some > 0) & (found == 0), 1, found)
        codes[run].copy_(found)


def of_codes(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the values that :func:`to_codes_` has stored, 1-D float32, in new memory."""
    maps = torchao_maps()
    levels = _levels(signed, codes.device)
    found = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    for run, of in _runs(codes.numel()):
        some = codes[run]
        values = maps.dequant_with_qmap(_padded(some), levels, scales[of])
        found[run].copy_(values.view(-1)[: some.numel()])
    return found


def _runs(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the values to process at a time, with those of their scales."""
    for start in range(0, numel, _AT_A_TIME):
        stop = start + _AT_A_TIME
        yield slice(start, stop), slice(start // SCALED, stop // SCALED)


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % SCALED))


@lru_cache(maxsize=None)
def _levels(signed: bool, device: torch.device) -> Tensor:
    """Return the values of the codes relative to the scale of their block, ascending.

    They are torchao's, except that the lowest value of the signed map is -1 instead of -0.993. So
    the largest value of a block is exact with either sign, and decoding and encoding gives the same
    codes.
    """
    found = torchao_maps().create_dynamic_map(signed=signed)
    levels = torch.tensor(found, dtype=torch.float32, device="cpu")
    if signed:
        levels[0] = -1.0
    return levels.to(device)


@lru_cache(maxsize=None)
def torchao_maps() -> Any:
    """Return torchao's functions for 8-bit maps.

    Raises:
        ConfigError: it is not installed, or lacks them.
    """
    try:
        from torchao.optim import quant_utils

        for name in ("create_dynamic_map", "quantize_8bit_with_qmap", "dequant_with_qmap"):
            getattr(quant_utils, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"states in '8bit' need torchao ({error}): pip install 'torchao>=0.18', or store them "
            "in 'bfloat16'"
        ) from error
    return quant_utils
