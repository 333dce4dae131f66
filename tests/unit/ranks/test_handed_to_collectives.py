"""Collectives of ranks fit together and suit NCCL, at sizes that no machine at hand has."""

import random
from collections import Counter

import pytest
import torch
from torch import distributed, nn

from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.comm import streams
from ds_layerwise.ranks.owned.buffers import DTYPES, FlatBuffer
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync.bucket_transfers import make_wires
from ds_layerwise.ranks.sync.grad_sync import GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync
from tests.support import streams as played_streams
from tests.support.model_specs import load_model_specs
from tests.support.played_ranks import META, Player, check_calls, check_groups
from tests.support.rooms import rooms
from tests.support.transports import in_cuts

pytestmark = rooms("bucket_transfers", "transfer", "grad_sync", "param_sync", "nodes", "comm")



#: By ranks, how many hold different experts.
EP_SIZES = {3: 3, 48: 4, 72: 8, 1024: 16}


def matrix(name, rows, cols, ep_size=1, wire="bfloat16"):
    return ParamSpec(name, (rows, cols), "bfloat16", True, 10 * rows * cols * min(rows, cols), ep_size, wire)


def specs(size):
    """Layers of matrices that go evenly into few numbers of ranks, experts, norms and a large embedding."""
    found = [ParamSpec("embed", (5003, 200), "bfloat16", False, wire="bfloat16")]
    for layer in range(12):
        found += [matrix(f"{layer}.{name}", 200, 200) for name in "qkvo"]
        found += [matrix(f"{layer}.down", 536, 200), matrix(f"{layer}.router", 40, 200, wire="float32"),
                  matrix(f"{layer}.experts", 136, 200, EP_SIZES[size])]
    return [*found, ParamSpec("norms", (12, 200), "float32", False)]


def layout_of(kind, size):
    *in_mxfp8, kind = kind.split()
    options = {"alignment": 512, "param_wire": "mxfp8"} if in_mxfp8 else {}
    layout = plan_layout(specs(size), size, bucket_numel=700_000, policy="lpt" if kind == "even" else "balanced",
                         **options)
    return in_cuts(layout, {"cuts": lambda bucket: True, "mixed": lambda bucket: bucket.index % 2}.get(
        kind, lambda bucket: False), even=kind == "mixed")


def syncs(layout, rank, stage, wires):
    """Return the reduction of gradients and the sync of parameters of one rank, and its parameters."""
    params = {slot.name: nn.Parameter(torch.empty(slot.numel, dtype=DTYPES[bucket.dtype], device=META))
              for bucket in layout.buckets for slot in bucket.slots}
    grads = None if stage == 2 else FlatBuffer(layout, META)
    kwargs = {"wires": wires, "divide_by": 2.0, "sent_as": [
        "float32" if bucket.slots[0].name.endswith(("router", "norms")) else "bfloat16" for bucket in layout.buckets]}
    grad_sync = GradSync(params, ReducedGradients(layout, rank, grads, META), grads, **kwargs)
    param_sync = ParamSync(rank, params, FlatBuffer(layout, META), wires=wires)
    param_sync.overlap_with_forward(nn.ParameterList(params.values()))
    return grad_sync, param_sync, params


def train(grad_sync, param_sync, params, rank, *, stage, steps):
    """Steps of two micro-batches, whose gradients come in an order of this rank's, and not all of them."""
    luck = random.Random(rank)
    for step in range(steps):
        for last in (False, True):
            # Of what the step before has sent, each rank needs other parts, at another time, or none.
            if needed := luck.sample(range(len(param_sync.layout.buckets)), step * luck.randrange(3)):
                param_sync.wait(needed)
            for name in luck.sample(sorted(params), len(params))[luck.randrange(3):]:
                params[name].grad = torch.empty(params[name].shape, dtype=params[name].dtype, device=META)
                grad_sync.accumulate(name, launch=last or stage == 2)
            if last or stage == 2:
                grad_sync.reduce()
        grad_sync.finish()
        param_sync.finish()
        for bucket in reversed(param_sync.layout.buckets):
            param_sync.launch(bucket.index)
        param_sync.leave_pending()
        grad_sync.reset()
    param_sync.finish()


def groups_of(layout, rank):
    """Groups by ep_size of the ranks that share buckets; made on all ranks in one order, as DeepSpeed does."""
    groups = {1: distributed.group.WORLD}
    for ep_size in sorted({bucket.ep_size for bucket in layout.buckets} - {1}):
        made = [distributed.new_group(list(range(first, layout.world_size, ep_size))) for first in range(ep_size)]
        groups[ep_size] = made[rank % ep_size]
    return groups


