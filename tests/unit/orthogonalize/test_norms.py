"""Norms of matrices so large that adding up in float32 loses some of them."""

import pytest
import torch

from ds_layerwise.orthogonalize.batching import frobenius_norms, norms_of
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from tests.support.rooms import rooms

pytestmark = rooms("batching")

#: Of 4 M entries float32 sums lose 1e-3.
LARGE = (64, 2**16 + 3)


def of_rank_one(*shape, scale=0.1):
    return torch.full(shape, scale)


def of_another(*shape):
    return of_rank_one(*shape, scale=1.9885)


def in_float64(matrix):
    return float(torch.linalg.vector_norm(matrix.double()))


@pytest.mark.parametrize("make, bound", [(of_rank_one, 1e-4), (of_another, 1e-4), (torch.randn, 1e-6)])
def test_norms_of_large_matrices(make, bound):
    torch.manual_seed(0)
    matrices = [make(*shape) for shape in [LARGE, (3, 5), (1, 2**16), (2**16 + 1, 1), LARGE]]
    norms = frobenius_norms(matrices)
    assert norms.dtype == torch.float32 and norms.shape == (5, )
    for norm, matrix in zip(norms, matrices, strict=True):
        assert float(norm) == pytest.approx(in_float64(matrix), rel=bound)
        assert torch.equal(norm, frobenius_norms([matrix])[0])


def test_norms_of_what_is_not_contiguous_and_of_batches():
    torch.manual_seed(0)
    stacked = torch.randn(2, 3, 2**15, 7).mT
    norms = norms_of(stacked)
    assert norms.shape == (2, 3, 1, 1)
    for norm, matrix in zip(norms.view(-1), stacked.reshape(6, 7, 2**15), strict=True):
        assert float(norm) == pytest.approx(in_float64(matrix), rel=1e-5)


@pytest.mark.parametrize("scale", [0.1, 1e24])
def test_a_large_matrix_of_rank_one_is_pushed_where_one_singular_value_is(scale):
    """Beyond norm 1 "polar_express" diverges. Huge entries take another way to norm 1."""
    for table in ("simple", "polar_express"):
        expected, slope = 1.0, 1.0
        for a, b, c in coefficients(table, 5):
            slope *= a + 3 * b * expected**2 + 5 * c * expected**4
            expected = a * expected + b * expected**3 + c * expected**5
        found = newton_schulz(of_rank_one(*LARGE, scale=scale), coefficients(table, 5), method="standard",
                              dtype=torch.float32)
        # sqrt(rows * cols) u v', of which every entry is the same. What float32 products of this length leave, 2e-5,
        # counts as often as the polynomial is steep at 1: 200 times with "polar_express".
        bound = 2e-5 * abs(slope / expected)
        assert float(found[3, 4]) == pytest.approx(expected / (LARGE[0] * LARGE[1])**0.5, rel=bound)
