"""The times of collectives on given links: the model that plans choose by, and predict with.

A link has a bandwidth and a latency; a collective takes what its slowest link takes for the bytes
that it must carry, and the latency of its longest chain of messages. Bytes count per direction.
What the model leaves out: other traffic, the tree and switch algorithms that NCCL may choose
instead of rings for short messages, and the protocols that it chooses for very short ones.
Bandwidths are in GB/s (10^9 bytes), which is bytes a nanosecond; times are whole nanoseconds, so
that every machine that compares two of them decides alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import Count, Section, build, nearest

#: In 10^9 a second, or 10^12 of operations, and in microseconds: within these bounds every time is
#: a finite number.
Rate = Annotated[float, Field(ge=1e-9, le=1e9)]
Latency = Annotated[float, Field(ge=0, le=1e9)]

#: Bytes that a rank hands on at a time in NCCL's pipelined rings: a slice of a chain starts when
#: the one before it is that far.
CHUNK_BYTES = 128 * 1024


class Links(Section):
    """The links of a cluster of equal nodes, and what its devices reach beside them.

    A file has the same keys. Those without a default must be there.
    """

    inside_gb_s: Rate
    """From one rank to others of its node, GB/s a direction."""
    between_gb_s: Rate
    """The bandwidth of one network interface (rail), GB/s a direction."""
    inside_us: Latency
    """The latency of a message inside a node, microseconds."""
    between_us: Latency
    """The latency of a message between nodes, microseconds."""
    ranks_per_node: Count
    rails: Count
    """Network interfaces of a node. Rings leave a node through all of them, all its ranks share
    them evenly.
    """
    peer_us: Latency = 0.5
    """The time of each peer of an all-to-all, and of each fused collective, microseconds."""
    memory_gb_s: Rate = 2000.0
    """At which a rank reads and writes its own memory to add up what it has received, GB/s."""
    on_host: bool = False
    """True where what travels lies in host memory, where gloo sends it: all-gathers go inside nodes
    and between them one after the other, and shards of any length by all-to-all, however sums are
    made."""
    tflops: Rate = 200.0
    """The rate of matrix products in Newton-Schulz, TFLOP/s a rank, as it is reached, not as it is
    advertised.
    """

    def are_full(self, size: int) -> bool:
        """Tell whether ``size`` ranks are equally many on each of their nodes."""
        return size <= self.ranks_per_node or size % self.ranks_per_node == 0

    def summary(self) -> str:
        """Their bandwidths, for a reader."""
        between = f"{self.rails} x {self.between_gb_s:g} GB/s between"
        if self.ranks_per_node == 1:
            return f"{between} nodes with one of these ranks each"
        inside = f"{self.inside_gb_s:g} GB/s inside nodes of {self.ranks_per_node} ranks"
        return f"{inside} and {between} them"


#: NVLink 4 through a switch, and a 400 Gbit/s interface a GPU. Products at 40 % of what an H100
#: does densely in bf16.
NVLINK_IB = Links(
    inside_gb_s=450.0,
    between_gb_s=50.0,
    inside_us=1.5,
    between_us=5.0,
    ranks_per_node=8,
    rails=8,
    memory_gb_s=3000.0,
    tflops=400.0,
)

#: PCIe 5 x16 inside a node, and a 200 Gbit/s interface a GPU. Products at 40 % of what an A100 does
#: densely in bf16.
PCIE_ETHERNET = NVLINK_IB.model_copy(
    update={"inside_gb_s": 50.0, "between_gb_s": 25.0, "memory_gb_s": 1500.0, "tflops": 125.0}
)

#: Processes that talk over TCP, as gloo does: one 10 Gbit/s interface a node.
TCP = Links(
    inside_gb_s=1.0,
    between_gb_s=1.25,
    inside_us=30.0,
    between_us=100.0,
    ranks_per_node=1,
    rails=1,
    peer_us=10.0,
    memory_gb_s=5.0,
    tflops=0.1,
    on_host=True,
)

#: The sets of links, by the name that a user gives.
LINKS = {"nvlink-ib": NVLINK_IB, "pcie-ethernet": PCIE_ETHERNET, "tcp": TCP}


def links_of_run(
    links: str,
    *,
    on_host: bool | None,
    ranks_per_node: int | None,
    where: str = "layerwise.links",
    places: int = 1,
) -> Links:
    """Return the links that a run plans with: as ``links`` says, or for "auto" by what talks.

    Their nodes are those of the run. Links with a name have an interface a device then; what a file
    says of interfaces stays.

    Args:
        links: "auto", a name of :data:`LINKS`, or the path of a JSON file.
        on_host: whether what travels lies in host memory, whatever the links say of themselves; as
            they say if None, where there is no run, and "auto" stands for devices that talk.
        ranks_per_node: of the run; as the links have it if None.
        where: who says so, for errors.
        places: as many groups of ``ranks_per_node`` ranks are on a node, at work at the same time,
            as those with the other parts of a model that tensor parallelism has cut: they share the
            interfaces that stay.

    Raises:
        ConfigError: as :func:`find_links`.
    """
    if links == "auto":
        if on_host:
            links = "tcp"
        else:
            links = "nvlink-ib"
    found = find_links(links, where=where, others=("auto",))
    changed: dict[str, Any] = {}
    if on_host is not None:
        # What talks decides how collectives go, as of gloo's or NCCL's, at whatever rates.
        changed["on_host"] = on_host
    if ranks_per_node is not None:
        changed["ranks_per_node"] = ranks_per_node
        if links in LINKS and not found.on_host:
            changed["rails"] = ranks_per_node
        else:
            changed["rails"] = max(1, found.rails // places)
            total = found.between_gb_s * found.rails
            changed["between_gb_s"] = total / places / changed["rails"]
    return found.model_copy(update=changed)


def unlike_the_run(links: str, *, on_host: bool) -> str:
    """Return a warning of links that are not between what talks in a run; empty if there is none.

    A file that does not say ``on_host`` is of either.

    Args:
        on_host: whether what travels lies in host memory.

    Raises:
        ConfigError: as :func:`find_links`.
    """
    if links == "auto":
        return ""
    found = find_links(links, where="layerwise.links")
    if found.on_host == on_host or links not in LINKS and "on_host" not in found.model_fields_set:
        return ""
    if found.on_host:
        theirs, here = ("host memory", "devices")
    else:
        theirs, here = ("devices", "host memory")
    if on_host:
        talks = "gloo"
    else:
        talks = "the device's own backend"
    return (
        f"layerwise.links {links!r} is between {theirs}, and parameters lie in {here}: ways of "
        "buckets are chosen "
        f"for the collectives of {talks}, at the rates of these links; measure those that are "
        "there with "
        'ds-layerwise links, or set it to "auto"'
    )


def find_links(links: str, *, where: str = "links", others: Sequence[str] = ()) -> Links:
    """Return the links that ``links`` names, or that the JSON file of that path has.

    Args:
        where: who says so, for errors.
        others: what else may stand there, for errors.

    Raises:
        ConfigError: it is neither; or the file is no JSON object, or a key is missing, not known or
            out of its bounds.
    """
    if links in LINKS:
        return LINKS[links]
    names = (*others, *LINKS)
    path = Path(links)
    wanted = f"{where} must be one of {', '.join(names)} or a file, got {links!r}"
    try:
        if path.is_file():
            text = path.read_bytes()
        else:
            text = None
    except OSError as e:
        raise ConfigError(f"{wanted}: {e.strerror}") from e
    if text is None:
        meant = nearest(links, names)
        raise ConfigError(
            f"{wanted}; did you mean {meant!r}?" if meant else f"{wanted}, which is none"
        )
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path.name} is no JSON: {e}") from e
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path.name} must be an object with {', '.join(Links.keys())}, got {content!r}"
        )
    required = [key for key, field in Links.model_fields.items() if field.is_required()]
    for key in required:
        if key not in content:
            raise ConfigError(f"{path.name}.{key} is missing; it needs {', '.join(required)}")
    return build(Links, path.name, content)


@dataclass(frozen=True)
class Group:
    """``size`` ranks that take part in collectives together, and where on ``links`` they are.

    Ranks are numbered node by node. Where experts make every ``stride``-th rank a group of its own,
    all groups are at work at the same time, so that each has its share of a node's interfaces.

    All of its methods return nanoseconds.
    """

    size: int
    links: Links
    stride: int = 1

    @cached_property
    def local(self) -> int:
        """The number of the ranks that share a node."""
        return min(self.size, max(1, self.links.ranks_per_node // self.stride))

    @cached_property
    def nodes(self) -> int:
        """The number of nodes that they are on."""
        return -(-self.size // self.local)

    @cached_property
    def node_gb_s(self) -> float:
        """The share of all ranks of the group on one node in its interfaces."""
        on_node = min(self.links.ranks_per_node, self.size * self.stride)
        return self.links.between_gb_s * self.links.rails * self.local / on_node

    @cached_property
    def rank_gb_s(self) -> float:
        """The share of one rank while the others of its group are silent."""
        return min(
            self.node_gb_s,
            self.links.between_gb_s * max(1, self.links.rails // self.links.ranks_per_node),
        )

    @cached_property
    def ring_gb_s(self) -> float:
        """The bandwidth of a ring through all ranks: of its slower steps, inside nodes or between
        them on all rails.
        """
        if self.nodes == 1:
            return self.links.inside_gb_s
        if self.local == 1:
            return self.node_gb_s
        return min(self.links.inside_gb_s, self.node_gb_s)

    @cached_property
    def _chain_ns(self) -> float:
        """The latency of a message that goes once around the ring."""
        if self.nodes == 1:
            return 1e3 * (self.size - 1) * self.links.inside_us
        return 1e3 * (
            (self.size - self.nodes) * self.links.inside_us + self.nodes * self.links.between_us
        )

    def ring(self, nbytes: float) -> int:
        """Reduce-scatter or all-gather of equal shards, ``nbytes`` altogether, around a ring.

        Each of size - 1 steps moves one shard from every rank to the next: (size - 1)/size of the
        bytes over each link, and one latency a step (Thakur, Rabenseifner and Gropp 2005, sections
        4.1 and 4.2.1).
        """
        if self.size == 1:
            return 0
        return round(nbytes * (self.size - 1) / self.size / self.ring_gb_s + self._chain_ns)

    def ragged_ring(self, nbytes: float, *, longest: float, num_shards: int, spread: int) -> int:
        """Shards of any length: a reduce to, or a broadcast from, each owner, fused into one
        launch.

        NCCL makes each of them a pipelined chain along the ring (``src/device/reduce.h``,
        ``broadcast.h``): all bytes of a shard cross each link but one, so the whole of the bytes
        crosses some link, size/(size - 1) times what equal shards would take. The last slice of a
        chain arrives after all hops, and each hop holds back one slice. torch makes one group of
        them (``_reduce_oop`` and ``_broadcast_oop`` in ProcessGroupNCCL), which NCCL runs as one
        kernel: the next chain starts at its owner when the one before has passed there, so that the
        starts add up to no more than the way from the first owner to the last.

        Args:
            nbytes: of all shards.
            longest: the bytes of the longest.
            num_shards: how many are not empty.
            spread: ranks from the first owner to the last.
        """
        if self.size == 1:
            return 0
        slices = (self.size - 2) * min(CHUNK_BYTES, longest) / self.ring_gb_s
        starts = self._chain_ns * spread / (self.size - 1)
        return round(
            nbytes / self.ring_gb_s
            + self._chain_ns
            + slices
            + starts
            + 1e3 * self.links.peer_us * num_shards
        )

    def all_to_all(self, most: float, mean: float | None = None) -> int:
        """Straight from every rank to every other, without a stop on the way.

        Peers are equal, so (size - local)/(size - 1) of the bytes leave the node. Those of the
        busiest rank take its own interface, those of the mean rank a node's.

        Args:
            most: bytes that the busiest rank sends to others, or receives from them.
            mean: the same of the mean rank; ``most`` where nothing is said.
        """
        if self.size == 1:
            return 0
        out = (self.size - self.local) / (self.size - 1)
        shared = out * self.local * (most if mean is None else mean) / self.node_gb_s
        moved = max(most * (1 - out) / self.links.inside_gb_s, most * out / self.rank_gb_s, shared)
        if self.nodes == 1:
            first = self.links.inside_us
        else:
            first = self.links.between_us
        return round(moved + 1e3 * (first + self.links.peer_us * (self.size - 1)))

    def added_up(self, read: float, written: float) -> int:
        """Adding up what has arrived: bytes that are read, and written."""
        if self.size == 1:
            return 0
        return round((read + written) / self.links.memory_gb_s)

    @cached_property
    def inner(self) -> Group:
        """The ranks of one node among themselves."""
        return Group(self.local, self.links, self.stride)

    @cached_property
    def outer(self) -> Group:
        """The ranks with the same place in their nodes, one a node, while those of the other places
        do the same.
        """
        return Group(self.nodes, self.links, max(self.links.ranks_per_node, self.stride))

    @cached_property
    def has_levels(self) -> bool:
        """True for several nodes with several ranks: it pays to add up inside a node first."""
        return 1 < self.local < self.size


@lru_cache(maxsize=256)
def group_of(size: int, links: Links, stride: int) -> Group:
    """The one group of that size; see :class:`Group`."""
    return Group(size, links, stride)
