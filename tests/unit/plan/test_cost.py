"""The cost model, against counts by hand and against a loop that multiplies matrices of known size."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.errors import LayoutError
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from ds_layerwise.orthogonalize.newton_schulz_cost import newton_schulz_flops
from ds_layerwise.plan.forecast.cost import (
    LayoutReport,
    RankMemory,
    RankTraffic,
    max_over_mean,
    traffic_bytes,
    wire_elements,
)
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec, Slot
from ds_layerwise.plan.network.links import NVLINK_IB, TCP
from ds_layerwise.plan.network.reduction import sum_dtype
from ds_layerwise.plan.planner.planner import plan_layout
from tests.support.costs import memory_bytes, pieces_on_host
from tests.support.rooms import rooms

pytestmark = rooms("cost", "transport", "host_pieces")


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 10])
@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (32, 32), (3, 16, 112)])
def test_flops_are_those_of_the_products_that_run(shape, steps, method):
    *batch, rows, cols = shape
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.ones(shape), coefficients("simple", steps), method=method, dtype=torch.float32)
    predicted = newton_schulz_flops(rows, cols, steps=steps, method=method, batch=math.prod(batch))
    assert predicted == counter.get_total_flops()


def test_flops_of_five_steps_in_units_of_the_cubed_short_side():
    m = 10
    assert newton_schulz_flops(m, m, method="standard") == 30 * m**3
    assert newton_schulz_flops(m, m) == 30 * m**3  # a square runs as standard
    assert newton_schulz_flops(4 * m, m, method="standard") == 90 * m**3
    assert newton_schulz_flops(m, 4 * m) == 60 * m**3
    assert newton_schulz_flops(m, 4 * m, batch=3) == 180 * m**3


@pytest.mark.parametrize("arguments, message", [
    ({"rows": 0}, "at least 1, got 0, 3, 5, 1"),
    ({"steps": 0}, "at least 1, got 2, 3, 0, 1"),
    ({"batch": -1}, "at least 1, got 2, 3, 5, -1"),
    ({"method": "grm"}, "method must be one of gram, standard, got 'grm'"),
])
def test_flops_of_something_that_cannot_run_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        newton_schulz_flops(**{"rows": 2, "cols": 3, **arguments})


def test_max_over_mean_of_nothing_is_one():
    assert max_over_mean([0, 0]) == 1.0
    assert max_over_mean([3, 1]) == 1.5


SPECS = [ParamSpec("a", (6, 10), "bfloat16", True, 700), ParamSpec("b", (64,), "bfloat16", True, 100),
         ParamSpec("c", (10,), "bfloat16", True, 7), ParamSpec("d", (70,), "float32", False)]


def layout():
    return Layout("balanced", 3, 64, (
        Bucket(0, "bfloat16", True, 0, (128, 0, 64), (Slot("a", 0, 60), Slot("b", 64, 64), Slot("c", 128, 10))),
        Bucket(1, "float32", False, 0, (64, 64, 64), (Slot("d", 0, 70),)),
    ))


def test_each_rank_sends_what_it_does_not_keep_and_its_shard_to_everyone():
    wire = wire_elements(layout())
    # the bucket without the own shard: 192 - (128, 0, 64), and 192 - 64
    assert wire.reduce == (64 + 128, 192 + 128, 128 + 128)
    assert wire.gather == (2 * (128 + 64), 2 * 64, 2 * (64 + 64))
    assert sum(wire.reduce) == sum(wire.gather) == 2 * (192 + 192)
    assert wire_elements(layout(), only={1}).reduce == (128, 128, 128)
    assert wire_elements(Layout("lpt", 1, 64, ())).reduce == (0,)


def test_experts_travel_among_the_ranks_that_hold_the_same_ones():
    dense = Bucket(0, "float32", True, 0, (64, 0, 0, 64), (Slot("a", 0, 60), Slot("b", 64, 64)))
    experts = Bucket(1, "float32", True, 128, (128, 64), (Slot("e", 128, 128), Slot("f", 256, 50)), ep_size=2)
    found = Layout("balanced", 4, 64, (dense, experts))
    wire = wire_elements(found)
    assert wire.reduce == (64 + 64, 128 + 64, 128 + 128, 64 + 128)
    assert wire.gather == (3 * 64 + 128, 128, 64, 3 * 64 + 64)
    specs = [ParamSpec("a", (60,), "float32", True, 1), ParamSpec("b", (64,), "float32", True, 2),
             ParamSpec("e", (128,), "float32", True, 30, 2), ParamSpec("f", (50,), "float32", True, 400, 2)]
    report = LayoutReport.of(found, specs)
    assert (report.work, report.whole_numel) == ((31, 30, 400, 402), (188, 128, 50, 114))
    assert (report.numel, report.padding) == (302, 320 - 302)
    assert [rank.states for rank in memory_bytes(found)] == [4 * 188, 4 * 128, 4 * 50, 4 * 114]


def in_cuts():
    """Return buckets of six ranks: one owns the first, one most of the second; these travel in cuts of 4 and of 2."""
    return Layout("balanced", 6, 1, (
        Bucket(0, "bfloat16", True, 0, (0, 0, 0, 24, 0, 0), (Slot("a", 0, 20),), way="cuts"),
        Bucket(1, "bfloat16", True, 24, (1, 0, 0, 0, 0, 11), (Slot("b", 24, 1), Slot("c", 25, 9)), way="cuts"),
        Bucket(2, "bfloat16", True, 36, (3, 0, 0, 0, 3, 3), (Slot("d", 36, 3), Slot("e", 39, 3), Slot("f", 42, 3))),
    ))


def test_a_bucket_in_cuts_is_sent_in_even_cuts_whose_sums_go_on_and_whose_parameters_come_back():
    wire = wire_elements(in_cuts())
    assert wire.reduce == (20 + 10 + 6, 20 + 10 + 9, 20 + 10 + 9, 20 + 10 + 9, 20 + 10 + 6, 20 + 10 + 6)
    # The owner of the first bucket keeps its whole cut of 4. Of the second, the first rank keeps one of its two, the
    # last both.
    assert wire.forward == (4 + 1, 4 + 2, 4 + 2, 0 + 2, 4 + 2, 4 + 0)
    # 5 times each cut, 5 times each ragged shard; and of the owners' shards what lies in the cuts of others.
    assert wire.gather == (20 + 10 + 15, 20 + 10, 20 + 10, 20 + 10 + 20, 20 + 10 + 15, 20 + 10 + 15 + 9)
    only = wire_elements(in_cuts(), only={1})
    assert (only.reduce, only.forward, only.gather) == ((10,) * 6, (1, 2, 2, 2, 2, 0), (10, 10, 10, 10, 10, 19))


def some_layout(random):
    """Buckets of any lengths that go any way, of which one rank owns parts of several, and what sums are sent as."""
    ranks, buckets, stop = random.choice([2, 4, 6]), [], 0
    for index in range(random.randint(1, 9)):
        ep_size = random.choice([size for size in (1, 2, 3) if ranks % size == 0])
        holders = ranks // ep_size
        way = random.choice(["even", "ragged", "cuts"]) if holders > 1 else "even"
        numels = [random.choice([0, 0, 1, 5, 9]) for _ in range(holders)]
        numels[random.randrange(holders)] += 2
        if way == "cuts":
            last = max(i for i, numel in enumerate(numels) if numel)
            numels[last] += -sum(numels) % holders
        numels = numels if way != "even" and len({*numels}) > 1 else [3] * holders
        way = way if len({*numels}) > 1 else "even"
        first = next(i for i, numel in enumerate(numels) if numel)
        slot = Slot(f"p{index}", stop + sum(numels[:first]), numels[first])
        buckets.append(Bucket(index, "bfloat16", True, stop, tuple(numels), (slot,), ep_size, way))
        stop = buckets[-1].stop
    return Layout("balanced", ranks, 1, tuple(buckets))


def test_any_buckets_are_counted_rank_by_rank_and_element_by_element():
    random = Random(3)
    for _ in range(200):
        found = some_layout(random)
        stage, reduction, dtype = random.choice([1, 2]), *random.choice(
            [("ordered", "bfloat16"), ("native", "bfloat16"), ("native", "float32")])
        wire, traffic = wire_elements(found), traffic_bytes(
            found, stage=stage, stored_as={"bfloat16": dtype}, wires=[dtype] * len(found.buckets), reduction=reduction)
        for rank in range(found.world_size):
            reduce = gather = forward = 0
            received, added = [0, 0], [0, 0]
            for bucket in found.buckets:
                number, others = rank // bucket.ep_size, bucket.holders - 1
                start, stop = bucket.shard(rank)
                shard, cut = range(start, stop), range(bucket.start + number * bucket.cut_numel,
                                                       bucket.start + (number + 1) * bucket.cut_numel)
                own = cut if bucket.way == "cuts" else shard
                reduce += bucket.numel - len(own)
                gather += others * len(own)
                if bucket.way == "cuts":
                    forward += len({*cut} - {*shard})
                    gather += len({*shard} - {*cut})
                turn, rows = bucket.index % 2, bucket.holders if bucket.holders > 2 else min(others, 1)
                if reduction == "native":
                    # What stays where it arrives, in the dtype in which it does, needs no memory.
                    stays = bucket.way != "ragged" and (dtype == "float32" or (bucket.way, stage) == ("cuts", 1))
                    rows = min(others, 1) * (not stays)
                received[turn] = max(received[turn], {"bfloat16": 2, "float32": 4}[dtype] * rows * len(own))
                added[turn] = max(added[turn], 4 * len(own) * (stage == 2))
            assert (wire.reduce[rank], wire.gather[rank], wire.forward[rank]) == (reduce, gather, forward)
            assert traffic[rank].received == sum(received) + sum(added)


def test_received_bytes_do_not_grow_with_the_ranks():
    def most(size, way):
        own = (0,) * (size - 1) + (1024,)
        bucket = Bucket(0, "bfloat16", True, 0, own, (Slot("a", 0, 1000),), way=way)
        return max(rank.received for rank in traffic_bytes(
            Layout("balanced", size, 1, (bucket,)), stage=1, stored_as={"bfloat16": "bfloat16"}, wires=["bfloat16"]))

    # Of two ranks only one sends.
    assert [most(size, "cuts") for size in (2, 4, 8, 64, 512)] == [1024, *[2 * 1024] * 4]
    assert [most(size, "ragged") for size in (2, 8)] == [2 * 1024, 2 * 1024 * 8]


def test_two_buckets_under_way_receive_at_once_and_sums_of_cuts_stay():
    buckets = tuple(Bucket(i, "bfloat16", True, 40 * i, (0, 40), (Slot(name, 40 * i, 40),), way=way)
                    for i, (name, way) in enumerate([("a", "cuts"), ("b", "cuts"), ("c", "cuts"), ("d", "ragged")]))
    found = traffic_bytes(Layout("balanced", 2, 1, buckets), stage=1, stored_as={"bfloat16": "bfloat16"},
                          wires=["bfloat16"] * 4)
    # At most two buckets are under way, of 20 or 0 and 40 elements of the other rank.
    assert [rank.received for rank in found] == [2 * (20 + 20), 2 * (20 + 40)]
    # Of the three in cuts 20 sums each stay from step to step, but where they lie in a float32 gradient buffer.
    kept = Layout("balanced", 2, 1, buckets)
    for stored_as, stage, cuts in (("bfloat16", 1, 3 * 20 * 4), ("float32", 1, 0), ("float32", 2, 3 * 20 * 4)):
        grads = [rank.grads for rank in memory_bytes(kept, stage=stage, grads_stored_as={"bfloat16": stored_as})]
        whole = {"bfloat16": 2, "float32": 4}[stored_as] * 160 if stage == 1 else 0
        apart = 0 if (stored_as, stage) == ("float32", 1) else 4 * 160
        assert grads == [whole + cuts, whole + apart + cuts]


def test_sums_of_a_node_are_under_way_too():
    links = NVLINK_IB.model_copy(update={"ranks_per_node": 2})
    even = Bucket(0, "bfloat16", True, 0, (10,) * 4, tuple(Slot(name, 10 * i, 10) for i, name in enumerate("abcd")))

    def found(bucket=even, wire="bfloat16", stage=1, **settings):
        layout = Layout("balanced", 4, 1, (bucket,))
        (rank, *others) = traffic_bytes(layout, stage=stage, wires=[wire], **{
            "stored_as": {"bfloat16": "bfloat16"}, "links": links, **settings})
        assert others == [rank] * 3
        return rank

    # 40 elements are sorted by place, and arrive; 20 are sums, which go on in the memory of those.
    levels = RankTraffic(2 * 40, 2 * 40 + 4 * 20)
    assert found() == found(replace(even, way="cuts")) == levels
    assert found(wire="float32") == RankTraffic(4 * 40, 4 * 40 + 4 * 20)
    # Stage 2 has a copy to sort, and adds what a further micro-batch brings.
    assert found(stage=2) == RankTraffic(2 * levels.sent, levels.received + 4 * 10)
    for other in ({"links": None}, {"links": NVLINK_IB}, {"bucket": replace(even, way="ragged")}):
        assert found(**other) == RankTraffic(0, 2 * 40)
    # The backend's sums of a node stay in the dtype that travels, and lie beside what it gets in the end.
    assert found(reduction="native") == RankTraffic(2 * 40, 2 * 20 + 2 * 10)
    assert found(reduction="native", stage=2) == RankTraffic(2 * 2 * 40, 2 * 20 + 2 * 10 + 4 * 10)
    # Where latencies are short it sends around one ring, and what is sorted for the gather is all there is beside.
    slow = links.model_copy(update={"inside_us": 0, "between_us": 0})
    assert found(reduction="native", links=slow) == RankTraffic(0, 2 * 10)
    # Of a bucket that is long in float32 and short in bfloat16 parameters alone are sorted, beside those of one place.
    longer = replace(even, shard_numels=(1 << 17,) * 4, slots=tuple(
        Slot(name, i << 17, 1 << 17) for i, name in enumerate("abcd")))
    in_float32 = {"wire": "float32", "stored_as": {"bfloat16": "float32"}, "reduction": "native"}
    assert found(longer, **in_float32) == RankTraffic(0, 2 * (6 << 17))
    assert found(longer, **in_float32, links=slow) == RankTraffic(0, 0)


def test_the_exchange_takes_the_bytes_counted_by_hand():
    settings = {"stage": 1, "stored_as": {"bfloat16": "bfloat16"}, "wires": ["bfloat16"] * 3}
    # One round. The owner of the first bucket gets all of it in one piece, its own 4 included; the first rank sends 4
    # and 1, and the last 4, whose 2 of the second bucket stay. Sums are float32, and arrive where owners have them.
    sums = (4 + 1, 4 + 2, 4 + 2, 4 + 2, 4 + 2, 4 + 0)
    assert [rank.exchanged for rank in traffic_bytes(in_cuts(), **settings)] == [4 * numel for numel in sums]
    # In bfloat16 they arrive beside.
    assert [rank.exchanged for rank in traffic_bytes(in_cuts(), reduction="native", **settings)] == [
        2 * numel for numel in (5, 6, 6, 6 + 24, 6, 4 + 9)]


def test_two_rounds_are_under_way_beside_buckets_on_a_host_and_after_them_on_a_device():
    # Of 20 in the middle 12 stay, and 4 come from each side: they arrive, and return, in memory of their own.
    layout = Layout("balanced", 3, 1, tuple(
        Bucket(i, "bfloat16", True, 36 * i, (8, 20, 8), tuple(
            Slot(f"{i}.{first}", 36 * i + first, numel) for first, numel in ((0, 8), (8, 20), (28, 8))), way="cuts")
        for i in range(3)))
    settings = {"stored_as": {"bfloat16": "float32"}, "wires": ["float32"] * 3}
    rounds = [2 * 4 * numel for numel in (4, 8, 4)]
    # In rank order each of two buckets receives 12 from three ranks.
    for links, exchanged in ((None, rounds), (TCP, rounds), (NVLINK_IB, [0, 0, 0])):
        assert traffic_bytes(layout, stage=1, links=links, **settings) == tuple(
            RankTraffic(0, 2 * 4 * 3 * 12, numel) for numel in exchanged)
    # The backend adds up in place.
    native = traffic_bytes(layout, stage=1, links=NVLINK_IB, reduction="native", **settings)
    assert native == tuple(RankTraffic(0, 0, numel) for numel in rounds)
    # In bfloat16 it is half of that: what comes in two pieces has memory of its own whatever its dtype.
    in_bfloat16 = traffic_bytes(layout, stage=1, links=NVLINK_IB, reduction="native",
                                stored_as={"bfloat16": "bfloat16"}, wires=["bfloat16"] * 3)
    assert in_bfloat16 == tuple(RankTraffic(0, 0, numel // 2) for numel in rounds)


def test_sums_that_the_backend_made_stay_as_it_made_them():
    bucket = Bucket(0, "bfloat16", True, 0, (0, 40), (Slot("a", 0, 40),), way="cuts")
    planned, wires = Layout("balanced", 2, 1, (bucket,)), ["bfloat16"]
    # In place, or apart; those of further micro-batches are added in float32.
    for stored_as, stage, cuts, received in (("bfloat16", 1, 0, 0), ("float32", 1, 2 * 20, 0),
                                             ("float32", 2, 4 * 20, (4 + 2) * 20)):
        settings = {"stage": stage, "reduction": "native", "wires": wires}
        grads = memory_bytes(planned, grads_stored_as={"bfloat16": stored_as}, **settings)[0].grads
        assert grads == cuts + (0 if stage == 2 else {"bfloat16": 2, "float32": 4}[stored_as] * 40)
        found = traffic_bytes(planned, stored_as={"bfloat16": stored_as}, **settings)
        assert found[0].received == received
    assert [sum_dtype("bfloat16", *each) for each in (("native", 1), ("native", 2), ("ordered", 1))] == [
        "bfloat16", "float32", "float32"]


def test_memory_by_rank_in_bytes():
    # bfloat16 buffer 192 elements, float32 buffer 192: parameters 2 * 192 + 4 * 192. Reduced shards and masters are
    # float32 copies of the bfloat16 shards only.
    params = 2 * 192 + 4 * 192
    assert memory_bytes(layout()) == (
        RankMemory(params, params + 4 * 128, 4 * 128, 4 * 124 + 8 * 64),
        RankMemory(params, params, 0, 8 * 6),
        RankMemory(params, params + 4 * 64, 4 * 64, 4 * 10),
    )
    assert memory_bytes(layout())[2].total == 2 * params + 4 * 64 + 4 * 64 + 4 * 10


def test_gradients_that_accumulate_in_float32_need_no_copy_of_the_reduced_shard():
    rank0 = memory_bytes(layout(), grads_stored_as={"bfloat16": "float32"}, whole_state_bytes=2, split_state_bytes=4)[0]
    assert rank0 == RankMemory(2 * 192 + 4 * 192, 4 * 192 + 4 * 192, 4 * 128, 2 * 124 + 4 * 64)


def test_at_stage_2_a_rank_keeps_gradients_of_its_shards_alone():
    # Shards of rank 0: 128 of the bfloat16 buffer, 64 of the float32 buffer; all gradients are float32.
    found = memory_bytes(layout(), stage=2)
    assert [rank.grads for rank in found] == [4 * (128 + 64), 4 * 64, 4 * (64 + 64)]
    for one, two in zip(memory_bytes(layout()), found, strict=True):
        assert (two.params, two.masters, two.states) == (one.params, one.masters, one.states)


def test_memory_of_a_dtype_without_a_known_size_is_refused():
    with pytest.raises(LayoutError, match="the size of 'int3' is not known; known: float64"):
        memory_bytes(layout(), grads_stored_as={"bfloat16": "int3"})


def test_on_the_host_go_whole_pieces_until_there_are_enough():
    # Rank 0 has 60 and 64 elements of bfloat16 matrices, 8 bytes each, and 64 of a float32 vector, 8 bytes each, too:
    # 480, 512, 512.
    assert [pieces_on_host(layout(), 0, ratio) for ratio in (0, 0.01, 0.33, 0.5, 0.67, 1)] == [
        frozenset(), {"a"}, {"a", "d"}, {"a", "b"}, {"a", "b", "d"}, {"a", "b", "d"}]
    assert pieces_on_host(layout(), 1, 1.0) == {"d"}
    halves = Layout("lpt", 1, 64, tuple(Bucket(i, "float16", True, 64 * i, (64,), (Slot(name, 64 * i, 64),))
                                        for i, name in enumerate("abcd")))
    assert [pieces_on_host(halves, 0, ratio) for ratio in (0.25, 0.5, 0.75)] == [{"a"}, {"a", "c"}, {"a", "b", "c"}]


def test_memory_on_the_host_and_off_it():
    plain, everything = memory_bytes(layout()), memory_bytes(layout(), host_ratio=1)
    for without, moved in zip(plain, everything, strict=True):
        assert (moved.params, moved.grads, moved.masters, moved.states) == (without.params, without.grads, 0, 0)
    # Masters leave the padding of their shards behind. Two buckets are worked on at a time, each in 8 * 124 bytes.
    assert [(rank.host, rank.staging) for rank in everything] == [
        (8 * 124 + 8 * 64, 2 * 8 * 124), (8 * 6, 8 * 6), (8 * 10, 8 * 10)]
    # Only the first matrix of rank 0; the master of the second, 64 elements, has memory of its own.
    assert memory_bytes(layout(), host_ratio=0.01)[0] == RankMemory(
        plain[0].params, plain[0].grads, 4 * 64, 4 * 64 + 8 * 64, host=8 * 60, staging=8 * 60)


def test_the_host_takes_the_ratio_of_any_layout_and_less_than_a_piece_more():
    random = Random(5)
    for _ in range(60):
        size, ratio = random.randint(1, 4), random.choice([0.0, 1.0, random.random(), random.random()])
        specs = [ParamSpec(f"p{i}", (random.randint(1, 40), random.randint(1, 40)), random.choice(
            ["float32", "bfloat16"]), whole := random.random() < 0.7, int(whole), random.choice([1, 1, size]))
            for i in range(random.randint(1, 30))]
        whole_bytes, split_bytes = random.choice([(4, 8), (4, 4), (4, 0)])
        planned = plan_layout(specs, size, bucket_numel=random.choice([1, 1000, 10**9]), policy="balanced",
                              alignment=random.choice([1, 64]))
        memory = memory_bytes(planned, whole_state_bytes=whole_bytes, split_state_bytes=split_bytes, host_ratio=ratio)
        for rank in range(size):
            chosen = pieces_on_host(planned, rank, ratio, whole_state_bytes=whole_bytes, split_state_bytes=split_bytes)
            sizes = {piece.name: piece.numel * (4 * (bucket.dtype != "float32")
                                                + (whole_bytes if bucket.whole else split_bytes))
                     for bucket in planned.buckets for piece in bucket.pieces(rank)}
            asked, found = ratio * sum(sizes.values()), sum(sizes[name] for name in chosen)
            assert found == memory[rank].host
            assert asked <= found < asked + max([*sizes.values(), 1])
            assert ratio not in (0, 1) or found == asked
            # Halfway through the walk the same holds: they do not lie together at one end.
            names = [piece.name for piece in planned.pieces(rank)]
            first = names[:len(names) // 2]
            half = sum(sizes[name] for name in first if name in chosen)
            assert ratio * sum(sizes[name] for name in first) <= half


def test_the_report_counts_what_the_layout_says():
    report = LayoutReport.of(layout(), SPECS)
    assert report.num_buckets == 2
    assert report.numel == 60 + 64 + 10 + 70
    assert report.padding == 2 * 192 - 204
    assert report.padding_fraction == 180 / 204
    assert report.work == (800, 0, 7)
    assert report.whole_numel == (124, 0, 10)
    assert report.work_max_over_mean == 800 * 3 / 807
    assert report.whole_max_over_mean == 124 * 3 / 134


def test_nothing_to_lay_out_costs_nothing():
    report = LayoutReport.of(Layout("balanced", 2, 64, ()), [])
    assert (report.padding_fraction, report.work_max_over_mean) == (0.0, 1.0)
