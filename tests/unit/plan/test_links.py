"""The model of the links by hand, the ways that it chooses, rows, and what a step is said to take."""

import itertools
import json
import math
import random
import re
from dataclasses import replace
from typing import get_args

import pytest

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import ConfigError, LayoutError
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.plan.forecast.forecast import LayoutReport, forecast
from ds_layerwise.plan.forecast.prediction import predict
from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.plan.layout.draft_buckets import draft_owned
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.layout.owners import Item
from ds_layerwise.plan.network.links import (
    LINKS,
    NVLINK_IB,
    PCIE_ETHERNET,
    TCP,
    Group,
    Links,
    find_links,
    links_of_run,
    unlike_the_run,
)
from ds_layerwise.plan.network.reduction import Reduction, reduction_of_run
from ds_layerwise.plan.network.transport import (
    Load,
    choose_ways,
    exchange,
    gather_levels,
    gather_ns,
    in_levels,
    ordered_levels,
    padded_for_cuts,
    reduce_all_ns,
    reduce_ns,
    ring_levels,
    takes_levels,
    wire_time,
)
from ds_layerwise.plan.planner import planner
from ds_layerwise.plan.planner.even_rows import row_limit, take_rows
from ds_layerwise.plan.planner.planner import plan_layout
from ds_layerwise.routing.routes import Route
from tests.support.model_specs import load_model_specs
from tests.support.rooms import rooms

pytestmark = rooms("links", "transport", "even_rows", "draft_buckets", "prediction", "planner")


#: Two nodes of four have 100 bytes a nanosecond inside, and two interfaces of 10 each between them.
SMALL = Links(inside_gb_s=100.0, between_gb_s=10.0, inside_us=1.0, between_us=10.0, ranks_per_node=4, rails=2,
              peer_us=0.5, memory_gb_s=1000.0, tflops=2.0)

#: Links between nodes that are much faster than those inside.
NEAR = {"between_gb_s": 1000.0}


# --- collectives by hand ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size, stride, nanoseconds", [
    (1, 1, 0),
    # 3/4 of 8 MB at 100, and 3 messages inside
    (4, 1, 60_000 + 3_000),
    # 7/8 of 8 MB at 2 x 10, and 6 messages inside, 2 between
    (8, 1, 350_000 + 26_000),
    # every second rank, 2 a node, which have half of its interfaces: 3/4 of 8 MB at 10, 2 messages inside, 2 between
    (4, 2, 600_000 + 22_000),
    # one rank of each node, which has a quarter: 1/2 of 8 MB at 5
    (2, 4, 800_000 + 20_000),
    (2, 8, 800_000 + 20_000),
])
def test_a_ring_takes_its_slowest_link_and_a_message_a_step(size, stride, nanoseconds):
    assert Group(size, SMALL, stride).ring(8e6) == nanoseconds


def test_a_ragged_ring_moves_all_bytes_over_some_link_and_waits_for_its_chains():
    group = Group(8, SMALL)
    # 8 MB at 20; the last slice goes around once, 6 ranks hold back a slice of 128 KiB each; the last chain starts 5 of
    # 7 ranks after the first; three collectives are fused.
    by_hand = 400_000 + 26_000 + 6 * 131_072 / 20 + 26_000 * 5 / 7 + 3 * 500
    assert group.ragged_ring(8e6, longest=4e6, num_shards=3, spread=5) == round(by_hand)
    # short shards are slices of their own length
    short = 20_000 / 20 + 26_000 + 6 * 10_000 / 20 + 26_000 * 1 / 7 + 2 * 500
    assert group.ragged_ring(20_000, longest=10_000, num_shards=2, spread=1) == round(short)
    assert Group(1, SMALL).ragged_ring(8e6, longest=8e6, num_shards=1, spread=0) == 0


def test_an_all_to_all_leaves_a_node_as_often_as_peers_are_elsewhere():
    group = Group(8, SMALL)
    # 4 of 7 peers are elsewhere: 4 MB of each of 4 ranks share 20
    assert group.all_to_all(7e6) == 800_000 + 10_000 + 7 * 500
    # where only one rank has much, its own interface is the bottleneck
    assert group.all_to_all(7e6, 1e6) == 400_000 + 10_000 + 7 * 500
    assert Group(4, SMALL).all_to_all(3e6) == 30_000 + 1_000 + 3 * 500
    assert Group(1, SMALL).all_to_all(3e6) == 0
    # ranks of which a node has one share nothing inside it
    assert Group(4, SMALL, 4).all_to_all(3e6) == 600_000 + 10_000 + 3 * 500


def test_ordered_sums_are_made_inside_nodes_first_and_go_on_as_gradients_travel():
    levels = ordered_levels(1_000_000, 2, Group(8, SMALL))
    # 3/4 of 2 MB at 100, 1 message and 3 peers; 2 MB are read and 1/4 of 1 M sums written at 1000
    assert levels.inside == 15_000 + 1_000 + 1_500 + 2_500
    # half of 0.5 MB of sums leaves each of 4 ranks, which share 20; 1 message, 1 peer; read, half written in float32
    assert levels.between == 50_000 + 10_000 + 500 + 1_000
    one_node = ordered_levels(1_000_000, 2, Group(4, SMALL))
    assert one_node == (15_000 + 1_000 + 1_500 + 3_000, 0)
    assert ordered_levels(1_000_000, 2, Group(2, SMALL, 4)) == (0, 200_000 + 10_000 + 500 + 4_000)


def test_a_gather_by_levels_is_a_ring_between_nodes_and_one_inside():
    # a quarter of 8 MB around the two nodes, at 5; all of it around the four ranks of a node, at 100
    assert gather_levels(8e6, Group(8, SMALL)) == (60_000 + 3_000, 200_000 + 20_000)
    assert gather_levels(8e6, Group(4, SMALL)) == (63_000, 0)


