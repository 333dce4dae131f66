"""Pieces of parameters in host memory, and how many buckets of them are worked on at a time."""

from __future__ import annotations

from collections.abc import Callable

from ds_layerwise.plan.layout.layout import Bucket, Layout

#: Bytes of the states that go with so many elements of a parameter, by its name.
StateBytes = Callable[[str, int], int]

#: Buckets that have their masters and states from the host on the device at a time: one that is
#: updated, and the next.
STAGING_SLOTS = 2


def pieces_on_host(
    layout: Layout, rank: int, ratio: float, *, state_bytes: StateBytes
) -> frozenset[str]:
    """Name the parameters whose piece on ``rank`` has its master and its states in host memory.

    Whole pieces, spread evenly over the buckets, so that one that is on the device can be updated
    while another is on its way. Of the bytes of all masters and states on ``rank``, they are at
    least the fraction ``ratio``, and less than one piece more. A float32 parameter is its own
    master, which stays on the device: of it only states count.

    Args:
        ratio: from 0, nothing, to 1, everything.
        state_bytes: as in :func:`memory_bytes`.
    """
    chosen = set()
    seen = taken = 0
    for bucket in layout.buckets:
        for piece in bucket.pieces(rank):
            # Of its master, where that is not the parameter, and of its states.
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