def play(layout, ranks, monkeypatch, *, native, on_device, per_node, stage, steps=1):
    """Return the collectives of these steps by rank; they must fit together."""
    player = Player(layout.world_size, on_device=on_device, monkeypatch=monkeypatch)
    if on_device:
        accelerator = played_streams.Device()
        monkeypatch.setattr(streams, "get_accelerator", lambda: accelerator)
        monkeypatch.setattr(streams.SideStream, "keep", lambda self, tensor: None)
    where = [rank // per_node for rank in range(layout.world_size)]
    calls, groups, device = {}, {}, torch.device("cuda" if on_device else "cpu")
    for told in (False, True):
        # What others say to a rank is known once all have been played.
        for rank in ranks:
            with player.playing(rank):
                wires = make_wires(groups_of(layout, rank), where, native=native, device=device)
                groups[rank] = player.made
                if told:
                    train(*syncs(layout, rank, stage, wires), rank, stage=stage, steps=steps)
                    calls[rank] = player.calls
    check_groups(groups)
    check_calls(calls, in_one_order=on_device)
    return calls


def kinds(calls):
    return {call.kind for of_rank in calls.values() for call in of_rank}


SENT, SUMMED, GATHERED = "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor"


@pytest.mark.parametrize("size, per_node, kind, reduction, stage, expected", [
    (3, 1, "mixed", "native", 1, {SENT, SUMMED, GATHERED}),
    (3, 3, "mixed", "ordered", 2, {SENT, GATHERED}),
    (48, 8, "even", "native", 2, {SUMMED, GATHERED}),
    (48, 8, "mixed", "native", 2, {SENT, SUMMED, GATHERED}),
    (48, 8, "mixed", "ordered", 1, {SENT, GATHERED}),
    (72, 72, "planned", "native", 1, {SENT, SUMMED, GATHERED}),
    (72, 8, "mixed", "ordered", 2, {SENT, GATHERED}),
    (48, 8, "mxfp8 mixed", "native", 1, {SENT, SUMMED, GATHERED}),
])
def test_on_devices(size, per_node, kind, reduction, stage, expected, monkeypatch):
    layout = layout_of(kind, size)
    calls = play(layout, range(size), monkeypatch, native=reduction == "native", on_device=True, per_node=per_node,
                 stage=stage)
    assert kinds(calls) == expected
    sent = {call.dtype for of_rank in calls.values() for call in of_rank}
    assert (torch.uint8 in sent) == kind.startswith("mxfp8")


@pytest.mark.parametrize("size, per_node, kind, stage", [
    (3, 1, "mixed", 1), (3, 2, "planned", 2), (48, 24, "mixed", 2), (48, 8, "cuts", 1)])
def test_over_gloo_whatever_arrives_when(size, per_node, kind, stage, monkeypatch):
    layout = layout_of(kind, size)
    calls = play(layout, range(size), monkeypatch, native=False, on_device=False, per_node=per_node, stage=stage,
                 steps=2)
    # gloo's sums are dearer.
    assert kinds(calls) <= {SENT, GATHERED}


def test_sums_are_made_inside_a_node_before_they_leave_it(monkeypatch):
    size, per_node = 48, 8
    layout = layout_of("even", size)
    calls = play(layout, range(size), monkeypatch, native=False, on_device=True, per_node=per_node, stage=1)
    to_each_node = sum(bucket.cut_numel for bucket in layout.buckets)
    for rank, of_rank in calls.items():
        left = sum(numel for call in of_rank if call.kind == SENT for peer, numel in zip(
            call.group[0], call.sent, strict=True) if peer // per_node != rank // per_node)
        assert left == to_each_node * (size // per_node - 1)


@pytest.mark.parametrize("model, ranks, reduction, stage", [
    ("llama-3-8b", (0, 3, 7), "native", 2), ("llama-3-8b", (0, 9, 63), "native", 1),
    ("llama-3-8b", (0, 130, 511), "native", 2), ("llama-3-70b", (0, 1, 520, 1023), "native", 1),
    ("llama-3-70b", (0, 1, 520, 1023), "ordered", 1)])
def test_some_ranks_of_many(model, ranks, reduction, stage, monkeypatch):
    layout = plan_layout(load_model_specs(model), ranks[-1] + 1, bucket_numel=500_000_000)
    calls = play(layout, ranks, monkeypatch, native=reduction == "native", on_device=True, per_node=8, stage=stage)
    cuts = any(bucket.transport == "cuts" for bucket in layout.buckets)
    assert kinds(calls) == {GATHERED, *[SUMMED] * (reduction == "native"), *[SENT] * (cuts or reduction == "ordered")}
    for of_rank in calls.values():
        count = Counter(call.kind for call in of_rank)
        # Each of the two passes of a step is reduced at stage 2. What is in cuts goes on to owners and comes back.
        assert count[GATHERED] == len(layout.buckets)
        assert count[SUMMED] == (stage * len(layout.buckets) if reduction == "native" else 0)
        assert reduction == "ordered" or count[SENT] <= 2 * len(layout.buckets), count
