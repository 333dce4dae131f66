"""Newton-Schulz against the same polynomial applied to singular values in float64, and its FLOPs against the products
that run."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.errors import ConfigError
from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.batching import batches, stack, unstack
from ds_layerwise.orthogonalize.newton_schulz import (
    TABLES,
    coefficients,
    gram_segments,
    newton_schulz,
    newton_schulz_flops,
)
from tests.support.reference import largest_singular_value
from tests.support.rooms import rooms

pytestmark = rooms("newton_schulz", "batching")

#: (method, dtype) -> relative error and largest singular value allowed on a condition number of 100. The exact
#: result's largest is about 1.2; an iteration that has lost its precision overshoots.
BOUNDS = {
    ("standard", torch.float32): (1e-4, 1.21),
    ("gram", torch.float32): (1e-4, 1.21),
    ("standard", torch.bfloat16): (0.06, 1.23),
    ("gram", torch.bfloat16): (0.06, 1.24),
    ("standard", torch.float16): (0.03, 1.23),
    ("gram", torch.float16): (0.03, 1.24),
}

SIMPLE5 = coefficients("simple", 5)


@pytest.mark.parametrize("steps, fp32, fp16, bf16", [
    (1, (1,), (1,), (1,)), (2, (2,), (2,), (2,)), (3, (2, 1), (2, 1), (2, 1)), (5, (2, 3), (2, 3), (2, 2, 1)),
    (6, (2, 3, 1), (2, 2, 2), (2, 2, 2)), (10, (2, 3, 3, 2), (2,) * 5, (2,) * 5)])
def test_the_gram_matrix_is_formed_anew_where_bits_run_out(steps, fp32, fp16, bf16):
    for dtype, lengths in ((torch.float32, fp32), (torch.float16, fp16), (torch.bfloat16, bf16)):
        bounds = itertools.accumulate(lengths, initial=0)
        assert gram_segments(steps, dtype) == list(itertools.pairwise(bounds))


def exact(matrix, rows):
    """The polynomial of every step on singular values, which start on the sphere of Frobenius norm 1."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vt


def conditioned(rows, cols, condition=100.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = min(rows, cols)
    u, _ = torch.linalg.qr(torch.randn(rows, k, generator=g))
    v, _ = torch.linalg.qr(torch.randn(cols, k, generator=g))
    return (u * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), k)) @ v.T


def error(value, wanted):
    return float((value.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", [(64, 64), (64, 160), (160, 64), (96, 120)])
@pytest.mark.parametrize("method, dtype", BOUNDS, ids=str)
def test_it_is_the_polynomial_of_the_singular_values(method, dtype, shape):
    matrix = conditioned(*shape)
    value = newton_schulz(matrix, SIMPLE5, method=method, dtype=dtype)
    bound, largest = BOUNDS[method, dtype]
    assert error(value, exact(matrix, SIMPLE5)) < bound
    assert torch.linalg.matrix_norm(value, 2) < largest


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10])
def test_every_table_and_number_of_steps(table, method, steps):
    rows = coefficients(table, steps)
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    assert error(newton_schulz(matrix, rows, method=method, dtype=torch.float32), exact(matrix, rows)) < 1e-3


@pytest.mark.parametrize("dtype, overshoot", [(torch.float32, 0.001), (torch.float16, 0.02), (torch.bfloat16, 0.06)],
                         ids=str)
@pytest.mark.parametrize("kind", ["noise", "low rank", "ill-conditioned"])
@pytest.mark.parametrize("table, steps", [("simple", 10), ("quintic", 10), ("polar_express", 8), ("deepseekv4", 10)])
@pytest.mark.parametrize("strips", [1, 4])
def test_gram_stays_stable_beyond_five_steps(table, steps, kind, dtype, overshoot, strips, monkeypatch):
    monkeypatch.setattr(symmetric, "num_strips", lambda side, dtype, device: strips)
    monkeypatch.setattr(symmetric, "one_by_one", lambda side, device: strips > 1)
    # Rounding makes small eigenvalues of a Gram matrix negative, and every step multiplies those by about a squared.
    g = torch.Generator().manual_seed(5)
    matrices = {"noise": torch.randn(8, 64, 160, generator=g),
                "low rank": torch.randn(8, 64, 4, generator=g) @ torch.randn(8, 4, 160, generator=g),
                "ill-conditioned": torch.stack([conditioned(64, 160, 1e6, seed) for seed in range(8)])}[kind]
    rows = coefficients(table, steps)
    value = newton_schulz(matrices, rows, method="gram", dtype=dtype)
    assert value.isfinite().all()
    # What starts as rounding noise ends anywhere on the curve, but nowhere above it.
    assert torch.linalg.matrix_norm(value, 2).max() < largest_singular_value(rows) + overshoot


@pytest.mark.parametrize("table, steps, expected", [
    ("simple", 3, [3.4445] * 3),
    ("quintic", 6, [4.0848, 3.9505, 3.7418, 2.8769, 2.8366, 4.0848]),
    ("polar_express", 10, [8.2051, 4.0664, 3.9096, 3.2856, 2.2779, 1.8726, 1.8564, 1.8750, 1.8750, 1.8750]),
    ("cans", 6, [8.4703, 4.1828, 3.9619, 3.2866, 2.2737, 2.2737]),
    ("deepseekv4", 10, [3.4445] * 8 + [2.0] * 2),
    ([[1.5, -0.5, 0]], 2, [1.5, 1.5]),
])
def test_a_table_fills_exactly_the_steps(table, steps, expected):
    assert [a for a, _, _ in coefficients(table, steps)] == expected