def load(*numels, stride=1, wire=2, params=2):
    items = [Item(str(i), i, numel, numel, 0, "bfloat16", stride, "bfloat16")
             for i, numel in enumerate(numels) if numel]
    draft = draft_owned(items, [i for i, numel in enumerate(numels) if numel], len(numels))
    return replace(Load.of_draft(draft), wire_bytes=wire, param_bytes=params)


def test_sums_inside_nodes_overlap_with_those_of_the_bucket_before_between_nodes():
    even, alone = load(*8 * [125_000]), load(*4 * [100_000], stride=2)
    inside, between = ordered_levels(1_000_000, 2, Group(8, SMALL))
    assert inside < between

    def took(loads, way="even", links=SMALL, reduction="ordered"):
        return reduce_all_ns(loads, [way] * len(loads), links, reduction)

    assert [took([even] * count) for count in range(4)] == [0, *(inside + count * between for count in (1, 2, 3))]
    slow_inside = SMALL.model_copy(update={"inside_gb_s": 10.0})
    inside, between = ordered_levels(1_000_000, 2, Group(8, slow_inside))
    assert inside > between
    assert took([even] * 3, links=slow_inside) == 3 * inside + between
    # The third has the memory of the first, which one that is large is still between nodes with.
    large, small = load(*8 * [10_000_000]), load(*8 * [100])
    (_, long), (first, last) = (ordered_levels(each.numel, 2, Group(8, SMALL)) for each in (large, small))
    inside = ordered_levels(large.numel, 2, Group(8, SMALL)).inside
    assert took([large, small]) == inside + long + last
    assert took([large, small, small]) == inside + long + max(first, last) + last
    # What knows no levels, and what a host sends, is one after another.
    on_host, small_nodes, at_once = (SMALL.model_copy(update=update) for update in (
        {"on_host": True}, {"ranks_per_node": 2}, {**NEAR, "inside_us": 0.0, "between_us": 0.0}))
    for loads, way, links, reduction in [
            ([even] * 3, "even", at_once, "native"), ([even] * 3, "ragged", SMALL, "ordered"),
            ([even] * 3, "even", on_host, "native"), ([alone] * 2, "even", small_nodes, "ordered"),
            ([even] * 3, "even", on_host, "ordered")]:
        each = reduce_ns(loads[0], way, loads[0].numel, Group(loads[0].holders, links, loads[0].ep_size), reduction)
        assert took(loads, way, links, reduction) == len(loads) * each


def test_rings_are_in_two_levels_where_one_takes_longer():
    group, even, in_float32 = Group(8, SMALL), load(*8 * [125_000]), load(*8 * [125_000], wire=4)
    # three quarters of 2 MB at 100, which is sorted, read and written at 1000, and half of a quarter at 5
    inside, between = ring_levels(2e6, group)
    assert (inside, between) == (15_000 + 3_000 + 2_000 + 2_000, 50_000 + 20_000)
    assert group.ring(2e6) == 87_500 + 6_000 + 20_000 and takes_levels(2e6, group)
    assert reduce_ns(even, "even", even.numel, group, "native") == gather_ns(even, "even", even.numel, group) == 92_000
    assert reduce_ns(in_float32, "cuts", even.numel, group, "native") == sum(ring_levels(4e6, group))
    assert reduce_all_ns([even] * 3, ["even"] * 3, SMALL, "native") == inside + 3 * between
    at_once = Group(8, SMALL.model_copy(update={**NEAR, "inside_us": 0.0, "between_us": 0.0}))
    assert sum(ring_levels(2e6, at_once)) > at_once.ring(2e6) and not takes_levels(2e6, at_once)
    for each in (at_once, Group(4, SMALL), Group(8, SMALL, 4)):
        assert reduce_ns(even, "even", even.numel, each, "native") == each.ring(2e6) == gather_ns(
            even, "even", even.numel, each)
    assert reduce_ns(even, "ragged", even.numel, group, "native") == group.ragged_ring(
        2e6, longest=250_000, num_shards=8, spread=7)


def test_the_backend_sends_in_two_levels_where_that_is_shorter():
    # Of two nodes that are near, what is shorter than 3 MB: one ring has 26 us of latency, two have 23, and take
    # 7/8 / 100 ns a byte, or 3/4 / 100 + 2 / 1000 + 1/8 / 500.
    near = SMALL.model_copy(update=NEAR)
    even = Bucket(0, "bfloat16", True, 0, (175_000,) * 8, tuple(Slot(str(i), 175_000 * i, 9) for i in range(8)))
    kinds = [("even", "bfloat16", "bfloat16"), ("ragged", "bfloat16", "bfloat16"), ("cuts", "bfloat16", "bfloat16"),
             ("even", "bfloat16", "float32"), ("cuts", "float32", "bfloat16"), ("even", "float32", "float32")]
    buckets = [replace(even, index=i, way=way, dtype=dtype) for i, (way, dtype, _) in enumerate(kinds)]
    wires = [wire for _, _, wire in kinds]

    def found(reduction="native", links=near):
        return tuple(sorted(each) for each in in_levels(buckets, wires, links, reduction))

    assert found() == ([0, 2, 4], [0, 2, 3])
    assert found("ordered") == ([], [0, 2, 3])
    assert found(links=near.model_copy(update={"on_host": True})) == ([0, 2, 4], [])
    assert found(links=near.model_copy(update={"ranks_per_node": 8})) == ([], [])
    assert found(links=near.model_copy(update={"between_us": 9.0, "inside_us": 2.0})) == ([0, 2, 3, 4, 5], ) * 2


