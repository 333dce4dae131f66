"""States of any number and shape are saved and resumed, not only Muon's and Adam's."""

import pytest
import torch

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero import optimizer
from tests.checkpoints import assert_equal_states, whole_states
from tests.harness import DistributedTest
from tests.training import Net, ds_config, start, train_engine
from tests.universal import convert


class Preconditioned:
    """Three moments, two of them named as DeepSpeed's converter knows them, two square statistics, and a count."""

    state_keys = ("exp_avg", "exp_avg_sq", "fast_avg")
    family, gradient_average = "preconditioned", "exp_avg"

    def init_state(self, param):
        rows, cols = param.shape[-2:]
        eye = [torch.eye(n).expand(*param.shape[:-2], n, n).clone() for n in (rows, cols)]
        return {**{key: torch.zeros_like(param) for key in self.state_keys}, "left": eye[0], "right": eye[1],
                "step": torch.zeros(()), "seen": torch.zeros(3, dtype=torch.int64)}

    def update_(self, params, grads, states, hyper):
        for param, grad, state in zip(params, grads, states, strict=True):
            for key, beta in zip(self.state_keys, (0.9, 0.99, 0.5), strict=True):
                state[key].lerp_(grad, 1 - beta)
            state["left"].add_(grad @ grad.mT)
            state["right"].add_(grad.mT @ grad)
            state["step"] += 1
            state["seen"][int(state["step"]) % 3] += 1
            param.sub_(state["fast_avg"], alpha=hyper.lr)


def engine_of(monkeypatch, **changes):
    monkeypatch.setattr(optimizer, "matrix_rule", lambda config: Preconditioned())
    return start(Net(), ds_config(**changes))


class TestAnyState(DistributedTest):
    @pytest.mark.world_size([1, 3])
    def test_1_save(self, class_tmpdir, monkeypatch):
        engine = engine_of(monkeypatch, layerwise={"save_universal": True})
        train_engine(engine, 3)
        folder = class_tmpdir / str(engine.world_size)
        engine.save_checkpoint(folder, tag="regular")
        expected = whole_states(engine)
        assert {key for _, key in expected} == {"fp32", "exp_avg", "exp_avg_sq", "fast_avg", "left", "right", "seen",
                                                "step"}
        if engine.global_rank == 0:
            torch.save(expected, folder / "expected.pt")

    @pytest.mark.world_size([1, 2, 3])
    @pytest.mark.parametrize("tag", ["regular", "regular_universal"])
    def test_2_resume(self, class_tmpdir, tag, monkeypatch):
        engine = engine_of(monkeypatch, bucket_numel=10**6, layerwise={"layout": "lpt"})
        train_engine(engine, 1, first=40)
        for saved_by in ("1", "3"):
            engine.load_checkpoint(class_tmpdir / saved_by, tag=tag)
            assert_equal_states(whole_states(engine), torch.load(class_tmpdir / saved_by / "expected.pt"), saved_by)
            train_engine(engine, 1, first=50)

    @pytest.mark.world_size(2)
    def test_3_the_converter_loses_what_it_does_not_know_and_that_is_said(self, class_tmpdir, monkeypatch):
        engine = engine_of(monkeypatch)
        convert(class_tmpdir / "3" / "regular", class_tmpdir / "3" / "converted")
        with pytest.raises(LayerWiseError, match="(fast_avg|left|right|seen).pt is missing.*ds-layerwise to-universal"):
            engine.load_checkpoint(class_tmpdir / "3", tag="converted")
        assert engine.optimizer.step_count == 0
