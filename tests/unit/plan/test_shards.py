"""Lengths of shards in their short form, against tuples."""

import itertools
import pickle

import numpy as np
import pytest

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.layout.shards import Numels, Shards
from tests.support.rooms import rooms

pytestmark = rooms("shards")

#: All there are of up to four shards of 0, 64 or 128 elements.
EVERY = [numels for size in range(1, 5) for numels in itertools.product((0, 64, 128), repeat=size)]


@pytest.mark.parametrize("numels", EVERY, ids=str)
def test_they_are_as_a_tuple(numels):
    short, size = Numels.of(numels), len(numels)
    assert tuple(short) == numels == short and short == numels and hash(short) == hash(numels)
    assert [short[i] for i in range(-size, size)] == [numels[i] for i in range(-size, size)]
    assert short[1:] == numels[1:] and len(short) == size and np.array(short).tolist() == list(numels)
    with pytest.raises(IndexError, match=f"there are {size} shards, got number {size}"):
        short[size]
    runs = short.runs()
    assert [numel for count, numel in runs for _ in range(count)] == list(numels)
    assert all(one[1] != other[1] for one, other in itertools.pairwise(runs))
    # However they came about, they are the same.
    for other in (Numels.of_runs(runs), Numels.of_runs([[1, numel] for numel in numels]), Numels.of(list(numels)),
                  pickle.loads(pickle.dumps(short)), eval(repr(short)),
                  Numels.of_filled(size, tuple(i for i in range(size) if numels[i]), tuple(filter(None, numels)))):
        assert other == short and hash(other) == hash(short) and other.runs() == runs
    assert all((Numels.of(other) == short) == (other == numels) for other in EVERY)


@pytest.mark.parametrize("runs", [[[0, 64]], [[5, 64], [-2, 0]], [[2, -64]], [[4, None]], [["2", 64]], [[2, 1.5]]])
def test_runs_that_are_none(runs):
    with pytest.raises(LayoutError, match="a run of shards is .how many, numel., at least 1 and 0, got"):
        Numels.of_runs(runs)


@pytest.mark.parametrize("numels", EVERY, ids=str)
def test_starts_lengths_and_sums_follow_from_the_numels(numels):
    shards, filled = Shards.of(Numels.of(numels), 1000), [i for i, numel in enumerate(numels) if numel]
    assert list(shards.filled) == filled and list(shards.lengths) == [numels[i] for i in filled]
    assert list(shards.starts) == [1000 + sum(numels[:i]) for i in filled]
    assert (shards.numel, shards.is_even) == (sum(numels), len(set(numels)) == 1)
    assert shards.shortest == min(filter(None, numels), default=0)


def test_only_those_that_are_filled_are_in_memory():
    for short in (Numels.equal(64, 1 << 20), Numels.of_filled(1 << 20, (5, 7), (64, 128))):
        assert len(pickle.dumps(short)) < 300