def test_a_bucket_goes_straight_to_its_owners_or_in_cuts():
    group, skewed = Group(4, SMALL), load(0, 700_000, 0, 100_000)
    assert (skewed.numel, skewed.longest, skewed.spread, skewed.shards.filled) == (800_000, 700_000, 2, (1, 3))
    assert reduce_ns(skewed, "cuts", 800_000, group, "native") == group.ring(1.6e6)
    assert reduce_ns(skewed, "ragged", 800_000, group, "native") == group.ragged_ring(
        1.6e6, longest=1.4e6, num_shards=2, spread=2)
    # The owner of most receives its shard from three others, and adds up four.
    assert reduce_ns(skewed, "ragged", 800_000, group, "ordered") == group.all_to_all(4.2e6, 1.2e6) + 5_600 + 2_800
    assert reduce_ns(skewed, "cuts", 800_000, group, "ordered") == sum(ordered_levels(800_000, 2, group))
    assert gather_ns(skewed, "cuts", 800_000, group) == group.ring(1.6e6)
    on_host = replace(group, links=SMALL.model_copy(update={"on_host": True}))
    assert gather_ns(skewed, "ragged", 800_000, on_host) == group.all_to_all(4.2e6, 1.2e6)
    there = reduce_ns(skewed, "ragged", 800_000, group, "native")
    assert gather_ns(skewed, "ragged", 800_000, group) == there


def test_an_exchange_takes_as_long_as_the_busiest_owner_of_all_cuts():
    group = Group(4, SMALL)
    moved = exchange([load(0, 700, 0, 100), load(300, 0, 0, 100)], group)
    # Of 700 elements of rank 1, and of 300 of rank 0, 200 and 100 are in their own cuts, all 200 of rank 3 are.
    assert moved.sums == group.all_to_all(500 * 4, (500 + 200) / 4 * 4)
    assert moved.params == group.all_to_all(500 * 2, (500 + 200) / 4 * 2)
    assert exchange([replace(load(0, 700, 0, 100), sum_bytes=2)], group).sums == group.all_to_all(1000, 250)
    assert exchange([], group) == (0, 0)


# --- links -----------------------------------------------------------------------------------------------------------

#: Seconds of a ring reduce-scatter of bfloat16 gradients, from alpha and beta alone, with so many buckets.
RINGS = [("nvlink-ib", 8_030_261_248, 8, 15, 0.031), ("nvlink-ib", 8_030_261_248, 64, 15, 0.041),
         ("nvlink-ib", 70_553_706_496, 512, 402, 0.750), ("pcie-ethernet", 70_553_706_496, 8, 402, 2.474),
         ("pcie-ethernet", 70_553_706_496, 512, 402, 3.215), ("pcie-ethernet", 8_030_261_248, 64, 99, 0.328)]


@pytest.mark.parametrize("links, numel, ranks, buckets, seconds", RINGS)
def test_the_default_links_give_the_rings_of_the_reference(links, numel, ranks, buckets, seconds):
    group = Group(ranks, LINKS[links])
    assert sum(group.ring(2 * numel / buckets) for _ in range(buckets)) / 1e9 == pytest.approx(seconds, abs=0.001)


def test_links_come_by_name_or_from_a_file(tmp_path):
    assert find_links("nvlink-ib") is NVLINK_IB and find_links("pcie-ethernet") is PCIE_ETHERNET
    file = tmp_path / "mine.json"
    given = {"inside_gb_s": 100, "between_gb_s": 10.0, "inside_us": 1, "between_us": 10, "ranks_per_node": 4,
             "rails": 2, "memory_gb_s": 1000, "tflops": 2}
    file.write_text(json.dumps(given))
    assert find_links(str(file)) == SMALL


@pytest.mark.parametrize("content, message", [
    (None, "^links must be one of nvlink-ib, pcie-ethernet, tcp or a file, got "),
    ("{", "mine.json is no JSON: "),
    ("[1]", r"mine.json must be an object with inside_gb_s, .*, got \[1\]"),
    ({"rails": None}, "mine.json.rails is missing; it needs inside_gb_s, between_gb_s, "),
    ({"inside_gbs": 3}, "mine.json.inside_gbs is not an option; did you mean 'inside_gb_s'?"),
    ({"between_gb_s": 0}, r"mine.json.between_gb_s must be in \[1e-09, 1e\+09\], got 0"),
    ({"between_us": -1}, r"mine.json.between_us must be in \[0, 1e\+09\], got -1"),
    ({"peer_us": math.nan}, r"mine.json.peer_us must be in \[0, 1e\+09\], got nan"),
    ({"ranks_per_node": 0}, "mine.json.ranks_per_node must be a whole number of at least 1, got 0"),
    ({"rails": "8"}, "mine.json.rails must be a whole number of at least 1, got '8'"),
])
def test_a_file_that_describes_no_links_is_refused(tmp_path, content, message):
    file = tmp_path / "mine.json"
    if isinstance(content, dict):
        changed = {**NVLINK_IB.model_dump(), **content}
        content = json.dumps({key: value for key, value in changed.items() if value is not None})
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_links(str(file))


def test_a_name_that_can_be_no_file_is_refused():
    with pytest.raises(ConfigError, match="^layerwise.links must be one of .* a file, got .*: File name too long"):
        find_links("{" * 300, where="layerwise.links")


#: By the unit in its name, the least and the most that a key may say, and what is beyond.
BOUNDS = {"gb_s": (1e-9, 1e9, 9e-10, 1.1e9), "flops": (1e-9, 1e9, 9e-10, 1.1e9), "us": (0, 1e9, -1e-9, 1.1e9)}


@pytest.mark.parametrize("key", [key for key, field in Links.model_fields.items() if field.annotation is float])
def test_whatever_links_a_file_may_have_can_be_planned_for(key, tmp_path):
    file = tmp_path / "mine.json"
    specs = [ParamSpec(f"{i}", (64 + i % 3, 64), "float32", True, work=9**6) for i in range(7)]
    *within, less, more = next(bounds for unit, bounds in BOUNDS.items() if key.endswith(unit))
    for value in within:
        file.write_text(json.dumps({**TCP.model_dump(), key: value}))
        for reduction, ranks in itertools.product(("ordered", "native"), (2, 16)):
            links = find_links(str(file))
            assert plan_layout(specs, ranks, bucket_numel=5000, links=links, reduction=reduction).buckets
    for value in (less, more):
        file.write_text(json.dumps({**TCP.model_dump(), key: value}))
        with pytest.raises(ConfigError, match=f"mine.json.{key} must be in"):
            find_links(str(file))


