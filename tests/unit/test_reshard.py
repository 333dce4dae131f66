"""Pieces of any layout to pieces of any other: every element from exactly where it was."""

import dataclasses
import random

import pytest
import torch

from ds_layerwise.checkpoint.record import PieceRecord, ShardRecord
from ds_layerwise.checkpoint.reshard import plan_copies
from ds_layerwise.errors import LayerwiseError
from ds_layerwise.layout import ParamSpec
from ds_layerwise.planner import plan_layout

SPECS = [ParamSpec("embed", (50, 7), "float32", False), ParamSpec("a", (12, 20), "float32", True, 10),
         ParamSpec("bias", (33,), "float32", False), ParamSpec("b", (9, 9), "bfloat16", True, 5),
         ParamSpec("c", (30, 4), "bfloat16", True, 7), ParamSpec("scale", (), "float32", False)]


def whole(spec, key):
    g = torch.Generator().manual_seed(hash_of(spec.name, key))
    return torch.randn(spec.numel, generator=g)


def hash_of(*words):
    return sum(ord(c) * 31**i for i, c in enumerate("/".join(words))) % 2**31


def records(world_size, policy, bucket_numel, *, filled=True):
    """What every rank holds; zeros unless ``filled``."""
    layout = plan_layout(SPECS, world_size, bucket_numel=bucket_numel, policy=policy)
    specs = {spec.name: spec for spec in SPECS}
    found = []
    for rank in range(world_size):
        pieces = []
        for bucket in layout.buckets:
            for piece in bucket.pieces(rank):
                cut = slice(piece.param_start, piece.param_start + piece.numel)
                tensors = {key: whole(specs[piece.name], key)[cut].clone() if filled else torch.zeros(piece.numel)
                           for key in ("fp32", "exp_avg")}
                step = torch.tensor(7.0 if filled else 0.0)
                pieces.append(PieceRecord(piece.name, bucket.index, piece.param_start, tensors["fp32"],
                                          {"exp_avg": tensors["exp_avg"], "step": step}))
        found.append(ShardRecord(rank, world_size, layout.to_json(), layout.digest(), tuple(pieces)))
    return found


def random_layout(rng):
    return rng.randint(1, 6), rng.choice(["balanced", "lpt", "size_matching"]), rng.choice([1, 100, 300, 10**6])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("masters, states", [(True, True), (True, False), (False, True)])
def test_every_element_arrives(seed, masters, states):
    rng = random.Random(seed)
    saved = records(*random_layout(rng))
    rng.shuffle(saved)
    for own, expected in zip(*[records(*layout, filled=f) for layout in [random_layout(rng)] for f in (False, True)]):
        for into, out_of in plan_copies(own, saved, masters=masters, states=states):
            into.copy_(out_of)
        for piece, wanted in zip(own.pieces, expected.pieces, strict=True):
            zeros = torch.zeros_like(piece.master)
            assert torch.equal(piece.master, wanted.master if masters else zeros), piece.name
            assert torch.equal(piece.state["exp_avg"], wanted.state["exp_avg"] if states else zeros), piece.name
            assert piece.state["step"] == (7 if states else 0)


def without(records, drop):
    return [dataclasses.replace(r, pieces=tuple(p for p in r.pieces if not drop(r, p))) for r in records]


def test_what_is_missing_is_named():
    saved, (own,) = records(3, "balanced", 100), records(1, "balanced", 100, filled=False)
    with pytest.raises(LayerwiseError, match=r"hold \d+ of the 350 elements of embed from 0 on; a file is missing"):
        plan_copies(own, without(saved, lambda r, p: r.rank == 1 and p.name == "embed"), masters=True, states=True)
    with pytest.raises(LayerwiseError, match="hold 0 of the 240 elements of a "):
        plan_copies(own, without(saved, lambda r, p: p.name == "a"), masters=True, states=True)


def test_other_parameters_are_named():
    (own,) = records(1, "balanced", 100, filled=False)
    layout = plan_layout(SPECS[1:], 1, bucket_numel=100)
    fewer = dataclasses.replace(own, layout_json=layout.to_json())
    with pytest.raises(LayerwiseError, match="embed is not in the checkpoint, which has 5 parameters"):
        plan_copies(own, [fewer], masters=True, states=True)
    wider = [ParamSpec("embed", (51, 7), "float32", False), *SPECS[1:]]
    other = dataclasses.replace(own, layout_json=plan_layout(wider, 1, bucket_numel=100).to_json())
    with pytest.raises(LayerwiseError, match="embed has 357 elements in the checkpoint, 350 in the model"):
        plan_copies(own, [other], masters=True, states=True)


def test_nothing_is_written_by_planning():
    (own,) = records(1, "balanced", 100, filled=False)
    plan_copies(own, records(2, "lpt", 100), masters=True, states=True)
    assert all(not piece.master.any() for piece in own.pieces)
