"""The methods to sum over ranks: where sums are made, in which dtype, and how many rows at a time.

Note: the two methods
    ``native`` is the backend's reduce-scatter, or grouped reduces: rings. ``ordered`` sums the data
    of an all-to-all in float32 and in rank order. If nodes have several ranks, it sums inside each
    node first, and then the sums of nodes between the ranks with the same place in each; these are
    sent in the dtype of the gradients. With either method, parameters go back by the backend's
    all-gathers. Reductions run one after the other, as on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

#: The methods to sum; see the note.
Reduction = Literal["native", "ordered"]

#: The bytes of a sum at its owner: float32.
SUM_BYTES = 4

#: The number of rows that one kernel on a device sums without splitting them. With more rows the
#: kernel splits them depending on their length, and the order of summation would depend on the
#: bucket size.
ROWS_AT_ONCE = 16


def sum_dtype(wire: str, reduction: Reduction, stage: int) -> str:
    """Return the dtype of sums in cuts, and on the wire, for gradients that are sent in ``wire``.

    The backend makes sums in that dtype, and owners divide them in float32. At stage 2 the sums of
    further micro-batches are added in the cut, and sums in rank order are float32 from the start.
    """
    if reduction == "native" and stage == 1:
        return wire
    return "float32"


def partial_sums(rows: int) -> Iterator[int]:
    """Yield the number of partial sums that a device makes of ``rows`` rows, then of those, and so
    on.

    Each is over :data:`ROWS_AT_ONCE` rows, the last over fewer. So the number of kernels grows with
    the logarithm of the ranks.
    """
    while rows > ROWS_AT_ONCE:
        rows = -(-rows // ROWS_AT_ONCE)
        yield rows


def most_partial_sums(ranks: int, *, per_node: int = 1) -> int:
    """Return the largest number of partial sums, each as long as a rank's part, that a device has
    at a time.

    Args:
        per_node: the ranks of a node that first sum inside it, for the ranks in their place on
            other nodes; 1 for no first level.
    """
    num_nodes = ranks // per_node
    return max(num_nodes * sum(partial_sums(per_node)), sum(partial_sums(num_nodes)))


def reduction_of_run(setting: Reduction | Literal["auto"], *, on_host: bool) -> Reduction:
    """Return the method of sums of a run; "auto" is the backend's method, unless the data is in
    host memory.
    """
    if setting != "auto":
        return setting
    return "ordered" if on_host else "native"