# --- ways ------------------------------------------------------------------------------------------------------------

def ways(loads, links, reduction, alignment=1):
    """Return the ways that are chosen and the time of a step of them, with cuts padded as a plan pads them."""
    chosen = choose_ways(loads, links, reduction, alignment)
    return chosen, step_ns(loads, chosen, links, reduction, alignment)


def step_ns(loads, chosen, links, reduction, alignment=1):
    padded = [replace(one, numel=padded_for_cuts(one.numel, one.holders, alignment)) if way == "cuts" else one
              for one, way in zip(loads, chosen, strict=True)]
    return wire_time(padded, chosen, links, reduction).total


@pytest.mark.parametrize("said, on_host, ranks_per_node, expected", [
    ("auto", True, 4, TCP.model_copy(update={"ranks_per_node": 4})),
    ("auto", False, None, NVLINK_IB),
    ("auto", False, 4, NVLINK_IB.model_copy(update={"ranks_per_node": 4, "rails": 4})),
    # Rates are those of the name, and collectives those of what talks; None leaves both to the name.
    ("pcie-ethernet", True, 2, PCIE_ETHERNET.model_copy(update={"ranks_per_node": 2, "rails": 2, "on_host": True})),
    ("pcie-ethernet", None, 2, PCIE_ETHERNET.model_copy(update={"ranks_per_node": 2, "rails": 2})),
    ("tcp", False, 2, TCP.model_copy(update={"ranks_per_node": 2, "on_host": False})),
    ("tcp", False, None, TCP.model_copy(update={"on_host": False})),
    ("tcp", None, 2, TCP.model_copy(update={"ranks_per_node": 2})),
    ("auto", None, None, NVLINK_IB),
])
def test_the_links_of_a_run_have_its_nodes(said, on_host, ranks_per_node, expected):
    assert links_of_run(said, on_host=on_host, ranks_per_node=ranks_per_node) == expected


def test_a_file_keeps_its_interfaces(tmp_path):
    file = tmp_path / "links.json"
    file.write_text(json.dumps(NVLINK_IB.model_dump()))
    found = links_of_run(str(file), on_host=False, ranks_per_node=2)
    assert found == NVLINK_IB.model_copy(update={"ranks_per_node": 2})
    with pytest.raises(ConfigError, match="^flag must be one of auto, nvlink-ib, "):
        links_of_run("ib", on_host=False, ranks_per_node=2, where="flag")


@pytest.mark.parametrize("said, on_host, told", [
    ("auto", True, ""), ("auto", False, ""), ("tcp", True, ""), ("nvlink-ib", False, ""), ("pcie-ethernet", False, ""),
    ("tcp", False, "between host memory, but parameters are in devices: .* collectives of the device's own backend"),
    ("nvlink-ib", True, "between devices, but parameters are in host memory: .* collectives of gloo"),
    ("host", True, ""), ("host", False, "between host memory"),
    ("device", False, ""), ("device", True, "between devices"), ("either", True, ""), ("either", False, "")])
def test_links_that_are_not_of_what_talks_are_told(said, on_host, told, tmp_path):
    content = NVLINK_IB.model_dump()
    own = {"host": {**content, "on_host": True}, "device": {**content, "on_host": False},
           "either": {key: value for key, value in content.items() if key != "on_host"}}.get(said)
    if own is not None:
        (tmp_path / "links.json").write_text(json.dumps(own))
        said = str(tmp_path / "links.json")
        assert links_of_run(said, on_host=on_host, ranks_per_node=8).on_host is on_host
    line = unlike_the_run(said, on_host=on_host)
    assert re.match(f"layerwise.links '{re.escape(said)}' is {told}", line) if told else line == ""


@pytest.mark.parametrize("said, on_host, expected", [
    ("auto", True, "ordered"), ("auto", False, "native"), ("native", True, "native"), ("ordered", False, "ordered")])
def test_auto_leaves_sums_to_the_backend_but_on_a_host(said, on_host, expected):
    assert reduction_of_run(said, on_host=on_host) == expected


def test_equal_shards_go_straight_and_skewed_ones_in_cuts_where_that_is_shorter():
    million = 1_000_000
    even, skewed = load(*[million] * 4), load(0, 4 * million, 0, 0)
    on_host = SMALL.model_copy(update={"on_host": True})
    # Four times what is received in cuts; against that an exchange of a quarter in float32.
    assert ways([even, skewed], on_host, "ordered")[0] == ["even", "cuts"]
    # One that is hardly skewed stays, though an exchange is on its way anyhow: its part of that is more than it gains.
    nearly = load(1_100_000, *[million] * 3)
    assert ways([skewed, nearly], on_host, "ordered")[0] == ["cuts", "ragged"]
    # A chain to one owner takes 4/3 of a ring; an exchange of a quarter more than 1/3 of it.
    assert ways([even, skewed], SMALL, "native")[0] == ["even", "ragged"]
    # Over many nodes each rank exchanges a small part, but a short chain has less latency than an exchange.
    many = [0] * 63
    assert ways([load(*many, 64 * million)], SMALL, "native")[0] == ["ragged"]
    assert ways([load(*many, 64 * million)] * 30, SMALL, "ordered")[0] == ["cuts"] * 30
    # Alone in its group, a rank sends nothing.
    assert ways([load(100)], SMALL, "ordered") == (["even"], 0)


