"""The formulas of docs/field.md, on three equal matrices of 4,096 elements on two ranks, counted by hand."""

from __future__ import annotations

from math import prod

import pytest

from ds_layerwise.plan.layout.layout import ParamSpec
from tests.support.rooms import rooms
from tests.unit.test_examples import load_example

pytestmark = rooms("outside")

field = load_example("benchmarks/field")

ONE, ALL = 4096, 3 * 4096
MATRICES = [ParamSpec(f"layers.0.{name}.weight", (64, 64), "bfloat16", True, work=10) for name in "abc"]
#: One rank has two of the three matrices.
TWO_OF_THREE = 2 / 1.5
#: Bytes for weights and gradients: each of two ranks sends half of the model in a gather or a reduction, and all of
#: it in an all-reduce, two bytes an element.
STAGE_1, STOCK_1, STAGE_3, STOCK_3 = (times * ALL for times in (2, 3, 3, 4))

#: By name: sent, held, work, padding.
BY_HAND = {
    # The cut is in the middle of the second matrix, so that each rank updates two.
    "stock Muon, stage 1": (STOCK_1, 4 * ALL + 4 * ALL // 2 + 4 * 2 * ONE, TWO_OF_THREE, 0),
    # Shards of two matrices, one of them half empty.
    "Megatron-LM, layer-wise": (2 * 4 * ONE, 4 * 4 * ONE + 8 * 2 * ONE, TWO_OF_THREE, 1 / 3),
    # A fourth matrix of zeros fills the batch.
    "dion, DDP": (STAGE_1 + 4 * ONE, 12 * ALL, TWO_OF_THREE, 1 / 3),
    "torch.optim.Muon, DDP": (STAGE_1, 12 * ALL, 2, 0),
    # Gradients and momenta are gathered, then rounds of two matrices, the second of them half empty.
    "stock Muon, stage 3": (STOCK_3 + 2 * ALL + 2 * 4 * ONE, 10 * ALL / 2, TWO_OF_THREE, 1 / 3),
    # The second matrix alone is on both ranks, and half of it travels to its owner and back.
    "Megatron-FSDP, FsdpMuon": (STAGE_3 + 8 * ONE / 2 / 2, 12 * ALL / 2, TWO_OF_THREE, 0),
    "MatrixFSDP": (STAGE_3, 12 * 2 * ONE, TWO_OF_THREE, 0),
    "dion, FSDP2": (STAGE_3 + 2 * 4 * ONE, 12 * ALL / 2, TWO_OF_THREE, 1 / 3),
    # Half of each matrix travels.
    "torchtitan, DistMuon": (STAGE_3 + 8 * ALL / 2 / 2, 12 * ALL / 2, TWO_OF_THREE, 0),
}


@pytest.mark.parametrize("who", BY_HAND)
def test_a_formula_on_three_matrices(who):
    cost = {**field.WHOLE, **field.CUT}[who](field.Model(MATRICES, [], 2))
    assert (cost.sent, cost.held, cost.work, cost.padding) == pytest.approx(BY_HAND[who])


def test_every_formula_was_counted():
    assert BY_HAND.keys() == {**field.WHOLE, **field.CUT}.keys()


@pytest.mark.parametrize("who", BY_HAND)
def test_matrices_of_adamw_are_kept_by_rows_or_by_whole_copies(who):
    scalar = ParamSpec("norm.weight", (100,), "bfloat16", False)
    formula = {**field.WHOLE, **field.CUT}[who]
    with_it, without = (formula(field.Model(MATRICES, others, 2)) for others in ([scalar], []))
    cut = 16 if who in field.CUT else 4 + 4 + 12
    whole = 32 if "DDP" in who else cut
    assert with_it.held - without.held == pytest.approx(whole * 50)
    times = 2 if who in ("Megatron-LM, layer-wise", "dion, DDP", "torch.optim.Muon, DDP") else 3
    assert with_it.sent - without.sent == pytest.approx((4 if who == "stock Muon, stage 3" else times) * 100)


SQUARE, HALF = (64, 64), (32, 64)
BIG, LESS, MIDDLE, SMALL = (8192, 8192), (6144, 8192), (6656, 8192), (64, 8192)
DEAR, CHEAP, THIRD, THIN = (4096, 4096), (256, 65536), (2048, 6144), (64, 65536)

#: A formula, the shapes of each layer, the ranks, one number, and what it is, in elements or over an even share.
ONE_RULE_EACH = {
    "a matrix over a cut is on both ranks, so that the middle one of three has two":
        ("stock Muon, stage 1", [[SQUARE, SQUARE]], 3, "work", 2 / (2 / 3)),
    "sorted by shape, no cut is inside a matrix":
        ("stock Muon, stage 1", [[HALF, SQUARE, HALF]], 2, "held", 4 * 8192 + 4 * 4096 + 4 * 4096),
    "the largest shapes come first, so that the last round is of small ones":
        ("stock Muon, stage 3", [[SQUARE, HALF, SQUARE]], 2, "padding", 2048),
    "a bucket is not closed before ranks times nine tenths of its largest matrix":
        ("Megatron-LM, layer-wise", [[BIG, LESS]], 2, "padding", prod(BIG) - prod(LESS)),
    "a closed bucket takes what fits into its padding":
        ("Megatron-LM, layer-wise", [[SMALL, MIDDLE, BIG]], 2, "padding", prod(BIG) - prod(MIDDLE) - prod(SMALL)),
    "buckets begin with the last matrix":
        ("Megatron-LM, layer-wise", [[LESS, LESS, BIG]], 2, "padding", 2 * prod(LESS) - prod(BIG)),
    "a shard has at most 1.3 times the mean of its bucket":
        ("Megatron-LM, layer-wise", [[DEAR, CHEAP, CHEAP, CHEAP]], 2, "padding", 0),
    "below that the cost decides, not the length":
        ("Megatron-LM, layer-wise", [[DEAR, THIRD, THIRD, THIN]], 2, "padding",
         2 * prod(THIRD) + prod(THIN) - prod(DEAR)),
    "a matrix that is on one rank stays there":
        ("Megatron-FSDP, FsdpMuon", [[SQUARE] * 4], 2, "sent", 3 * 4 * 4096),
    "rows are whole":
        ("Megatron-FSDP, FsdpMuon", [[(3, 64)]], 2, "sent", 3 * 4 * 64 + 8 * 64 / 2),
    "the longest of a layer first":
        ("MatrixFSDP", [[SQUARE, HALF, HALF]], 2, "held", 12 * 4096),
    "equal shapes go together, wherever they are":
        ("dion, DDP", [[SQUARE, HALF], [SQUARE, HALF]], 2, "padding", 0),
    "rows that are filled up are kept":
        ("dion, FSDP2", [[(3, 64), (3, 64)]], 2, "held", 12 * 2 * 2 * 64),
    "work is carried over to the next bucket":
        ("torchtitan, DistMuon", [[SQUARE], [SQUARE]], 2, "work", 1),
    "two layers share a bucket, in which each rank has one matrix":
        ("torchtitan, DistMuon", [[SQUARE], [HALF], [HALF]], 2, "work", (4096 + 2048) / 4096),
}


def model_of(layers, ranks):
    specs = [ParamSpec(f"layers.{layer}.{i}.weight", shape, "bfloat16", True, work=prod(shape))
             for layer, shapes in enumerate(layers) for i, shape in enumerate(shapes)]
    return field.Model(specs, [], ranks)


@pytest.mark.parametrize("rule", ONE_RULE_EACH)
def test_a_single_rule_of_a_formula(rule):
    who, layers, ranks, column, expected = ONE_RULE_EACH[rule]
    model = model_of(layers, ranks)
    found = getattr({**field.WHOLE, **field.CUT}[who](model), column)
    assert found * (model.numel if column == "padding" else 1) == pytest.approx(expected)


def test_stock_goes_through_rounds_of_each_bucket():
    cost = field.stock_3(field.Model(MATRICES, [], 2), bucket=ONE)
    assert (cost.work, cost.padding) == pytest.approx((3 / 1.5, 1))


def test_ours_is_the_plan():
    rows = field.rows_of("gpt2-124m", 2)
    others = 50257 * 768 + 1024 * 768 + 12 * 13 * 768 + 2 * 768
    matrices = 12 * 12 * 768 * 768
    numel = matrices + others
    assert rows["torch.optim.Muon, DDP"].sent == 2 * numel
    assert [rows[f"ours, stage {stage}"].sent / numel for stage in (1, 2, 3)] == pytest.approx(
        [2, 2, 3 + matrices / numel / 2], rel=0.01)
    assert [rows[f"ours, stage {stage}"].work for stage in (1, 2, 3)] == pytest.approx([1, 1, 1])
    # Weights, gradients as they are accumulated, float32 ones of the own half, masters and states.
    kept = (4 * numel + 4 * matrices + 8 * others) / 2
    assert rows["ours, stage 1"].held == pytest.approx(4 * numel + 4 * numel / 2 + kept, rel=1e-4)
    assert rows["ours, stage 2"].held == pytest.approx(2 * numel + 4 * numel / 2 + kept, rel=1e-4)
    # Owners have weights of matrices beside the cuts. Vectors stay whole, with a copy that shows what is written.
    vectors = 12 * 13 * 768 + 2 * 768
    assert rows["ours, stage 3"].held == pytest.approx(
        2 * (numel + matrices) / 2 + 2 * 2 * vectors + 4 * numel / 2 + kept, rel=1e-4)
