"""The bytes that the exchange between cuts and owners moves, against elements counted one by one."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from ds_layerwise.plan.layout.shards import Numels, Shards
from ds_layerwise.plan.network.transport import Exchange, Load, exchange
from tests.support.rooms import rooms

pytestmark = rooms("transport")


def load(numels, sum_bytes):
    shards = Shards.of(Numels.of(numels), 0)
    return Load(shards.numel, shards, len(numels), 1, 2, 2, sum_bytes)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_every_element_that_is_not_with_its_owner_moves(size, seed):
    choice = random.Random(seed)
    buckets = [[choice.choice([0, 0, 1, 5, 40]) * size for _ in range(size)] for _ in range(choice.randrange(1, 5))]
    buckets = [numels if any(numels) else [size, *numels[1:]] for numels in buckets]
    widths = [choice.choice([2, 4]) for _ in buckets]
    expected = []
    for nbytes in (widths, [2] * len(buckets)):
        received, sent = np.zeros(size, int), np.zeros(size, int)
        for numels, each in zip(buckets, nbytes, strict=True):
            owners = np.repeat(range(size), numels)
            holders = np.repeat(range(size), len(owners) // size)
            for owner, holder in zip(owners, holders, strict=True):
                received[owner] += each * (owner != holder)
                sent[holder] += each * (owner != holder)
        expected.append((max(received.max(), sent.max()), sent.sum() / size))
    asked = []
    group = SimpleNamespace(size=size, all_to_all=lambda most, mean: asked.append((most, mean)) or len(asked))
    assert exchange([load(*each) for each in zip(buckets, widths, strict=True)], group) == (
        Exchange(1, 2) if expected[0][0] else Exchange(0, 0))
    assert asked == (expected if expected[0][0] else [])
