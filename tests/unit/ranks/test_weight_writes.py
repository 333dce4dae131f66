"""Masters that follow what somebody has written over their rounded values."""

import math

import pytest
import torch

from ds_layerwise.ranks.owned import weight_checksums, weight_writes
from ds_layerwise.ranks.owned.weight_writes import follow_
from tests.support.live_memory import LiveMemory
from tests.support.rooms import rooms

pytestmark = rooms("weight_writes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_a_time", [3, 1 << 22])
def test_only_what_was_written_loses_its_precision(dtype, at_a_time, monkeypatch):
    monkeypatch.setattr(weight_writes, "_AT_A_TIME", at_a_time)
    masters = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 3
    # The last one is infinite in fp16, and no reason to forget the master.
    masters[4], masters[19] = math.nan, 1e38 if dtype == torch.bfloat16 else 70000.0
    values, before = masters.to(dtype), masters.clone()
    assert not follow_(masters, values)
    assert torch.equal(masters.nan_to_num(0.5), before.nan_to_num(0.5))
    for index, value in ((7, 0.25), (19, 2.0), (4, 1.0), (0, math.inf)):
        values[index] = value
        assert follow_(masters, values)
        before[index] = value
        assert torch.equal(masters.nan_to_num(0.5), before.nan_to_num(0.5))
        assert not follow_(masters, values)


def test_a_value_that_is_no_number_is_followed_too():
    masters = torch.ones(4)
    follow_(masters, torch.tensor([1, math.nan, 1, 1], dtype=torch.bfloat16))
    assert masters.isnan().tolist() == [False, True, False, False]


def test_the_sign_of_zero():
    masters = torch.tensor([0.0, 1e-45, -1e-45])
    follow_(masters, torch.tensor([-0.0, 0.0, -0.0], dtype=torch.bfloat16))
    assert math.copysign(1, masters[0]) == -1 and torch.equal(masters[1:], torch.tensor([1e-45, -1e-45]))


def checksum(values):
    return tuple(weight_checksums.checksum_of(values).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_tells_where_and_what(dtype, monkeypatch):
    monkeypatch.setattr(weight_checksums, "CHECKED_AT_A_TIME", 3)
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = {checksum(values)}
    assert checksum(values.clone()) in seen
    for _ in range(2):
        values = values.flip(1)
        values[0, 0] += 1
        seen.add(checksum(values))
        seen.add(checksum(values.flip(0)))
    assert len(seen) == 5
    assert checksum(torch.tensor(0.5, dtype=dtype)) == checksum(torch.tensor([0.5], dtype=dtype))


@pytest.mark.parametrize("numel", [9, 10, 40])
def test_a_checksum_takes_what_the_plan_says(numel, monkeypatch):
    monkeypatch.setattr(weight_checksums, "CHECKED_AT_A_TIME", 10)
    values = torch.zeros(numel, dtype=torch.bfloat16)
    with LiveMemory([values]) as memory:
        weight_checksums.checksum_of(values)
    # Beside the elements: the total, the two sums, and their stack.
    assert memory.peak - values.untyped_storage().nbytes() <= 16 * min(numel, 10) + 48


def test_values_that_change_places_symmetrically_are_told():
    one, other = torch.tensor([1.0, 2, 2, 1]), torch.tensor([2.0, 1, 1, 2])
    assert checksum(one) != checksum(other)
