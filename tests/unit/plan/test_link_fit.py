"""Links from times: exactly those that the times are made of, and what becomes of times that no links can have."""

import itertools
import json
import math
import re

import pytest

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.network.link_fit import Timing, fit, measured_links, missing_keys
from ds_layerwise.plan.network.links import NVLINK_IB, TCP, Group, Links, find_links
from tests.support.rooms import rooms

pytestmark = rooms("link_fit", "links")

SIZES = (1 << 10, 1 << 18, 1 << 22, 1 << 26)

#: Two rails for four ranks, and what others have.
TWO_RAILS = Links(inside_gb_s=100.0, between_gb_s=10.0, inside_us=1.0, between_us=10.0, ranks_per_node=4, rails=2,
                  peer_us=0.25, memory_gb_s=1000.0, tflops=2.0)
CLUSTERS = [(TWO_RAILS, 2), (TWO_RAILS, 3), (NVLINK_IB, 8), (TCP, 4),
            (TCP.model_copy(update={"ranks_per_node": 2, "inside_us": 5.0}), 2),
            (TWO_RAILS.model_copy(update={"rails": 4, "peer_us": 0.0}), 2)]


def times_on(links, num_nodes):
    """Return the times that the model of links predicts on such nodes, in every way that they are measured."""
    per_node = links.ranks_per_node
    # A rank that sends alone has a rail, or its part of more rails than ranks, to itself.
    lonely = links.model_copy(update={"ranks_per_node": 1, "rails": max(1, links.rails // per_node)})
    groups = []
    if per_node > 1:
        groups.append(("inside", Group(per_node, links)))
    if num_nodes > 1:
        groups.append(("alone", Group(num_nodes, lonely)))
    if per_node > 1 and num_nodes > 1:
        groups.append(("together", Group(num_nodes, links, per_node)))
    found = []
    for (where, group), nbytes in itertools.product(groups, SIZES):
        found.append(Timing("ring", where, group.size, nbytes, group.ring(nbytes) / 1e9))
        moved = nbytes * (group.size - 1) / group.size
        found.append(Timing("all_to_all", where, group.size, nbytes, group.all_to_all(moved) / 1e9))
    if per_node > 1 and num_nodes > 1:
        world = Group(per_node * num_nodes, links)
        moved = 1024 * (world.size - 1) / world.size
        found.append(Timing("all_to_all", "everywhere", world.size, 1024, world.all_to_all(moved) / 1e9))
    return found


def links_of(timings, links, num_nodes, **kwargs):
    return measured_links(timings, ranks_per_node=links.ranks_per_node, num_nodes=num_nodes, on_host=links.on_host,
                          memory_gb_s=links.memory_gb_s, tflops=links.tflops, **kwargs)


@pytest.mark.parametrize("links, num_nodes", CLUSTERS)
def test_links_come_back_from_the_times_that_they_predict(links, num_nodes):
    like = links if missing_keys(links.ranks_per_node, num_nodes) else None
    found = links_of(times_on(links, num_nodes), links, num_nodes, like=like)
    assert found.links.model_dump() == pytest.approx(links.model_dump(), rel=2e-3, abs=1e-3)
    assert found.fit.off[-1] == pytest.approx(1, abs=2e-3)
    assert set(found.sources) == set(Links.keys())


def test_the_rate_of_a_whole_node_is_divided_among_its_rails():
    # One rank reaches 8, four of them 4.9 each, 19.6 together: nearer to 2 rails than to 3.
    def times(where, gb_s):
        return [Timing("ring", where, 2, nbytes, nbytes / 2 / gb_s / 1e9) for nbytes in SIZES]

    def found(alone, together):
        timings = [*times("inside", 100), *times("alone", alone), *times("together", together)]
        timings += [Timing("all_to_all", "inside", 4, nbytes, nbytes * 3 / 4 / 100e9) for nbytes in SIZES]
        return links_of(timings, TWO_RAILS, 2).links

    assert (found(8, 4.9).rails, found(8, 4.9).between_gb_s) == (2, 9.8)
    assert (found(8, 5.1).rails, found(8, 5.1).between_gb_s) == (3, 6.8)
    # By chance a rank may reach more beside others than alone, or one as much as all of them.
    assert (found(5, 6).rails, found(5, 6).between_gb_s) == (4, 6)
    assert (found(50, 5).rails, found(50, 5).between_gb_s) == (1, 20)


def test_half_as_long_counts_as_much_as_twice_as_long():
    timings = [Timing("ring", "inside", 2, nbytes, seconds * nbytes) for nbytes in SIZES for seconds in (1e-9, 4e-9)]
    found = fit(timings, 2)
    # Half of the bytes travel; 2 nanoseconds a byte lie between 1 and 4.
    assert found.values["inside"] == pytest.approx(4) and found.values["inside_us"] == pytest.approx(0, abs=1e-9)
    assert found.off == pytest.approx([2] * 2 * len(SIZES))
    assert sorted(found.ratios) == pytest.approx([0.5] * len(SIZES) + [2] * len(SIZES))


def test_a_latency_that_comes_out_negative_is_taken_for_0_and_said():
    times = {"ring": 9.0, "all_to_all": 6.0}
    timings = [Timing(kind, "inside", 2, nbytes, 1e-6 * us + nbytes / 2 / 10e9)
               for kind, us in times.items() for nbytes in SIZES]
    links = TWO_RAILS.model_copy(update={"ranks_per_node": 2})
    found = links_of(timings, links, 1, like=NVLINK_IB, like_name="nvlink-ib")
    assert found.links.peer_us == 0 and 6 < found.links.inside_us < 9
    assert "came out negative" in found.sources["peer_us"]
    assert re.search(r"^peer_us +0 us +came out negative, and is taken for 0$", found.text, re.MULTILINE)
    assert re.search(r"^between_gb_s +50 GB/s +not measured, as --like nvlink-ib has it$", found.text, re.MULTILINE)


@pytest.mark.parametrize("seconds", [lambda nbytes: 1e-3, lambda nbytes: 1 / nbytes])
def test_times_that_do_not_grow_with_the_bytes_are_refused(seconds):
    timings = [Timing(kind, "inside", 2, nbytes, seconds(nbytes)) for kind in ("ring", "all_to_all")
               for nbytes in SIZES]
    with pytest.raises(LayerWiseError, match=r"times \(inside\) do not grow with the message size: 1024 bytes in .*us"):
        fit([*timings, Timing("ring", "inside", 2, 1 << 26, seconds(1 << 26) / 2)], 2)


@pytest.mark.parametrize("ranks_per_node, num_nodes, missing", [
    (4, 1, ("between_gb_s", "between_us", "rails")), (1, 4, ("inside_gb_s", "inside_us")), (2, 2, ())])
def test_keys_that_cannot_be_measured_are_named_and_taken_from_the_links_of_like(ranks_per_node, num_nodes, missing):
    assert missing_keys(ranks_per_node, num_nodes) == missing
    if not missing:
        return
    links = TWO_RAILS.model_copy(update={"ranks_per_node": ranks_per_node})
    timings = times_on(links, num_nodes)
    with pytest.raises(LayerWiseError, match=f"{missing[0]}, .* cannot be measured on .* with --like"):
        links_of(timings, links, num_nodes)
    found = links_of(timings, links, num_nodes, like=NVLINK_IB, like_name="nvlink-ib")
    for key, value in found.links.model_dump().items():
        assert (found.sources[key] == "not measured, as --like nvlink-ib has it") == (key in missing)
        assert key not in missing or value == getattr(NVLINK_IB, key)


def test_a_file_of_them_is_what_plans_read(tmp_path):
    found = links_of(times_on(TWO_RAILS, 2), TWO_RAILS, 2).links
    (tmp_path / "links.json").write_text(json.dumps(found.model_dump()))
    assert find_links(str(tmp_path / "links.json")) == found
    assert all(math.isfinite(value) for value in found.model_dump().values())
