"""Checkpoints of fused matrices with named parts: resumed by other numbers of ranks, and by runs without parts."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ds_layerwise.cli import main
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.registry import REGISTRY
from tests.distributed.checkpoint import test_any_state
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.fused import FUSED, OVERRIDES, Fused, parts_in, taken_apart
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import whole_number_loss
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, train_engines
from tests.support.universal import convert

pytestmark = rooms("fused_parts", "part_views", "owned", "regular",
                   "universal", "reshard", "single_file", "whole_states")


def engine_of(*, apart=False, split=True, layerwise=None, **changes):
    entries = OVERRIDES if split and not apart else []
    return start(Fused(apart=apart), ds_config(layerwise={"overrides": entries, **(layerwise or {})},
                                               **{"bucket_numel": 200, **changes}))


def with_any_state(monkeypatch, **changes):
    """An engine of an optimizer whose states have shapes of their own, and a count."""
    monkeypatch.setitem(REGISTRY, "preconditioned", test_any_state.Recipe_)
    params = {"matrix_optimizer": "preconditioned", "fast": 0.25, "lr": 0.003, "muon_lr": 0.01}
    return engine_of(**changes, optimizer={"type": "LayerWise", "params": params})


def save_runs(folder, make_engine):
    """A run of three steps with parts and, of more than one rank, one without; and what is in them."""
    # One rank leaves the run without parts to three.
    for split, called in ((True, ""), (False, "_whole"))[:torch.distributed.get_world_size()]:
        engine = make_engine(split=split, layerwise={"save_universal": True})
        train_engine(engine, 3)
        own = folder / f"{engine.world_size}{called}"
        engine.save_checkpoint(own, tag="regular")
        expected = whole_states(engine)
        if engine.global_rank == 0:
            torch.save(expected, own / "expected.pt")

class TestMomenta(DistributedTest):
    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints in folders that are called as the number of ranks that saved them, one of them without parts."""
        return made_once(class_tmpdir / "runs", [1, 3], self.save)

    def save(self, folder):
        save_runs(folder, engine_of)

    @pytest.mark.world_size(2)
    def test_they_are_whole_in_every_checkpoint(self, runs, tmp_path):
        convert(runs / "3" / "regular", tmp_path / "converted")
        engine = engine_of(bucket_numel=10**6, layerwise={"layout": "lpt"})
        train_engine(engine, 1, first=40)
        folders = [(runs / saved_by, tag) for saved_by in ("1", "3") for tag in ("regular", "regular_universal")]
        for folder, tag in [*folders, (tmp_path, "converted")]:
            engine.load_checkpoint(folder, tag=tag)
            expected = torch.load((runs / "3" if folder == tmp_path else folder) / "expected.pt")
            assert_equal_states(whole_states(engine), expected, f"{folder} {tag}")
            train_engine(engine, 1, first=50)

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("split", [True, False])
    def test_a_run_goes_on_from_one_that_was_split_otherwise(self, runs, split):
        engine = engine_of(split=split)
        for tag in ("regular", "regular_universal"):
            folder = runs / ("3_whole" if split else "3")
            engine.load_checkpoint(folder, tag=tag)
            assert_equal_states(whole_states(engine), torch.load(folder / "expected.pt"), tag)
            train_engine(engine, 1, first=50)


