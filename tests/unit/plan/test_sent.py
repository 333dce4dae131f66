"""The bytes that ranks send, against counts by hand and element by element."""

from dataclasses import replace
from random import Random

import pytest

from ds_layerwise.plan.forecast.sent import sent_bytes
from ds_layerwise.plan.layout.layout import Layout, Slot
from tests.support.rooms import rooms
from tests.support.transports import bucket_of

pytestmark = rooms("sent")

SIZES = {"bfloat16": 2, "float32": 4}


def some_layout(random):
    """Buckets of any lengths, of which one rank owns parts of several."""
    ranks, buckets, stop = random.choice([2, 4, 6]), [], 0
    for index in range(random.randint(1, 9)):
        ep_size = random.choice([size for size in (1, 2, 3) if ranks % size == 0])
        holders = ranks // ep_size
        numels = [random.choice([0, 0, 1, 5, 9]) for _ in range(holders)]
        numels[random.randrange(holders)] += 2
        last = max(i for i, numel in enumerate(numels) if numel)
        numels[last] += -sum(numels) % holders
        if random.random() < 0.4:
            numels = [3] * holders
        transport = "cuts" if len({*numels}) > 1 else "even"
        first = next(i for i, numel in enumerate(numels) if numel)
        slot = Slot(f"p{index}", stop + sum(numels[:first]), numels[first])
        buckets.append(bucket_of(index, "bfloat16", True, stop, tuple(numels), (slot,), ep_size, transport))
        stop = buckets[-1].stop
    return Layout("balanced", ranks, 1, tuple(buckets))


@pytest.mark.parametrize("wire, reduction, stage, sums_in", [
    ("bfloat16", "ordered", 1, 4), ("bfloat16", "native", 1, 2), ("bfloat16", "native", 2, 4),
    ("float32", "native", 1, 4)])
def test_any_buckets_are_counted_rank_by_rank_and_element_by_element(wire, reduction, stage, sums_in):
    random = Random(3)
    for _ in range(60):
        planned = some_layout(random)
        sent = sent_bytes(planned, wires=[wire] * len(planned.buckets), reduction=reduction, stage=stage)["bfloat16"]
        for rank in range(planned.world_size):
            gradients = parameters = 0
            for bucket in planned.buckets:
                number, others = rank // bucket.ep_size, bucket.holders - 1
                shard = {*range(*bucket.shard(rank))}
                first = bucket.start + number * bucket.cut_numel
                cut = {*range(first, first + bucket.cut_numel)}
                own = cut if bucket.transport == "cuts" else shard
                gradients += SIZES[wire] * (bucket.numel - len(own))
                parameters += 2 * others * len(own)
                if bucket.transport == "cuts":
                    gradients += sums_in * len(cut - shard)
                    parameters += 2 * len(shard - cut)
            assert (sent.gradients[rank], sent.parameters[rank]) == (gradients, parameters)


def test_each_dtype_of_parameters_is_counted_for_itself():
    planned = Layout("balanced", 2, 1, (
        bucket_of(0, "bfloat16", True, 0, (8, 8), (Slot("a", 0, 8), Slot("b", 8, 8))),
        bucket_of(1, "float32", False, 0, (4, 4), (Slot("c", 0, 8),)),
        bucket_of(2, "bfloat16", False, 16, (2, 2), (Slot("d", 16, 4),))))
    sent = sent_bytes(planned, wires=["float32", "float32", "bfloat16"], reduction="ordered", stage=1)
    assert sent == {"bfloat16": ((4 * 8 + 2 * 2,) * 2, (2 * 8 + 2 * 2,) * 2), "float32": ((4 * 4,) * 2, (4 * 4,) * 2)}


def test_at_stage_3_both_passes_gather_the_cuts_and_owners_send_to_all_cuts():
    # Of 10 elements a rank has a cut of 5, of 3 one of 2.
    planned = Layout("balanced", 2, 1, (
        bucket_of(0, "float32", True, 0, (10, 4), (Slot("a", 0, 10), Slot("b", 10, 3)), transport="cuts"),))
    sent = sent_bytes(planned, wires=["float32"], reduction="ordered", stage=3)["float32"]
    fetched = 2 * 4 * (5 + 2)
    # Rank 0 sends a cut of 7, and of those keeps 7; of the other cut 3 go to rank 0.
    assert sent.gradients == (4 * 7 + fetched, 4 * 7 + 4 * 3 + fetched)
    assert sent.parameters == (4 * 5, 4 * 2)


def test_experts_are_gathered_among_those_who_hold_the_same():
    # Ranks 0 and 2 have one expert, 1 and 3 another.
    planned = Layout("balanced", 4, 1, (
        bucket_of(0, "float32", True, 0, (10, 10), (Slot("a", 0, 10), Slot("b", 10, 9)), ep_size=2),))
    sent = sent_bytes(planned, wires=["float32"], reduction="ordered", stage=3)["float32"]
    assert sent.gradients == (4 * 10 + 2 * 4 * (5 + 5),) * 4
    assert sent.parameters == (4 * 5,) * 4


def test_matrices_are_counted_in_whole_groups_of_mxfp8():
    slots = [(Slot("a", 0, 1024), Slot("b", 1024, 700)), (Slot("c", 2048, 500), Slot("d", 2560, 1000))]
    matrices = [bucket_of(0, "bfloat16", True, 0, (1024, 1024), slots[0]),
                bucket_of(1, "bfloat16", True, 2048, (512, 1536), slots[1], transport="cuts")]
    planned = Layout("balanced", 2, 512, (*(replace(bucket, in_mxfp8=True) for bucket in matrices),
                                          bucket_of(2, "bfloat16", False, 4096, (512, 512), (Slot("e", 4096, 1000),))))
    assert Layout.from_json(planned.to_json()) == planned
    sent = sent_bytes(planned, wires=["bfloat16"] * 3, reduction="native", stage=1)["bfloat16"]
    # Each gathers 1024 elements of either bucket; of the second, rank 1 sends 512 to the cut of rank 0 before.
    assert sent.parameters == (2 * (2 * 528) + 2 * 512, 2 * (2 * 528) + 528 + 2 * 512)
    whole = Layout("balanced", 2, 512, planned.buckets[:2])
    # At stage 3, cuts of 512 and 350 elements are no whole groups, nor are those of 250 and 500.
    assert sent_bytes(whole, wires=["bfloat16"] * 2, reduction="native", stage=3)["bfloat16"].parameters == (
        2 * (512 + 250), 2 * (350 + 500))
    alone = Layout("balanced", 2, 512, (replace(bucket_of(0, "bfloat16", True, 0, (1024, 0), slots[0][:1]),
                                                in_mxfp8=True), ))
    assert sent_bytes(alone, wires=["bfloat16"], reduction="native", stage=3)["bfloat16"].parameters == (528, 0)
