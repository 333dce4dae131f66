"""A Layout that breaks an invariant cannot be built; one that can be built answers for every element."""

import itertools

import pytest

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout.layout import Layout, ParamSpec, Piece, Slot
from ds_layerwise.plan.layout.planner import plan_layout
from tests.support.rooms import rooms
from tests.support.transports import bucket_of, numels_of

pytestmark = rooms("layout")


def whole(index=0, start=0, shards=(128, 0, 64), slots=(("a", 0, 60), ("b", 64, 64), ("c", 128, 10)), dtype="bfloat16",
          transport=None):
    return bucket_of(index, dtype, True, start, shards, tuple(Slot(*slot) for slot in slots), transport=transport)


def split(index=0, start=0, shards=(64, 64), slots=(("d", 0, 100), ("e", 128, 0)), dtype="bfloat16", transport=None):
    slots = tuple(Slot(*slot) for slot in slots if slot[2])
    return bucket_of(index, dtype, False, start, shards, slots, transport=transport)


def layout(*buckets, world_size=3, alignment=64, policy="balanced"):
    return Layout(policy, world_size, alignment, buckets)


# --- what cannot be built --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make, message", [
    (lambda: whole(shards=(0, 0, 0)), r"a: no rank owns \[0, 60\) in bucket 0, \[0, 0\)"),
    (lambda: whole(slots=(("a", 0, 60), ("c", 128, 65))), r"c: \[128, 193\) leaves .* bucket 0, \[60, 192\)"),
    (lambda: whole(start=64, slots=(("a", 0, 60),)), r"a: no rank owns \[0, 60\) in bucket 0, \[64, 256\)"),
    (lambda: split(start=64, slots=(("a", 0, 60),)), r"a: \[0, 60\) leaves .* bucket 0, \[64, 192\)"),
    (lambda: split(slots=(("d", 0, 60), ("e", 64, 65))), r"e: \[64, 129\) leaves .* bucket 0, \[60, 128\)"),
    (lambda: whole(slots=(("a", 0, 65), ("b", 64, 64))), r"a: \[0, 65\) leaves .* bucket 0, \[0, 64\)"),
    (lambda: whole(slots=(("b", 64, 64), ("a", 0, 60))), r"b: \[64, 128\) leaves .* bucket 0, \[0, 0\)"),
    (lambda: whole(slots=(("a", 64, 65),)), r"a: \[64, 129\) leaves .* bucket 0, \[0, 128\)"),
    (lambda: whole(slots=(("a", 0, 0),)), r"a: \[0, 0\) leaves .* bucket 0, \[0, 128\)"),
])
def test_a_bucket_that_breaks_an_invariant_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


@pytest.mark.parametrize("make, message", [
    (lambda: whole(transport="broadcast"), "bucket 0 of whole .* transport 'broadcast', .* possible are cuts"),
    (lambda: whole(transport="even"), r"shards \(\(1, 128\), \(1, 0\), \(1, 64\)\) has the transport 'even', which"),
    (lambda: split(shards=(128, 64)), "bucket 0 of split .* has the transport 'cuts'"),
    (lambda: split(transport="cuts"), "has the transport 'cuts', .* possible are even, by_param"),
    (lambda: whole(transport="by_param", shards=(64, 64, 64)), "transport 'by_param', .* possible are even, cuts"),
    (lambda: split(transport="by_param", shards=(128, 64)), "has the transport 'by_param'"),
    (lambda: split(transport="by_param", shards=(64, 64), slots=(("a", 0, 100), ("b", 98, 4))),
     r"a: \[0, 100\) leaves .* bucket 0, \[0, 98\)"),
    (lambda: split(transport="by_param", shards=(64, 64), slots=(("a", 0, 99), ("b", 99, 4))),
     r"a: \[0, 100\) leaves .* bucket 0, \[0, 99\)"),
])
def test_a_transport_that_a_bucket_cannot_have_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_a_bucket_has_as_many_cuts_as_shards():
    cuts = whole(shards=(64, 64, 64), slots=(("f", 64, 8),), transport="cuts")
    assert (cuts.transport, cuts.holders, cuts.cut_numel) == ("cuts", 3, 64)
    experts = bucket_of(0, "float32", True, 0, (0, 128), (Slot("a", 0, 60),), ep_size=3, transport="cuts")
    assert (experts.holders, experts.cut_numel, experts.world_size) == (2, 64, 6)


