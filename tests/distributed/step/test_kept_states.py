"""Momenta and moments in fewer bits: the same for any number of ranks and after a resume, and converted where that
changes."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon
from tests.support import internals
from tests.support.checkpoints import ONE_FILE, assert_equal_states, assert_same_run, go_on_from, masters, whole_states
from tests.support.expected import assert_close, by_its_rule
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import (
    MATRICES,
    PARTS,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    start,
    train_engine,
    train_engines,
    weights,
)
from tests.support.universal import convert
from tests.unit.optimizers.test_low_bit import by_chance

pytestmark = rooms("forms", "dtypes", "rate_checks", "owned", "memory", "checkpointing")

BF16 = {"momentum_dtype": "bfloat16", "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
CHANCE = {**BF16, "stochastic_rounding": True}
CODES = {"momentum_dtype": "8bit", "exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit"}
MIXED = {"momentum_dtype": "bfloat16", "exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "bfloat16",
         "stochastic_rounding": True}
ALL = {"bf16": BF16, "chance": CHANCE, "codes": CODES, "mixed": MIXED}

RARELY = ("bf16", "mixed")
KINDS = [pytest.param(kind, marks=[pytest.mark.thorough] * (kind in RARELY)) for kind in ALL]


def config(kind=None, **changes):
    layerwise = {"alignment": 256, "batch_matrices": False, **changes.pop("layerwise", {})}
    return ds_config(params={**ALL.get(kind, {}), **changes.pop("params", {})}, layerwise=layerwise, **changes)


class Large(Net):
    """A net with an embedding of several blocks of codes, the last one short, that ranks cut."""

    def __init__(self):
        super().__init__(odd=True)
        self.embed = torch.nn.Embedding(97, 12)
        with torch.no_grad():
            self.embed.weight.copy_(torch.sin(torch.arange(97 * 12.0)).view(97, 12))


def started(kind=None, **changes):
    return start(Large(), config(kind, **changes))


def by_the_rules(kind, steps, seed=0):
    """Masters after ``steps``: every rule gets its states in float32, and they are rounded after it, by hand."""
    found, settings = {}, ALL[kind]
    common = {"weight_decay_method": "decoupled"}
    for name, param in trainable(Large()).items():
        matrix = name in MATRICES
        recipe = Muon(ns_method="standard", ns_dtype="fp32", **common) if matrix else AdamW(**common)
        hyper = Hyper(lr=0.02 if matrix else 0.003, weight_decay=0.1, momentum=0.95, betas=(0.9, 0.95), eps=1e-10)

        def after(step, state, name=name):
            for key, value in state.items():
                if settings.get(f"{key.removesuffix('_buffer')}_dtype") == "bfloat16":
                    value.copy_(rounded(value, (seed, step + 1, name, key), settings))

        found[name] = by_its_rule(recipe, name, param, [dist.get_world_size()] * steps, lambda _, now=hyper: now, after)
    return found


def rounded(value, which, settings):
    from ds_layerwise.optimizers.dtypes import chance_of
    if not settings.get("stochastic_rounding"):
        return value.bfloat16().float()
    return by_chance(value.flatten(), chance_of(*which), 0).view(value.shape)


class TestAgainstTheOracle(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("kind, stage", [("bf16", 1), ("chance", 2)])
    def test_masters(self, kind, stage):
        engine = started(kind, stage=stage, layerwise={"rounding_seed": 5} if kind == "chance" else {})
        train_engine(engine, 4)
        found = {name: value for name, value in masters(engine).items() if not name.startswith("unused")}
        assert_close(found, by_the_rules(kind, 4, seed=5), rtol=2e-6, atol=2e-7)


class TestTheSameForAll(DistributedTest):
    """Saved by one and by three ranks, which have the same, bit for bit; and gone on with by one, two and three."""

    STEPS = 4
    thorough_on = (1, 3)

    @pytest.fixture
    def kind(self, request):
        return getattr(request, "param", "chance")

    @pytest.fixture
    def runs(self, class_tmpdir, kind):
        return made_once(class_tmpdir / kind, [1, 3], self.save, kind=kind)

    def save(self, folder, kind):
        ranks = dist.get_world_size()
        # Sums over one rank and over three are the same where all ranks have the same gradients.
        engine = started(kind, bucket_numel=600 * ranks, layerwise={"save_universal": True, "overrides": PARTS})
        self.train(engine, 0)
        engine.save_checkpoint(folder / str(ranks), tag="here")
        engine.optimizer.save_state_dict_to_file(folder / str(ranks) / ONE_FILE)
        states = whole_states(engine)
        self.train(engine, self.STEPS)
        after = whole_states(engine)
        if dist.get_rank() == 0:
            torch.save((states, after), folder / f"{ranks}.pt")

    def train(self, engine, first):
        for step in range(first, first + self.STEPS):
            engine.backward(engine((step, 0, 0)))
            engine.step()

    @pytest.mark.parametrize("kind", KINDS, indirect=True)
    @pytest.mark.world_size([1, 2, 3])
    def test_any_rank_count_saves_and_any_goes_on(self, kind, runs):
        states, after = torch.load(runs / "3.pt")
        for kept in zip(torch.load(runs / "1.pt"), (states, after), strict=True):
            assert_equal_states(*kept)
        for saved_by in (1, 3):
            folder = runs / str(saved_by)
            for tag in ("here", "here_universal" if saved_by == 3 else None):
                engine = started(kind, stage=2 if tag == "here" else 1, layerwise={
                    "alignment": 512, "overrides": PARTS})
                train_engine(engine, 1, first=20)
                go_on_from(engine, folder, tag)
                assert_equal_states(whole_states(engine), states, tag)
                self.train(engine, self.STEPS)
                assert_equal_states(whole_states(engine), after, tag)
                assert_same_on_all_ranks(engine.module)
                engine.destroy()

    @pytest.mark.world_size(2)
    def test_the_converter_keeps_them(self, runs, tmp_path):
        states, _ = torch.load(runs / "3.pt")
        convert(runs / "3" / "here", tmp_path / "converted")
        engine = started("chance")
        engine.load_checkpoint(tmp_path, tag="converted")
        assert_equal_states(whole_states(engine), states)

    @pytest.mark.world_size(2)
    def test_converted_where_it_changes(self, runs, capsys):
        states, _ = torch.load(runs / "3.pt")
        for kind in (None, "codes"):
            engine = started(kind)
            engine.load_checkpoint(runs / "3", tag="here")
            found = whole_states(engine)
            for (name, key), value in states.items():
                # Codes are off by up to half of what is between the two largest levels of a block of 256.
                off = 0.0 if kind is None or key in ("fp32", "step") else 0.008 * float(value.abs().max())
                torch.testing.assert_close(found[name, key].float(), value.float(), rtol=0, atol=off, msg=name)
            told = capsys.readouterr().out
            now = "float32" if kind is None else "8bit"
            line = f"exp_avg_sq of 9 parameters was converted from 'bfloat16' in the checkpoint to '{now}' in this run"
            assert told.count(line) == (1 if dist.get_rank() == 0 else 0), told
            assert told.count("momentum_buffer of 8 parameters was converted") == (1 if dist.get_rank() == 0 else 0)
            engine.destroy()
        engine = started("chance")
        engine.load_checkpoint(runs / "3", tag="here")
        assert "was converted from" not in capsys.readouterr().out


class TestMemory(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("kind, precision", [
        ("bf16", "fp32"), ("codes", "bf16"), pytest.param("mixed", "fp32", marks=pytest.mark.thorough)])
    def test_memory_is_as_planned(self, kind, precision):
        changes = {"bf16": {"enabled": precision == "bf16"}, "layerwise": {
            "master_dtype": "bfloat16+remainder"} if precision == "bf16" else {}}
        engine, rank = started(kind, **changes), dist.get_rank()
        train_engine(engine, 1)
        forecast, sizes = engine.optimizer.forecast(), internals.memory_by_kind(engine)
        assert sizes[Kind.optim_states] == forecast.memory[rank].states
        assert sizes[Kind.hp_params] == forecast.memory[rank].masters
        wide = sum(4 * (piece.numel * (1 if piece.name in MATRICES else 2)) for piece in internals.pieces(engine))
        bits = {"bf16": 2, "chance": 2, "codes": 1 + 4 / 256, "mixed": None}[kind]
        if bits:
            assert wide * bits / 4 <= sizes[Kind.optim_states] <= wide * bits / 4 + 8 * len(internals.pieces(engine))
        said = " ".join(engine.optimizer.describe().replace("│", " ").split())
        assert {
            "bf16": "exp_avg in bfloat16", "chance": "rounded by chance", "codes": "exp_avg in 8bit",
            "mixed": "exp_avg in 8bit"}[kind] in said
        before = weights(engine.module)
        engine.offload_states()
        engine.reload_states()
        train_engine(engine, 1, first=1)
        twin = started(kind, **changes)
        train_engine(twin, 2)
        assert_same_run(engine, twin)
        assert not torch.equal(weights(engine.module), before)


class TestBeside(DistributedTest):
    def test_on_the_host(self):
        plain, hosted = started("chance"), config("chance")
        hosted["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
        engine = start(Large(), hosted)
        train_engines((plain, engine), 4)
        assert_equal_states(whole_states(engine), whole_states(plain))
        found = sum(t.untyped_storage().nbytes() for t in internals.host_tensors(engine))
        assert found == engine.optimizer.forecast().memory[dist.get_rank()].host > 0

    @pytest.mark.parametrize("kind", KINDS)
    def test_states_are_read_and_set(self, kind):
        engine = started(kind)
        train_engine(engine, 2)
        kept = whole_states(engine)
        for name, p in engine.module.named_parameters():
            if not p.numel():
                continue
            for key in ["momentum_buffer"] if name in MATRICES else ["exp_avg", "exp_avg_sq"]:
                found = safe_get_full_optimizer_state(p, key)
                assert found.dtype == torch.float32 and torch.equal(found.flatten(), kept[name, key].float()), name
                safe_set_full_optimizer_state(p, torch.full(p.shape, 0.5), key)
                assert torch.equal(safe_get_full_optimizer_state(p, key), torch.full(p.shape, 0.5)), name

    def test_frozen_for_a_step(self):
        engine = started("codes")
        train_engine(engine, 2)
        before = whole_states(engine)
        for p in engine.module.parameters():
            p.requires_grad_(p is engine.module.tall.weight)
        train_engine(engine, 1, first=2)
        for (name, key), value in whole_states(engine).items():
            assert torch.equal(value, before[name, key]) == (name != "tall.weight"), (name, key)

    @pytest.mark.parametrize("ratio", [0.5, 1.0])
    def test_frozen_for_a_step_on_the_host(self, ratio):
        found = []
        for host in ({}, {"offload_optimizer": {"device": "cpu", "ratio": ratio}}):
            hosted = config("chance")
            hosted["zero_optimization"].update(host)
            engine = train_engine(start(Large(), hosted), 2)
            for p in engine.module.parameters():
                p.requires_grad_(p is engine.module.tall.weight)
            train_engine(engine, 1, first=2)
            found.append(whole_states(engine))
        assert_equal_states(*found)

    def test_for_one_parameter(self):
        engine = started(layerwise={"overrides": [
            {"name": "square.weight", "momentum_dtype": "bfloat16"},
            {"name": "embed.weight", "exp_avg_sq_dtype": "bfloat16", "stochastic_rounding": True}]})
        train_engine(engine, 1)
        found = {(name, key): value.dtype for name, state in internals.states(engine).items()
                 for key, value in state.items() if key != "step"}
        narrow = {which for which, dtype in found.items() if dtype == torch.bfloat16}
        assert narrow == {("square.weight", "momentum_buffer"), ("embed.weight", "exp_avg_sq")} & found.keys()

    def test_betas_of_a_checkpoint_that_would_make_a_state_stand_still_are_refused(self, tmp_path):
        saved = started(params={"betas": [0.9, 0.999]})
        train_engine(saved, 1)
        saved.save_checkpoint(str(tmp_path))
        kept = {"exp_avg_sq_dtype": "bfloat16", "betas": [0.9, 0.95]}
        engine = started(params=kept)
        train_engine(engine, 1, first=5)
        before = whole_states(engine)
        with pytest.raises(ConfigError, match="on_hyper_change is 'checkpoint'.*exp_avg_sq of adamw keeps 0.999 of"):
            engine.load_checkpoint(str(tmp_path))
        assert_equal_states(whole_states(engine), before)
        # Weights alone bring no betas, by chance they are no hindrance, and those of the config are good.
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
        assert engine.optimizer.param_groups[0]["betas"][1] == 0.95
        for changes, found in (({"params": {**kept, "stochastic_rounding": True}}, 0.999),
                               ({"params": kept, "layerwise": {"on_hyper_change": "config"}}, 0.95)):
            engine = started(**changes)
            engine.load_checkpoint(str(tmp_path))
            assert engine.optimizer.param_groups[0]["betas"][1] == found
            train_engine(engine, 1, first=1)

