"""Products that are computed by half, against products in full."""

import pytest
import torch

from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from tests.support.rooms import rooms

pytestmark = rooms("symmetric", "newton_schulz")

SIMPLE5 = coefficients("simple", 5)
CPU = torch.device("cpu")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def force(monkeypatch, strips, *, one_by_one):
    monkeypatch.setattr(symmetric, "num_strips", lambda side, dtype, device: strips)
    monkeypatch.setattr(symmetric, "one_by_one", lambda side, device: one_by_one)


@pytest.mark.parametrize("dtype, side, strips", [
    (torch.float32, 128, 1), (torch.float32, 240, 1), (torch.float32, 256, 3), (torch.float32, 320, 4),
    (torch.float32, 512, 6), (torch.float32, 4096, 8), (torch.bfloat16, 256, 1), (torch.bfloat16, 288, 2),
    (torch.bfloat16, 512, 3), (torch.bfloat16, 1024, 7), (torch.float16, 2048, 8), (torch.float64, 2048, 1)])
def test_small_matrices_are_not_cut(dtype, side, strips):
    assert symmetric.num_strips(side, dtype, CPU) == strips
    assert symmetric.num_strips(side, dtype, torch.device("cuda", 0)) == 1


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("strips", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("side", [16, 48, 144])
def test_a_product_by_half_is_the_product_in_full(side, strips, one_by_one, monkeypatch):
    force(monkeypatch, strips, one_by_one=one_by_one)
    x = noise(3, side, 40).double()
    gram = symmetric.gram(x)
    torch.testing.assert_close(gram, x @ x.mT)
    other = 2 * gram @ gram - gram
    value = symmetric.commuting(other, gram, other, beta=0.5, alpha=-3.0)
    torch.testing.assert_close(value, 0.5 * other - 3.0 * gram @ other)
    torch.testing.assert_close(symmetric.product(gram, x), gram @ x)
    torch.testing.assert_close(symmetric.product(gram, x, x, beta=-2.0), gram @ x - 2.0 * x)
    assert torch.equal(symmetric.upright(x), x.mT)


def test_nothing_above_the_diagonal_strips_is_computed(monkeypatch):
    """Each entry above is a copy of the one below, whatever rounding made of it."""
    force(monkeypatch, 4, one_by_one=True)
    gram = symmetric.gram(noise(2, 64, 200).to(torch.bfloat16))
    for start in range(0, 64, 16):
        assert torch.equal(gram[:, start:start + 16, start + 16:], gram[:, start + 16:, start:start + 16].mT)


@pytest.mark.parametrize("method, rounding", [("standard", 3e-6), ("gram", 3e-5)])
@pytest.mark.parametrize("shape", [(272, 272), (272, 400), (400, 272), (250, 300)])
def test_the_iteration_is_the_same_to_rounding(shape, method, rounding, monkeypatch):
    # 250 is padded to 256. Gram's own rounding is larger, see the note on precision.
    matrix = noise(*shape)
    value = newton_schulz(matrix, SIMPLE5, method=method, dtype=torch.float32)
    force(monkeypatch, 1, one_by_one=False)
    in_full = newton_schulz(matrix, SIMPLE5, method=method, dtype=torch.float32)
    assert 0 < float((value - in_full).norm() / in_full.norm()) < rounding


@pytest.mark.parametrize("side, dtype, gap", [
    (512, torch.float32, 16), (512, torch.bfloat16, 16), (256, torch.bfloat16, 0), (320, torch.float32, 0)])
def test_rows_are_apart_where_a_column_would_fall_on_few_lines_of_a_cache(side, dtype, gap):
    x = noise(2, side, side).to(dtype)
    for square in (symmetric.gram(x), symmetric.commuting(x, x, x, beta=1.0)):
        assert square.shape == (2, side, side) and square.stride() == (side * (side + gap), side + gap, 1)
