"""Buffers of more than 2^31 elements, planned and laid out on meta tensors, which have shapes and no memory."""

import math

import pytest
import torch
from torch import nn

from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.orthogonalize.newton_schulz import newton_schulz_flops
from ds_layerwise.plan.forecast.memory import update_bytes
from ds_layerwise.plan.forecast.sent import sent_bytes
from ds_layerwise.plan.layout.layout import Bucket, Layout, ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.owned.buffers import FlatBuffer, dtype_name
from ds_layerwise.routing.routes import Route
from tests.support.costs import memory_bytes
from tests.support.rooms import rooms
from tests.support.routing import route_parameters
from tests.support.transports import numels_of

pytestmark = rooms("layout", "buffers")

LIMIT = 2**31


class Large(nn.Module):
    """A table and a matrix that are too large for 32 bits each, and smaller ones that together are, too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(250_001, 12_288)
        self.layers = nn.ModuleList(nn.Linear(16_384, 16_384 * 3) for _ in range(4))
        self.last = nn.Linear(46_337, 46_351)


def planned(world_size, policy, *, bucket_numel):
    with torch.device("meta"):
        model = Large().bfloat16()
    routes = route_parameters(model, [{"params": list(model.parameters())}])
    specs = []
    for name, param in model.named_parameters():
        shape = routes[name].matrix_shape
        specs.append(ParamSpec(name, tuple(param.shape), dtype_name(param.dtype), shape is not None,
                               newton_schulz_flops(*shape) if shape else 0))
    return specs, plan_layout(specs, world_size, bucket_numel=bucket_numel, policy=policy)


@pytest.mark.parametrize("world_size", [1, 8, 64])
@pytest.mark.parametrize("policy", ["balanced", "lpt", "size_matching"])
@pytest.mark.parametrize("bucket_numel", [500_000_000, 10**12])
def test_offsets_beyond_32_bits(world_size, policy, bucket_numel):
    specs, layout = planned(world_size, policy, bucket_numel=bucket_numel)
    numel_of = {spec.name: spec.numel for spec in specs}
    assert sum(numel > LIMIT for numel in numel_of.values()) == 2
    buffer_numel = layout.buffers["bfloat16"]
    assert buffer_numel >= sum(numel_of.values()) > 3 * LIMIT

    # Every element has exactly one place, and every rank's pieces make up the whole.
    covered = dict.fromkeys(numel_of, 0)
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            assert type(piece.start) is type(piece.numel) is type(piece.param_start) is int
            assert piece.param_start == covered[piece.name]
            assert piece.start == layout.slot(piece.name).start + piece.param_start
            covered[piece.name] += piece.numel
    assert covered == numel_of
    assert any(piece.start > LIMIT for rank in range(world_size) for piece in layout.pieces(rank))
    assert Layout.from_json(layout.to_json()) == layout

    # What tensors make of it.
    buffer = FlatBuffer(layout, torch.device("meta"))
    assert sum(tensor.numel() for tensor in buffer.tensors) == buffer_numel
    for name, numel in numel_of.items():
        view, slot, bucket = buffer.params[name], layout.slot(name), layout.bucket_of(name)
        assert (view.storage_offset(), view.numel()) == (slot.start - bucket.start, numel)
    for rank in {0, world_size // 2, world_size - 1}:
        shards = buffer.shards(rank)
        for piece in layout.pieces(rank):
            view = shards.piece(piece.name)
            first = piece.start - layout.bucket_of(piece.name).start
            assert (view.storage_offset(), view.numel()) == (first, piece.numel)


@pytest.mark.parametrize("world_size", [1, 8, 64])
def test_costs_are_whole_numbers(world_size):
    specs, layout = planned(world_size, "balanced", bucket_numel=500_000_000)
    numel = layout.buffers["bfloat16"]
    whole, split = (sum(spec.numel for spec in specs if spec.whole is kind) for kind in (True, False))
    memory = memory_bytes(layout)
    sent = sent_bytes(layout, wires=["bfloat16"] * len(layout.buckets), reduction="native", stage=1)["bfloat16"]
    assert sum(rank.masters for rank in memory) == 4 * numel
    assert sum(rank.states for rank in memory) == 4 * whole + 8 * split
    # What goes on from cuts to owners comes back from owners to cuts.
    assert sum(sent.gradients) == sum(sent.parameters) >= 2 * (world_size - 1) * numel
    assert all(type(value) is int for rank in memory for value in (rank.masters, rank.states, rank.total))
    assert all(type(value) is int for value in sent.gradients)
    for bucket in layout.buckets:
        # What a collective is told: shards back to back, in Python's own whole numbers.
        assert sum(numels_of(bucket)) == bucket.numel == bucket.stop - bucket.start
        assert all(type(numel) is int for numel in numels_of(bucket))
    assert math.prod((46_351, 46_337)) == layout.slot("last.weight").numel > LIMIT


def test_costs_of_thousands_of_owners_are_counted_once_a_shape(monkeypatch):
    """A plan of a large model takes ten thousand buckets, each with hundreds of owners."""
    specs = [ParamSpec(f"experts.{i}", (8, 16), "bfloat16", True, 10, ep_size=64) for i in range(4)]
    routes = {spec.name: Route(name=spec.name, recipe=Muon(), reason="", group=0, matrix_shape=spec.shape)
              for spec in specs}
    layout = plan_layout(specs, 64, bucket_numel=10**6)
    expected = update_bytes(layout, routes, "float32"), memory_bytes(layout)
    calls, workspace = [], Muon.workspace

    def counted(recipe, shape):
        calls.append(shape)
        return workspace(recipe, shape)

    monkeypatch.setattr(Muon, "workspace", counted)
    monkeypatch.setattr(Bucket, "pieces", None)
    assert (update_bytes(layout, routes, "float32"), memory_bytes(layout)) == expected
    assert len(calls) == 1
