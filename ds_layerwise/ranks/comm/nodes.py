"""The nodes of ranks, the groups of ranks on one node, and the groups of ranks in the same place on
each node.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import distributed

from ds_layerwise.ranks.comm import comm

#: The ranks of a group, in its order.
Ranks = tuple[int, ...]

#: Groups made from a group of all ranks, by their ranks. torch frees none before the parent group
#: ends.
_levels: weakref.WeakKeyDictionary[comm.Group, dict[Ranks, comm.Group]] = (
    weakref.WeakKeyDictionary()
)


def node_of_each_rank() -> list[int]:
    """Return the node number of each rank of the world, counted in rank order. Every rank must call
    this.

    A node begins where the host name changes, or where local ranks start again, because nodes may
    be namespaces of one host. If one host counts as several nodes, rank 0 reports that.
    """
    said = os.environ.get("LOCAL_RANK", "")
    local_rank = int(said) if said.isdecimal() else -1
    places = comm.gather_objects((socket.gethostname(), local_rank), group=None)
    nodes = [0]
    for (host, local), (next_host, next_local) in zip(places, places[1:]):
        begins = next_host != host or 0 <= next_local <= local
        nodes.append(nodes[-1] + begins)
    num_hosts = len({host for host, _ in places})
    num_nodes = nodes[-1] + 1
    if num_nodes > num_hosts:
        comm.report_once(
            f"{len(places)} ranks on {num_hosts} host{'s' * (num_hosts > 1)} count as {num_nodes} "
            "nodes, because the ranks of a host are not consecutive, or LOCAL_RANK restarts among "
            "them; if a host is one node, more bytes than needed go between hosts: number the "
            "ranks host by host, with LOCAL_RANK from 0 on each host"
        )
    return nodes


def ranks_per_node(ranks: Sequence[int], nodes: Sequence[int]) -> int:
    """Return the number of ``ranks`` on each node; 1 if nodes have different numbers.

    Args:
        ranks: in the order of their group.
        nodes: the node of each rank of the world.
    """
    counts = counts_on_nodes(ranks, nodes)
    if len(set(counts)) > 1:
        return 1
    for first in range(0, len(ranks), counts[0]):
        if len({nodes[rank] for rank in ranks[first : first + counts[0]]}) > 1:
            return 1
    return counts[0]


def counts_on_nodes(ranks: Iterable[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of ``ranks`` on each node that has any.

    Args:
        nodes: the node of each rank of the world.
    """
    return tuple(Counter(nodes[rank] for rank in ranks).values())


def make_levels(
    groups: comm.Groups, nodes: Sequence[int], *, wants: bool = True
) -> dict[int, tuple[comm.Group, comm.Group]]:
    """Return the group of this rank's node, and the group of the ranks in its place on all nodes,
    by key of ``groups``.

    The result has only groups in which several nodes have several ranks each. Calls with the same
    ``groups`` return the same groups. Every rank of the world must call this, also one that does
    not need them, such as one of another pipeline stage.

    Args:
        wants: False if this rank does not need the groups; the result is then empty.
    """
    wanted = {}
    for key, group in groups.items():
        ranks = tuple(comm.ranks_of(group))
        per_node = ranks_per_node(ranks, nodes)
        if wants and 1 < per_node < len(ranks):
            node, place = divmod(comm.rank_of(group), per_node)
            inside = ranks[node * per_node : (node + 1) * per_node]
            wanted[key] = [inside, ranks[place::per_node]]
    made = _levels.setdefault(groups[1] or distributed.group.WORLD, {})
    made.update(_make_groups(set(chain(*wanted.values())) - made.keys()))
    return {key: (made[inside], made[across]) for key, (inside, across) in wanted.items()}


def send_both_ways(groups: Iterable[comm.Group], nodes: Sequence[int]) -> None:
    """Let the all-to-alls of ``groups`` that span several nodes send in both directions at a time,
    over gloo.

    Every rank of the world must call this at the same point.
    """
    wanted = {}
    for group in groups:
        ranks = tuple(comm.ranks_of(group))
        if len(counts_on_nodes(ranks, nodes)) > 1 and comm.opposite_of(group) is None:
            wanted[ranks] = group
    for ranks, opposite in _make_groups(wanted).items():
        comm.send_both_ways(wanted[ranks], opposite)


def _make_groups(wanted: Iterable[Ranks]) -> dict[Ranks, comm.Group]:
    """Make the groups that this rank is in, by their ranks, while the other ranks make theirs."""
    left = sorted(set(chain(*comm.gather_objects(sorted(set(wanted)), group=None))))
    world: comm.Group = distributed.group.WORLD
    device = world.bound_device_id
    splits = device is not None and world._get_backend(device).supports_splitting
    made = {}
    while left:
        # A group made by itself would be a split of the whole world. Groups that share no rank are
        # made in one split.
        at_once: list[Ranks] = []
        for ranks in left:
            if not at_once or (splits and set(ranks).isdisjoint(chain(*at_once))):
                at_once.append(ranks)
        left = [ranks for ranks in left if ranks not in at_once]
        if splits:
            group = distributed.split_group(split_ranks=[list(ranks) for ranks in at_once])
        else:
            group = distributed.new_group(list(at_once[0]))
        for ranks in at_once:
            if comm.rank_of(None) in ranks:
                comm.take_over_timeout(group)
                made[ranks] = group
    return made
