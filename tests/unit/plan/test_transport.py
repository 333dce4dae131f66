"""The transports of buckets against counts by hand, rows, and the levels in which sums are made."""

import random

import pytest

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.forecast.forecast import LayoutReport
from ds_layerwise.plan.forecast.sent import sent_bytes
from ds_layerwise.plan.layout.draft_buckets import draft_balanced, draft_owned, row_limit, take_rows
from ds_layerwise.plan.layout.layout import Layout, ParamSpec, Slot
from ds_layerwise.plan.layout.owners import Item
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.plan.layout.transport import itemsize, reduction_of_run, transport_of
from tests.support.model_specs import load_model_specs
from tests.support.rooms import rooms
from tests.support.transports import bucket_of, numels_of

pytestmark = rooms("transport", "draft_buckets", "planner")


def items(*kinds):
    return [Item(f"w{i}", i, numel, numel + -numel % 64, work, "bfloat16", 1)
            for i, (numel, work) in enumerate(kinds)]


def sent(shards, transport):
    """Return the elements that all ranks send in both directions, for a bucket with these shards."""
    starts = [sum(shards[:i]) for i in range(len(shards))]
    slots = [Slot(f"p{i}", start, numel) for i, (start, numel) in enumerate(zip(starts, shards)) if numel]
    layout = Layout("balanced", len(shards), 1, (
        bucket_of(0, "float32", True, 0, tuple(shards), tuple(slots), transport=transport),))
    each, = sent_bytes(layout, wires=["float32"], reduction="ordered", stage=1).values()
    return (sum(each.gradients) + sum(each.parameters)) // 4


# --- one bucket ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("numel, longest, holders, transport", [
    (100, 100, 1, "even"),
    # Padding of a half, against half of the bucket that moves on; one more is too much.
    (100, 75, 2, "even"), (100, 76, 2, "cuts"), (100, 100, 2, "cuts"),
    (400, 100, 4, "even"), (400, 125, 4, "even"), (400, 126, 4, "cuts"),
    (6400, 101, 64, "even"), (6400, 102, 64, "cuts"),
])
def test_a_bucket_is_even_where_its_padding_is_no_more_than_moves_on_from_cuts(numel, longest, holders, transport):
    assert transport_of(numel, longest, holders) == transport


@pytest.mark.parametrize("seed", range(40))
def test_the_other_transport_sends_no_less(seed):
    """But for what happens to lie in its owner's cut, which then need not move."""
    rng = random.Random(seed)
    holders = rng.randint(2, 8)
    shards = [holders * rng.choice([0, 3, 4, 5, 9]) for _ in range(holders)]
    shards[rng.randrange(holders)] += holders
    even, cuts = sent([max(shards)] * holders, "even"), sent(shards, "cuts")
    if transport_of(sum(shards), max(shards), holders) == "cuts":
        assert cuts < even
    else:
        cut = sum(shards) // holders
        stays = sum(max(0, min(sum(shards[:i + 1]), (i + 1) * cut) - max(sum(shards[:i]), i * cut))
                    for i in range(holders))
        assert even <= cuts + 2 * stays


def test_shards_of_cuts_lie_back_to_back_and_the_last_one_is_padded_to_equal_cuts():
    draft = draft_balanced(items((10**7, 1), (64, 1)), [0, 1], 4, 64)
    # 10,000,064 elements and 64 more are a multiple of 4 x 64.
    assert (draft.transport, numels_of(draft), draft.offsets) == ("cuts", (10_000_000, 64 + 64, 0, 0), [0, 10**7])
    assert draft.shards.numel == 10_000_128


def test_shards_of_an_even_bucket_are_as_long_as_the_longest():
    draft = draft_balanced(items((640, 1), (1000, 1), (300, 1)), [1, 0, 1], 2, 64)
    assert (draft.transport, numels_of(draft), draft.offsets) == ("even", (1024, 1024), [0, 1024, 1664])
    assert [item.name for item in draft.items] == ["w1", "w0", "w2"]
    assert draft == draft_owned(items((640, 1), (1000, 1), (300, 1)), [1, 0, 1], 2, 1024)


# --- rows ------------------------------------------------------------------------------------------------------------

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
    assert [numels_of(draft) for draft in drafts] == [(64, 64), (64, 64), (128, 128)]
    assert all(draft.transport == "even" for draft in drafts)
    # A row that is too long is none, and rows fill a bucket.
    assert len(take_rows(stream, owners, 2, bucket_numel=1, limit=255).buckets) == 2
    (bucket, last) = take_rows(stream, owners, 2, bucket_numel=129, limit=256).buckets
    assert [item.position for item in bucket] == [0, 2, 4, 6] and len(last) == 2
    (every,) = take_rows(stream, owners, 2, bucket_numel=10**9, limit=256).drafts(2)
    assert numels_of(every) == (256, 256)


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


# --- layouts ---------------------------------------------------------------------------------------------------------

def real(name):
    return load_model_specs(name)


def chosen(layout):
    return {bucket.transport for bucket in layout.buckets if bucket.whole}


def test_a_single_node_takes_rows_and_many_take_cuts():
    specs = real("llama-3-8b")
    node = plan_layout(specs, 8, bucket_numel=50_000_000)
    assert chosen(node) == {"even"} and LayoutReport.of(node, specs).padding == 0
    # 4 x 32 matrices of 4096 x 4096 and less, 3 x 32 larger ones; a row of eight of these is 470 M elements.
    assert len([bucket for bucket in node.buckets if bucket.whole]) == 20
    assert chosen(plan_layout(specs, 512, bucket_numel=50_000_000)) == {"cuts"}


def test_rows_are_taken_where_ranks_then_send_two_percent_less():
    # One matrix a bucket is in cuts, which send one R-th more than rows of R.
    for ranks, rows in ((2, True), (8, True), (49, True), (64, False)):
        specs = [ParamSpec(f"w{i}", (64, ranks), "bfloat16", True, 1) for i in range(64 * ranks)]
        layout = plan_layout(specs, ranks, bucket_numel=64)
        assert chosen(layout) == ({"even"} if rows else {"cuts"}), ranks


def test_rows_do_not_change_who_works_how_much():
    specs = real("llama-3-8b")
    with_rows = plan_layout(specs, 8, bucket_numel=50_000_000)
    # Buckets of the whole model leave no room for rows: they are even as they are, or not.
    without = plan_layout(specs, 8, bucket_numel=10**12)
    for key in ("work", "whole_numel"):
        assert sorted(getattr(LayoutReport.of(with_rows, specs), key)) == \
            sorted(getattr(LayoutReport.of(without, specs), key))


# --- sums ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("said, on_host, expected", [
    ("auto", True, "ordered"), ("auto", False, "native"), ("native", True, "native"), ("ordered", False, "ordered")])
def test_auto_leaves_sums_to_the_backend_but_on_a_host(said, on_host, expected):
    assert reduction_of_run(said, on_host=on_host) == expected


def test_the_size_of_an_unknown_dtype_is_refused():
    assert itemsize("bfloat16") == 2
    with pytest.raises(LayoutError, match="the size of 'float8' is not known; known: float64, float32"):
        itemsize("float8")