class TestStatesOfOtherShapes(DistributedTest):
    @pytest.fixture
    def runs(self, class_tmpdir, monkeypatch):
        return made_once(class_tmpdir / "runs", [1, 3], self.save, monkeypatch=monkeypatch)

    def save(self, folder, monkeypatch):
        save_runs(folder, partial(with_any_state, monkeypatch))

    @pytest.mark.world_size(2)
    def test_resume(self, runs, monkeypatch):
        engine = with_any_state(monkeypatch, bucket_numel=10**6, layerwise={"layout": "lpt"})
        train_engine(engine, 1, first=40)
        for saved_by, tag in (("1", "regular"), ("3", "regular"), ("3", "regular_universal")):
            engine.load_checkpoint(runs / saved_by, tag=tag)
            assert_equal_states(whole_states(engine), torch.load(runs / saved_by / "expected.pt"), saved_by)
            train_engine(engine, 1, first=50)
            assert main(["verify", str(runs / saved_by / tag)]) == 0

    @pytest.mark.world_size(3)
    def test_each_part_has_those_that_it_has_as_a_parameter(self, monkeypatch):
        fused, apart = (with_any_state(monkeypatch, apart=apart) for apart in (False, True))
        train_engines((fused, apart), 3)
        found, expected = whole_states(fused), whole_states(apart)
        for key in ("fp32", "exp_avg", "exp_avg_sq", "fast_avg"):
            of_parts = taken_apart({name: value for (name, own), value in found.items() if own == key})
            for name, value in of_parts.items():
                if (name, key) in expected:
                    assert torch.equal(value.flatten(), expected[name, key]), (name, key)
        for name in FUSED:
            for part in parts_in(name).names:
                for key in ("row_avg", "left", "right", "seen", "step"):
                    value = expected[f"{name}.{part}", key]
                    assert torch.equal(found[name, f"{key}.{part}"].view_as(value), value), (name, part, key)
        held = fused.optimizer.forecast().memory[fused.global_rank]
        assert held.states == sum(value.nbytes for state in internals.states(fused).values()
                                  for key, value in state.items() if not key.startswith("step"))

    @pytest.mark.world_size(2)
    def test_a_run_without_parts_cannot_go_on_from_one_with_them(self, runs, monkeypatch):
        for split, folder in ((True, "3_whole"), (False, "3")):
            engine = with_any_state(monkeypatch, split=split)
            with pytest.raises(LayerWiseError, match=r"was updated by preconditioned \(states .*left.*this run updates "
                                                     r"it by preconditioned \(.*set layerwise.on_optimizer_change"):
                engine.load_checkpoint(runs / folder, tag="regular")
            other = with_any_state(monkeypatch, split=split, layerwise={"on_optimizer_change": "keep_shared"})
            train_engine(other, 1)
            other.load_checkpoint(runs / folder, tag="regular")
            states = whole_states(other)
            # Averages that are corrected by a count of steps do not go on without it.
            assert not any(value.any() for (name, key), value in states.items()
                           if name in FUSED and key.startswith(("exp_avg", "row_avg", "step")))
            assert torch.equal(states["plain", "left"], torch.load(runs / folder / "expected.pt")["plain", "left"])


