"""Which ranks share a node, from the names of hosts and local ranks alone."""

import pytest

from ds_layerwise.ranks import comm, nodes
from tests.support.rooms import rooms

pytestmark = rooms("nodes")


@pytest.mark.parametrize("places, found, told", [
    ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [0, 0, 1, 1], ""),
    ([("a", -1), ("a", -1), ("b", -1)], [0, 0, 1], ""),
    ([("a", 0), ("b", 0)], [0, 1], ""),
    # Dealt out in turn, as mpirun does with --map-by node.
    ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [0, 1, 2, 3], "4 ranks on 2 hosts are taken for 4 nodes"),
    # Each process with one device in sight, which is its number 0.
    ([("a", 0), ("a", 0), ("b", 0), ("b", 0)], [0, 1, 2, 3], "4 ranks on 2 hosts are taken for 4 nodes"),
    ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [0, 0, 1, 1], "4 ranks on 1 host are taken for 2 nodes")])
@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_are_rows_of_ranks_and_several_of_one_host_are_told(places, found, told, rank, monkeypatch, capsys):
    monkeypatch.setattr(comm, "gather_objects", lambda mine, *, group: places)
    monkeypatch.setattr(comm, "rank_of", lambda group: rank)
    monkeypatch.setattr(nodes, "_told", [])
    assert nodes.node_of_each_rank() == found
    said = capsys.readouterr().out
    # Once a process, however many engines it makes.
    assert nodes.node_of_each_rank() == found and not capsys.readouterr().out
    assert (told in said and "number the ranks host by host" in said) if told and not rank else not said


@pytest.mark.parametrize("ranks, where, per_node, counts", [
    (range(4), [0, 0, 1, 1], 2, (2, 2)), (range(3), [0, 0, 1], 1, (2, 1)), ([0, 2], [0, 0, 1, 1], 1, (1, 1)),
    ([0, 2, 1, 3], [0, 0, 1, 1], 1, (2, 2)), (range(2), [0, 0, 1], 2, (2,))])
def test_how_many_of_a_group_are_on_each(ranks, where, per_node, counts):
    assert nodes.ranks_per_node(ranks, where) == per_node
    assert nodes.counts_on_nodes(ranks, where) == counts
