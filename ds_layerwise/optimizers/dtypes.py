"""The dtypes of masters and states, their bytes, and the formats in fewer bits than float32.

States are stored as bfloat16, optionally with stochastic rounding, or as 8-bit codes between
updates. Rules get them as float32. The random numbers are a hash of the value's place and step, so
they are the same for any number of ranks and after a resume, and do not use torch's generators.

Note: masters of 17 bits
    Beside bfloat16 weights, a float32 master is stored as the bits that its weight lacks, and a
    mark that shows whether the weight has changed. It is its weight with 16 zero bits appended,
    plus a remainder from -2^15 to 2^15, both as 32-bit integers: weights are rounded to nearest,
    ties to even. That is one remainder more than 16 bits can hold, so -2^15 and 2^15 share a code.
    One more bit tells them apart; it is 1 for about one master in 2^17.

    The 64 bits of a block of masters are combined (exclusive or) with a 64-bit hash of its weights.
    If the weights are unchanged, a second exclusive or removes the hash and leaves the bits, and
    only bits of masters with the shared code may be 1. If any other bit is 1, a weight of the block
    was written.

    Reference: the remainders of Transformer Engine's FusedAdam (``store_param_remainders``). It
    rounds ties away from zero, so its weights differ from those of a run with float32 masters, and
    it does not notice written weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError

#: The formats of masters.
MasterDtype = Literal["float32", "bfloat16+remainder"]

#: The formats of states with one element per element of the parameter.
StateDtype = Literal["float32", "bfloat16", "8bit"]

#: The number of masters that share one mark; see the note.
BLOCK = 64

#: The number of elements of an 8-bit state that share one scale.
SCALED = 256

#: The largest fraction of itself that a low-bit average may keep in a step, so that 8 bits of
#: precision can represent its changes: a new value that differs by a quarter of the average then
#: moves it by half of the resolution of bfloat16.
MOST_KEPT = 1 - 2**-6

#: The number of elements per operation, which takes about 60 bytes of memory for each.
_AT_A_TIME = 1 << 20

_TIE = 1 << 15

#: The bytes of one element, by torch's names of dtypes.
DTYPE_BYTES: dict[str, int] = {
    name: getattr(torch, name).itemsize
    for name in "float64 float32 bfloat16 float16 int64 int32 int16 int8 uint8 bool".split()
}


def state_bytes(numel: int, dtype: str) -> int:
    """Return the bytes of a state of ``numel`` elements."""
    if dtype == "8bit":
        return numel + 4 * -(-numel // SCALED)
    return numel * DTYPE_BYTES[dtype]


def master_bytes(numel: int, param_dtype: str, kept_as: MasterDtype) -> int:
    """Return the bytes of ``numel`` masters, a multiple of 64; 0 for float32 parameters."""
    if param_dtype == "float32":
        return 0
    if kept_as == "bfloat16+remainder" and param_dtype == "bfloat16":
        return 2 * numel + 8 * (numel // BLOCK)
    return 4 * numel


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
    for run, _ in _runs(values.numel()):
        some = values[run]
        start = first + run.start
        drawn = torch.arange(start, start + some.numel(), device=some.device)
        # The finaliser of splitmix64; shifts keep the sign here.
        drawn.mul_(-7046029254386353131).add_(chance)
        drawn.bitwise_xor_(drawn >> 30).mul_(-4658895280553007687)
        drawn.bitwise_xor_(drawn >> 27).mul_(-7723592293110705685)
        drawn = drawn >> 48 & 0xFFFF
        bits = (some.view(torch.int32) + drawn.to(torch.int32)) >> 16
        plain = some.to(torch.bfloat16).view(torch.int16)
        place = into[run].view(torch.int16)
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
    for run, of in _runs(values.numel(), SCALED):
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
    for run, of in _runs(codes.numel(), SCALED):
        some = codes[run]
        values = maps.dequant_with_qmap(_padded(some), levels, scales[of])
        found[run].copy_(values.view(-1)[: some.numel()])
    return found


def _runs(numel: int, block: int = 1) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the values to process at a time, with those of what each ``block`` of values
    shares. The last ones may reach beyond the end.
    """
    for start in range(0, numel, _AT_A_TIME):
        stop = start + _AT_A_TIME
        yield slice(start, stop), slice(start // block, stop // block)


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % SCALED))


@cache
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


@cache
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


def split_(
    masters: Tensor,
    values: Tensor,
    remainders: Tensor,
    marks: Tensor,
) -> None:
    """Store ``masters`` as weights, remainders and marks. :func:`merge_` restores them.

    For a NaN, only that it is a NaN is kept.

    Args:
        masters: 1-D float32, with a length that is a multiple of 64.
        values: bfloat16, of the same length, written.
        remainders: int16, of the same length, written.
        marks: int64, one per 64 masters, written.
    """
    for some, of in _runs(masters.numel(), BLOCK):
        values[some].copy_(masters[some])
        lacks = masters[some].view(torch.int32) - _upper(values[some])
        remainders[some].copy_(lacks)
        torch.bitwise_xor(_hash(values[some]), _packed(lacks == _TIE), out=marks[of])


def merge_(
    masters: Tensor,
    values: Tensor,
    remainders: Tensor,
    marks: Tensor,
) -> Tensor:
    """Set ``masters`` to those that :func:`split_` got.

    If a weight of a block has been written since, all masters of the block are set to the weights.

    Returns:
        0-d bool on the device of ``masters``: True if there was such a block. The host does not
        wait.
    """
    written = torch.zeros((), dtype=torch.bool, device=masters.device)
    for some, of in _runs(masters.numel(), BLOCK):
        lacks = remainders[some].to(torch.int32)
        left = marks[of] ^ _hash(values[some])
        foreign = (left & ~_packed(lacks == -_TIE)) != 0
        ties = (left.unsqueeze(-1) >> _places(left.device)) & 1
        lacks += ties.to(torch.int32).view(-1) << 16
        lacks.view(-1, BLOCK).masked_fill_(foreign.unsqueeze(-1), 0)
        upper = _upper(values[some])
        torch.add(upper, lacks, out=masters[some].view(torch.int32))
        written |= foreign.any()
    return written


def _upper(values: Tensor) -> Tensor:
    """Return the bits of bfloat16 as the upper bits of int32."""
    return values.view(torch.int16).to(torch.int32) << 16


def _places(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, device=device)


def _packed(bits: Tensor) -> Tensor:
    """Return an int64 for every 64 of ``bits``."""
    return (bits.view(-1, BLOCK).long() << _places(bits.device)).sum(-1)


def _hash(values: Tensor) -> Tensor:
    """Return a 64-bit hash of each block of 64 bfloat16, which also depends on the positions of
    values.
    """
    words = values.view(torch.int64).view(-1, BLOCK // 4)
    # An odd factor, so that nothing is lost: the golden ratio's bits, as in splitmix64.
    mixed = words * -7046029254386353131
    # Information in the highest bits must reach the others before words are summed.
    mixed = mixed ^ (mixed >> 32)
    weights = _places(values.device)[: BLOCK // 4] * 5871781006564002452 + 3935559000370003845
    return (mixed * (weights | 1)).sum(-1)
