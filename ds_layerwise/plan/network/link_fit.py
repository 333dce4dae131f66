"""From measured seconds of collectives to the links that explain them best: the model of
:mod:`.plan.network.links`, solved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.network.links import Links

#: Which ranks a collective was measured between: those of each node; one of each node, while the
#: others are silent; those in the same place on each node, all places at a time; all ranks, by
#: messages so short that only latency counts.
Where = Literal["inside", "alone", "together", "everywhere"]

#: Keys of links that only a node with several ranks can tell, and those that only several nodes
#: can.
OF_INSIDE = ("inside_gb_s", "inside_us")
OF_BETWEEN = ("between_gb_s", "between_us", "rails")

_SIGNIFICANT = 4

#: How often a fit is made better, and by what factor a prediction counts as off at most.
_ROUNDS, _FAR = 30, 10.0


@dataclass(frozen=True, slots=True)
class Timing:
    """What one collective took: the median over repetitions, each until the last rank was done."""

    kind: Literal["ring", "all_to_all"]
    where: Where
    size: int
    """Ranks of the group."""
    nbytes: int
    """Of what a ring moves altogether, or a rank of an all-to-all sends, its own part too."""
    seconds: float

    def terms(self, ranks_per_node: int) -> dict[str, float]:
        """By unknown, what it is multiplied with: their sum is the time in nanoseconds.

        Unknowns are the latencies of :class:`.plan.network.links.Links`, microseconds, and
        nanoseconds a byte inside a node (``inside``), of a rank that alone sends to other nodes
        (``alone``), and of one among all (``together``).
        """
        others = self.size - 1
        moved, first = (
            self.nbytes * others / self.size,
            "inside_us" if self.where == "inside" else "between_us",
        )
        if self.where == "everywhere":
            leaves = (self.size - ranks_per_node) / others
            return {"together": moved * leaves, first: 1e3, "peer_us": 1e3 * others}
        if self.kind == "all_to_all":
            return {self.where: moved, first: 1e3, "peer_us": 1e3 * others}
        return {self.where: moved, first: 1e3 * (others if self.where == "inside" else self.size)}


@dataclass(frozen=True, slots=True)
class Fit:
    """The unknowns that explain timings best."""

    values: Mapping[str, float]
    clamped: tuple[str, ...]
    """Latencies that came out negative, and are 0 instead."""
    ratios: tuple[float, ...]
    """What each of the timings takes by these values, over what was measured."""

    @property
    def usual(self) -> float:
        """By what factor a time is off, the median of them."""
        return float(np.median([max(ratio, 1 / ratio) for ratio in self.ratios]))

    @property
    def worst(self) -> float:
        """By what factor a time is off at most."""
        return max(max(ratio, 1 / ratio) for ratio in self.ratios)


def fit(timings: Sequence[Timing], ranks_per_node: int) -> Fit:
    """Find the unknowns of :meth:`Timing.terms`, of which none is negative.

    The squares of log(p / t) are made least, over measured times t and those that are predicted, p:
    so a short message counts as much as a long one, and half as long as twice as long.

    Raises:
        LayerWiseError: some time does not grow with the bytes.
    """
    terms = [timing.terms(ranks_per_node) for timing in timings]
    free = sorted({name for each in terms for name in each})
    measured = 1e9 * np.array([timing.seconds for timing in timings])
    clamped: list[str] = []
    while True:
        rows = np.array([[each.get(name, 0.0) for name in free] for each in terms])
        solved = _least(rows, measured)
        found = {name: float(value) for name, value in zip(free, solved, strict=True)}
        negative = [name for name in free if name.endswith("_us") and found[name] < 0]
        if not negative:
            break
        clamped.append(min(negative, key=lambda name: found[name]))
        free.remove(clamped[-1])
    for name, value in found.items():
        if not name.endswith("_us") and not value > 0:
            of = ", ".join(
                f"{timing.nbytes} bytes in {1e6 * timing.seconds:.0f} us"
                for timing in timings
                if timing.where == name
            )
            raise LayerWiseError(
                f"what was measured ({name}) does not grow with the bytes: {of}; measure again "
                "when nothing else runs on these nodes"
            )
    return Fit(
        {**found, **dict.fromkeys(clamped, 0.0)},
        tuple(clamped),
        tuple(map(float, rows @ solved / measured)),
    )


def _least(rows: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """What ``rows`` are multiplied with to come nearest to ``measured``, as :func:`fit` counts it:
    Gauss and Newton's method, from where every prediction is taken for right."""
    predicted, solved = measured, np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        relative = rows / predicted[:, None]
        # Bytes are in millions, messages are few.
        scale = np.linalg.norm(relative, axis=0)
        solved = (
            np.linalg.lstsq(relative / scale, 1 + np.log(measured / predicted), rcond=None)[0]
            / scale
        )
        predicted = np.clip(rows @ solved, measured / _FAR, measured * _FAR)
    return solved


