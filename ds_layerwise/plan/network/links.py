"""The times of collectives on given links. Plans use this model to choose and to predict.

A link has a bandwidth and a latency. The time of a collective is the time of its slowest link for
its bytes, plus the latency of its longest chain of messages. Bytes count per direction. The model
leaves out other traffic, the tree and switch algorithms that NCCL may choose instead of rings for
short messages, and the protocols that it chooses for very short ones. Bandwidths are in GB/s (10^9
bytes), which is bytes per nanosecond. Times are integer nanoseconds, so that every machine that
compares two of them decides the same way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ds_layerwise.errors import ConfigError, nearest
from ds_layerwise.optimizers.base.fields import Count, Section, build

#: Bounds that keep every time finite. Rates are in 10^9 per second, or 10^12 operations per second;
#: latencies in microseconds.
Rate = Annotated[float, Field(ge=1e-9, le=1e9)]
Latency = Annotated[float, Field(ge=0, le=1e9)]

#: The bytes that a rank passes on at a time in NCCL's pipelined rings: the next step of a chain
#: starts when the previous one has finished a slice.
CHUNK_BYTES = 128 * 1024


class Links(Section):
    """The links of a cluster of equal nodes, and the memory and product rates of its devices.

    A file has the same keys. Keys without a default are required.
    """

    inside_gb_s: Rate
    """The bandwidth from one rank to others of its node, GB/s per direction."""
    between_gb_s: Rate
    """The bandwidth of one network interface (rail), GB/s per direction."""
    inside_us: Latency
    """The latency of a message inside a node, microseconds."""
    between_us: Latency
    """The latency of a message between nodes, microseconds."""
    ranks_per_node: Count
    rails: Count
    """The number of network interfaces per node. Rings leave a node through all of them, and its
    ranks share them evenly.
    """
    peer_us: Latency = 0.5
    """The time per peer of an all-to-all, and per fused collective, microseconds."""
    memory_gb_s: Rate = 2000.0
    """The rate at which a rank reads and writes its own memory when it sums received data, GB/s."""
    on_host: bool = False
    """True if the data is in host memory, from which gloo sends it. Then all-gathers run inside
    nodes and between them one after the other, and shards of any length use all-to-all, whatever
    the method of sums.
    """
    tflops: Rate = 200.0
    """The rate of matrix products in Newton-Schulz, TFLOP/s per rank: the achieved rate, not the
    advertised one.
    """

    def are_full(self, size: int) -> bool:
        """Tell whether ``size`` ranks fill their nodes equally."""
        return size <= self.ranks_per_node or size % self.ranks_per_node == 0

    def summary(self) -> str:
        """Return the bandwidths as text."""
        between = f"{self.rails} x {self.between_gb_s:g} GB/s between"
        if self.ranks_per_node == 1:
            return f"{between} nodes with one of these ranks each"
        inside = f"{self.inside_gb_s:g} GB/s inside nodes of {self.ranks_per_node} ranks"
        return f"{inside} and {between} them"


#: NVLink 4 through a switch, and a 400 Gbit/s interface per GPU. Products at 40 % of the dense bf16
#: rate of an H100.
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

#: PCIe 5 x16 inside a node, and a 200 Gbit/s interface per GPU. Products at 40 % of the dense bf16
#: rate of an A100.
PCIE_ETHERNET = NVLINK_IB.model_copy(
    update={"inside_gb_s": 50.0, "between_gb_s": 25.0, "memory_gb_s": 1500.0, "tflops": 125.0}
)

#: Processes that communicate over TCP, such as gloo: one 10 Gbit/s interface per node.
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

#: The named links.
LINKS = {"nvlink-ib": NVLINK_IB, "pcie-ethernet": PCIE_ETHERNET, "tcp": TCP}


def links_of_run(
    links: str,
    *,
    on_host: bool | None,
    ranks_per_node: int | None,
    where: str = "layerwise.links",
    places: int = 1,
) -> Links:
    """Return the links that a run plans with: those of ``links``, or for "auto" those that suit the
    memory of the data.

    The nodes are those of the run. Named links then have one interface per device; the interfaces
    in a file stay as they are.

    Args:
        links: "auto", a name of :data:`LINKS`, or the path of a JSON file.
        on_host: True if the data is in host memory; this overrides the links' own value. None keeps
            that value; it is for plans without a run, and "auto" then assumes that devices
            communicate.
        ranks_per_node: the value of the run; None keeps that of the links.
        where: the source of ``links``, for errors.
        places: the number of groups of ``ranks_per_node`` ranks on a node that work at the same
            time, such as those with the other tensor-parallel parts of a model. They share the
            interfaces that a file gives.

    Raises:
        ConfigError: as in :func:`find_links`.
    """
    if links == "auto":
        if on_host:
            links = "tcp"
        else:
            links = "nvlink-ib"
    found = find_links(links, where=where, others=("auto",))
    changed: dict[str, Any] = {}
    if on_host is not None:
        # The backend, gloo or NCCL, determines how collectives run, at any rate.
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
    """Return a warning if ``links`` do not match the run's memory; empty if they do.

    A file without ``on_host`` matches both.

    Args:
        on_host: True if the data is in host memory.

    Raises:
        ConfigError: as in :func:`find_links`.
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
        f"layerwise.links {links!r} is between {theirs}, but parameters are in {here}: "
        "transports are chosen "
        f"for the collectives of {talks}, at the rates of these links; measure those that are "
        "there with "
        'ds-layerwise links, or set it to "auto"'
    )


