"""The largest attention logit of each head among the unmasked ones, without building the whole
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.errors import StepError

#: The number of logits in memory at a time.
_AT_A_TIME = 1 << 24

#: A mask value below this hides a logit. Models use -1e4 or the lowest number of a dtype.
_HIDDEN = -5e3

#: A function that returns which logits of the rows [first, last) count: a bool tensor that
#: broadcasts to (batch, heads, rows, keys).
Counts = Callable[[int, int], Tensor]


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, *, scaling: float, counts: Counts) -> Tensor:
    """Return the largest of ``scaling * query @ key.T`` among the logits that count, by query head:
    (heads,), float32; -inf if none counts.

    Products are in the dtype of ``query``; in bfloat16, a logit has three significant digits.

    Args:
        query: (batch, heads, length, width).
        key: (batch, key heads, keys, width); consecutive query heads share one key head.
    """
    batch, heads, length, _ = query.shape
    _, kv_heads, keys, _ = key.shape
    largest = torch.full((heads,), -math.inf, dtype=torch.float32, device=query.device)
    turned = key.to(query.dtype).transpose(-1, -2)
    rows = max(1, _AT_A_TIME // (batch * heads * keys))
    with torch.autocast(query.device.type, enabled=False):
        for first in range(0, length, rows):
            some = query[:, :, first : first + rows] * scaling
            logits = some.reshape(batch, kv_heads, -1, some.shape[-1]) @ turned
            logits = logits.view(batch, heads, -1, keys)
            allowed = counts(first, first + some.shape[2])
            logits = logits.masked_fill(~allowed, -math.inf)
            largest = torch.maximum(largest, logits.amax((0, 2, 3)).float())
    return largest


def is_measured(implementation: str) -> bool:
    """Tell whether logits can be measured in an implementation of transformers."""
    return implementation == "sdpa" or "flash" in implementation


def counts_for(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Any,
    kwargs: Mapping[str, Any],
) -> Counts:
    """Return which logits count in one of transformers' attention implementations, given its
    arguments.

    Raises:
        StepError: the mask is of another kind than those of transformers.
    """
    length = query.shape[2]
    keys = key.shape[2]
    flash = "flash" in implementation
    if not flash and isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.dtype != torch.bool:
            mask = mask > _HIDDEN
        by_row = mask[..., :keys].expand(-1, -1, length, -1)
        return lambda first, last: by_row[:, :, first:last]
    if mask is not None and not (flash and isinstance(mask, Tensor) and mask.dim() == 2):
        raise StepError(
            f"the attention logits of {type(module).__name__} cannot be measured in implementation "
            f"{implementation!r} with a mask of {type(mask).__name__}; pass 2-D masks to flash "
            "attention and 4-D ones to 'sdpa', as transformers does, or leave "
            "layerwise.log_max_attention_logit and layerwise.qk_clip out"
        )
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    sequences = None
    # Row i is at key i + shift: the implicit mask of "sdpa" starts at the first key, and in flash
    # attention the last row belongs to the last key.
    shift = 0
    window = keys + length
    if flash:
        shift = keys - length
        window = kwargs.get("sliding_window") or window
        sequences = _sequences(length, keys, query.device, kwargs)
    elif length == 1:
        causal = False

    def counts(first: int, last: int) -> Tensor:
        places = torch.arange(keys, device=key.device)
        away = torch.arange(first + shift, last + shift, device=key.device)[:, None] - places
        allowed = away.abs() < window
        if causal:
            allowed &= away >= 0
        if sequences is not None:
            of_query, of_key = sequences
            allowed &= of_query[first:last, None] == of_key
        if mask is not None:
            real = mask[:, -keys:].bool()
            rows = real[:, shift:][:, first:last]
            allowed = allowed & (rows[:, :, None] & real[:, None, :])[:, None]
        return allowed

    return counts


def _sequences(
    length: int, keys: int, device: torch.device, kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Return the sequence number of each query and of each key; None if there is a single
    sequence.
    """
    numbers = []
    for name, count in (("cu_seq_lens_q", length), ("cu_seq_lens_k", keys)):
        ends = kwargs.get(name)
        if isinstance(ends, Tensor):
            places = torch.arange(count, device=device, dtype=ends.dtype)
            numbers.append(torch.searchsorted(ends.to(device).contiguous(), places, right=True))
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or not positions.shape == (1, length) == (1, keys):
        return None
    # As in transformers: sequences are packed if positions ever go back, and each sequence starts
    # at 0.
    begins = (positions[0] == 0).long().cumsum(0).to(device)
    number = begins * (torch.diff(positions[0]) < 0).any().to(device)
    return number, number
