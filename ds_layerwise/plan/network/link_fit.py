"""The fit of links to measured times of collectives, with the model of
:mod:`.plan.network.links`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.network.links import Links

#: The ranks of a measured collective: the ranks of each node; one rank per node, while the others
#: are idle; the ranks in the same place on each node, all places at the same time; or all ranks,
#: with messages so short that only latency counts.
Where = Literal["inside", "alone", "together", "everywhere"]

#: The keys of links that need a node with several ranks, and those that need several nodes.
OF_INSIDE = ("inside_gb_s", "inside_us")
OF_BETWEEN = ("between_gb_s", "between_us", "rails")

_SIGNIFICANT = 4

#: The number of iterations of a fit, and the largest factor by which an error of prediction counts.
_ROUNDS = 30
_FAR = 10.0


@dataclass(frozen=True)
class Timing:
    """The time of one collective: the median over repetitions, each until the last rank has
    finished.
    """

    kind: Literal["ring", "all_to_all"]
    where: Where
    size: int
    """The number of ranks of the group."""
    nbytes: int
    """The bytes that a ring moves altogether, or that a rank of an all-to-all sends, with its own
    part.
    """
    seconds: float

    def terms(self, ranks_per_node: int) -> dict[str, float]:
        """Return the factor of each unknown. The time in nanoseconds is the sum of the products.

        The unknowns are the latencies of :class:`.plan.network.links.Links` in microseconds, and
        the nanoseconds per byte inside a node (``inside``), for a single rank that sends to other
        nodes (``alone``), and for one of all ranks that do so (``together``).
        """
        others = self.size - 1
        moved = self.nbytes * others / self.size
        first = "inside_us" if self.where == "inside" else "between_us"
        if self.where == "everywhere":
            leaves = (self.size - ranks_per_node) / others
            return {"together": moved * leaves, first: 1e3, "peer_us": 1e3 * others}
        if self.kind == "all_to_all":
            return {self.where: moved, first: 1e3, "peer_us": 1e3 * others}
        return {self.where: moved, first: 1e3 * (others if self.where == "inside" else self.size)}


@dataclass(frozen=True)
class Fit:
    """The unknowns that explain the timings best."""

    values: Mapping[str, float]
    clamped: tuple[str, ...]
    """The latencies that came out negative and were set to 0."""
    ratios: tuple[float, ...]
    """The predicted time of each timing, divided by the measured one."""

    @property
    def off(self) -> list[float]:
        """The factors by which predictions are wrong, in ascending order."""
        return sorted(max(ratio, 1 / ratio) for ratio in self.ratios)


def fit(timings: Sequence[Timing], ranks_per_node: int) -> Fit:
    """Find the unknowns of :meth:`Timing.terms`, none of them negative.

    The fit minimizes the squares of log(p / t) for measured times t and predicted times p. So a
    short message counts as much as a long one, and half the time as much as twice the time.

    Raises:
        LayerWiseError: some time does not grow with the bytes.
    """
    terms = [timing.terms(ranks_per_node) for timing in timings]
    free = sorted(set().union(*terms))
    measured = 1e9 * np.array([timing.seconds for timing in timings])
    clamped = []
    while True:
        rows = np.zeros((len(terms), len(free)))
        for i, factors in enumerate(terms):
            rows[i] = [factors.get(name, 0.0) for name in free]
        solved = _least(rows, measured)
        values = dict(zip(free, solved.tolist(), strict=True))
        lowest = min(free, key=lambda name: values[name] if name.endswith("_us") else 0.0)
        if not values[lowest] < 0 or not lowest.endswith("_us"):
            break
        clamped.append(lowest)
        free.remove(lowest)
    for where in sorted({*free} & {timing.where for timing in timings}):
        if not values[where] > 0:
            times = ", ".join(
                f"{timing.nbytes} bytes in {1e6 * timing.seconds:.0f} us"
                for timing in timings
                if timing.where == where
            )
            raise LayerWiseError(
                f"measured times ({where}) do not grow with the message size: {times}; measure "
                "again when nothing else runs on these nodes"
            )
    ratios = (rows @ solved / measured).tolist()
    return Fit(values | dict.fromkeys(clamped, 0.0), tuple(clamped), tuple(ratios))


def _least(rows: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve ``rows @ solved = measured`` with the error measure of :func:`fit`.

    It uses Gauss-Newton and starts as if every prediction were right.
    """
    predicted = measured
    for _ in range(_ROUNDS):
        relative = rows / predicted[:, None]
        # Scale the columns: bytes are in millions, messages are few.
        scale = np.linalg.norm(relative, axis=0)
        off = 1 + np.log(measured / predicted)
        solved: NDArray[np.float64] = np.linalg.lstsq(relative / scale, off, rcond=None)[0] / scale
        predicted = np.clip(rows @ solved, measured / _FAR, measured * _FAR)
    return solved


