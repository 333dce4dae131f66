"""The times of collectives between all ranks, measured in the form that a step uses.

Every rank calls everything here at the same point and gets the same results: the number of
repetitions and the length of messages follow from times that all ranks have seen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.devices import fast_dtypes
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from ds_layerwise.plan.network.link_fit import Timing, Where
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.ranks.sync.bucket_transfers import Wire, average, gather_between_nodes, make_wires

#: The bytes of messages: a short one that shows only latency, then longer ones, up to the last size
#: or the last duration in seconds.
_SHORT = 2**10
_FIRST = 2**18
_GROWS = 4
_LONGEST = 2**28
_LONGEST_ON_HOST = 2**26
_LONG_ENOUGH_S = 0.2
#: A repetition consists of several collectives in a row, so that they take at least this long
#: together, and of at most this number.
_REPETITION_S = 0.02
_IN_A_ROW = 50
_REPETITIONS = 9
#: After this many seconds, messages become no longer than necessary.
_PATIENCE_S = 40.0

#: The number of rows that are summed, and the bytes of all of them, more than caches hold.
_ROWS = 4
_ROW_BYTES = 2**26
_ROW_BYTES_ON_HOST = 2**24
#: The matrix that is orthogonalised: one of a feed-forward layer, and a small one for a CPU.
_MATRIX = (4096, 14336)
_MATRIX_ON_HOST = (256, 1024)


class Shape(NamedTuple):
    """The number of nodes, and of ranks on each."""

    num_nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class Times:
    """The measurements, and the dtype of products."""

    timings: tuple[Timing, ...]
    memory_gb_s: float
    """The rate at which all ranks sum received data, in bytes read and written."""
    tflops: float
    """The rate of Newton-Schulz as in a step, with all ranks working at the same time."""
    products_in: str
    """The dtype of these products."""


def shape_of(where: list[int]) -> Shape:
    """Return the nodes of all ranks.

    Args:
        where: see :func:`.ranks.comm.nodes.node_of_each_rank`.

    Raises:
        LayerWiseError: nodes have different numbers of ranks, but plans only know equal ones.
    """
    counts = nodes.counts_on_nodes(range(len(where)), where)
    if len(set(counts)) > 1:
        raise LayerWiseError(
            f"the nodes have {', '.join(map(str, counts))} ranks, and links are of nodes with "
            "equally many; start as many on each"
        )
    return Shape(len(counts), counts[0])


def measure(where: list[int], device: torch.device) -> Times:
    """Measure for at most about a minute, on all ranks together.

    Args:
        where: see :func:`.ranks.comm.nodes.node_of_each_rank`.
        device: the device of this rank, from which its group sends.

    Raises:
        LayerWiseError: as in :func:`shape_of`.
    """
    shape = shape_of(where)
    clock = _Clock(device)
    wire = make_wires({1: None}, where, native=False, device=device)[1]
    wire.connect(device)
    timings = tuple(_all_timings(clock, wire, shape))
    tflops, products_in = _tflops(clock)
    return Times(timings, _memory_gb_s(clock), tflops, products_in)


class _Clock:
    """Measures the time that all ranks together take for an operation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._start = time.monotonic()
        self.on_host = device.type == "cpu"
        self._token = torch.zeros(1, dtype=torch.float32, device=device)

    def finish(self) -> None:
        if not self.on_host:
            get_accelerator().synchronize()

    def seconds(
        self, operation: Callable[[], object], *, in_a_row: int = 1, repetitions: int = 1
    ) -> float:
        """Return the median time of ``operation`` on the slowest rank."""
        taken = []
        for _ in range(repetitions):
            comm.sum_over_ranks(self._token, group=None)
            self.finish()
            start = time.perf_counter()
            for _ in range(in_a_row):
                operation()
            self.finish()
            taken.append((time.perf_counter() - start) / in_a_row)
        everyone = comm.gather_objects(taken, group=None)
        return float(statistics.median(map(max, zip(*everyone, strict=True))))

    def steady(self, operation: Callable[[], object]) -> float:
        """Return :meth:`seconds` of ``operation`` after a warm-up, with a suitable number of
        repetitions.
        """
        self.seconds(operation)
        once = max(self.seconds(operation), 1e-9)
        return self.seconds(
            operation,
            in_a_row=min(_IN_A_ROW, max(1, round(_REPETITION_S / once))),
            repetitions=_REPETITIONS if once < _LONG_ENOUGH_S else 2,
        )

    @property
    def is_late(self) -> bool:
        """True if the time of any rank is over. A collective."""
        return any(comm.gather_objects(time.monotonic() - self._start > _PATIENCE_S, group=None))


