"""The bytes that a rank holds and works in, and the balance of a layout, against counts by hand."""

from dataclasses import replace
from random import Random

import pytest

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import LayoutError
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.plan.forecast.forecast import LayoutReport, kept_dtypes, max_over_mean
from ds_layerwise.plan.forecast.memory import RankMemory, Sums, sums_bytes, transfer_bytes, update_bytes
from ds_layerwise.plan.layout.layout import Layout, ParamSpec, Slot
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.plan.layout.transport import sum_dtype
from ds_layerwise.routing.routes import Route
from tests.support.costs import memory_bytes, pieces_on_host
from tests.support.rooms import rooms
from tests.support.transports import bucket_of

pytestmark = rooms("memory", "forecast")

REMAINDER = "bfloat16+remainder"


def layout():
    return Layout("balanced", 3, 64, (
        bucket_of(0, "bfloat16", True, 0, (128, 0, 64), (Slot("a", 0, 60), Slot("b", 64, 64), Slot("c", 128, 10)),
               transport="cuts"),
        bucket_of(1, "float32", False, 0, (64, 64, 64), (Slot("d", 0, 70),)),
    ))


def test_memory_by_rank_in_bytes():
    # bfloat16 buffer 192 elements, float32 buffer 192: parameters 2 * 192 + 4 * 192. Masters are float32 copies of the
    # bfloat16 shards only.
    params = 2 * 192 + 4 * 192
    assert memory_bytes(layout()) == (
        RankMemory(params, params, 4 * 128, 4 * 124 + 8 * 64),
        RankMemory(params, params, 0, 8 * 6),
        RankMemory(params, params, 4 * 64, 4 * 10),
    )
    assert memory_bytes(layout())[2].total == params + params + 4 * 64 + 4 * 10
    rank0 = memory_bytes(layout(), stored_as={"bfloat16": "float32"}, whole_state_bytes=2, split_state_bytes=4)[0]
    assert rank0 == RankMemory(params, 4 * 192 + 4 * 192, 4 * 128, 2 * 124 + 4 * 64)


def test_at_stage_2_a_rank_keeps_no_gradients():
    for one, two in zip(memory_bytes(layout()), memory_bytes(layout(), stage=2), strict=True):
        assert two == replace(one, grads=0)


def test_at_stage_3_owners_of_16_bit_matrices_have_masters_alone():
    # Cuts of a, b and c of 20, 22 and 4 elements, and the float32 shard of d; masters end with the last matrix.
    params = 2 * (20 + 22 + 4) + 4 * 64
    for rank, masters in enumerate((128, 0, 10)):
        held = memory_bytes(layout(), stage=3)[rank]
        assert (held.params, held.masters) == (params, 4 * masters)
    # With the host, or as remainders, masters are made of weights that owners keep.
    for numel, (split, hosted) in zip((128, 0, 64), zip(memory_bytes(layout(), stage=3, master_dtype=REMAINDER),
                                                        memory_bytes(layout(), stage=3, host_ratio=1)), strict=True):
        assert split.params == hosted.params == params + 2 * numel


@pytest.mark.parametrize("stage, reduction, sections, kept", [
    (3, "native", {}, True), (2, "native", {}, True), (1, "native", {}, False), (3, "ordered", {}, False),
    (3, "native", {"gradient_accumulation_steps": 2}, False),
    (3, "native", {"layerwise": {"cuda_graph": True}}, False)])
def test_bfloat16_sums_of_the_backend_are_kept_if_nothing_is_added(stage, reduction, sections, kept):
    run = RunConfig.from_ds_config({"optimizer": {"type": "LayerWiseMuon", "params": {}},
                                    "zero_optimization": {"stage": stage}, **sections})
    assert kept_dtypes(["bfloat16", "float16", "float32"], reduction, run) == (
        "bfloat16" if kept else "float32", "float32", "float32")


def test_sums_are_kept_as_they_arrive():
    settings = {"stage": 3, "reduction": "native", "wires": ["bfloat16", "float32"], "stored_as": {}}
    # The cut of 64 elements, and 64 of the shard of d; shards of 128 and 64 on the fullest rank.
    assert sums_bytes(layout(), **settings, kept_as=["bfloat16", "float32"]) == Sums(
        2 * 64 + 4 * 64, 2 * (64 + 128) + 4 * 64, 2 * 128 + 4 * 64)
    # Straight at their owners, without the padding behind the last one.
    even = Layout("balanced", 2, 64, (bucket_of(0, "bfloat16", True, 0, (128, 128), (
        Slot("a", 0, 70), Slot("b", 128, 30)), transport="even"),))
    settings["wires"] = ["bfloat16"]
    assert sums_bytes(even, **settings, kept_as=["bfloat16"]) == Sums(*3 * [2 * 70])


