"""Masters that follow what somebody has written over their rounded values."""

import itertools
import math

import pytest
import torch

from ds_layerwise.ranks.owned import weight_writes
from ds_layerwise.ranks.owned.weight_writes import follow_
from tests.support.rooms import rooms

pytestmark = rooms("weight_writes")


def follows(masters, weights, **options):
    """Follow ``weights``, and tell whether any master changed."""
    written = torch.zeros((), dtype=torch.bool, device="cpu")
    follow_(masters, weights, written=written, **options)
    return bool(written)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_a_time", [3, 1 << 22])
def test_only_what_was_written_loses_its_precision(dtype, at_a_time, monkeypatch):
    monkeypatch.setattr(weight_writes, "_AT_A_TIME", at_a_time)
    masters = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 3
    # The last one is infinite in fp16, and no reason to forget the master.
    masters[4], masters[19] = math.nan, 1e38 if dtype == torch.bfloat16 else 70000.0
    values, before = masters.to(dtype), masters.clone()
    assert not follows(masters, values)
    assert torch.equal(masters.nan_to_num(0.5), before.nan_to_num(0.5))
    for index, value in ((7, 0.25), (19, 2.0), (4, 1.0), (0, math.inf)):
        values[index] = value
        assert follows(masters, values)
        before[index] = value
        assert torch.equal(masters.nan_to_num(0.5), before.nan_to_num(0.5))
        assert not follows(masters, values)


def test_a_value_that_is_no_number_is_followed_too():
    masters = torch.ones(4)
    follow_(masters, torch.tensor([1, math.nan, 1, 1], dtype=torch.bfloat16))
    assert masters.isnan().tolist() == [False, True, False, False]


def test_the_sign_of_zero():
    masters = torch.tensor([0.0, 1e-45, -1e-45])
    follow_(masters, torch.tensor([-0.0, 0.0, -0.0], dtype=torch.bfloat16))
    assert math.copysign(1, masters[0]) == -1 and torch.equal(masters[1:], torch.tensor([1e-45, -1e-45]))


checksum = weight_writes.checksum_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_every_bit_of_every_element_and_leaves_values_alone(dtype):
    values = torch.randn(11, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    kept, seen = bits.clone(), {checksum(values)}
    for index, bit in itertools.product(range(11), range(8 * values.element_size())):
        flipped = bits.clone()
        flipped[index] ^= torch.tensor(1 << bit).to(bits.dtype)
        seen.add(checksum(flipped.view(dtype)))
    assert len(seen) == 1 + 11 * 8 * values.element_size()
    assert torch.equal(bits, kept)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_checksum_is_the_same_wherever_the_values_lie(first):
    values = torch.randn(50, generator=torch.Generator().manual_seed(1)).bfloat16()
    elsewhere = torch.cat([values[:first], values])[first:]
    assert checksum(elsewhere) == checksum(values)
    assert checksum(elsewhere.view(5, 10).t()) == checksum(values.view(5, 10).t().contiguous())


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_values_that_change_places_are_told(place):
    values = torch.randperm(256, generator=torch.Generator().manual_seed(1)).view(64, 4).bfloat16()
    seen = {checksum(values)}
    for one, other in itertools.combinations(range(64), 2):
        swapped = values.clone()
        swapped[[one, other], place] = values[[other, one], place]
        seen.add(checksum(swapped))
    assert len(seen) == 1 + 64 * 63 // 2
    assert checksum(torch.tensor([1.0, 2, 2, 1])) != checksum(torch.tensor([2.0, 1, 1, 2]))