def test_json_says_the_transport_but_of_even_buckets():
    even, cuts = layout(split(shards=(64, 64, 64))), layout(whole())
    assert '"way"' not in even.to_json() and '"way":"cuts"' in cuts.to_json()
    assert Layout.from_json(cuts.to_json()) == cuts and Layout.from_json(even.to_json()) == even
    with pytest.raises(LayoutError, match="has the transport 'across'"):
        Layout.from_json(cuts.to_json().replace('"way":"cuts"', '"way":"across"'))


@pytest.mark.parametrize("way", ["", ',"way":"ragged"'])
def test_shards_of_any_length_that_an_older_save_has_are_read(way):
    older = Layout.from_json(
        '{"policy":"balanced","world_size":3,"alignment":64,"buckets":[{"dtype":"bfloat16","whole":true,"start":0,'
        '"shards":[[1,128],[1,0],[1,128]],"slots":[["a",0,60],["b",64,64],["c",128,100]]' + way + "}]}")
    assert [older.pieces(rank) for rank in range(3)] == [
        (Piece("a", 0, 60, 0), Piece("b", 64, 64, 0)), (), (Piece("c", 128, 100, 0),)]


@pytest.mark.parametrize("make, message", [
    (lambda: layout(whole(index=1)), "bucket 1 is at place 0 of the launch order"),
    (lambda: layout(whole(), world_size=2), "bucket 0 has 3 shards with ep_size 1, the layout 2 ranks"),
    (lambda: layout(whole(start=64, slots=(("a", 64, 60),))), "starts at 64 of the bfloat16 buffer, .* stops at 0"),
    (lambda: layout(whole(), whole(1, 128, slots=(("x", 128, 4),))), "bucket 1 starts at 128 .* stops at 192"),
    (lambda: layout(whole(shards=(128, 0, 65))), "bucket 0: a shard has 65 elements, not a multiple of 64"),
    (lambda: layout(whole(shards=(65, 65, 65), slots=(("a", 0, 60),))), "a shard has 65 elements"),
    (lambda: layout(whole(slots=(("a", 32, 60),))), "a starts at 32, not a multiple of 64"),
    (lambda: layout(whole(), whole(1, 192, slots=(("b", 192, 4),))), "b is in bucket 0 and in bucket 1"),
    (lambda: layout(whole(), whole(1, dtype="float32")), "a is in bucket 0 and in bucket 1"),
])
def test_a_layout_that_breaks_an_invariant_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


# --- what one can ask ------------------------------------------------------------------------------------------------

def test_shards_follow_each_other_and_may_be_empty():
    bucket = whole(start=64, slots=(("a", 64, 60), ("b", 128, 64), ("c", 192, 10)))
    assert [bucket.shard(rank) for rank in range(3)] == [(64, 192), (192, 192), (192, 256)]
    assert (bucket.numel, bucket.stop, bucket.world_size, bucket.is_even) == (192, 256, 3, False)
    assert list(bucket.non_empty_shards()) == [(0, 128), (2, 64)]
    assert [bucket.owner(slot) for slot in bucket.slots] == [0, 0, 2]
    assert [[p.name for p in bucket.pieces(rank)] for rank in range(3)] == [["a", "b"], [], ["c"]]
    assert bucket.pieces(2) == (Piece("c", 192, 10, 0),)


#: All there are of up to four shards of 0, 64 or 128 elements.
EVERY = [numels for size in range(1, 5) for numels in itertools.product((0, 64, 128), repeat=size) if any(numels)]