class Gated(nn.Module):
    """Gate and up, each twice as wide as their input: the factor of the rows of either has as many elements as both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.both, self.other = nn.Linear(3, 12), nn.Linear(8, 6)

    def forward(self, place):
        return whole_number_loss(self, place)


class TestStatesAsLargeAsTheParameter(DistributedTest):
    @pytest.mark.world_size(2)
    def test_they_come_back_in_their_own_shape(self, tmp_path):
        def engine_of_soap(**layerwise):
            return start(Gated(), ds_config(
                optimizer={"type": "LayerWise", "params": {"lr": 0.003, "matrix_optimizer": "soap"}},
                layerwise={"overrides": [{"name": "both.weight", "split": {"gate": 6, "up": 6}}], **layerwise}))

        engine = engine_of_soap(save_universal=True)
        train_engine(engine, 3)
        expected = whole_states(engine)
        assert expected["both.weight", "L.up"].shape == (6, 6)
        engine.save_checkpoint(tmp_path, tag="regular")
        engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        other = engine_of_soap(layout="lpt")
        for load in (lambda: other.load_checkpoint(tmp_path, tag="regular"),
                     lambda: other.load_checkpoint(tmp_path, tag="regular_universal"),
                     lambda: other.optimizer.load_state_dict_from_file(tmp_path / "file")):
            train_engine(other, 1, first=40)
            load()
            assert_equal_states(whole_states(other), expected)


class TestPartsThatLieElsewhere(DistributedTest):
    """Parts as long as before, in the same number of rows: their states have the same shapes, of other rows."""

    THEN = ({"q": 4, "k": 4}, 5)
    NOW = (({"q": 20, "k": 20}, 1), ({"k": 4, "q": 4}, 5))

    def start(self, optimizer, parts, **layerwise):
        split, groups = parts
        params = {"lr": 0.003, "matrix_optimizer": optimizer, "muon_lr": 0.003}
        return start(Net(), ds_config(optimizer={"type": "LayerWise", "params": params}, layerwise={
            "overrides": [{"name": "tall.weight", "split": split, "split_groups": groups}], **layerwise}))

    @pytest.mark.parametrize("optimizer", ["normuon", "soap", "shampoo"])
    def test_states_of_other_rows_do_not_go_on(self, optimizer, tmp_path):
        engine = self.start(optimizer, self.THEN, save_universal=True)
        train_engine(engine, 2)
        expected = whole_states(engine)
        engine.save_checkpoint(tmp_path, tag="regular")
        engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        dcp.save(engine.optimizer.sharded_state_dict(), checkpoint_id=str(tmp_path / "sharded"))

        def loads(engine):
            yield lambda: engine.load_checkpoint(tmp_path, tag="regular")
            yield lambda: engine.load_checkpoint(tmp_path, tag="regular_universal")
            yield lambda: engine.optimizer.load_state_dict_from_file(tmp_path / "file")
            yield lambda: engine.optimizer.load_sharded_state_dict(tmp_path / "sharded")

        same = self.start(optimizer, self.THEN)
        for load in loads(same):
            train_engine(same, 1, first=40)
            load()
            assert_equal_states(whole_states(same), expected)
        for now in self.NOW:
            other = self.start(optimizer, now)
            before = whole_states(other)
            for load in loads(other):
                with pytest.raises(LayerWiseError, match=r"tall.weight was updated .* another meaning \(.*parts q 4, k "
                                                         r"4 x 5, now .*set layerwise.on_optimizer_change"):
                    load()
            assert_equal_states(whole_states(other), before)
        shared = self.start(optimizer, self.NOW[0], on_optimizer_change="keep_shared")
        before = whole_states(shared)
        shared.load_checkpoint(tmp_path, tag="regular")
        assert list(shared.optimizer.fresh_states) == ["tall.weight"]
        for (name, key), value in whole_states(shared).items():
            goes_on = name != "tall.weight" or key in ("fp32", "momentum_buffer")
            assert torch.equal(value, (expected if goes_on else before)[name, key]), (name, key)

    @pytest.mark.parametrize("optimizer", ["muon", "torch.optim:NAdam"])
    def test_momenta_do(self, optimizer, tmp_path):
        engine = self.start(optimizer, self.THEN)
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path, tag="regular")
        for now in self.NOW:
            other = self.start(optimizer, now)
            other.load_checkpoint(tmp_path, tag="regular")
            assert_equal_states(whole_states(other), whole_states(engine))
            assert optimizer == "muon" or ("tall.weight", "step.q") in whole_states(other)
            assert not other.optimizer.fresh_states


class TestSettings(DistributedTest):
    def test_sums_are_no_averages(self, tmp_path):
        def of(statistics):
            return start(Net(), ds_config(optimizer={"type": "LayerWise", "params": {
                "lr": 0.003, "matrix_optimizer": "shampoo", "muon_lr": 0.003, "statistics": statistics}}))

        engine, other = of("sum"), of("average")
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path, tag="regular")
        with pytest.raises(LayerWiseError, match="another meaning .statistics 'sum', now statistics 'average'"):
            other.load_checkpoint(tmp_path, tag="regular")
        again = of("sum")
        again.load_checkpoint(tmp_path, tag="regular")
        assert_equal_states(whole_states(again), whole_states(engine))
