"""MXFP8 against its specification, an element at a time."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ds_layerwise.optimizers import mxfp8
from ds_layerwise.optimizers.mxfp8 import GROUP, decode_, encode, encoded_bytes, rounded
from ds_layerwise.ranks.owned.weight_writes import follow_, followed
from tests.support.microscaling import blocks_of, weights_of
from tests.support.rooms import rooms

pytestmark = rooms("mxfp8", "weight_writes")


def follows(masters, weights, **options):
    """Follow ``weights``, and tell whether any master changed."""
    written = torch.zeros((), dtype=torch.bool, device="cpu")
    follow_(masters, weights, written=written, **options)
    return bool(written)


def random_values(numel=5 * GROUP + 77):
    """Values of any size, some of them far below their neighbours, and zeros of both signs."""
    draw = torch.Generator().manual_seed(4)
    blocks = torch.randn(-(-numel // 32), 1, generator=draw) * 40
    values = torch.randn(len(blocks), 32, generator=draw) * torch.exp2(
        blocks.round() + 3 * torch.randn(len(blocks), 32, generator=draw))
    values[3::7, 5::3] = 0.0
    values[5::7] *= -0.0
    return values.flatten()[:numel].clone()


def ties():
    """All that lies halfway between two numbers of e4m3, and its neighbours in float32, below a largest of 448."""
    elements = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (elements[1:] + elements[:-1]) / 2
    around = torch.stack([middle, middle.nextafter(middle + 1), middle.nextafter(middle - 1)]).flatten()
    around = torch.cat([around, around.new_tensor([449.0, 464.0, 480.0, 511.9]), -around])
    first = torch.tensor([448.0, 0.0, -0.0]).expand(-(-len(around) // 29), 3)
    rest = torch.nn.functional.pad(around, (0, -len(around) % 29)).view(-1, 29)
    return torch.cat([first, rest], 1).flatten()


TINY = torch.finfo(torch.float32).smallest_normal
CASES = {
    "random": random_values(), "ties": ties(), "ties below 1": ties() * 2**-20,
    "one": torch.tensor([-3.7]), "none": torch.zeros(0), "zeros": torch.tensor([0.0, -0.0] * 20),
    # With the smallest scale there are subnormal numbers, of the scale, of elements, and of bfloat16.
    "small": ties() * 2**-126 * 2**-9, "smaller": ties() * 2**-149,
    "subnormal": torch.tensor([TINY / 2**20, -TINY / 8]),
    "large": ties() * 2.0**119, "largest": torch.tensor([torch.finfo(torch.float32).max, -1e38, 1e36, 1e20])}


@pytest.mark.parametrize("case", CASES)
def test_every_byte_and_value_is_that_of_the_specification(case):
    values = CASES[case]
    groups = encode(values)
    assert groups.numel() == encoded_bytes(values.numel())
    expected = blocks_of(values)
    scales = [scale for scale, _, _ in expected]
    elements = [byte for _, of_block, _ in expected for byte in of_block]
    for number, group in enumerate(groups.view(-1, 528)):
        own = scales[16 * number:16 * number + 16]
        assert group[512:].tolist() == own + [0] * (16 - len(own))
        own = elements[512 * number:512 * number + 512]
        assert group[:512].tolist() == own + [0] * (512 - len(own))
    found = torch.full_like(values, 5, dtype=torch.bfloat16)
    decode_(found, groups)
    for each in (found, rounded(values)):
        assert torch.equal(each.view(torch.int16), weights_of(values).view(torch.int16))
    # What arrives is what the owner has: it sends decoded weights.
    again = encode(found)
    assert torch.equal(again, groups) or case == "small"
    decode_(arrived := torch.empty_like(found), again)
    assert torch.equal(arrived.view(torch.int16), found.view(torch.int16))


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_an_infinity_or_a_nan_makes_its_block_nan_and_no_other(value):
    values = random_values(100)
    values[40] = value
    found = rounded(values)
    assert found[32:64].isnan().all()
    assert torch.equal(found[:32], weights_of(values[:32])) and torch.equal(found[64:], weights_of(values[64:]))
    decode_(decoded := torch.empty_like(found), encode(found))
    assert torch.equal(decoded.view(torch.int16), found.view(torch.int16))


def test_large_tensors_go_in_parts(monkeypatch):
    values = random_values()
    expected = rounded(values)
    groups = encode(values)
    monkeypatch.setattr(mxfp8, "_AT_A_TIME", 2 * GROUP)
    of_parts = encode(values)
    decode_(found := torch.empty_like(expected), of_parts)
    assert torch.equal(of_parts, groups) and torch.equal(found, expected) and torch.equal(rounded(values), expected)


def test_nothing_is_read_on_the_host():
    with FakeTensorMode():
        values = torch.empty(700)
        decode_(rounded(values), encode(values))


class TestWrittenWeights:
    """Masters follow block by block, and an untouched block is never taken for a written one."""

    def test_the_block_of_a_write_follows_and_no_other(self):
        masters = random_values(300)
        before, weights = masters.clone(), rounded(masters)
        assert followed(masters, weights, in_mxfp8=True) is masters
        assert not follows(masters, weights, in_mxfp8=True) and torch.equal(masters, before)
        weights[[70, 299]] = 3.0
        expected = before.clone()
        expected[64:96], expected[288:] = weights[64:96].float(), weights[288:].float()
        assert torch.equal(followed(masters, weights, in_mxfp8=True), expected) and torch.equal(masters, before)
        assert follows(masters, weights, in_mxfp8=True) and torch.equal(masters, expected)
        # The weights are as they were written until they are sent, which is no other write.
        assert not follows(masters, weights, in_mxfp8=True) and torch.equal(masters, expected)
        assert followed(masters, weights, in_mxfp8=True) is masters

    def test_a_nan_that_an_update_made_is_no_write(self):
        masters = random_values(64)
        masters[3] = torch.nan
        weights, before = rounded(masters), masters.clone()
        assert not follows(masters, weights, in_mxfp8=True)
        assert torch.equal(masters[4:], before[4:]) and torch.equal(masters[:3], before[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e5, 1e-20, 1e-36, 1e30])
def test_torchao_has_the_same_codes_and_scales(size, dtype):
    """Compare with another implementation, in the mode of the specification."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    draw = torch.Generator().manual_seed(0)
    spread = torch.exp(3 * torch.randn(64 * GROUP, generator=draw))
    values = (torch.randn(64 * GROUP, generator=draw) * size * spread).to(dtype)
    values[:32] = 0
    scales, codes = to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)
    groups = encode(values).view(64, -1)
    assert torch.equal(groups[:, :GROUP].reshape(-1), codes.view(torch.uint8).reshape(-1))
    assert torch.equal(groups[:, GROUP:].reshape(-1), scales.view(torch.uint8).reshape(-1))