@dataclass(frozen=True)
class Measured:
    """The links of a cluster, and the source of each value."""

    links: Links
    sources: Mapping[str, str]
    """The source of each value, in words, by key."""
    fit: Fit

    @property
    def text(self) -> str:
        """Return a table in plain text."""
        lines = []
        for key, value in self.links.model_dump().items():
            shown = f"{value:,.4g}" if isinstance(value, float) else str(value).lower()
            lines.append(f"{key:14}  {shown:>8} {_UNITS.get(key, ''):7}  {self.sources[key]}")
        off = self.fit.off
        lines.append(
            "on these links, predicted times of collectives match the measured ones within a "
            f"factor of {float(np.median(off)):.2f} in half of the cases, {off[-1]:.2f} in all"
        )
        return "\n".join(lines)


_UNITS = {
    "inside_gb_s": "GB/s",
    "between_gb_s": "GB/s",
    "inside_us": "us",
    "between_us": "us",
    "peer_us": "us",
    "memory_gb_s": "GB/s",
    "tflops": "TFLOP/s",
}


def missing_keys(ranks_per_node: int, num_nodes: int) -> tuple[str, ...]:
    """Return the keys of links that cannot be measured on these nodes."""
    return (*(OF_INSIDE if ranks_per_node == 1 else ()), *(OF_BETWEEN if num_nodes == 1 else ()))


def measured_links(
    timings: Sequence[Timing],
    *,
    ranks_per_node: int,
    num_nodes: int,
    memory_gb_s: float,
    tflops: float,
    on_host: bool,
    like: Links | None = None,
    like_name: str = "",
) -> Measured:
    """Return the links that explain ``timings``.

    The number of rails is the bandwidth that all ranks of a node reach together, divided by that of
    one rank alone. Each rail has its part of the total.

    Args:
        memory_gb_s, tflops, on_host: as in :class:`.plan.network.links.Links`.
        like: the links for the keys of :func:`missing_keys`.
        like_name: the user's name of ``like``.

    Raises:
        LayerWiseError: as in :func:`fit`; or ``like`` is None and a key is missing.
    """
    missing = missing_keys(ranks_per_node, num_nodes)
    if missing and like is None:
        raise LayerWiseError(require_like(ranks_per_node, num_nodes))
    found = fit(timings, ranks_per_node)
    times = found.values
    values = {
        "ranks_per_node": ranks_per_node,
        "on_host": on_host,
        "memory_gb_s": memory_gb_s,
        "tflops": tflops,
        "peer_us": times["peer_us"],
    }
    if ranks_per_node > 1:
        values |= {"inside_gb_s": 1 / times["inside"], "inside_us": times["inside_us"]}
    if num_nodes > 1:
        node = alone = 1 / times["alone"]
        if ranks_per_node > 1:
            node = ranks_per_node / times["together"]
        rails = min(ranks_per_node, max(1, round(node / alone)))
        values |= {
            "between_gb_s": node / rails,
            "between_us": times["between_us"],
            "rails": rails,
        }
    sources = {
        **dict.fromkeys(values, "measured"),
        "ranks_per_node": "of this start",
        "on_host": "of this start",
        **dict.fromkeys(found.clamped, "came out negative, and is taken for 0"),
    }
    for key in missing:
        values[key] = getattr(like, key)
        sources[key] = f"not measured, as --like {like_name} has it"
    for key, value in values.items():
        if isinstance(value, float):
            values[key] = float(f"{value:.{_SIGNIFICANT}g}")
    return Measured(Links.model_validate(values), sources, found)


def require_like(ranks_per_node: int, num_nodes: int) -> str:
    """Return the error for the keys of :func:`missing_keys` without another source."""
    there = "one node; start it on several"
    if num_nodes > 1:
        there = "nodes of one rank; start it on nodes of several ranks"
    return (
        f"{', '.join(missing_keys(ranks_per_node, num_nodes))} cannot be measured on {there}, or "
        "name links that have them with --like"
    )
