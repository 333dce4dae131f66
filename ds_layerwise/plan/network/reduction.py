"""The ways to make sums over ranks: by whom, in which dtype, and how many at a time.

Note: the two ways
    ``native`` is the backend's reduce-scatter, or grouped reduces: rings. ``ordered`` adds up what
    an all-to-all brings, in float32 and in rank order; where nodes have several ranks, inside each
    node first, and then the sums of nodes between the ranks with the same place in each, on their
    way in the dtype that gradients travel in. However sums are made, parameters return by the
    backend's all-gathers. One reduction follows the other, as on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

#: The ways to make sums; see the note.
Reduction = Literal["native", "ordered"]

#: Bytes of a sum at its owner: float32.
SUM_BYTES = 4

#: So many rows one kernel adds up on a device without sharing them out, which it would do otherwise
#: by how long they are: the order in which an element is added up would depend on the size of its
#: bucket.
ROWS_AT_ONCE = 16


def sum_dtype(wire: str, reduction: Reduction, stage: int) -> str:
    """Return the dtype of sums in cuts, and on their way, of gradients that travel in ``wire``.

    The backend makes them in that dtype, and owners divide them in float32. At stage 2 those of
    further micro-batches are added to them in the cut, and sums in rank order are float32 to begin
    with.
    """
    if reduction == "native" and stage == 1:
        return wire
    return "float32"


def partial_sums(rows: int) -> Iterator[int]:
    """Yield how many partial sums a device makes of ``rows`` rows, and of those again.

    Each is of :data:`ROWS_AT_ONCE`, the last of fewer; so the kernels of a sum grow with the
    logarithm of the ranks.
    """
    while rows > ROWS_AT_ONCE:
        rows = -(-rows // ROWS_AT_ONCE)
        yield rows


def most_partial_sums(ranks: int, *, per_node: int = 1) -> int:
    """Return how many partial sums, as long as a rank's part, a device has at a time.

    Args:
        per_node: ranks that add up inside a node first, for those in their place on each of the
            others; 1 for none.
    """
    num_nodes = ranks // per_node
    return max(num_nodes * sum(partial_sums(per_node)), sum(partial_sums(num_nodes)))


def reduction_of_run(setting: Reduction | Literal["auto"], *, on_host: bool) -> Reduction:
    """Return how a run makes sums; "auto": the backend's way where nothing lies in host memory."""
    if setting == "auto":
        if on_host:
            return "ordered"
        return "native"
    return setting
