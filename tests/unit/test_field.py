"""The formulas of docs/field.md, on three equal matrices of 4,096 elements on two ranks, counted by hand."""

from __future__ import annotations

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
    # Weights, gradients as they are accumulated and float32 ones of the own half, or from stage 2 on as they arrive;
    # masters and states.
    kept = (4 * numel + 4 * matrices + 8 * others) / 2
    assert rows["ours, stage 1"].held == pytest.approx(4 * numel + 4 * numel / 2 + kept, rel=1e-4)
    assert rows["ours, stage 2"].held == pytest.approx(2 * numel + 2 * numel / 2 + kept, rel=1e-4)
    # 12 and 16 bytes over the ranks. Vectors stay whole, with a copy that shows what is written.
    vectors = 12 * 13 * 768 + 2 * 768
    assert rows["ours, stage 3"].held == pytest.approx(
        (12 * matrices + 16 * others) / 2 + 2 * 2 * vectors, rel=1e-4)