def test_memory_of_a_dtype_without_a_known_size_is_refused():
    with pytest.raises(LayoutError, match="the size of 'int3' is not known; known: float64"):
        memory_bytes(layout(), stored_as={"bfloat16": "int3"})


def test_on_the_host_go_whole_pieces_until_there_are_enough():
    # Rank 0 has 60 and 64 elements of bfloat16 matrices, 8 bytes each, and 64 of a float32 vector, 8 bytes each, too:
    # 480, 512, 512.
    assert [pieces_on_host(layout(), 0, ratio) for ratio in (0, 0.01, 0.33, 0.5, 0.67, 1)] == [
        frozenset(), {"a"}, {"a", "d"}, {"a", "b"}, {"a", "b", "d"}, {"a", "b", "d"}]
    assert pieces_on_host(layout(), 1, 1.0) == {"d"}
    halves = Layout("lpt", 1, 64, tuple(bucket_of(i, "float16", True, 64 * i, (64,), (Slot(name, 64 * i, 64),))
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


def two_in_cuts(transport="cuts"):
    """Two buckets of two ranks, of which the second owns all."""
    return Layout("balanced", 2, 1, tuple(
        bucket_of(i, "bfloat16", True, 40 * i, (0, 40), (Slot(name, 40 * i, 40),), transport=transport)
        for i, name in enumerate("ab")))


@pytest.mark.parametrize("stored_as, stage, reduction, expected", [
    # In the gradients' own memory, or apart; those of further micro-batches are added in float32. The first cut is away
    # when the second shard comes.
    ("bfloat16", 1, "native", Sums(0, 320, 320)), ("float32", 1, "native", Sums(2 * 40, 2 * 40, 0)),
    ("float32", 2, "native", Sums(2 * 80, 80 + 320, 320)), ("bfloat16", 1, "ordered", Sums(2 * 80, 80 + 320, 320)),
    ("float32", 1, "ordered", Sums(0, 0, 0))])
def test_sums_are_in_cuts_then_at_owners(stored_as, stage, reduction, expected):
    wire = "bfloat16" if reduction == "native" else stored_as
    assert sums_bytes(two_in_cuts(), stage=stage, reduction=reduction, wires=[wire] * 2,
                      stored_as={"bfloat16": stored_as}) == expected


def test_sums_of_other_buckets_are_at_their_owners_at_once():
    # Cuts of 64; shards of 128 and 64 on the fullest rank.
    assert sums_bytes(layout(), stage=2, reduction="ordered", wires=["bfloat16", "float32"],
                      stored_as={"bfloat16": "bfloat16", "float32": "float32"}) == Sums(
        4 * (64 + 64), 4 * (64 + 64 + 128), 4 * (64 + 128))


def test_sums_of_a_rank_that_holds_little_else_do_not_raise_the_most():
    # The last rank has shards of 64 and 64 alone, and 512 bytes of other things more than the first.
    settings = {"stage": 2, "reduction": "ordered", "wires": ["bfloat16", "float32"]}
    stored = {"bfloat16": "bfloat16", "float32": "float32"}
    assert sums_bytes(layout(), **settings, stored_as=stored, beside=(0, 0, 512)) == Sums(
        4 * (64 + 64), 4 * (64 + 64 + 64), 4 * (64 + 64))


def test_sums_are_in_the_dtype_that_travels_if_the_backend_makes_them_once():
    assert [sum_dtype("bfloat16", *each) for each in (("native", 1), ("native", 2), ("ordered", 1))] == [
        "bfloat16", "float32", "float32"]


@pytest.mark.parametrize("settings, expected", [
    # Two buckets of 40: the parts of both ranks arrive and are sorted, and 20 sums of each go on to who has 40.
    ({"reduction": "ordered"}, 2 * (2 * 2 * 40) + 2 * 4 * (20 + 40)),
    # Their copies, in what travels.
    ({"reduction": "ordered", "wires": ["float32"] * 2}, 2 * (3 * 4 * 40) + 2 * 4 * (20 + 40)),
    # The backend sends from where gradients are; what arrives is exchanged afterwards.
    ({"reduction": "native"}, 2 * 4 * (20 + 40)),
    # At stage 2 gradients are copied, and those of further micro-batches are added in float32; the exchange is more.
    ({"reduction": "native", "stage": 2, "wires": ["float32"] * 2}, 2 * (4 * 40 + 4 * 20)),
    ({"reduction": "native", "stage": 2}, 2 * 4 * (20 + 40)),
])
def test_transfers_are_those_of_two_buckets(settings, expected):
    settings = {"stage": 1, "stored_as": {"bfloat16": "bfloat16"}, "wires": ["bfloat16"] * 2, **settings}
    assert transfer_bytes(two_in_cuts(), **settings) == expected


@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_transfers_of_a_bucket_do_not_grow_with_the_ranks(reduction):
    """Also if one rank owns all of it."""
    most = []
    for ranks in (2, 4, 8, 64, 512):
        bucket = bucket_of(0, "bfloat16", True, 0, (0,) * (ranks - 1) + (1024,), (Slot("a", 0, 1000),),
                           transport="cuts")
        most.append(transfer_bytes(Layout("balanced", ranks, 1, (bucket,)), stage=1, wires=["bfloat16"],
                                   stored_as={"bfloat16": "bfloat16"}, reduction=reduction))
    assert most == sorted(most, reverse=True)


def test_an_update_works_in_a_batch_of_equal_matrices():
    muon, adamw = Muon(), AdamW()
    sizes = (128, 128, 64)
    names = [["a", "b"], ["c", "d"], ["e"]]
    buckets = tuple(bucket_of(i, "bfloat16", i < 2, 128 * i, (size, 0), tuple(
        Slot(name, 128 * i + 64 * j, 64) for j, name in enumerate(names[i])), transport="cuts" if i < 2 else "by_param")
        for i, size in enumerate(sizes[:2]))
    planned = Layout("balanced", 2, 1, buckets)
    routes = {name: Route(name=name, recipe=muon, reason="", group=0, matrix_shape=(8, 8)) for name in "abcd"}
    # All four are one batch, though they are in two buckets.
    assert update_bytes(planned, routes, "float32") == muon.workspace((4, 8, 8))
    # Masters of the largest shard, opened to float32.
    assert update_bytes(planned, routes, "bfloat16+remainder") == muon.workspace((4, 8, 8)) + 4 * 128
    # Sums that are kept as they arrive become float32 for the batch: of all shards, or of one and a full batch.
    for full, sums in ((muon.full_batch_numel, 256), (32, 128 + 32)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Muon, "full_batch_numel", full)
            kept = [update_bytes(planned, routes, "float32", kept_as=[dtype] * 2) for dtype in ("float32", "bfloat16")]
        assert kept[1] - kept[0] == 4 * sums
    split = Layout("balanced", 2, 64, (bucket_of(0, "float32", False, 0, (64, 64), (Slot("e", 0, 100),)),))
    routes = {"e": Route(name="e", recipe=adamw, reason="", group=0)}
    assert update_bytes(split, routes, "bfloat16+remainder") == adamw.workspace((64,))


# --- the report on a layout ------------------------------------------------------------------------------------------

def test_the_report_counts_what_the_layout_says():
    report = LayoutReport.of(layout(), [
        ParamSpec("a", (6, 10), "bfloat16", True, 700), ParamSpec("b", (64,), "bfloat16", True, 100),
        ParamSpec("c", (10,), "bfloat16", True, 7), ParamSpec("d", (70,), "float32", False)])
    assert report.num_buckets == 2
    assert report.numel == 60 + 64 + 10 + 70
    assert report.padding == 2 * 192 - 204
    assert report.padding / report.numel == 180 / 204
    assert report.work == (800, 0, 7)
    assert report.whole_numel == (124, 0, 10)
    assert max_over_mean(report.work) == 800 * 3 / 807
    assert max_over_mean(report.whole_numel) == 124 * 3 / 134


def test_experts_count_for_each_rank_that_owns_some_of_the_same():
    dense = bucket_of(0, "float32", True, 0, (64, 0, 0, 64), (Slot("a", 0, 60), Slot("b", 64, 64)), transport="cuts")
    experts = bucket_of(1, "float32", True, 128, (128, 64), (Slot("e", 128, 128), Slot("f", 256, 50)), ep_size=2,
                     transport="cuts")
    found = Layout("balanced", 4, 32, (dense, experts))
    report = LayoutReport.of(found, [
        ParamSpec("a", (60,), "float32", True, 1), ParamSpec("b", (64,), "float32", True, 2),
        ParamSpec("e", (128,), "float32", True, 30, 2), ParamSpec("f", (50,), "float32", True, 400, 2)])
    assert (report.work, report.whole_numel) == ((31, 30, 400, 402), (188, 128, 50, 114))
    assert (report.numel, report.padding) == (302, 320 - 302)
    assert [rank.states for rank in memory_bytes(found)] == [4 * 188, 4 * 128, 4 * 50, 4 * 114]


def test_nothing_to_lay_out_costs_nothing():
    report = LayoutReport.of(Layout("balanced", 2, 64, ()), [])
    assert (report.padding, max_over_mean(report.work)) == (0, 1.0)
    assert max_over_mean([0, 0]) == 1.0
    assert max_over_mean([3, 1]) == 1.5