def find_links(links: str, *, where: str = "links", others: Sequence[str] = ()) -> Links:
    """Return the links that ``links`` names, or those of the JSON file with that path.

    Args:
        where: the source of ``links``, for errors.
        others: further valid values, for errors.

    Raises:
        ConfigError: it is neither; or the file is not a JSON object, or a key is missing, unknown
            or out of its bounds.
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
    return build(Links, path.name, content)


@dataclass(frozen=True)
class Group:
    """``size`` ranks that take part in collectives together, and their place on ``links``.

    Ranks are numbered node by node. With experts, every ``stride``-th rank is in the same group,
    and all groups work at the same time, so that each has its share of a node's interfaces.

    All methods return nanoseconds.
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
        """The number of nodes of the ranks."""
        return -(-self.size // self.local)

    @cached_property
    def node_gb_s(self) -> float:
        """The bandwidth that all ranks of the group on one node have through its interfaces."""
        on_node = min(self.links.ranks_per_node, self.size * self.stride)
        return self.links.between_gb_s * self.links.rails * self.local / on_node

    @cached_property
    def rank_gb_s(self) -> float:
        """The bandwidth that one rank has while the others of its group are idle."""
        return min(
            self.node_gb_s,
            self.links.between_gb_s * max(1, self.links.rails // self.links.ranks_per_node),
        )

    @cached_property
    def ring_gb_s(self) -> float:
        """The bandwidth of a ring through all ranks: that of its slower steps, inside nodes or
        between them on all rails.
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
        """Return the time of a reduce-scatter or all-gather of equal shards around a ring,
        ``nbytes`` altogether.

        Each of size - 1 steps moves one shard from every rank to the next: (size - 1)/size of the
        bytes over each link, and one latency per step (Thakur, Rabenseifner and Gropp 2005,
        sections 4.1 and 4.2.1).
        """
        if self.size == 1:
            return 0
        return round(nbytes * (self.size - 1) / self.size / self.ring_gb_s + self._chain_ns)

    def ragged_ring(self, nbytes: float, *, longest: float, num_shards: int, spread: int) -> int:
        """Return the time of shards of any length: a reduce to, or a broadcast from, each owner,
        fused into one launch.

        NCCL makes each of them a pipelined chain along the ring (``src/device/reduce.h``,
        ``broadcast.h``). All bytes of a shard cross each link but one, so all bytes cross some
        link: size/(size - 1) times as many as with equal shards. The last slice of a chain arrives
        after all hops, and each hop holds back one slice. torch makes one group of them
        (``_reduce_oop`` and ``_broadcast_oop`` in ProcessGroupNCCL), which NCCL runs as one kernel.
        The next chain starts at its owner when the previous one has passed there, so that the
        starts add up to at most the path from the first owner to the last.

        Args:
            nbytes: the bytes of all shards.
            longest: the bytes of the longest shard.
            num_shards: the number of shards that are not empty.
            spread: the number of ranks from the first owner to the last.
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
        """Return the time of sending directly from every rank to every other.

        All peers get equal parts, so (size - local)/(size - 1) of the bytes leave the node. The
        bytes of the busiest rank go through its own interface; the bytes of all ranks of a node,
        counted by the mean rank, go through the node's.

        Args:
            most: the bytes that the busiest rank sends to others, or receives from them.
            mean: the same for the mean rank; None if it equals ``most``.
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
        """Return the time to sum received data, from the bytes that are read and written."""
        if self.size == 1:
            return 0
        return round((read + written) / self.links.memory_gb_s)

    @cached_property
    def inner(self) -> Group:
        """The ranks of one node."""
        return Group(self.local, self.links, self.stride)

    @cached_property
    def outer(self) -> Group:
        """The ranks with the same place in their nodes, one per node, while those of the other
        places do the same.
        """
        return Group(self.nodes, self.links, max(self.links.ranks_per_node, self.stride))

    @cached_property
    def has_levels(self) -> bool:
        """True for several nodes with several ranks each: it pays to sum inside a node first."""
        return 1 < self.local < self.size


@lru_cache(maxsize=256)
def group_of(size: int, links: Links, stride: int) -> Group:
    """Return the group of that size, created once; see :class:`Group`."""
    return Group(size, links, stride)