@dataclass(frozen=True, slots=True)
class Measured:
    """Links of a cluster, and where each of their keys comes from."""

    links: Links
    sources: Mapping[str, str]
    """By key, in words."""
    fit: Fit

    @property
    def text(self) -> str:
        """A table in plain text."""
        rows = [
            (
                key,
                f"{value:,.4g}" if isinstance(value, float) else str(value).lower(),
                _UNITS.get(key, ""),
                self.sources[key],
            )
            for key, value in self.links.model_dump().items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{key:{widths[0]}}  {value:>{widths[1]}} {unit:{widths[2]}}  {source}".rstrip()
            for key, value, unit, source in rows
        ]
        return "\n".join(
            [
                *lines,
                "on these links, collectives take what was measured within a factor of "
                f"{self.fit.usual:.2f} in half of the cases, {self.fit.worst:.2f} in all",
            ]
        )


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
    """The keys of links that nothing can be measured for on such nodes."""
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
    """The links that explain ``timings``.

    What all ranks of a node reach together, over what one of them reaches alone, is how many rails
    there are; each has its part of what all reach.

    Args:
        memory_gb_s, tflops, on_host: as :class:`.plan.network.links.Links` has them.
        like: for what :func:`missing_keys` names.
        like_name: what the user calls that.

    Raises:
        LayerWiseError: as :func:`fit`; or ``like`` is None, and something is missing.
    """
    missing = missing_keys(ranks_per_node, num_nodes)
    if missing and like is None:
        raise LayerWiseError(require_like(ranks_per_node, num_nodes))
    found = fit(timings, ranks_per_node)
    values: dict[str, object] = {
        "ranks_per_node": ranks_per_node,
        "on_host": on_host,
        "memory_gb_s": memory_gb_s,
        "tflops": tflops,
        "peer_us": found.values["peer_us"],
    }
    if ranks_per_node > 1:
        values |= {
            "inside_gb_s": 1 / found.values["inside"],
            "inside_us": found.values["inside_us"],
        }
    if num_nodes > 1:
        alone = 1 / found.values["alone"]
        node = ranks_per_node / found.values["together"] if ranks_per_node > 1 else alone
        rails = min(ranks_per_node, max(1, round(node / alone)))
        values |= {
            "between_gb_s": node / rails,
            "between_us": found.values["between_us"],
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
    rounded = {
        key: float(f"{value:.{_SIGNIFICANT}g}") if isinstance(value, float) else value
        for key, value in values.items()
    }
    return Measured(Links.model_validate(rounded), sources, found)


def require_like(ranks_per_node: int, num_nodes: int) -> str:
    """Why something else has to say what :func:`missing_keys` names."""
    where = "one node" if num_nodes == 1 else "nodes of one rank"
    return (
        f"{', '.join(missing_keys(ranks_per_node, num_nodes))} cannot be measured on {where}; "
        f"start it on {'several' if num_nodes == 1 else 'nodes of several ranks'}, or name what "
        "has them with --like"
    )
