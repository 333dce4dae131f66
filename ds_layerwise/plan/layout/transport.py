"""The transports of buckets, and the sums over ranks: where they are made, in which dtype, and how
many rows at a time.

Note: the two transports of whole parameters
    An ``even`` bucket has shards of one length, and the collectives of ZeRO-1 lead straight to the
    owners; shorter shards are padded, and the padding is sent, too. A bucket in ``cuts`` has shards
    of any length, back to back. It is cut evenly, as ZeRO-1 cuts it, and each way an all-to-all
    moves what a rank's cut has of other owners, about one R-th of the bucket for R ranks.

Note: the two methods to sum
    ``native`` is the backend's reduce-scatter. ``ordered`` sums the data of an all-to-all in
    float32 and in rank order. If several nodes have several ranks each, as many on each, it sums
    inside each node first, and then the sums of nodes between the ranks with the same place in
    each; these are sent in the dtype of the gradients. With either method, parameters go back by
    the backend's all-gathers. Reductions run one after the other, as on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from ds_layerwise.errors import LayoutError
from ds_layerwise.optimizers.dtypes import DTYPE_BYTES
from ds_layerwise.optimizers.mxfp8 import GROUP, GROUP_BYTES, MXFP8

#: The transports of a bucket to its owners and back; see the note and
#: :class:`.plan.layout.layout.Bucket`.
Transport = Literal["even", "cuts", "by_param"]

#: The methods to sum; see the note.
Reduction = Literal["native", "ordered"]

#: The number of buckets, or rounds of an exchange, that are pending at a time. It bounds the memory
#: for sent and received data.
MAX_PENDING = 2

#: The bytes of a sum at its owner: float32.
SUM_BYTES = 4

#: The number of rows that one kernel on a device sums without splitting them. With more rows the
#: kernel splits them depending on their length, and the order of summation would depend on the
#: bucket size.
ROWS_AT_ONCE = 16


def transport_of(numel: int, longest: int, holders: int) -> Transport:
    """Return the transport of a bucket of whole parameters that sends less; see the note.

    Args:
        numel: the number of elements of all shards, without padding.
        longest: that of the longest shard.
        holders: the number of shards.
    """
    padding = longest * holders - numel
    if padding <= numel // holders:
        return "even"
    return "cuts"


def padded(numel: int, alignment: int, holders: int = 1) -> int:
    """Return ``numel`` with the padding that makes it as many equal multiples of ``alignment`` as
    there are ``holders``.
    """
    return numel + -numel % (holders * alignment)


def itemsize(dtype: str) -> int:
    """Return the bytes of an element.

    Raises:
        LayoutError: the dtype is unknown.
    """
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"the size of {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def nbytes_in(form: str, numel: Any) -> Any:
    """Return the bytes of ``numel`` elements, an int or array, in a dtype, or as groups of MXFP8.

    Raises:
        LayoutError: the dtype is unknown.
    """
    if form == MXFP8:
        return numel // GROUP * GROUP_BYTES
    return numel * itemsize(form)


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