def at_levels(reduction, holders, links):
    return reduction == "ordered" and 1 < links.ranks_per_node < holders


def test_sums_made_inside_nodes_first_are_never_ragged_so_that_the_way_changes_no_sum():
    nodes = SMALL.model_copy(update={"ranks_per_node": 2})
    nearly = [load(11_000_000, 10_000_000, 10_000_000, 10_000_000)]
    assert ways(nearly, SMALL.model_copy(update={"ranks_per_node": 1}), "ordered")[0] == ["ragged"]
    assert ways(nearly, nodes, "native")[0] == ["ragged"]
    assert ways(nearly, nodes, "ordered")[0] == ["cuts"]
    for links, ranks in itertools.product((NVLINK_IB, PCIE_ETHERNET, TCP.model_copy(update={"ranks_per_node": 2})),
                                          (4, 16, 64)):
        for model, bucket_numel in itertools.product(("gpt2-124m", "qwen3-0.6b"), (10**6, 5 * 10**7, 5 * 10**8)):
            layout = plan_layout(load_model_specs(model), ranks, bucket_numel=bucket_numel,
                                 links=links, reduction="ordered")
            if at_levels("ordered", ranks, links):
                assert chosen_ways(layout) <= {"even", "cuts"}, (links, ranks, model, bucket_numel)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_ways_take_much_less(seed):
    rng = random.Random(seed)
    for _ in range(10):
        holders, links = rng.choice([2, 4, 8, 16]), rng.choice([SMALL, NVLINK_IB, PCIE_ETHERNET])
        owned = [[rng.choice([0, 0, 1, 10]) * rng.choice([10**4, 10**6, 10**7]) for _ in range(holders - 1)] + [10**5]
                 for _ in range(rng.randint(1, 6))]
        loads = [load(*numels) for numels in owned]
        for reduction in ("native", "ordered"):
            chosen, took = ways(loads, links, reduction)
            others = ["cuts"] if at_levels(reduction, holders, links) else ["ragged", "cuts"]
            options = [["even"] if way == "even" else others for way in chosen]
            found = {way: step_ns(loads, way, links, reduction) for way in itertools.product(*options)}
            straight = found[tuple(kinds[0] for kinds in options)]
            assert took <= straight
            assert took <= 1.15 * min(found.values()), (owned, chosen)


def planned(model, ranks, *, bucket_numel=500_000_000, links=NVLINK_IB, reduction="ordered", policy="balanced"):
    """Return the number of buckets and the time of all collectives."""
    specs = [replace(spec, wire="bfloat16") for spec in load_model_specs(model)]
    buckets = plan_layout(specs, ranks, bucket_numel=bucket_numel, links=links, reduction=reduction,
                          policy=policy).buckets
    return len(buckets), wire_time([Load.of_bucket(bucket, "bfloat16", reduction) for bucket in buckets],
                                   [bucket.way for bucket in buckets], links, reduction)


def felt(wire):
    """Return the time of collectives if half of what may hide behind the backward pass does."""
    return wire.last + (wire.reduce - wire.last) / 2 + wire.sums + wire.params + wire.gather


@pytest.mark.parametrize("reduction", get_args(Reduction))
@pytest.mark.parametrize("model, bucket_numel, links, ranks", [
    ("qwen3-0.6b", 500_000_000, NVLINK_IB, {64, 128}), ("qwen3-0.6b", 500_000_000, TCP, set()),
    ("llama-2-7b", 4_000_000_000, NVLINK_IB, {16, 128}), ("llama-2-7b", 4_000_000_000, PCIE_ETHERNET, {16}),
    ("gpt2-124m", 500_000_000, NVLINK_IB, set())])
def test_few_buckets_are_cut_into_more_where_levels_overlap_and_that_gains(model, bucket_numel, links, ranks, reduction,
                                                                          monkeypatch):
    how = {"bucket_numel": bucket_numel, "links": links, "reduction": reduction}
    found = {size: planned(model, size, **how) for size in (8, 16, 64, 128)}
    monkeypatch.setattr(planner, "_FEW_BUCKETS", 0)
    plain = {size: planned(model, size, **how) for size in found}
    more = {size for size in found if found[size] != plain[size]}
    assert more == (ranks if reduction == "ordered" else set())
    for size in more:
        assert found[size][0] > plain[size][0] and felt(found[size][1]) <= 0.98 * felt(plain[size][1])
        assert found[size][1].tail <= plain[size][1].tail


@pytest.mark.parametrize("model, ranks, bucket_numel, num_buckets, by_total", [
    ("qwen3-0.6b", 64, 500_000_000, 3, 3), ("qwen3-0.6b", 64, 4_000_000_000, 4, 4),
    ("llama-2-7b", 512, 4_000_000_000, 5, 8)])