@pytest.mark.parametrize("numels", EVERY, ids=str)
def test_shards_as_runs_lie_where_their_lengths_say(numels):
    bucket = bucket_of(0, "float32", True, 1000, numels, (Slot("a", 1000, 1),), ep_size=2, transport="cuts")
    assert numels_of(bucket) == numels and bucket.is_even == (len(set(numels)) == 1)
    assert (bucket.holders, bucket.numel, bucket.shards.longest) == (len(numels), sum(numels), max(numels))
    starts = [1000 + sum(numels[:number]) for number in range(len(numels))]
    assert [bucket.shard(2 * number + 1) for number in range(len(numels))] == [
        (start, start + numel) for start, numel in zip(starts, numels)]
    assert list(bucket.filled()) == [each for each in zip(itertools.count(), starts, numels) if each[2]]
    assert all(one[1] != other[1] for one, other in itertools.pairwise(bucket.shards.runs))
    for number, start, numel in bucket.filled():
        assert {bucket.owner(Slot("a", start + i, 1)) for i in (0, numel // 2, numel - 1)} == {2 * number}


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_bucket_has_no_shard(rank):
    with pytest.raises(LayoutError, match=rf"rank must be in \[0, 3\), got {rank}"):
        whole().shard(rank)


def test_a_split_parameter_has_a_piece_in_every_shard_it_touches_and_no_owner():
    bucket = split(shards=(64, 64), slots=(("d", 0, 100),))
    assert bucket.pieces(0) == (Piece("d", 0, 64, 0),)
    assert bucket.pieces(1) == (Piece("d", 64, 36, 64),)
    assert bucket.is_even
    with pytest.raises(LayoutError, match="d: no rank owns"):
        bucket.owner(bucket.slots[0])


def test_pieces_cover_every_element_once_whatever_the_borders():
    slots = (("a", 0, 1), ("b", 64, 300), ("c", 384, 64), ("d", 448, 7))
    for shards in [(512,), (256, 256), (192, 192, 192), (128,) * 4, (64,) * 8, (1,) * 512]:
        bucket = split(shards=shards, slots=slots)
        pieces = [piece for rank in range(len(shards)) for piece in bucket.pieces(rank)]
        covered = [(p.name, p.param_start + i, p.start + i) for p in pieces for i in range(p.numel)]
        assert covered == [(name, i, start + i) for name, start, numel in slots for i in range(numel)]


def test_no_rank_owns_a_slot_of_another_bucket():
    with pytest.raises(LayoutError, match=r"x: no rank owns \[192, 196\) in bucket 0"):
        whole().owner(Slot("x", 192, 4))


def test_ranks_in_a_row_have_the_same_shard_each_of_its_own_experts():
    slots = (Slot("a", 0, 60), Slot("b", 64, 10))
    bucket = bucket_of(0, "float32", True, 0, (64, 64), slots, ep_size=2)
    assert bucket.world_size == 4
    assert [bucket.shard(rank) for rank in range(4)] == [(0, 64), (0, 64), (64, 128), (64, 128)]
    assert [[p.name for p in bucket.pieces(rank)] for rank in range(4)] == [["a"], ["a"], ["b"], ["b"]]
    assert [list(bucket.owners(slot)) for slot in slots] == [[0, 1], [2, 3]]
    assert list(bucket.non_empty_shards()) == [(0, 64), (1, 64), (2, 64), (3, 64)]
    result = layout(whole(shards=(128, 0, 0, 64)), world_size=4)
    with_experts = Layout("balanced", 4, 64, (bucket,))
    assert Layout.from_json(with_experts.to_json()) == with_experts
    assert '"variants":2' in with_experts.to_json() and "variants" not in result.to_json()
    experts = bucket_of(0, "float32", True, 0, (0, 128), slots, ep_size=3)
    assert [experts.owner(slot) for slot in slots] == [3, 3]
    assert [experts.shard(rank) for rank in (2, 3, 5)] == [(0, 0), (0, 128), (0, 128)]
    assert Layout.from_json(Layout("lpt", 6, 64, (experts,)).to_json()).buckets == (experts,)
    with pytest.raises(LayoutError, match="2 shards with ep_size 2, the layout 3 ranks"):
        layout(bucket)


def three_buckets():
    return layout(whole(), whole(1, shards=(64, 64, 64), slots=(("f", 64, 8),), dtype="float32"),
                  split(2, 192, (64, 64, 64), (("d", 192, 130),)))


def test_each_dtype_has_a_buffer_of_its_own():
    result = three_buckets()
    assert list(result.buffers.items()) == [("bfloat16", 384), ("float32", 192)]


def test_a_parameter_is_found_by_name():
    result = three_buckets()
    assert result.slot("d") == Slot("d", 192, 130)
    assert result.bucket_of("f") is result.buckets[1]
    with pytest.raises(LayoutError, match="nobody is not in this layout of 5 parameters"):
        result.slot("nobody")
    with pytest.raises(LayoutError, match="nobody"):
        result.bucket_of("nobody")


def test_pieces_of_a_rank_come_bucket_by_bucket():
    assert [p.name for p in three_buckets().pieces(0)] == ["a", "b", "d"]
    assert three_buckets().pieces(1) == (Piece("f", 64, 8, 0), Piece("d", 256, 64, 64))


def test_json_gives_back_the_same_layout_and_runs_of_shards_are_short():
    result = three_buckets()
    again = Layout.from_json(result.to_json())
    assert again == result and again.digest() == result.digest() and hash(again) == hash(result)
    sparse = layout(whole(shards=(0,) * 500 + (64,) + (0,) * 523, slots=(("a", 0, 60),)), world_size=1024)
    assert '"shards":[[500,0],[1,64],[523,0]]' in sparse.to_json()
    assert Layout.from_json(sparse.to_json()) == sparse


def test_json_of_a_broken_layout_is_refused_like_the_layout():
    with pytest.raises(LayoutError, match="a starts at 1, not a multiple of 64"):
        Layout.from_json(three_buckets().to_json().replace('["a",0,60]', '["a",1,60]'))


@pytest.mark.parametrize("other", [
    lambda: layout(*three_buckets().buckets, policy="lpt"),
    lambda: layout(*three_buckets().buckets, alignment=32),
    lambda: layout(*three_buckets().buckets[:2]),
    lambda: layout(whole(shards=(128, 64, 0)), *three_buckets().buckets[1:]),
    lambda: layout(whole(slots=(("a", 0, 61), ("b", 64, 64), ("c", 128, 10))), *three_buckets().buckets[1:]),
    lambda: layout(whole(slots=(("A", 0, 60), ("b", 64, 64), ("c", 128, 10))), *three_buckets().buckets[1:]),
    lambda: layout(*three_buckets().buckets[:2], whole(2, 192, (64, 64, 64), (("d", 192, 64),))),
    lambda: layout(*three_buckets().buckets[:2], split(2, 192, (64, 64, 64), (("d", 192, 64),))),
])
def test_layouts_that_differ_anywhere_have_different_digests(other):
    assert other() != three_buckets()
    assert other().digest() != three_buckets().digest()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_each_parameter_is_cut_by_itself_at_stage_3(world_size, alignment):
    specs = [ParamSpec(f"p{numel}", (numel, ), "float32", False) for numel in (1, 2, 5, 64, 97, 300)]
    planned = plan_layout(specs, world_size, bucket_numel=100, alignment=alignment, stage=3)
    assert {bucket.transport for bucket in planned.buckets} == {"by_param"} and len(planned.buckets) > 1
    assert Layout.from_json(planned.to_json()) == planned
    found = {spec.name: [] for spec in specs}
    for rank in range(world_size):
        end = {}
        for piece in planned.pieces(rank):
            found[piece.name].append((rank, piece.param_start, piece.numel))
            bucket = next(b for b in planned.buckets if b.shard(rank)[0] <= piece.start < b.shard(rank)[1])
            assert piece.start >= end.get(bucket.index, 0) and piece.start + piece.numel <= bucket.shard(rank)[1]
            end[bucket.index] = piece.start + piece.numel
    for spec in specs:
        cut = -(-spec.numel // world_size)
        assert found[spec.name] == [(rank, rank * cut, min(cut, spec.numel - rank * cut))
                                    for rank in range(world_size) if rank * cut < spec.numel]
