"""Which ranks of a group share a node, and the groups of those that do and of those in the same
place on each.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from torch import distributed

from ds_layerwise.output import announce
from ds_layerwise.ranks.comm import comm

#: By group of all ranks, those that were made for whoever has it, by their ranks: torch lets go of
#: none before its end.
_levels: weakref.WeakKeyDictionary[comm.Group, dict[tuple[int, ...], comm.Group]] = (
    weakref.WeakKeyDictionary()
)

#: Something, once this process has said that hosts are taken for several nodes.
_told: list[bool] = []


def node_of_each_rank() -> list[int]:
    """By rank of the world, the number of its node, counted in rank order. Every rank must call
    this.

    A node begins where the host's name changes, or where local ranks begin again: nodes may be
    namespaces of one host. Where that makes several nodes of one host, rank 0 says so.
    """
    said = os.environ.get("LOCAL_RANK", "")
    places = comm.gather_objects(
        (socket.gethostname(), int(said) if said.isdecimal() else -1), group=None
    )
    nodes, node = [0], 0
    for (host, local), (next_host, next_local) in zip(places, places[1:]):
        node += next_host != host or (next_local <= local and next_local >= 0)
        nodes.append(node)
    num_hosts = len({host for host, _ in places})
    if node >= num_hosts and comm.rank_of(None) == 0 and not _told:
        _told.append(True)
        announce(
            f"ds_layerwise: {len(places)} ranks on {num_hosts} host{'s' * (num_hosts > 1)} are "
            f"taken for {node + 1} nodes, as those of a host are not in a row, or LOCAL_RANK "
            "begins again among them; if they are one node, more bytes leave hosts than need to: "
            "number the ranks host by host, with LOCAL_RANK from 0 on in each"
        )
    return nodes


def ranks_per_node(ranks: Sequence[int], nodes: Sequence[int]) -> int:
    """How many of ``ranks``, in the order of their group, are on each node; 1 where nodes have
    different numbers.

    Args:
        nodes: by rank of the world.
    """
    counts = counts_on_nodes(ranks, nodes)
    most = max(counts)
    in_rows = all(
        len({nodes[rank] for rank in ranks[first : first + most]}) == 1
        for first in range(0, len(ranks), most)
    )
    return most if len(set(counts)) == 1 and in_rows else 1


def counts_on_nodes(ranks: Iterable[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """How many of ``ranks`` are on each node that has any.

    Args:
        nodes: by rank of the world.
    """
    return tuple(Counter(nodes[rank] for rank in ranks).values())


def make_levels(
    groups: Mapping[int, comm.Group], nodes: Sequence[int], *, wants: bool = True
) -> dict[int, tuple[comm.Group, comm.Group]]:
    """By key of ``groups``, the group of this rank's node and that of the ranks in its place on the
    other nodes.

    Only for groups of which several nodes have several ranks each. The same ``groups`` get the same
    ones again. Every rank of the world must call this, also one that has no use for them, as
    another stage of a pipeline may.

    Args:
        wants: whether this rank has; else there are none for it.
    """
    wanted: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for key, group in groups.items() if wants else ():
        ranks = comm.ranks_of(group)
        per_node = ranks_per_node(ranks, nodes)
        if 1 < per_node < len(ranks):
            place = comm.rank_of(group)
            first = place - place % per_node
            wanted[key] = (
                tuple(ranks[first : first + per_node]),
                tuple(ranks[place % per_node :: per_node]),
            )
    made = _levels.setdefault(distributed.group.WORLD if groups[1] is None else groups[1], {})
    made.update(
        _make_groups(ranks for levels in wanted.values() for ranks in levels if ranks not in made)
    )
    return {key: (made[inside], made[across]) for key, (inside, across) in wanted.items()}


def send_both_ways(groups: Iterable[comm.Group], nodes: Sequence[int]) -> None:
    """Let the all-to-alls of those of ``groups`` that have several nodes send in both directions at
    a time, over gloo.

    Every rank of the world must call this at the same point.
    """
    by_ranks = {tuple(comm.ranks_of(group)): group for group in groups}
    wanted = {
        ranks: group
        for ranks, group in by_ranks.items()
        if len({nodes[rank] for rank in ranks}) > 1 and comm.opposite_of(group) is None
    }
    for ranks, opposite in _make_groups(wanted).items():
        comm.send_both_ways(wanted[ranks], opposite)


def _make_groups(wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], comm.Group]:
    """By their ranks, groups that this rank is in; the others make theirs at the same time."""
    everyone = comm.gather_objects(sorted(set(wanted)), group=None)
    left = sorted({ranks for of_rank in everyone for ranks in of_rank})
    world: comm.Group = distributed.group.WORLD
    device = world.bound_device_id
    splits = device is not None and world._get_backend(device).supports_splitting
    made = {}
    while left:
        # A group that is made by itself would be a split of the whole world, too: all that share no
        # rank are one.
        at_once: list[tuple[int, ...]] = []
        for ranks in left:
            if not at_once or (splits and set(ranks).isdisjoint(chain(*at_once))):
                at_once.append(ranks)
        left = [ranks for ranks in left if ranks not in at_once]
        parts = [list(ranks) for ranks in at_once]
        group = (
            distributed.split_group(split_ranks=parts)
            if splits
            else distributed.new_group(parts[0])
        )
        for ranks in at_once:
            if comm.rank_of(None) in ranks:
                comm.take_over_timeout(group)
                made[ranks] = group
    return made
