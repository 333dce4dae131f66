"""An optimizer with states of any number, shape and dtype: planned, trained, saved, resumed and converted.

It is all that a new one takes: a recipe, a rule, and a line in the registry.
"""

from typing import ClassVar

import pytest
import torch

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.fields import Decay
from ds_layerwise.optimizers.recipe import ANYWHERE, Recipe, StateSpec
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.plan.forecast.report import as_json
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, train_engines
from tests.support.universal import convert

pytestmark = rooms("recipe", "registry", "record", "regular", "universal", "reshard", "host_memory")


class Recipe_(Recipe):
    """Three moments, two of them named as DeepSpeed's converter knows them, a row buffer, two square statistics, and a
    count of whole numbers."""

    rule: ClassVar[str] = "preconditioned"
    whole: ClassVar[bool] = True
    family: ClassVar[str] = "preconditioned"
    gradient_average: ClassVar[str | None] = "exp_avg"
    fast: Decay = 0.5

    def states(self, shape):
        *batch, rows, cols = shape
        return {**self.like(shape, "exp_avg", "exp_avg_sq", "fast_avg"), "row_avg": StateSpec((*batch, rows)),
                "left": StateSpec((*batch, rows, rows)), "right": StateSpec((*batch, cols, cols)),
                "step": StateSpec((), on_host=True), "seen": StateSpec((3,), dtype="int64")}

    def work(self, shape):
        *_, rows, cols = shape
        return rows * cols * (rows + cols)

    def init_state(self, param):
        state = super().init_state(param)
        for key in ("left", "right"):
            state[key].diagonal(dim1=-2, dim2=-1).fill_(1)
        return state

    def update_(self, params, grads, states, hyper, site=ANYWHERE):
        for param, grad, state in zip(params, grads, states, strict=True):
            for key, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.99), ("fast_avg", self.fast)):
                state[key].lerp_(grad, 1 - beta)
            state["row_avg"].lerp_(grad.square().mean(-1), 0.1)
            state["left"].add_(grad @ grad.mT)
            state["right"].add_(grad.mT @ grad)
            state["step"] += 1
            state["seen"][int(state["step"]) % 3] += 1
            param.sub_(state["fast_avg"], alpha=hyper.lr)


KEYS = {"fp32", "exp_avg", "exp_avg_sq", "fast_avg", "row_avg", "left", "right", "seen", "step"}


def engine_of(monkeypatch, **changes):
    monkeypatch.setitem(REGISTRY, "preconditioned", Recipe_)
    params = {"matrix_optimizer": "preconditioned", "fast": 0.25, "lr": 0.003, "muon_lr": 0.01}
    return start(Net(), ds_config(**changes, optimizer={"type": "LayerWise", "params": params}))


def bytes_of_states(engine):
    """The bytes that the states take on the device, by the tensors themselves."""
    return sum(value.nbytes for state in internals.states(engine).values() for key, value in state.items()
               if key != "step")


class TestAnyState(DistributedTest):
    @pytest.fixture
    def runs(self, class_tmpdir, monkeypatch):
        """Checkpoints in folders that are called as the number of ranks that saved them."""
        return made_once(class_tmpdir / "runs", [1, 3], self.save, monkeypatch=monkeypatch)

    def save(self, folder, monkeypatch):
        engine = engine_of(monkeypatch, layerwise={"save_universal": True})
        train_engine(engine, 3)
        folder = folder / str(engine.world_size)
        engine.save_checkpoint(folder, tag="regular")
        expected = whole_states(engine)
        assert {key for _, key in expected} == KEYS
        if engine.global_rank == 0:
            torch.save(expected, folder / "expected.pt")

    @pytest.mark.world_size([1, 2, 3])
    @pytest.mark.parametrize("tag", ["regular", "regular_universal"])
    def test_resume(self, runs, tag, monkeypatch):
        engine = engine_of(monkeypatch, bucket_numel=10**6, layerwise={"layout": "lpt"})
        train_engine(engine, 1, first=40)
        for saved_by in ("1", "3"):
            engine.load_checkpoint(runs / saved_by, tag=tag)
            assert_equal_states(whole_states(engine), torch.load(runs / saved_by / "expected.pt"), saved_by)
            train_engine(engine, 1, first=50)

    @pytest.mark.world_size(2)
    def test_the_converter_loses_what_it_does_not_know_and_that_is_said(self, runs, tmp_path, monkeypatch):
        engine = engine_of(monkeypatch)
        convert(runs / "3" / "regular", tmp_path / "converted")
        with pytest.raises(LayerWiseError,
                           match="(fast_avg|row_avg|left|right|seen).pt is missing.*ds-layerwise to-universal"):
            engine.load_checkpoint(tmp_path, tag="converted")
        assert engine.optimizer.step_count == 0

    @pytest.mark.world_size([1, 3])
    def test_the_states_take_the_bytes_that_the_plan_says(self, monkeypatch):
        engine = engine_of(monkeypatch)
        planned = engine.optimizer.forecast()
        assert as_json(planned)["memory_bytes"][engine.global_rank]["states"] == bytes_of_states(engine)

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("ratio", [0.4, 1.0])
    def test_on_the_host(self, ratio, monkeypatch):
        plain, hosted = engine_of(monkeypatch), engine_of(monkeypatch, zero_optimization={
            "stage": 1, "reduce_bucket_size": 600, "offload_optimizer": {"device": "cpu", "ratio": ratio}})
        held = hosted.optimizer.forecast().memory[hosted.global_rank]
        assert sum(t.nbytes for t in internals.host_tensors(hosted)) == held.host
        train_engines((plain, hosted), 3)
        assert_equal_states(whole_states(hosted), whole_states(plain))
