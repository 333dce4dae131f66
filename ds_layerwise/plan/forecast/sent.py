"""The bytes that each rank sends in one optimizer step.

Note: the elements on the wire, and how they are counted
    A rank counts the elements that it sends. To reduce a bucket, it sends every other rank that
    rank's shard: the bucket without its own shard. To gather the bucket, it sends its own shard to
    each of the others. Of R ranks, each so sends (R - 1)/R of the buffer, twice, and receives as
    much. For a bucket that travels in cuts, a rank also sends the elements of its cut that belong
    to others, as sums, and the elements of its own shard in the cuts of others, as parameters.
    Rings, trees and levels of nodes move the same number of elements per rank, on other paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ds_layerwise.plan.layout.layout import Ints, Layout
from ds_layerwise.plan.layout.transfer_plan import begun_backwards
from ds_layerwise.plan.layout.transport import Reduction, itemsize, nbytes_in, sum_dtype


class Sent(NamedTuple):
    """The bytes that each rank sends, by rank."""

    gradients: tuple[int, ...]
    """The bytes in a step at stage 1, in a backward pass at stage 2; at stage 3 in a forward and a
    backward pass, with the parameters that DeepSpeed gathers for them.
    """
    parameters: tuple[int, ...]
    """The bytes in a step."""


def totals(sent: Mapping[str, Sent]) -> Ints:
    """Return the bytes that each rank sends, of both kinds and all dtypes."""
    total: Ints = np.array(list(sent.values())).sum((0, 1))
    return total


def sent_bytes(
    layout: Layout,
    *,
    wires: Sequence[str],
    reduction: Reduction,
    stage: int,
    experts_alone: bool = False,
) -> dict[str, Sent]:
    """Count the bytes that each rank sends, by dtype of the parameters; see the note.

    Args:
        wires: the dtype in which gradients are sent, by bucket.
        reduction: the method of sums; see :mod:`.plan.layout.transport`.
        stage: the ZeRO stage.
        experts_alone: True to leave out what all ranks of the layout hold alike.
    """
    sent = {}
    for dtype in layout.buffers:
        gradients = np.zeros(layout.world_size, np.int64)
        parameters = np.zeros(layout.world_size, np.int64)
        buckets = []
        for bucket, wire in zip(layout.buckets, wires, strict=True):
            if bucket.dtype != dtype or (experts_alone and bucket.ep_size == 1):
                continue
            buckets.append(bucket)
            to_others = (bucket.holders - 1) * bucket.cut_numel
            gradients += to_others * itemsize(wire)
            parameters += nbytes_in(bucket.sent_as(), to_others)
            if bucket.transport == "cuts":
                # Elements go from each rank's cut to their owners, and from each owner to the cuts
                # of others.
                sums = np.full(bucket.holders, bucket.cut_numel, np.int64)
                back = np.zeros(bucket.holders, np.int64)
                for owner, start, numel in bucket.filled():
                    cut = bucket.start + owner * bucket.cut_numel
                    stays = min(start + numel, cut + bucket.cut_numel) - max(start, cut)
                    sums[owner] -= max(stays, 0)
                    back[owner] += numel - max(stays, 0)
                sums = np.repeat(sums, bucket.ep_size)
                gradients += sums * itemsize(sum_dtype(wire, reduction, stage))
                parameters += nbytes_in(bucket.sent_as(), np.repeat(back, bucket.ep_size))
        if stage == 3:
            # DeepSpeed gathers all cuts in the forward pass, and once more in the backward pass:
            # they go to the other ranks that hold the same parameters.
            for bucket in buckets:
                cuts = sum(map(bucket.cut_of, bucket.slots)) * (bucket.holders - 1)
                gradients += 2 * cuts * itemsize(dtype)
            # A rank sends as the owner, to the cuts of the other ranks.
            parameters = np.zeros(layout.world_size, np.int64)
            for dealt in begun_backwards(buckets, by_param=True):
                nbytes = nbytes_in(dealt.dtype, dealt.row_sizes())
                parameters += np.repeat(nbytes, dealt.ep_size) * (dealt.holders - 1)
        sent[dtype] = Sent(tuple(gradients.tolist()), tuple(parameters.tolist()))
    return sent