def _all_timings(clock: _Clock, wire: Wire, shape: Shape) -> Iterator[Timing]:
    num_nodes, per_node = shape
    # On one node, and with one rank on each, all ranks are one level.
    inside = wire.inside or wire.group
    across = wire.across or wire.group
    if per_node > 1:
        yield from _series(clock, "inside", per_node, inside, takes_part=True)
    if num_nodes > 1:
        yield from _series(clock, "alone", num_nodes, across, takes_part=wire.rank % per_node == 0)
    if per_node > 1 and num_nodes > 1:
        yield from _series(clock, "together", num_nodes, across, takes_part=True)
        yield _timing(
            clock, "all_to_all", "everywhere", wire.size, wire.group, _SHORT, takes_part=True
        )


def _series(
    clock: _Clock, where: Where, size: int, group: comm.Group, *, takes_part: bool
) -> Iterator[Timing]:
    """Measure a ring and an all-to-all with messages of increasing length."""
    longest = _LONGEST_ON_HOST if clock.on_host else _LONGEST
    for kind in ("ring", "all_to_all"):
        yield _timing(clock, kind, where, size, group, _SHORT, takes_part=takes_part)
        nbytes = _FIRST
        while nbytes <= longest:
            timing = _timing(clock, kind, where, size, group, nbytes, takes_part=takes_part)
            yield timing
            if timing.seconds > _LONG_ENOUGH_S or clock.is_late:
                break
            nbytes *= _GROWS


def _timing(
    clock: _Clock,
    kind: Any,
    where: Where,
    size: int,
    group: comm.Group,
    nbytes: int,
    *,
    takes_part: bool,
) -> Timing:
    part = max(1, nbytes // 4 // size)
    if not takes_part:
        return Timing(kind, where, size, 4 * part * size, clock.steady(lambda: None))
    out = torch.zeros(part * size, dtype=torch.float32, device=clock.device)
    begin: Callable[..., Any] = comm.all_gather
    sent = out[:part].clone()
    if kind == "all_to_all":
        begin = comm.all_to_all
        sent = torch.zeros_like(out)
    elif clock.on_host and where != "inside":
        begin = gather_between_nodes
    seconds = clock.steady(lambda: begin(out, sent, group=group).wait())
    return Timing(kind, where, size, 4 * part * size, seconds)


def _memory_gb_s(clock: _Clock) -> float:
    numel = (_ROW_BYTES_ON_HOST if clock.on_host else _ROW_BYTES) // 4
    rows = torch.zeros(_ROWS, numel, dtype=torch.float32, device=clock.device)
    out = torch.zeros(numel, dtype=torch.float32, device=clock.device)
    return (rows.nbytes + out.nbytes) / 1e9 / clock.steady(lambda: average(rows, out, 1))


def _tflops(clock: _Clock) -> tuple[float, str]:
    """Return the TFLOP/s of Newton-Schulz with a run's default settings, and the dtype of
    products.
    """
    recipe = Muon()
    shape = _MATRIX_ON_HOST if clock.on_host else _MATRIX
    dtype = recipe.products_in(fast_dtypes(clock.device))
    rows = coefficients(recipe.ns_coefficients, recipe.ns_steps)
    matrix = torch.randn(shape, dtype=torch.float32, device=clock.device)
    seconds = clock.steady(
        lambda: newton_schulz(matrix, rows, method=recipe.ns_method, dtype=dtype)
    )
    return recipe.work(shape) / seconds / 1e12, str(dtype).removeprefix("torch.")
