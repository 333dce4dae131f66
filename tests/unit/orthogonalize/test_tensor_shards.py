"""Matrices that tensor parallelism has cut, against the same matrices whole."""

import pytest
import torch

from ds_layerwise.optimizers.recipe import Hyper, Site
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.orthogonalize.newton_schulz import coefficients, gram_segments, newton_schulz
from ds_layerwise.orthogonalize.tensor_shards import newton_schulz_of_shards, whole_shape
from tests.support.peers import on_ranks
from tests.support.rooms import rooms

pytestmark = rooms("tensor_shards")

SIMPLE5 = coefficients("simple", 5)
HYPER = Hyper(lr=0.1, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)

#: A batch of matrices each: square, wide and tall, divisible by 2 and 4 and not by the alignment of products.
SHAPES = [(2, 12, 12), (3, 12, 40), (3, 40, 12)]
SHARDED = [(shape, axis) for shape in SHAPES for axis in (-2, -1)]

#: Relative error against the unsharded result. Half precision rounds the parts of a sum apart.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 0.05, torch.float16: 0.004}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(matrices, size, **kwargs):
    """The whole result, put together from ``size`` ranks, and what each asked of the others."""
    axis = kwargs["axis"]

    def rank(peers):
        part = matrices.chunk(size, axis)[peers.rank]
        before = part.clone()
        done = newton_schulz_of_shards(part, SIMPLE5, peers=peers, **kwargs)
        assert torch.equal(part, before) and done.shape == part.shape and done.dtype == part.dtype
        return done, peers.calls

    done, calls = zip(*on_ranks(size, rank), strict=True)
    assert all(other == calls[0] for other in calls)
    return torch.cat(done, axis), calls[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape, axis", SHARDED)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_both_exact_modes_give_the_unsharded_result(dtype, method, shape, axis, size):
    matrices = noise(*shape)
    whole = newton_schulz(matrices, SIMPLE5, method=method, dtype=dtype)
    shared = {"axis": axis, "method": method, "dtype": dtype}
    duplicated, calls = orthogonal(matrices, size, distributed=False, **shared)
    assert torch.equal(duplicated, whole)
    assert calls == [("gather", tuple(matrices.chunk(size, axis)[0].shape))], "one gather a batch"
    distributed, calls = orthogonal(matrices, size, distributed=True, **shared)
    assert float((distributed - whole).norm() / whole.norm()) < BOUNDS[dtype]
    cut, other = shape[axis], shape[-3 - axis]
    if other > cut:
        assert torch.equal(distributed, whole) and [kind for kind, _ in calls] == ["gather"]
    else:
        padded = -(-other // 16) * 16
        standard = method == "standard" or cut == other
        sums = 5 if standard else len(gram_segments(5, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16))
        assert calls == [("gather", (shape[0], 1, 2))] + [("sum", (shape[0], padded, padded))] * sums


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_matrices_so_large_that_squares_have_gaps_between_rows(method):
    matrices = noise(1, 512, 1024)
    wanted = newton_schulz(matrices, SIMPLE5, method=method, dtype=torch.float32)
    done, _ = orthogonal(matrices, 2, axis=-1, distributed=True, method=method, dtype=torch.float32)
    assert float((done - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_neither_the_scale_nor_zeros_matter(scale, distributed):
    matrices = noise(3, 12, 40)
    matrices[1] = 0
    matrices[2, :, :20] = 0  # one rank has nothing of it
    wanted = newton_schulz(matrices, SIMPLE5, method="gram", dtype=torch.float32)
    matrices[0, :, 20:] *= 1e-5  # parts of different size
    done, _ = orthogonal(matrices * scale, 2, axis=-1, distributed=distributed, method="gram", dtype=torch.float32)
    uneven = newton_schulz(matrices[:1], SIMPLE5, method="gram", dtype=torch.float32)
    torch.testing.assert_close(done, torch.cat([uneven, wanted[1:]]), rtol=1e-4, atol=1e-5)
    assert torch.equal(done[1], torch.zeros(12, 40))


@pytest.mark.parametrize("distributed", [False, True])
def test_shards_of_fused_projections_need_not_be_consecutive(distributed):
    # Each rank has half of the queries, half of the keys and half of the values.
    fused = noise(1, 36, 12)
    wanted = newton_schulz(fused, SIMPLE5, method="standard", dtype=torch.float32)
    order = torch.arange(36).view(3, 2, 6).transpose(0, 1).flatten()
    done, _ = orthogonal(fused[:, order], 2, axis=-2, distributed=distributed, method="standard", dtype=torch.float32)
    torch.testing.assert_close(done, wanted[:, order], rtol=1e-5, atol=1e-6)


def test_the_shape_of_the_whole():
    assert whole_shape((6, 4), -2, 3) == (18, 4)
    assert whole_shape((2, 6, 4), -1, 3) == (2, 6, 12)


def train(rule, params, steps=3):
    """Three steps of matrices (rows, cols) and a batch of them, on gradients that depend on their place alone."""
    states = [rule.init_state(p) for p in params]
    for step in range(steps):
        rule.update_(params, [noise(*p.shape, seed=10 * step + i) for i, p in enumerate(params)], states, HYPER)
    return params


def train_cut(tp_mode, size, axis, shapes, **kwargs):
    """The same on ``size`` ranks, each with a part of everything; whole results, and what rank 0 asked of others."""

    def rank(peers):
        def part(value):
            return value.chunk(size, axis)[peers.rank].clone()

        rule = Muon(ns_dtype="fp32", muon_tp_mode=tp_mode, **kwargs)
        params = [part(noise(*shape, seed=100 + i)) for i, shape in enumerate(shapes)]
        states = [rule.init_state(p) for p in params]
        for step in range(3):
            grads = [part(noise(*shape, seed=10 * step + i)) for i, shape in enumerate(shapes)]
            rule.update_(params, grads, states, HYPER, Site(cut=(axis, peers)))
        return params, peers.calls

    ranks = on_ranks(size, rank)
    return [torch.cat(parts, axis) for parts in zip(*(params for params, _ in ranks), strict=True)], ranks[0][1]


MIXED = [(12, 40), (40, 12), (12, 40), (2, 12, 40), (12, 12)]


@pytest.mark.parametrize("tp_mode", ["duplicated", "distributed"])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kwargs", [
    {"scale_mode": "original"}, {"scale_mode": "unit_rms_norm", "ns_method": "standard"},
    {"scale_mode": "spectral", "nesterov": False}], ids=str)
def test_an_update_of_parts_is_the_part_of_the_update(kwargs, axis, tp_mode):
    rule = Muon(ns_dtype="fp32", **kwargs)
    wanted = train(rule, [noise(*shape, seed=100 + i) for i, shape in enumerate(MIXED)])
    done, calls = train_cut(tp_mode, 2, axis, MIXED, **kwargs)
    for value, whole in zip(done, wanted, strict=True):
        if tp_mode == "duplicated":
            assert torch.equal(value, whole)
        assert float((value - whole).norm() / whole.norm()) < 1e-6
    if tp_mode == "duplicated":
        # Three batches of equal shape a step: (12, 40) four times, (40, 12) and (12, 12).
        assert [kind for kind, _ in calls] == ["gather"] * 9 and max(shape[0] for _, shape in calls) == 4