def test_the_fastest_of_smaller_sizes_is_taken_if_that_gains_enough(model, ranks, bucket_numel, num_buckets, by_total,
                                                                   monkeypatch):
    found = planned(model, ranks, bucket_numel=bucket_numel)
    monkeypatch.setattr(planner, "_MUST_GAIN", 30)
    assert planned(model, ranks, bucket_numel=bucket_numel)[0] < found[0] == num_buckets
    monkeypatch.setattr(planner, "_FEW_BUCKETS", 0)
    # A bucket holds all of the model at most.
    full = min(bucket_numel, sum(spec.numel for spec in load_model_specs(model)))
    smaller = [planned(model, ranks, bucket_numel=-(-full // parts)) for parts in (1, 2, 4, 8)]
    assert found == min(smaller, key=lambda each: felt(each[1])) and felt(found[1]) < 0.97 * felt(smaller[0][1])
    assert min(smaller, key=lambda each: each[1].total)[0] == by_total


def test_nothing_is_cut_that_would_leave_more_after_the_last_gradient(monkeypatch):
    """The fastest are fourteen buckets, of which thirteen go in cuts, and so in an exchange that nothing hides."""
    found = planned("llama-2-7b", 64, bucket_numel=4_000_000_000)
    monkeypatch.setattr(planner, "_FEW_BUCKETS", 0)
    plain, *smaller = (planned("llama-2-7b", 64, bucket_numel=4_000_000_000 // parts) for parts in (1, 2, 4, 8))
    fastest = min(smaller, key=lambda each: each[1].total)
    assert fastest[1].total < 0.95 * plain[1].total and fastest[1].tail > plain[1].tail
    assert found == plain


def test_many_buckets_and_other_policies_stay_as_they_are(monkeypatch):
    cases = [("qwen3-0.6b", {"bucket_numel": 50_000_000}), ("qwen3-0.6b", {"policy": "lpt"}),
             ("qwen3-0.6b", {"policy": "size_matching"})]
    found = [planned(model, 64, **settings) for model, settings in cases]
    assert found[0][0] > 8 >= found[1][0]
    monkeypatch.setattr(planner, "_FEW_BUCKETS", 0)
    assert found == [planned(model, 64, **settings) for model, settings in cases]


def test_a_reduction_that_is_none_is_refused():
    with pytest.raises(LayoutError, match="reduction must be one of native, ordered, got 'auto'"):
        plan_layout([ParamSpec("w", (4, 4), "float32", True, 1)], 2, bucket_numel=1, reduction="auto")


# --- rows ------------------------------------------------------------------------------------------------------------

def items(*kinds):
    return [Item(f"w{i}", i, numel, numel + -numel % 64, work, "bfloat16", 1, "float32")
            for i, (numel, work) in enumerate(kinds)]


def test_rows_take_one_parameter_of_a_size_from_every_rank_as_far_as_the_poorest_goes():
    big, small, other = (64, 3), (64, 2), (128, 3)
    stream = items(big, small, big, other, big, small, big, big, other)
    owners = dict(zip(range(9), (0, 1, 0, 0, 1, 1, 1, 0, 1)))
    rows = take_rows(stream, owners, 2, bucket_numel=1, limit=256)
    # Both own two of the big ones, and one of the others; of the small ones one rank has none.
    assert [[item.position for item in bucket] for bucket in rows.buckets] == [[0, 2], [4, 6], [3, 8]]
    assert [item.position for item in rows.rest] == [1, 5, 7]
    assert rows.owners == {1: 1, 5: 1, 7: 0}
    drafts = rows.drafts(2)
    assert [draft.shard_numels for draft in drafts] == [(64, 64), (64, 64), (128, 128)]
    assert all(draft.shards.is_even and draft.items[0].wire == "float32" for draft in drafts)
    # A row that is too long is none, and rows fill a bucket.
    assert len(take_rows(stream, owners, 2, bucket_numel=1, limit=255).buckets) == 2
    (bucket, last) = take_rows(stream, owners, 2, bucket_numel=129, limit=256).buckets
    assert [item.position for item in bucket] == [0, 2, 4, 6] and len(last) == 2
    (every,) = take_rows(stream, owners, 2, bucket_numel=10**9, limit=256).drafts(2)
    assert every.shard_numels == (256, 256)


def test_a_row_is_a_bucket_or_a_sixteenth_of_the_model_at_most():
    assert (row_limit(100, 1599), row_limit(100, 1600), row_limit(100, 3200)) == (100, 100, 200)


@pytest.mark.parametrize("seed", range(40))
def test_rows_alter_nobodys_total(seed):
    rng = random.Random(seed)
    kinds = [(rng.randint(1, 9) * 64, rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
    stream, holders = items(*rng.choices(kinds, k=rng.randint(1, 60))), rng.randint(2, 6)
    owners = {item.position: rng.randrange(holders) for item in stream}
    rows = take_rows(stream, owners, holders, bucket_numel=rng.choice([1, 1000, 10**6]), limit=10**9)
    found = dict(rows.owners)
    for bucket in rows.buckets:
        found.update((item.position, number % holders) for number, item in enumerate(bucket))
        for row in zip(*[iter(bucket)] * holders, strict=True):
            assert len({(item.numel, item.work) for item in row}) == 1
            assert [item.position for item in row] == sorted(item.position for item in row)
    assert found.keys() == owners.keys() and [item.position for item in rows.rest] == sorted(rows.owners)
    for kind in set(kinds):
        alike = [item.position for item in stream if (item.numel, item.work) == kind]
        assert sorted(found[position] for position in alike) == sorted(owners[position] for position in alike)


# --- plans -----------------------------------------------------------------------------------------------------------

def real(name, wire="bfloat16"):
    return [replace(spec, wire=wire) for spec in load_model_specs(name)]


def chosen_ways(layout):
    return {bucket.way for bucket in layout.buckets if bucket.whole}


def test_a_single_node_takes_rows_and_many_take_cuts():
    specs = real("llama-3-8b")
    node = plan_layout(specs, 8, bucket_numel=50_000_000, reduction="native")
    assert chosen_ways(node) == {"even"} and LayoutReport.of(node, specs).padding == 0
    # 4 x 32 matrices of 4096 x 4096 and less, 3 x 32 larger ones; a row of eight of these is 470 M elements.
    assert len([bucket for bucket in node.buckets if bucket.whole]) == 20
    assert chosen_ways(plan_layout(specs, 512, bucket_numel=50_000_000, reduction="native")) == {"cuts"}
    # Where a detour through cuts costs nothing but latency, and chains of ranks are free, there is no need of cuts.
    free = NVLINK_IB.model_copy(update={"inside_us": 0.0, "between_us": 0.0, "peer_us": 100.0})
    assert chosen_ways(plan_layout(specs, 512, bucket_numel=500_000_000, reduction="native", links=free)) == {"ragged"}


def test_rows_do_not_change_who_works_how_much():
    specs = real("llama-3-8b")
    with_rows = plan_layout(specs, 8, bucket_numel=50_000_000)
    # Buckets of the whole model leave no room for rows: they are even as they are, or not.
    without = plan_layout(specs, 8, bucket_numel=10**12)
    for key in ("work", "whole_numel"):
        assert sorted(getattr(LayoutReport.of(with_rows, specs), key)) == \
            sorted(getattr(LayoutReport.of(without, specs), key))


def test_cuts_pad_the_last_shard_that_is_not_empty_and_that_counts_where_plans_are_compared(monkeypatch):
    compared = []

    def counted(loads, ways, *rest):
        compared.extend((load.numel, load.shards.numel) for load, way in zip(loads, ways, strict=True) if way == "cuts")
        return wire_time(loads, ways, *rest)

    monkeypatch.setattr(planner, "wire_time", counted)
    specs = [ParamSpec(name, (numel,), "bfloat16", True, numel) for name, numel in (("a", 10**7), ("b", 64))]
    links = SMALL.model_copy(update={"inside_us": 0.0, "between_us": 0.0, "peer_us": 0.0})
    (bucket,) = plan_layout(specs, 4, bucket_numel=10**9, links=links).buckets
    # 10,000,064 elements and 64 more are a multiple of 4 x 64.
    assert bucket.way == "cuts" and bucket.shard_numels == (10_000_000, 64 + 64, 0, 0)
    assert bucket.cut_numel == 2_500_032 and {*compared} == {(bucket.numel, bucket.numel)}


@pytest.mark.parametrize("links", [NVLINK_IB, PCIE_ETHERNET], ids=["nvlink-ib", "pcie-ethernet"])
@pytest.mark.parametrize("ranks", [8, 64, 512, 4096])
def test_native_sums_take_hardly_more_than_rings(ranks, links):
    specs = real("llama-3-70b")
    layout = plan_layout(specs, ranks, bucket_numel=50_000_000, links=links, reduction="native")
    wire = wire_time([Load.of_bucket(bucket, "bfloat16") for bucket in layout.buckets],
                     [bucket.way for bucket in layout.buckets], links, "native")
    # 402 buckets of ZeRO-1, each a ring
    ring = sum(Group(ranks, links).ring(2 * 70_553_706_496 / 402) for _ in range(402))
    assert wire.reduce + wire.sums <= 1.1 * ring and wire.gather + wire.params <= 1.1 * ring
    if ranks == 4096:
        # Such a ring is latency for the most part: of two levels there is less, and those of two reductions overlap.
        assert wire.reduce + wire.sums <= 0.5 * ring and wire.gather + wire.params <= 0.75 * ring


@pytest.mark.parametrize("links", [NVLINK_IB, PCIE_ETHERNET], ids=["nvlink-ib", "pcie-ethernet"])
@pytest.mark.parametrize("bucket_numel", [50_000_000, 500_000_000])
@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3-8b", "llama-3-70b", "llama-3-405b"])
@pytest.mark.parametrize("reduction, bound", [("native", 1.1), ("ordered", 1.5)])
def test_a_step_takes_little_more_than_rings_without_owners(model, bucket_numel, links, reduction, bound):
    """The bounds that the results of examples/benchmarks/links.py have for all models, and say where they do not."""
    for ranks in (8, 64, 512, 4096):
        num_buckets, found = planned(model, ranks, bucket_numel=bucket_numel, links=links, reduction=reduction)
        specs = load_model_specs(model)
        total = sum(spec.numel for spec in specs)
        rings = -(-total // bucket_numel)
        ring = rings * Group(ranks, links).ring(2 * total / rings)
        assert found.reduce + found.sums <= bound * ring and found.gather + found.params <= bound * ring


# --- what a step takes -----------------------------------------------------------------------------------------------

CONFIG = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 128}, "bf16": {"enabled": True},
          "optimizer": {"type": "LayerWiseMuon", "params": {}}}


def small_prediction(**arguments):
    specs = [ParamSpec(f"w{i}", (8, 8), "bfloat16", True, 1000 * (i + 1)) for i in range(4)]
    run = RunConfig.from_ds_config(CONFIG)
    routes = {spec.name: Route(name=spec.name, recipe=Muon(), reason="matrix", group=0, matrix_shape=spec.shape)
              for spec in specs}
    planned = forecast(specs, routes, run, 2, links=SMALL)
    return planned, predict(planned, specs, routes, run, links=SMALL, bucket_numels=(64, 256), **arguments)


def test_a_step_takes_what_its_collectives_take_and_the_busiest_rank():
    planned, predicted = small_prediction()
    assert max(planned.report.work) == 5000 and predicted.update == round(5000 / 2000)
    assert (predicted.ways, [(size.bucket_numel, size.num_buckets) for size in predicted.sizes]) == (
        {"even": 2}, [(64, 4), (128, 2), (256, 1)])
    group = Group(2, SMALL)
    one = sum(ordered_levels(128, 2, group))
    assert predicted.wire == (2 * one, 0, 0, 2 * group.ring(256), one)
    assert predicted.total == 2 * one + 2 * group.ring(256) + predicted.update and predicted.wire.tail == one


def test_a_bucket_takes_the_same_beside_others():
    # The same elements: on other ranks, on ranks further apart, on more of them, longest shards of other lengths.
    loads = [load(*numels) for numels in ((800_000, 0, 0, 0), (400_000, 400_000, 0, 0), (400_000, 0, 0, 400_000),
                                          (400_000, 200_000, 0, 200_000), (700_000, 0, 0, 100_000))]
    loads += [replace(loads[1], wire_bytes=4), replace(loads[1], param_bytes=4), replace(loads[1], sum_bytes=2)]
    for reduction, links in itertools.product(("native", "ordered"), (SMALL, TCP)):
        for way in ("ragged", "cuts"):
            alone = [wire_time([each], [way], links, reduction) for each in loads]
            together = wire_time(loads, [way] * len(loads), links, reduction)
            assert (together.gather, together.last) == (sum(each.gather for each in alone), alone[-1].last)
            if way == "ragged":
                assert together.reduce == sum(each.reduce for each in alone)
                assert len({(each.reduce, each.gather) for each in alone}) >= 4


def test_other_sizes_take_what_their_layouts_take():
    specs = [ParamSpec(f"w{i}", (numel,), "bfloat16", True, numel)
             for i, numel in enumerate((*[10**7] * 4, 640, 640, 640, 576))]
    specs.append(ParamSpec("v", (1000,), "bfloat16", False))
    no_latency = SMALL.model_copy(update={"inside_us": 0.0, "between_us": 0.0, "peer_us": 0.0})
    run = RunConfig.from_ds_config({**CONFIG, "communication_data_type": "bf16"})
    routes = {spec.name: Route(name=spec.name, recipe=Muon() if spec.whole else AdamW(), reason="", group=0,
                               matrix_shape=(1, spec.numel) if spec.whole else None) for spec in specs}
    sizes = (2496, 10**6, 10**9)
    ways = set()
    for links, reduction in itertools.product((SMALL, TCP, no_latency), ("native", "ordered")):
        plan = forecast(specs, routes, run, 4, links=links, reduction=reduction)
        predicted = predict(plan, specs, routes, run, links=links, reduction=reduction, bucket_numels=sizes)
        for size, found in zip(sizes, predicted.sizes[1:], strict=True):
            other = forecast(specs, routes, run, 4, links=links, reduction=reduction, bucket_numel=size)
            buckets = other.layout.buckets
            ways.update(bucket.way for bucket in buckets)
            loads = [Load.of_bucket(bucket, wire, reduction) for bucket, wire in zip(buckets, other.wires, strict=True)]
            assert (found.bucket_numel, found.num_buckets) == (size, len(buckets))
            assert found.wire == wire_time(loads, [bucket.way for bucket in buckets], links, reduction)
    assert ways == {"even", "ragged", "cuts"}


def test_the_best_size_leaves_least_to_the_end_of_those_that_are_about_as_fast():
    _, predicted = small_prediction()
    sizes = predicted.sizes

    def best(*times):
        made = [replace(size, wire=size.wire._replace(reduce=reduce, gather=0, last=last))
                for size, (reduce, last) in zip(sizes, times, strict=True)]
        return replace(predicted, sizes=made).best.bucket_numel

    assert best((200, 1), (100, 2), (99, 9)) == 128
    assert best((105, 1), (105, 2), (100, 9)) == 64
    assert best((106, 1), (106, 2), (100, 9)) == 256
    assert best((100, 5), (102, 5), (101, 5)) == 64


def test_the_best_size_is_one_that_fits():
    _, predicted = small_prediction()

    def best(*made):
        sizes = [replace(size, wire=size.wire._replace(reduce=reduce, gather=0, last=last), left=left)
                 for size, (reduce, last, left) in zip(predicted.sizes, made, strict=True)]
        found = replace(predicted, sizes=sizes, memory_bytes=100).best
        return found and found.bucket_numel

    # Neither what is fastest nor what leaves least to the end counts, if it does not fit; nothing left is enough.
    assert best((104, 1, -1), (104, 2, 0), (100, 9, 7)) == 128
    assert best((200, 1, 5), (104, 2, -3), (100, 9, -1)) == 64
    assert best((104, 1, -1), (104, 2, -1), (100, 9, -1)) is None


def test_the_memory_left_is_that_of_the_rank_that_needs_most():
    planned, predicted = small_prediction(memory_bytes=6000)
    # Four matrices of 64 elements in bf16, two a rank: parameters and gradients, sums of its own, masters; no states.
    assert [held.total for held in planned.memory] == [2 * 256 + 2 * 256 + 2 * 4 * 128] * 2
    assert planned.needed == 2048 + planned.working.total
    assert (predicted.memory_bytes, predicted.own.left) == (6000, 6000 - planned.needed)
    # Each of the others is what a plan with that size says itself.
    assert [size.left for size in small_prediction(memory_bytes=5000)[1].sizes] == [
        size.left - 1000 for size in predicted.sizes]
    assert [(size.left, size.fits) for size in small_prediction()[1].sizes] == [(None, True)] * 3


def test_seconds_are_told_to_people_and_programs():
    planned, predicted = small_prediction()
    told = as_json(planned, predicted)["predicted"]
    assert told["seconds"] == {
        "reduce": predicted.wire.reduce / 1e9, "after_last_gradient": predicted.wire.last / 1e9,
        "gather": predicted.wire.gather / 1e9, "update": 2e-9, "all": predicted.total / 1e9}
    assert (told["links"]["between_gb_s"], told["reduction"], told["ways"]) == (10.0, "ordered", {"even": 2})
    assert told["best_bucket_elements"] == predicted.best.bucket_numel
    assert [size["elements"] for size in told["bucket_sizes"]] == [64, 128, 256]
    assert "predicted" not in as_json(planned)


def test_a_layout_says_which_way_and_a_prediction_follows_it():
    # The same shards, sent ragged and in cuts: what is predicted is what the layout says, not what would be best.
    shards, slots = (0, 1_000_000), (Slot("w", 0, 1_000_000),)
    times = {}
    for way in ("ragged", "cuts"):
        layout = Layout("balanced", 2, 1, (Bucket(0, "bfloat16", True, 0, shards, slots, way=way),))
        loads = [Load.of_bucket(bucket, "bfloat16") for bucket in layout.buckets]
        times[way] = wire_time(loads, [way], SMALL, "ordered")
    assert times["ragged"].sums == 0 and times["cuts"].sums == exchange([load(0, 1_000_000)], Group(2, SMALL)).sums
    assert times["cuts"].tail == times["cuts"].last + times["cuts"].sums
