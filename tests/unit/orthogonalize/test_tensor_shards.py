"""Matrices that tensor parallelism has cut, against the same matrices whole."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.optimizers.recipe import Hyper, Site
from ds_layerwise.optimizers.rules import muon_family
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.orthogonalize.newton_schulz import coefficients, gram_segments, newton_schulz
from ds_layerwise.orthogonalize.tensor_modes import EXACT, FLOPS_PER_BYTE, Cut
from ds_layerwise.orthogonalize.tensor_shards import (
    at_all,
    at_owners,
    dealt,
    newton_schulz_of_shards,
    whole_shape,
)
from tests.support.peers import on_ranks
from tests.support.rooms import rooms

pytestmark = rooms("tensor_shards", "tensor_modes")

SIMPLE5 = coefficients("simple", 5)
HYPER = Hyper(lr=0.1, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)

#: A batch of matrices each: square, wide and tall, divisible by 2 and 4 and not by the alignment of products.
SHAPES = [(2, 12, 12), (3, 12, 40), (3, 40, 12)]
SHARDED = [(shape, axis) for shape in SHAPES for axis in (-2, -1)]

#: Relative error against the unsharded result. Half precision rounds the parts of a sum apart.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 0.05, torch.float16: 0.004}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(matrices, size, mode, *, axis, method, dtype):
    """The whole result, put together from ``size`` ranks, and what each asked of the others."""
    mode = Cut(*matrices.shape[-2:], axis, size, 5, method, 0).mode(mode, size)

    def whole(x):
        return newton_schulz(x, SIMPLE5, method=method, dtype=dtype)

    def rank(peers):
        part, place = matrices.chunk(size, axis)[peers.rank], {"axis": axis, "peers": peers}
        before = part.clone()
        if mode == "owner":
            done, = at_owners([part], whole, work=[1], dtype=dtype, **place)
        elif mode == "distributed":
            done = newton_schulz_of_shards(part, SIMPLE5, method=method, dtype=dtype, **place)
        else:
            done = at_all(part, whole, **place)
        assert torch.equal(part, before) and done.shape == part.shape and done.dtype == part.dtype
        return done, peers.calls

    done, calls = zip(*on_ranks(size, rank), strict=True)
    assert mode == "owner" or all(other == calls[0] for other in calls)
    return torch.cat(done, axis), calls[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("shape, axis", SHARDED)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_exact_modes_give_the_unsharded_result(dtype, method, shape, axis, size):
    matrices = noise(*shape)
    whole = newton_schulz(matrices, SIMPLE5, method=method, dtype=dtype)
    shared = {"axis": axis, "method": method, "dtype": dtype}
    at_owner, calls = orthogonal(matrices, size, "owner", **shared)
    assert torch.equal(at_owner, whole) and [kind for kind, _ in calls] == ["exchange"] * 2
    duplicated, calls = orthogonal(matrices, size, "duplicated", **shared)
    assert torch.equal(duplicated, whole)
    assert calls == [("gather", tuple(matrices.chunk(size, axis)[0].shape))], "one gather a batch"
    distributed, calls = orthogonal(matrices, size, "distributed", **shared)
    assert float((distributed - whole).norm() / whole.norm()) < BOUNDS[dtype]
    cut, other = shape[axis], shape[-3 - axis]
    if other > cut:
        assert torch.equal(distributed, whole) and [kind for kind, _ in calls] == ["gather"]
    else:
        padded = -(-other // 16) * 16
        standard = method == "standard" or cut == other
        sums = 5 if standard else len(gram_segments(5, dtype))
        assert calls == [("gather", (shape[0], 1, 2))] + [("sum", (shape[0], padded, padded))] * sums


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_matrices_so_large_that_squares_have_gaps_between_rows(method):
    matrices = noise(1, 512, 1024)
    wanted = newton_schulz(matrices, SIMPLE5, method=method, dtype=torch.float32)
    done, _ = orthogonal(matrices, 2, "distributed", axis=-1, method=method, dtype=torch.float32)
    assert float((done - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_neither_the_scale_nor_zeros_matter(scale, mode):
    matrices = noise(3, 12, 40)
    matrices[1] = 0
    matrices[2, :, :20] = 0  # one rank has nothing of it
    wanted = newton_schulz(matrices, SIMPLE5, method="gram", dtype=torch.float32)
    matrices[0, :, 20:] *= 1e-5  # parts of different size
    done, _ = orthogonal(matrices * scale, 2, mode, axis=-1, method="gram", dtype=torch.float32)
    uneven = newton_schulz(matrices[:1], SIMPLE5, method="gram", dtype=torch.float32)
    torch.testing.assert_close(done, torch.cat([uneven, wanted[1:]]), rtol=1e-4, atol=1e-5)
    assert torch.equal(done[1], torch.zeros(12, 40))


@pytest.mark.parametrize("mode", EXACT)
def test_shards_of_fused_projections_need_not_be_consecutive(mode):
    # Each rank has half of the queries, half of the keys and half of the values.
    fused = noise(1, 36, 12)
    wanted = newton_schulz(fused, SIMPLE5, method="standard", dtype=torch.float32)
    order = torch.arange(36).view(3, 2, 6).transpose(0, 1).flatten()
    done, _ = orthogonal(fused[:, order], 2, mode, axis=-2, method="standard", dtype=torch.float32)
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
    """The same on ``size`` ranks, each with a part of everything; whole results, and by rank what it asked of others
    and the FLOPs of its products."""

    def rank(peers):
        def part(value):
            return value.chunk(size, axis)[peers.rank].clone()

        rule = Muon(ns_dtype="fp32", muon_tp_mode=tp_mode, **kwargs)
        params = [part(noise(*shape, seed=100 + i)) for i, shape in enumerate(shapes)]
        states = [rule.init_state(p) for p in params]
        with FlopCounterMode(display=False) as counter:
            for step in range(3):
                grads = [part(noise(*shape, seed=10 * step + i)) for i, shape in enumerate(shapes)]
                rule.update_(params, grads, states, HYPER, Site(cut=(axis, peers)))
        return params, peers.calls, counter.get_total_flops()

    params, calls, flops = zip(*on_ranks(size, rank), strict=True)
    return [torch.cat(parts, axis) for parts in zip(*params, strict=True)], calls, flops


def test_owners_send_twice_for_all_matrices_of_an_update_or_for_each_full_batch(monkeypatch):
    assert muon_family.MAX_BATCH_NUMEL == 64 * 2**20
    for most, rounds in ((64 * 2**20, 1), (48 * 96, 2), (1, 3)):
        monkeypatch.setattr(muon_family, "MAX_BATCH_NUMEL", most)
        _, calls, _ = train_cut("owner", 2, -2, [(48, 96), (96, 48), (48, 48)])
        assert [[kind for kind, _ in asked] for asked in calls] == [["exchange"] * 2 * rounds * 3] * 2, most


MIXED = [(12, 40), (40, 12), (12, 40), (2, 12, 40), (12, 12)]


@pytest.mark.parametrize("tp_mode", ["owner", "auto", "duplicated", "distributed"])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kwargs", [
    {"scale_mode": "original"}, {"scale_mode": "unit_rms_norm", "ns_method": "standard"},
    {"scale_mode": "spectral", "nesterov": False}], ids=str)
def test_an_update_of_parts_is_the_part_of_the_update(kwargs, axis, tp_mode):
    rule = Muon(ns_dtype="fp32", **kwargs)
    wanted = train(rule, [noise(*shape, seed=100 + i) for i, shape in enumerate(MIXED)])
    done, (calls, _), _ = train_cut(tp_mode, 2, axis, MIXED, **kwargs)
    for value, whole in zip(done, wanted, strict=True):
        if tp_mode in ("owner", "duplicated"):
            assert torch.equal(value, whole)
        assert float((value - whole).norm() / whole.norm()) < 1e-6
    if tp_mode == "duplicated":
        # Three batches of equal shape a step: (12, 40) four times, (40, 12) and (12, 12).
        assert [kind for kind, _ in calls] == ["gather"] * 9 and max(shape[0] for _, shape in calls) == 4
    if tp_mode == "owner":
        assert [kind for kind, _ in calls] == ["exchange"] * 6, "two for all matrices of a step"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kwargs", [{}, {"spectral_clip": 1.5, "ns_method": "standard"}], ids=str)
def test_owners_have_the_bits_of_the_whole_and_divide_the_work(kwargs, axis, size):
    """Seven matrices in parts, so that some rank has one more than others."""
    shapes = [(48, 96), (96, 48), (48, 96), (3, 48, 48), (48, 48)]
    wanted = train(Muon(ns_dtype="fp32", **kwargs), [noise(*shape, seed=100 + i) for i, shape in enumerate(shapes)])
    done, calls, flops = train_cut("owner", size, axis, shapes, **kwargs)
    for value, whole in zip(done, wanted, strict=True):
        assert torch.equal(value, whole)
    same, _, (duplicated, *others) = train_cut("duplicated", size, axis, shapes, **kwargs)
    assert all(torch.equal(value, whole) for value, whole in zip(same, wanted, strict=True))
    assert {duplicated} == {*others} and sum(flops) == duplicated, "no work twice"
    assert max(flops) < 1.3 * duplicated / size
    # What leaves each rank: of each matrix the part to its owner, and all parts but its own from there.
    left = sum(sum(sent) - sent[rank] for rank, asked in enumerate(calls) for kind, sent in asked if kind == "exchange")
    numel = sum(value.numel() for value in wanted)
    assert left * size == 3 * 2 * (size - 1) * numel * (1 + ("spectral_clip" in kwargs))


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("kwargs", [{}, {"spectral_clip": 1.5}, {"ns_method": "standard"}], ids=str)
def test_the_plan_counts_what_ranks_compute_and_send(kwargs, axis, mode):
    shapes = [(32, 96), (96, 32), (32, 32)]
    for shape in shapes:
        rule = Muon(ns_dtype="fp32", muon_tp_mode=mode, **kwargs)
        flops, sent = rule.shared_work((4, *shape), axis, 2)
        _, calls, counted = train_cut(mode, 2, axis, [(4, *shape)], **kwargs)
        assert [3 * flops] * 2 == [*counted]
        own = [0, 0]
        for rank, asked in enumerate(calls):
            for kind, what in asked:
                if kind == "exchange":
                    own[rank] += sum(what) - what[rank]
                elif kind == "gather" and what[-1] > 2:
                    own[rank] += math.prod(what)
                elif kind == "sum":
                    own[rank] += math.prod(what)
        assert own == [3 * sent / 4] * 2


def test_the_longest_work_is_dealt_first_to_whom_has_least():
    assert dealt([1, 4, 2], [10, 3, 5], 2) == [[1, 0], [2, 2], [0, 2]]
    assert dealt([5], [7], 3) == [[2, 2, 1]]
    assert dealt([0, 1], [1, 1], 2) == [[0, 0], [1, 0]]


def test_auto_takes_what_costs_the_busiest_rank_least():
    def chosen(rows, cols, axis, owners, size=2):
        return Cut(rows, cols, axis, size, 5, "gram", 0).mode("auto", owners)

    # Of several, each rank works on some. Of one, an owner would only send more.
    assert chosen(4096, 4096, -1, owners=2) == "owner"
    assert chosen(4096, 4096, -2, owners=8, size=8) == "owner"
    assert chosen(256, 512, -2, owners=1) == "duplicated"
    # Parts of a long matrix take less to multiply, and a Gram matrix less to send, if the longer side is cut.
    assert chosen(1024, 65536, -1, owners=1) == "distributed"
    assert chosen(1024, 65536, -2, owners=1) == "duplicated"
    assert FLOPS_PER_BYTE == 1000


def test_auto_takes_each_shape_in_its_mode():
    shapes = [(48, 48), (16, 512), (48, 48), (96, 48)]
    rule = Muon(ns_dtype="fp32")
    wanted = train(rule, [noise(*shape, seed=100 + i) for i, shape in enumerate(shapes)])
    done, calls, _ = train_cut("auto", 2, -1, shapes)
    for value, whole, shape in zip(done, wanted, shapes, strict=True):
        assert float((value - whole).norm() / whole.norm()) < 1e-6
        assert torch.equal(value, whole) or shape == (16, 512), "owners have its bits"
    # The flat one's norm and Gram matrices, and there and back for the rest.
    for asked in calls:
        assert [kind for kind, _ in asked] == ["gather", "sum", "sum", "exchange", "exchange"] * 3
    there = [sum(asked[3][1]) for asked in calls]
    assert there == [(2 * 48 * 48 + 96 * 48) / 2] * 2
