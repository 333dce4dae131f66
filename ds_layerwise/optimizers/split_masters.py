"""Float32 masters stored as 17 bits beside their bfloat16 weights: the bits that the weights lack,
and a mark that shows whether the weights have changed.

A master is its weight with 16 zero bits appended, plus a remainder from -2^15 to 2^15, both as
32-bit integers: weights are rounded to nearest, ties to even. That is one remainder more than 16
bits can hold, so -2^15 and 2^15 share a code. One more bit tells them apart; it is 1 for about one
master in 2^17.

Note: one number for 64 masters
    The 64 bits of a block of masters are combined (exclusive or) with a 64-bit hash of its weights.
    If the weights are unchanged, a second exclusive or removes the hash and leaves the bits, and
    only bits of masters with the shared code may be 1. If any other bit is 1, a weight of the block
    was written.

Reference: the remainders of Transformer Engine's FusedAdam (``store_param_remainders``). It rounds
ties away from zero, so its weights differ from those of a run with float32 masters, and it does not
notice written weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_layerwise.optimizers.base.dtypes import BLOCK

#: The number of masters per operation, which takes about 40 bytes of memory for each.
_AT_A_TIME = 1 << 20

_TIE = 1 << 15


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
    """Set ``masters`` to those that :func:`split_` got.

    If a weight of a block has been written since, all masters of the block are set to the weights.

    Returns:
        0-d bool on the device of ``masters``: True if there was such a block. The host does not
        wait.
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
