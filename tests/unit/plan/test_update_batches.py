"""Matrices of several buckets are updated together, beside a plain search of all that may be."""

import random

import pytest

from ds_layerwise.orthogonalize.batching import most_together
from ds_layerwise.ranks.owned.update_sets import Matrices, together
from tests.support.rooms import rooms

pytestmark = rooms("update_sets")

A, B = (4, 8), (4, 4)


def matrices(name, *shapes, alike="muon", most=100):
    return Matrices(name, alike, dict(sorted(shapes)), most)


def names(buckets):
    return [[" ".join(each.name for each in update) for update in updates] for updates in together(buckets)]


def test_a_batch_is_filled_from_the_buckets_whose_turn_comes_next():
    buckets = [[matrices(f"{index}", (A, 32))] for index in range(5)]
    assert names(buckets) == [[], ["1 0"], [], [], ["4 3 2"]]


def test_only_shapes_that_are_there_are_taken_along():
    buckets = [[matrices("0a", (A, 32)), matrices("0b", (B, 16))], [matrices("1b", (B, 16))], [matrices("2a", (A, 32))]]
    assert names(buckets) == [[], ["1b 0b"], ["2a 0a"]]


def test_matrices_of_several_shapes_go_where_all_of_them_have_room():
    both = ((A, 32), (B, 16))
    buckets = [[matrices("0", *both)], [matrices("1", (A, 32))], [matrices("2", *both)]]
    assert names(buckets) == [[], [], ["2 1 0"]]
    assert names([*buckets[:2], [matrices("2", (A, 32))]]) == [["0"], [], ["2 1"]]
    assert names([[matrices("0", *both, most=90)], [matrices("1", (A, 32), most=90)], [matrices("2", *both, most=90)]
                  ]) == [["0"], [], ["2 1"]]


def test_matrices_that_are_not_alike_are_apart():
    buckets = [[matrices("0", (A, 32), alike="other lr")], [matrices("1", (A, 32))], [matrices("2", (A, 32))]]
    assert names(buckets) == [["0"], [], ["2 1"]]


def test_a_bucket_of_its_own_neither_takes_along_nor_is_taken():
    buckets = [[matrices("0", (A, 32))], [matrices("1", (A, 32), most=0)], [matrices("2", (A, 32))]]
    assert names(buckets) == [[], ["1"], ["2 0"]]
    assert names([buckets[0], buckets[2], buckets[1]]) == [[], ["2 0"], ["1"]]


def test_a_matrix_that_overfills_a_batch_stays_whole():
    buckets = [[matrices("0", (A, 320))], [matrices("1", (A, 32))], [matrices("2", (A, 320)), matrices("2b", (A, 32))]]
    assert names(buckets) == [["0"], ["1"], ["2 2b"]]


@pytest.mark.parametrize("seed", range(200))
def test_everything_is_updated_once_when_its_turn_comes_at_the_latest_and_batches_are_full(seed):
    rng = random.Random(seed)
    most = rng.choice((0, 16, 64, 200, 10**6))
    shapes = [((rows, cols), rows * cols) for rows, cols in ((2, 4), (4, 4), (4, 8), (8, 8))]
    buckets = [[matrices(f"{index}.{i}", *rng.sample(shapes, rng.choice((1, 1, 1, 2))), alike=rng.choice("xy"),
                         most=rng.choice((0, most)) if seed % 3 == 0 else most) for i in range(rng.randrange(4))]
               for index in range(rng.randrange(1, 9))]
    found = together(buckets)
    turn = {each.name: index for index, updates in enumerate(found) for update in updates for each in update}
    bucket_of = {each.name: index for index, held in enumerate(buckets) for each in held}
    assert sorted(each.name for updates in found for update in updates for each in update) == sorted(bucket_of)
    for index, updates in enumerate(found):
        for update in updates:
            assert len({each.alike for each in update}) == 1
            along = [each for each in update if bucket_of[each.name] != index]
            assert all(bucket_of[each.name] < index for each in along)
            limit = update[0].most
            assert not along or all(each.most for each in along) and limit
            for shape in {shape for each in along for shape in each.numels}:
                held = sum(numel for each in update for its, numel in each.numels.items() if its == shape)
                own = {its for each in update if bucket_of[each.name] == index for its in each.numels}
                assert held <= limit and shape in own
            # Nothing that would fit is left for later, unless what waits in front of it does not fit.
            for later, each in ((turn[each.name], each) for held in buckets[:index] for each in held):
                first = next((other for held in reversed(buckets[:index]) for other in held
                              if other.alike == each.alike and other.most and turn[other.name] < index
                              and [*other.numels] == [*each.numels]), None)
                if later < index and each is first and each.alike == update[0].alike:
                    assert not fits(each, update, index, bucket_of)


def fits(each, update, index, bucket_of):
    own = {its for other in update if bucket_of[other.name] == index for its in other.numels}
    return all(shape in own and numel + sum(n for other in update for its, n in other.numels.items() if its == shape)
               <= update[0].most for shape, numel in each.numels.items())


@pytest.mark.parametrize("count, numel, most, expected", [
    (10, 4, 16, 4), (3, 4, 16, 3), (10, 4, 19, 4), (10, 40, 16, 1), (10, 4, 0, 1)])
def test_the_largest_batch_has_as_many_as_fit(count, numel, most, expected):
    assert most_together(count, numel, most) == expected
    updates = together([[matrices(str(index), (A, numel), most=most)] for index in range(count)])
    assert max(len(update) for of_bucket in updates for update in of_bucket) == expected
