"""Masters and states in fewer bits, by value: what a float32 number becomes, and what that becomes again."""

import hashlib
import json
import struct

import numpy as np
import pytest
import torch
from torch import nn

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers import dtypes
from ds_layerwise.optimizers.dtypes import (
    BLOCK,
    SCALED,
    chance_of,
    master_bytes,
    merge_,
    of_codes,
    round_by_chance_,
    scales_of,
    split_,
    state_bytes,
    to_codes_,
)
from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.rules.elementwise import AdamW, Lion
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.plan.forecast.report import plan_table
from ds_layerwise.ranks.owned.forms import Chance, Form, form_of
from ds_layerwise.tools.dry_run import DryRun
from tests.support.rooms import rooms

pytestmark = rooms("dtypes", "forms", "rate_checks")


def split(masters):
    """Weights, remainders and marks of 1-D ``masters``."""
    kept = (torch.empty(masters.numel(), dtype=torch.bfloat16), torch.empty(masters.numel(), dtype=torch.int16),
            torch.empty(masters.numel() // BLOCK, dtype=torch.int64))
    split_(masters, *kept)
    return kept


def merged(kept):
    """Masters again, and whether any was found written."""
    masters = torch.empty(kept[0].numel())
    return masters, bool(merge_(masters, *kept))


def bits_of(masters):
    return masters.view(torch.int32)


class TestMasters:
    #: Every upper half of a float32 with the lower halves about which rounding turns.
    LOWER = (0, 1, 2, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xABCD, 0xC000, 0xFFFE, 0xFFFF, 0x8000, 0x4000,
             0x8000)

    @pytest.fixture
    def every(self):
        upper, lower = torch.arange(65536).view(-1, 1) << 16, torch.tensor(self.LOWER)
        return (upper | lower).view(-1).to(torch.int32).view(torch.float32)

    def test_they_are_themselves_again(self, every):
        weights, remainders, marks = split(every)
        # By hand: the nearest, and of two that are as near the even one.
        words = every.view(torch.int32).numpy().view(np.uint32).astype(np.uint64)
        nearest = (words + 0x7FFF + (words >> 16 & 1)) >> 16
        number = ~every.isnan()
        assert torch.equal(weights.view(torch.int16)[number],
                           torch.from_numpy(nearest.astype(np.uint16).view(np.int16))[number])
        found, written = merged((weights, remainders, marks))
        assert not written
        assert torch.equal(bits_of(found)[number], bits_of(every)[number])
        assert bool(found[~number].isnan().all())

    def test_ties_alone_in_any_number(self):
        # Below 2^k all 64 masters of a block are halfway between two weights, and half of these are rounded down.
        ties = ((torch.arange(4096) << 16) | 0x8000).to(torch.int32).view(torch.float32)
        kept = split(ties)
        assert torch.equal(bits_of(merged(kept)[0]), bits_of(ties))
        assert set(kept[1].tolist()) == {-0x8000}

    @pytest.mark.parametrize("change", ["negate", "set", "swap", "two_signs", "lowest_bit"])
    def test_a_block_that_is_written_is_its_weights(self, change):
        masters = torch.randn(64 * 300, generator=torch.Generator().manual_seed(0))
        kept = split(masters)
        weights = kept[0].view(-1, BLOCK)
        before, written = weights.clone(), slice(7, 290, 3)
        if change == "negate":
            weights[written].neg_()
        elif change == "set":
            weights[written, 13] = 0.0
        elif change == "swap":
            weights[written, :32] = weights[written, 32:].clone()
        elif change == "two_signs":
            weights[written, 3] *= -1
            weights[written, 11] *= -1
        else:
            weights.view(torch.int16)[written, 63] ^= 1
        found, was = merged(kept)
        changed = (weights != before).any(-1)
        assert was and changed.sum() == len(range(7, 290, 3))
        expected = torch.where(changed.unsqueeze(-1), weights.float(), masters.view(-1, BLOCK))
        assert torch.equal(found.view(-1, BLOCK), expected)
        weights.copy_(before)
        again, was = merged(kept)
        assert torch.equal(again, masters) and not was

    def test_bytes(self):
        for numel in (64, 6400):
            assert sum(t.nbytes for t in split(torch.zeros(numel))[1:]) == master_bytes(
                numel, "bfloat16", "bfloat16+remainder") == numel * 17 // 8
        assert master_bytes(64, "bfloat16", "float32") == master_bytes(64, "float16", "bfloat16+remainder") == 256
        assert master_bytes(64, "float32", "bfloat16+remainder") == 0


def drawn(chance, index):
    """The 16 bits that element ``index`` draws, in plain numbers."""
    mask = 2**64 - 1

    def signed(x):
        return x - 2**64 if x >> 63 else x

    x = (index * (-7046029254386353131 & mask) + (chance & mask)) & mask
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = ((x ^ (signed(x) >> shift) & mask) & mask) * (factor & mask) & mask
    return x >> 48


def by_chance(values, chance, first):
    """The values that :func:`round_by_chance_` gives, number by number."""
    found = []
    for i, value in enumerate(values.tolist()):
        word = struct.unpack("<I", struct.pack("<f", value))[0]
        found.append(struct.unpack("<f", struct.pack("<I", (word + drawn(chance, first + i)) & 0xFFFF0000))[0])
    return torch.tensor(found)


class TestRoundedByChance:
    def test_values_are_those_by_hand_wherever_they_are_cut(self):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
        whole = torch.empty(1000, dtype=torch.bfloat16)
        round_by_chance_(whole, values, 12345, 0)
        assert torch.equal(whole.float(), by_chance(values, 12345, 0))
        for cut in (1, 64, 333):
            parts = torch.empty(1000, dtype=torch.bfloat16)
            round_by_chance_(parts[:cut], values[:cut], 12345, 0)
            round_by_chance_(parts[cut:], values[cut:], 12345, cut)
            assert torch.equal(parts, whole)

    def test_the_mean_is_the_value(self):
        value, count = 1.0 + 2**-7 * 0.3, 1 << 16
        found = torch.empty(count, dtype=torch.bfloat16)
        round_by_chance_(found, torch.full((count,), value), 7, 0)
        up = (found.float() > value).double().mean()
        assert set(found.float().tolist()) == {1.0, 1 + 2**-7}
        # Four standard deviations.
        assert abs(float(up) - 0.3) < 4 * (0.21 / count) ** 0.5
        others = torch.empty(count, dtype=torch.bfloat16)
        round_by_chance_(others, torch.full((count,), value), 8, 0)
        # Another chance is independent of it: both up in 9 %.
        both = ((found.float() > value) & (others.float() > value)).double().mean()
        assert abs(float(both) - 0.09) < 4 * (0.09 * 0.91 / count) ** 0.5

    def test_exact_and_infinite_values_stay_and_nan_stays_nan(self):
        values = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf")] * 50)
        found = torch.empty(300, dtype=torch.bfloat16)
        round_by_chance_(found, values, 3, 0)
        assert torch.equal(found.view(torch.int16), values.bfloat16().view(torch.int16))
        # The least and the greatest bits of what is no number: without a carry, or with one, they would be one.
        for bits in (0x7F800001, 0x7FFFFFFF, 0x7FC00000):
            round_by_chance_(found, torch.full((300,), bits, dtype=torch.int32).view(torch.float32), 3, 0)
            assert bool(found.isnan().all()), hex(bits)

    def test_each_step_parameter_state_and_seed_has_its_own_chance(self):
        each = {chance_of(seed, step, name, key) for seed in (0, 1) for step in (1, 11) for name in ("a", "a1")
                for key in ("exp_avg", "exp_avg_sq")}
        assert len(each) == 16
        digest = hashlib.blake2b(b"(0, 3, 'a.weight', 'exp_avg')", digest_size=8).digest()
        assert chance_of(0, 3, "a.weight", "exp_avg") == struct.unpack("<q", digest)[0]

    def test_torch_is_not_asked(self):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        round_by_chance_(torch.empty(9, dtype=torch.bfloat16), torch.randn(9, generator=torch.Generator()), 1, 0)
        assert torch.equal(torch.get_rng_state(), before)


def coded(values, signed):
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), scales_of(values.numel(), values.device)
    to_codes_(codes, scales, values, signed=signed)
    return codes, scales


class TestCodes:
    @pytest.mark.parametrize("signed", [True, False])
    @pytest.mark.parametrize("numel", [1, 255, 256, 1000, 256 * 4100 + 3])
    def test_codes_are_the_nearest_of_all_levels(self, signed, numel):
        from torchao.optim.quant_utils import create_dynamic_map
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3 * 1e-9
        values = values if signed else values.abs()
        codes, scales = coded(values, signed)
        levels = torch.tensor(create_dynamic_map(signed=signed))
        if signed:
            levels[0] = -1
        found = of_codes(codes, scales, signed=signed)
        for start in range(0, min(numel, 1000), SCALED):
            block = values[start:start + SCALED]
            assert scales[start // SCALED] == block.abs().max()
            # Of all levels the nearest, and none at 0 where something positive was.
            of_one = block / block.abs().max()
            distance = (of_one.unsqueeze(-1) - levels).abs()
            expected = levels[distance.argmin(-1)]
            if not signed:
                expected = torch.where((block > 0) & (expected == 0), levels[1], expected)
            near = (found[start:start + SCALED] / scales[start // SCALED] - of_one).abs()
            torch.testing.assert_close(found[start:start + SCALED], expected * scales[start // SCALED], rtol=2e-2,
                                       atol=1e-7 * float(block.abs().max()))
            if signed:
                assert bool((near <= distance.min(-1).values + 1e-6).all())
        if not signed:
            assert bool((found[values > 0] > 0).all())
        again, same_scales = coded(found, signed)
        assert torch.equal(again, codes) and torch.equal(same_scales, scales)

    def test_zeros_stay_and_infinity_makes_nan_of_its_block_alone(self):
        values = torch.zeros(600)
        assert torch.equal(of_codes(*coded(values, True), signed=True), values)
        assert torch.equal(of_codes(*coded(values, False), signed=False), values)
        values[300] = float("inf")
        found = of_codes(*coded(values, True), signed=True)
        assert bool(found[256:512].isnan().all()) and not found[:256].any() and not found[512:].any()

    def test_8bit_without_torchao_is_an_error(self, monkeypatch):
        dtypes.torchao_maps.cache_clear()
        monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
        with pytest.raises(ConfigError, match=r"'8bit' need torchao .*pip install 'torchao>=0.18'"):
            dtypes.torchao_maps()

    def test_bytes(self):
        for numel in (1, 256, 257, 5000):
            codes, scales = coded(torch.ones(numel), True)
            assert codes.nbytes + scales.nbytes == state_bytes(numel, "8bit")


HYPER = Hyper(lr=0.01, weight_decay=0.0, momentum=0.95, betas=(0.9, 0.95), eps=1e-10)


def drifted(recipe, hyper, steps=150, numel=512, fades_at=None):
    """The relative error of the parameter and each state after ``steps``, against a run that keeps float32.

    From step ``fades_at`` on, every second gradient is a tenth of what it was, and it is those whose error counts.
    """
    rule, seed = recipe, torch.Generator().manual_seed(11)
    sizes = torch.exp(torch.randn(1, numel, generator=seed))
    shape = (numel,) if not recipe.whole else (64, numel // 64)
    runs = []
    for narrow in (True, False):
        g = torch.Generator().manual_seed(12)
        param = torch.zeros(shape)
        specs, forms = recipe.states(shape), {}
        for key, value in rule.init_state(param).items():
            chance = Chance(0, "p", key, 0) if recipe.rounds_by_chance else None
            forms[key] = form_of(specs[key], value, chance) if narrow else Form(value)
        for step in range(1, steps + 1):
            grad = (sizes * (0.5 + torch.randn(1, numel, generator=g))).view(shape)
            if fades_at and step >= fades_at:
                grad.view(-1)[::2] *= 0.1
            for form in forms.values():
                form.open(form.memory)
            rule.update_([param], [grad], [{key: form.opened for key, form in forms.items()}], hyper)
            for form in forms.values():
                form.close(step)
                form.forget()
        runs.append({"param": param, **{key: form.read().float() for key, form in forms.items()}})
    narrow, wide = runs
    every = 2 if fades_at else 1
    return {key: float((narrow[key] - wide[key]).view(-1)[::every].norm() / wide[key].view(-1)[::every].norm())
            for key in wide if wide[key].dim()}


class TestAccuracy:
    """The measured error of states in fewer bits, after steps on noisy gradients of many sizes."""

    @pytest.mark.parametrize("recipe, state, most", [
        (Muon(momentum_dtype="bfloat16"), "momentum_buffer", 0.01),
        (Muon(momentum_dtype="8bit"), "momentum_buffer", 0.1),
        (Lion(exp_avg_dtype="bfloat16"), "exp_avg", 0.01),
        (AdamW(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16"), "exp_avg_sq", 0.01),
        (AdamW(exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit"), "exp_avg_sq", 0.1),
        (AdamW(exp_avg_sq_dtype="bfloat16", stochastic_rounding=True), "exp_avg_sq", 0.02),
    ])
    def test_allowed_settings_stay_near_float32(self, recipe, state, most):
        for fades_at in (None, 60):
            found = drifted(recipe, HYPER, fades_at=fades_at)
            assert most / 10 < found[state] < most

    def test_refused_settings_go_far_from_float32(self):
        slow = Hyper(lr=0.01, weight_decay=0.0, momentum=0.95, betas=(0.9, 0.999), eps=1e-10)
        wrong = {recipe: drifted(recipe, slow, steps=1500, numel=256, fades_at=200)["exp_avg_sq"] for recipe in (
            AdamW(exp_avg_sq_dtype="bfloat16"), AdamW(exp_avg_sq_dtype="8bit"),
            AdamW(exp_avg_sq_dtype="bfloat16", stochastic_rounding=True))}
        nearest, codes, chance = wrong.values()
        # An average of squares that cannot fade is several times too large, and steps too short for good.
        assert nearest > 2 and codes > 0.2 and chance < 0.1


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8, device="meta")
        self.layers = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(32, 32, bias=False, device="meta")})])
        self.norm = nn.RMSNorm(40, device="meta")


def planned(folder, ranks=(1,), *, dtype="bf16", host=False, params=(), layerwise=()):
    """The plan of such a config."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, dtype: {"enabled": True},
              "optimizer": {"type": "LayerWiseMuon", "params": dict(params)}, "layerwise": dict(layerwise)}
    if host:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    (folder / "ds.json").write_text(json.dumps(config))
    return DryRun.of(Small(), folder / "ds.json", list(ranks))


REMAINDER = {"master_dtype": "bfloat16+remainder"}
MXFP8 = {"param_wire": "mxfp8", "alignment": 512}


class TestPlans:
    def test_a_plan_says_the_bytes_that_are_saved(self, tmp_path):
        few = planned(tmp_path, [1, 2], layerwise={**REMAINDER, "alignment": 256}, params={
            "momentum_dtype": "8bit", "exp_avg_dtype": "bfloat16"})
        many = planned(tmp_path, [1, 2], layerwise={"alignment": 256})
        for now, before in zip(few.forecasts, many.forecasts, strict=True):
            assert all(n.total < b.total for n, b in zip(now.memory, before.memory, strict=True))
        alone = few.forecasts[0].memory[0]
        # 1024 of the matrix, 512 and 256 with their padding.
        assert alone.masters == 1792 * 17 // 8
        assert alone.states == 1024 + 4 * 4 + (320 + 40) * (2 + 4)
        # Everything is opened that has fewer bits: all masters and the momentum.
        opened = few.forecasts[0].working.update - many.forecasts[0].working.update
        assert opened == 4 * 1024 + 4 * 1024
        told = " ".join(plan_table(few.routes, few.specs, few.forecasts, few.run.optimizer).replace("│", " ").split())
        assert "muon with momentum_buffer in 8bit" in told

    @pytest.mark.parametrize("params, layerwise, host, message", [
        ({"exp_avg_sq_dtype": "bfloat16", "betas": [0.9, 0.999]}, {}, False,
         "exp_avg_sq of adamw keeps 0.999 of itself in a step .*'bfloat16'.* set stochastic_rounding to true"),
        ({"exp_avg_sq_dtype": "8bit", "betas": [0.9, 0.999]}, {"alignment": 256}, False,
         "exp_avg_sq of adamw keeps 0.999 .*'8bit'.* store it in 'bfloat16' with stochastic_rounding, or in 'float32'"),
        ({"momentum_dtype": "bfloat16", "momentum": 0.99}, {}, False, "momentum_buffer of muon keeps 0.99 of itself"),
        ({"scalar_optimizer": "lion", "exp_avg_dtype": "bfloat16", "betas": [0.9, 0.99]}, {}, False,
         "exp_avg of lion keeps 0.99 of itself"),
        ({"stochastic_rounding": True}, {}, False,
         "stochastic_rounding is true for .* no state is stored in 'bfloat16'"),
        ({"exp_avg_dtype": "8bit"}, {"alignment": 64}, False,
         "states in '8bit', and layerwise.alignment is 64: .* set it to a multiple of 256"),
        ({"momentum_dtype": "bfloat16"}, {"rounding_seed": 3}, False,
         "layerwise.rounding_seed is 3, and nothing is rounded by chance; set stochastic_rounding"),
        ({"momentum_dtype": "8bit"}, {}, True, "states in '8bit', and zero_optimization.offload_optimizer"),
        ({"momentum_dtype": "float16"}, {}, False,
         "optimizer.params.momentum_dtype must be one of 'float32', 'bfloat16', '8bit', got 'float16'"),
    ])
    def test_settings_that_would_drift_are_refused(self, params, layerwise, host, message, tmp_path):
        with pytest.raises(ConfigError, match=message):
            planned(tmp_path, params=params, layerwise=layerwise, host=host)

    @pytest.mark.parametrize("params", [
        {"exp_avg_sq_dtype": "bfloat16", "betas": [0.9, 0.999], "stochastic_rounding": True},
        {"exp_avg_sq_dtype": "bfloat16", "betas": [0.9, 0.984375]}, {"momentum_dtype": "8bit", "momentum": 0.98},
        {"momentum_dtype": "8bit", "betas": [0.9, 0.9999]}])
    def test_settings_that_do_not_drift_are_taken(self, params, tmp_path):
        few, many = (planned(tmp_path, params=each).forecasts[0] for each in (params, {}))
        assert few.memory[0].states < many.memory[0].states

    @pytest.mark.parametrize("changes, message", [
        ({"dtype": "fp16"}, "parameters are float16: it is for bfloat16 matrices; train in bf16"),
        ({"dtype": "fp32"}, "parameters are float32: it is for bfloat16 matrices; train in bf16"),
        ({"layerwise": {**MXFP8, **REMAINDER}}, r"layerwise.master_dtype is 'bfloat16\+remainder': such masters"),
        ({"layerwise": {**MXFP8, "alignment": 256}}, "layerwise.alignment is 256: .* set it to a multiple of 512"),
        ({"params": {"scalar_optimizer": "torch.optim:NAdam"}}, "norm.weight, which is no matrix, has one owner"),
    ])
    def test_mxfp8_is_refused_where_it_cannot_be(self, changes, message, tmp_path):
        with pytest.raises(ConfigError, match=r"layerwise.param_wire is 'mxfp8', and " + message):
            planned(tmp_path, **{"layerwise": MXFP8, **changes})

    def test_a_plan_says_what_travels_as_mxfp8(self, tmp_path):
        few, many = (planned(tmp_path, [2], layerwise=each) for each in (MXFP8, {"alignment": 512}))
        plans = [each.forecasts[0] for each in (few, many)]
        matrices = sum(bucket.numel for bucket in plans[0].layout.buckets if bucket.in_mxfp8)
        assert matrices and [bucket.whole for bucket in plans[0].layout.buckets] == [
            bucket.in_mxfp8 for bucket in plans[0].layout.buckets]
        (now, ), (before, ) = (plan.sent.values() for plan in plans)
        assert now.gradients == before.gradients
        # Half of a matrix goes from its owner to the cut of the other rank, and then both cuts to the other.
        assert sum(before.parameters) - sum(now.parameters) == (matrices // 2 + matrices) * 31 // 32
        # What is gathered is beside what it becomes.
        assert plans[0].working.transfers == plans[1].working.transfers + matrices * 33 // 32
        told = " ".join(plan_table(few.routes, few.specs, few.forecasts, few.run.optimizer).replace("│", " ").split())
        assert "MiB, mxfp8" in told

    @pytest.mark.parametrize("changes, message", [
        ({"dtype": "fp16"}, "parameters are float16: a float16 weight is not a part of its float32 master"),
        ({"dtype": "fp32"}, "parameters are float32: a float32 weight is its own master"),
        ({"layerwise": {**REMAINDER, "alignment": 96}}, "layerwise.alignment is 96: .* set it to a multiple of 64"),
        ({"host": True}, "zero_optimization.offload_optimizer keeps masters on the host"),
    ])
    def test_remainders_are_refused_where_they_cannot_be(self, changes, message, tmp_path):
        with pytest.raises(ConfigError, match=r"layerwise.master_dtype is 'bfloat16\+remainder', and " + message):
            planned(tmp_path, **{"layerwise": REMAINDER, **changes})
