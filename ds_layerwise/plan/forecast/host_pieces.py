"""The pieces of parameters in host memory, and the number of buckets that are on the device at a
time.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_layerwise.plan.layout.layout import Bucket, Layout

#: A function that returns the bytes of the states for a number of elements of a parameter, given by
#: name.
StateBytes = Callable[[str, int], int]

#: The number of buckets whose masters and states are copied from the host to the device at a time:
#: the one that is updated, and the next.
STAGING_SLOTS = 2


def pieces_on_host(
    layout: Layout, rank: int, ratio: float, *, state_bytes: StateBytes
) -> frozenset[str]:
    """Return the parameters whose piece on ``rank`` has its master and states in host memory.

    Pieces move as a whole. They are spread evenly over the buckets, so that one bucket can be
    updated while another is copied. They have at least the fraction ``ratio`` of the bytes of all
    masters and states on ``rank``, and exceed it by less than one piece. A float32 parameter is its
    own master, which stays on the device, so only its states count.

    Args:
        ratio: from 0, nothing, to 1, everything.
        state_bytes: as in :func:`memory_bytes`.
    """
    chosen = set()
    seen = taken = 0
    for bucket in layout.buckets:
        for piece in bucket.pieces(rank):
            # The bytes of its master, unless the parameter is its own, and of its states.
            nbytes = master_bytes(bucket) * piece.numel + state_bytes(piece.name, piece.numel)
            seen += nbytes
            if nbytes and taken < ratio * seen:
                taken += nbytes
                chosen.add(piece.name)
    return frozenset(chosen)


def master_bytes(bucket: Bucket) -> int:
    """Return the bytes of the master of one element; 0 if the parameter is its own master."""
    if bucket.dtype == "float32":
        return 0
    return 4
