"""MXFP8, a format of the OCP Microscaling specification 1.0, in which updated matrices are sent:
blocks of 32 consecutive elements in e4m3, each with one scale, a power of two in e8m0.

Blocks begin at the start of a parameter; a last one that is not full has zeros for the rest. Of
16 blocks, a group, first the elements are sent and then the scales, so that all that is sent
starts at a multiple of 16 bytes, and any range of whole groups is a range of bytes.

Note: rounding
    As in the specification's conversion, the scale is the largest power of two that is not larger
    than the largest magnitude, divided by 2^8, the largest power of two of e4m3. Elements are
    rounded to nearest, ties to even, and those that would exceed 448 become 448. The smallest
    scale, 2^-127, is also that of zeros. A block with an element that is not finite gets the scale
    NaN, which makes all of it NaN.

Note: weights are what they are sent as
    bfloat16 holds every decoded value, except fractions of its smallest number, 2^-133, to which
    those of blocks with scales below 2^-124 are rounded. The largest element of a block keeps its
    power of two. So weights that were encoded and decoded once do not change if that is repeated:
    owners keep them, and encode them when they send them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: The formats in which updated matrices are sent, beside their own dtype.
ParamWire = Literal["mxfp8"]

#: The name of the format.
MXFP8: ParamWire = "mxfp8"

#: The number of elements of a block, and of a group of blocks.
BLOCK = 32
GROUP = 16 * BLOCK

#: The bytes of a group.
GROUP_BYTES = GROUP + GROUP // BLOCK

#: The number of elements per operation, which takes about 15 bytes of memory for each.
_AT_A_TIME = 1 << 22

#: The largest number of e4m3, and the exponent of its largest power of two.
_LARGEST = 448.0
_EXPONENT = 8

#: The scale NaN, which is also the biased exponent of a float32 that is not finite.
_NAN = 255


def encoded_bytes(numel: int) -> int:
    """Return the bytes of ``numel`` elements from the start of a group on."""
    return -(-numel // GROUP) * GROUP_BYTES


def encode(values: Tensor) -> Tensor:
    """Return 1-D ``values``, float32 or bfloat16, as 1-D uint8, of :func:`encoded_bytes`."""
    return torch.cat(list(map(_encoded, torch.split(values, _AT_A_TIME)))).view(-1)


def decode_(values: Tensor, encoded: Tensor) -> None:
    """Write what :func:`encode` got into 1-D bfloat16 ``values``."""
    groups = torch.split(encoded.view(-1, GROUP_BYTES), _AT_A_TIME // GROUP)
    for place, some in zip(torch.split(values, _AT_A_TIME), groups, strict=True):
        place.copy_(_decoded(some)[: place.numel()])


def rounded(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Return 1-D ``values``, float32 or bfloat16, encoded and decoded: bfloat16 in new memory, or
    in ``out``.
    """
    found = torch.empty_like(values, dtype=torch.bfloat16) if out is None else out
    parts = (torch.split(each, _AT_A_TIME) for each in (found, values))
    for place, some in zip(*parts, strict=True):
        decode_(place, encode(some))
    return found


def any_of_block(marks: Tensor) -> Tensor:
    """Return 1-D bool ``marks``, true for all elements of a block if one is."""
    return _blocks(marks).any(-1).repeat_interleave(BLOCK)[: marks.numel()]


def _blocks(values: Tensor) -> Tensor:
    """Return the blocks of ``values``, with zeros up to a whole group."""
    return torch.nn.functional.pad(values, (0, -values.numel() % GROUP)).view(-1, BLOCK)


def _encoded(values: Tensor) -> Tensor:
    """Return the groups of ``values``, a row for each."""
    blocks = _blocks(values.float())
    exponents = blocks.abs().amax(-1).view(torch.int32) >> 23
    biased = (exponents - _EXPONENT).clamp_(min=0).masked_fill_(exponents == _NAN, _NAN)
    scales = biased.to(torch.uint8)
    divisors = scales.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
    # Not every torch makes 448 of what exceeds it.
    elements = (blocks / divisors).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    of_groups = elements.view(torch.uint8).view(-1, GROUP)
    return torch.cat([of_groups, scales.view(-1, GROUP // BLOCK)], 1)


def _decoded(groups: Tensor) -> Tensor:
    """Return what :func:`_encoded` got, 1-D bfloat16 up to a whole group."""
    elements = groups[:, :GROUP].view(torch.float8_e4m3fn).to(torch.bfloat16)
    scales = groups[:, GROUP:].view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return elements.reshape(-1, BLOCK).mul_(scales.reshape(-1, 1)).view(-1)
