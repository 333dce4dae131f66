"""Float32 masters in 17 bits beside their bfloat16 weights: what these lack, and what tells that
they are the same yet.

A master is its weight with 16 zero bits after it, plus a remainder from -2^15 to 2^15, both as
whole numbers of 32 bits: weights are rounded to the nearest, and where two are as near, to the even
one. That is one remainder more than 16 bits have, so -2^15 and 2^15 share a code. Which of the two
it is takes a bit, which is 1 for about every 2^17th master.

Note: one number for 64 masters
    The 64 bits of a block of masters are kept mixed (exclusive or) with a 64-bit hash of its
    weights. Where the weights are what they were, the hash takes itself away and leaves the bits,
    of which only those may be 1 that share a code. Where anything else is left, somebody has
    written weights of the block.

Reference: the remainders of Transformer Engine's FusedAdam (``store_param_remainders``), which
rounds such ties away from zero instead, so that its weights are not those of a run with float32
masters, and does not notice weights that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_layerwise.recipes.base.dtypes import BLOCK

#: Masters that are worked on at a time: the memory that it takes is some 40 bytes for each.
_AT_A_TIME = 1 << 20

_TIE = 1 << 15


def split_(
    masters: Tensor,
    values: Tensor,
    remainders: Tensor,
    marks: Tensor,
) -> None:
    """Write ``masters`` as weights, remainders and marks, of which :func:`merge_` makes them again.

    Of what is not a number only that is kept.

    Args:
        masters: 1-D float32, a multiple of 64 of them.
        values: as many bfloat16, written.
        remainders: as many int16, written.
        marks: int64, one for 64 of them, written.
    """
    for start in range(0, masters.numel(), _AT_A_TIME):
        some = slice(start, start + _AT_A_TIME)
        values[some].copy_(masters[some])
        lacks = masters[some].view(torch.int32) - _upper(values[some])
        remainders[some].copy_(lacks)
        of = slice(start // BLOCK, (start + lacks.numel()) // BLOCK)
        torch.bitwise_xor(_hash(values[some]), _packed(lacks == _TIE), out=marks[of])


def merge_(
    masters: Tensor,
    values: Tensor,
    remainders: Tensor,
    marks: Tensor,
) -> Tensor:
    """Set ``masters`` to what :func:`split_` got.

    All masters of a block of which a weight has been written since are those weights.

    Returns:
        0-d bool on the device of ``masters``: whether there were any such. Nobody waits for the
        device.
    """
    written = torch.zeros((), dtype=torch.bool, device=masters.device)
    for start in range(0, masters.numel(), _AT_A_TIME):
        some = slice(start, start + _AT_A_TIME)
        lacks = remainders[some].to(torch.int32)
        of = slice(start // BLOCK, (start + lacks.numel()) // BLOCK)
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
    """The bits of bfloat16 as the upper ones of int32."""
    return values.view(torch.int16).to(torch.int32) << 16


def _places(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, device=device)


def _packed(bits: Tensor) -> Tensor:
    """Return an int64 for every 64 of ``bits``."""
    return (bits.view(-1, BLOCK).long() << _places(bits.device)).sum(-1)


def _hash(values: Tensor) -> Tensor:
    """A number of 64 bits for each block of 64 bfloat16, also of where in it a value stands."""
    words = values.view(torch.int64).view(-1, BLOCK // 4)
    # Odd, so that nothing is lost: the golden ratio's bits, as in splitmix64.
    mixed = words * -7046029254386353131
    # What is in the highest bits alone has to reach others before words are added up.
    mixed = mixed ^ (mixed >> 32)
    weights = _places(values.device)[: BLOCK // 4] * 5871781006564002452 + 3935559000370003845
    return (mixed * (weights | 1)).sum(-1)