@pytest.mark.parametrize("table, smallest, largest", [
    ("simple", 0.68, 1.14), ("quintic", 0.97, 1.04), ("polar_express", 0.87, 1.13), ("cans", 0.88, 1.13)])
def test_five_steps_bring_singular_values_of_a_hundredth_to_about_one(table, smallest, largest):
    # The published ranges; a wrong digit in a table leaves them.
    s = torch.logspace(-2, 0, 400, dtype=torch.float64)
    for a, b, c in coefficients(table, 5):
        s = a * s + b * s**3 + c * s**5
    assert smallest < s.min() and s.max() < largest


def test_unknown_tables_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'quintic'"):
        coefficients("quintc", 5)
    with pytest.raises(ConfigError, match="known: simple"):
        coefficients("x", 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("scale", [1e-22, 1e-21, 1.0, 1e25])
def test_the_scale_of_a_gradient_does_not_matter(method, dtype, scale):
    matrix = torch.randn(12, 20, generator=torch.Generator().manual_seed(2))
    value = newton_schulz(matrix * scale, SIMPLE5, method=method, dtype=dtype)
    wanted = exact(matrix, SIMPLE5)
    assert value.isfinite().all() and error(value, wanted) < (1e-5 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_zero_matrix_stays_zero_and_disturbs_no_other(method):
    matrices = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(3))
    matrices[1] = 0
    value = newton_schulz(matrices, SIMPLE5, method=method, dtype=torch.float32)
    assert torch.equal(value[1], torch.zeros(8, 12))
    assert torch.equal(value[0], newton_schulz(matrices[0], SIMPLE5, method=method, dtype=torch.float32))


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape, dtype", [
    *itertools.product([(5, 48, 64), (3, 64, 16), (4, 32, 32), (2, 7, 13), (3, 256, 272), (2, 530, 512)],
                       [torch.float32, torch.bfloat16]),
    ((2, 768, 768), torch.float32)], ids=str)
def test_a_batch_gives_the_bits_of_each_matrix_alone(shape, method, dtype):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    # Squares of the last two leave float32.
    matrices[-1] *= 1e25
    matrices[-2] *= 1e-22
    together = newton_schulz(matrices, SIMPLE5, method=method, dtype=dtype)
    for i, matrix in enumerate(matrices):
        assert torch.equal(together[i], newton_schulz(matrix, SIMPLE5, method=method, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(8, 8), (8, 12), (12, 8), (256, 256), (256, 320), (320, 256)])
def test_the_input_is_left_alone(shape, method, dtype):
    matrix = torch.randn(shape).to(dtype)
    before = matrix.clone()
    value = newton_schulz(matrix, SIMPLE5, method=method, dtype=dtype)
    assert torch.equal(matrix, before) and value.dtype == dtype and value.shape == matrix.shape
    assert value.data_ptr() != matrix.data_ptr()


def test_batches_are_of_equal_shape_and_bounded():
    shapes = [(2, 3), (3, 2), (2, 3), (4, 2, 3), (2, 3), (3, 2)]
    assert batches(shapes) == [[(0, 0, 1), (2, 0, 1), (3, 0, 4), (4, 0, 1)], [(1, 0, 1), (5, 0, 1)]]
    assert batches(shapes, max_numel=12) == [
        [(0, 0, 1), (2, 0, 1)], [(3, 0, 2)], [(3, 2, 4)], [(4, 0, 1)], [(1, 0, 1), (5, 0, 1)]]
    assert batches(shapes, max_numel=5) == [
        [(0, 0, 1)], [(2, 0, 1)], *([(3, i, i + 1)] for i in range(4)), [(4, 0, 1)], [(1, 0, 1)], [(5, 0, 1)]]
    assert batches([]) == []


def test_stacked_experts_are_cut_into_batches():
    # gpt-oss-120b's, which an owner has whole: four of 128 fit.
    groups = batches([(128, 2880, 5760)])
    assert len(groups) == 32 and all(stop - start == 4 for ((_, start, stop),) in groups)
    assert sorted(i for ((_, start, stop),) in groups for i in range(start, stop)) == list(range(128))


@pytest.mark.parametrize("max_numel", [1, 10**6, 20])
def test_unstack_undoes_stack(max_numel):
    tensors = [torch.randn(2, 3), torch.randn(4, 2, 3), torch.randn(2, 3)]
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    for group in batches([tensor.shape for tensor in tensors], max_numel):
        into = [some.of(copies) for some in group]
        stacked = stack([some.of(tensors) for some in group])
        assert stacked.numel() <= max(max_numel, 6) and stacked.shape[1:] == (2, 3)
        for part, place in zip(unstack(stacked, into), into, strict=True):
            place.copy_(part)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 10])
@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (32, 32), (3, 16, 112)])
def test_flops_are_those_of_the_products_that_run(shape, steps, method):
    *batch, rows, cols = shape
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.ones(shape), coefficients("simple", steps), method=method, dtype=torch.float32)
    predicted = math.prod(batch) * newton_schulz_flops(rows, cols, steps=steps, method=method)
    assert predicted == counter.get_total_flops()


def test_flops_of_five_steps_in_units_of_the_cubed_short_side():
    m = 10
    assert newton_schulz_flops(m, m, method="standard") == 30 * m**3
    assert newton_schulz_flops(m, m) == 30 * m**3  # a square runs as standard
    assert newton_schulz_flops(4 * m, m, method="standard") == 90 * m**3
    assert newton_schulz_flops(m, 4 * m) == 60 * m**3
