"""Ranks that share a node are found from the names of hosts and local ranks alone."""

from types import SimpleNamespace

import pytest
import torch

from ds_layerwise.ranks.comm import comm, nodes
from tests.support.rooms import rooms

pytestmark = rooms("nodes")


@pytest.mark.parametrize("places, found, told", [
    ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [0, 0, 1, 1], ""),
    ([("a", -1), ("a", -1), ("b", -1)], [0, 0, 1], ""),
    ([("a", 0), ("b", 0)], [0, 1], ""),
    # Dealt out in turn, as mpirun does with --map-by node.
    ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [0, 1, 2, 3], "4 ranks on 2 hosts count as 4 nodes"),
    # Each process with one device in sight, which is its number 0.
    ([("a", 0), ("a", 0), ("b", 0), ("b", 0)], [0, 1, 2, 3], "4 ranks on 2 hosts count as 4 nodes"),
    ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [0, 0, 1, 1], "4 ranks on 1 host count as 2 nodes")])
@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_are_rows_of_ranks_and_several_of_one_host_are_told(places, found, told, rank, monkeypatch, capsys):
    monkeypatch.setattr(comm, "gather_objects", lambda mine, *, group: places)
    monkeypatch.setattr(comm, "rank_of", lambda group: rank)
    comm.report_once.cache_clear()
    assert nodes.node_of_each_rank() == found
    said = capsys.readouterr().out
    # Once a process, however many engines it makes.
    assert nodes.node_of_each_rank() == found and not capsys.readouterr().out
    assert (told in said and "number the ranks host by host" in said) if told and not rank else not said


@pytest.mark.parametrize("ranks, where, per_node, counts", [
    (range(4), [0, 0, 1, 1], 2, (2, 2)), (range(3), [0, 0, 1], 1, (2, 1)), ([0, 2], [0, 0, 1, 1], 1, (1, 1)),
    ([0, 2, 1, 3], [0, 0, 1, 1], 1, (2, 2)), (range(2), [0, 0, 1], 2, (2,))])
def test_ranks_of_a_group_are_counted_by_node(ranks, where, per_node, counts):
    assert nodes.ranks_per_node(ranks, where) == per_node
    assert nodes.counts_on_nodes(ranks, where) == counts


class World:
    """All ranks, on devices of a backend that can split, or cannot."""

    def __init__(self, splits):
        self.bound_device_id = torch.device("cuda", 0)
        self._backend = SimpleNamespace(supports_splitting=splits)

    def _get_backend(self, device):
        assert device == self.bound_device_id
        return self._backend


@pytest.mark.parametrize("splits", [True, False])
def test_levels_of_many_nodes_are_two_splits_of_the_world(splits, monkeypatch):
    """And not one a group: each is one of the whole world, 72 of them on 512 ranks."""
    num_ranks, per_node, calls, found = 512, 8, [], {}
    wanted = [(tuple(range(rank - rank % per_node, rank - rank % per_node + per_node)),
               tuple(range(rank % per_node, num_ranks, per_node))) for rank in range(num_ranks)]
    # Some groups overlap with both: those of experts, say.
    wanted[0] += ((0, 1, 8, 9), )

    def split_group(*, split_ranks):
        calls.append(split_ranks)
        return next((tuple(ranks) for ranks in split_ranks if me in ranks), None)

    def new_group(ranks):
        calls.append([ranks])
        return tuple(ranks) if me in ranks else "no member"

    monkeypatch.setattr(nodes.distributed, "split_group", split_group)
    monkeypatch.setattr(nodes.distributed, "new_group", new_group)
    monkeypatch.setattr(nodes.distributed, "group", SimpleNamespace(WORLD=World(splits)))
    monkeypatch.setattr(comm, "gather_objects", lambda mine, *, group: wanted)
    monkeypatch.setattr(comm, "rank_of", lambda group: me)
    monkeypatch.setattr(comm, "take_over_timeout", lambda group: None)
    for me in (0, 13, 31):
        made = nodes._make_groups(wanted[me])
        assert {**made} == {ranks: ranks for ranks in {*wanted[me], *wanted[0][2:]} if me in ranks}
        found[me], calls[:] = [*calls], []
    assert found[0] == found[13] == found[31]
    assert len(found[0]) == (3 if splits else num_ranks // per_node + per_node + 1)
    assert all(len(ranks) == len(set(ranks)) for ranks in (sum(call, []) for call in found[0]))
