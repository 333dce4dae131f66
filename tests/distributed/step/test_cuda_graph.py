"""Engines whose updates are captured and replayed, on graphs that a CPU plays, train as those without."""

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.errors import ConfigError
from ds_layerwise.zero import run_state
from tests.support.harness import DistributedTest
from tests.support.played_graph import PlayedGraph
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, assert_same_on_all_ranks, ds_config, start, train_engine, weights

pytestmark = rooms("captured", "owned")


@pytest.fixture
def played(monkeypatch):
    """Graphs on a CPU, where the package asks for numbers because that costs nothing: a capture keeps the answers."""
    monkeypatch.setattr(run_state, "graphs_of", lambda device: PlayedGraph)
    monkeypatch.setattr(PlayedGraph, "refuses", ())
    PlayedGraph.made.clear()


def settings(step):
    """Settings of a step that a scheduler or a script could choose; weight decay begins after the capture."""
    return {"lr": 0.003 / (1 + step), "weight_decay": 0.1 * (step > 2), "momentum": 0.95 - 0.1 * (step % 3),
            "betas": (0.9 - 0.1 * (step % 2), 0.95)}


def train(engine, steps, first=0):
    for step in range(first, first + steps):
        for group in engine.optimizer.param_groups:
            group.update(settings(step))
        train_engine(engine, 1, gas=engine.gradient_accumulation_steps(), first=step)
    return engine


def same(engine, expected):
    torch.testing.assert_close(weights(engine.module), expected, rtol=2e-5, atol=2e-5)


class TestCudaGraph(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("stage, options", [
        (1, {"gas": 2}), (1, {"clip": 0.5, **BF16}), (2, {"clip": 0.5}), (3, {"clip": 0.5, **BF16})], ids=str)
    def test_trains_as_without_and_resumes_from_its_checkpoints(self, stage, options, played, tmpdir):
        plain = train(start(Net(), ds_config(stage=stage, **options)), 6)
        expected = weights(plain.module)
        config = ds_config(stage=stage, layerwise={"cuda_graph": True}, **options)
        engine = train(start(Net(), config), 4)
        captured = len(PlayedGraph.made)
        assert captured == len(engine.optimizer.layout.buckets)
        assert {graph.replays for graph in PlayedGraph.made} == {3}
        engine.save_checkpoint(tmpdir)
        same(train(engine, 2, first=4), expected)
        # Into the engine whose graphs have read the weights that the load replaces, and into a new one.
        engine.load_checkpoint(tmpdir)
        same(train(engine, 2, first=4), expected)
        fresh = start(Net(), config)
        fresh.load_checkpoint(tmpdir)
        same(train(fresh, 2, first=4), expected)
        assert_same_on_all_ranks(engine.module)

    def test_a_parameter_that_is_frozen_for_a_while_trains_again(self, played):
        """All ranks freeze it before the capture, so that the first graphs leave it out."""
        engines = [start(Net(), ds_config(layerwise={"cuda_graph": graph})) for graph in (False, True)]
        for steps, frozen in ((3, True), (4, False)):
            for engine in engines:
                engine.module.tall.weight.requires_grad_(not frozen)
                before = engine.module.tall.weight.detach().clone()
                train(engine, steps, first=3 * (not frozen))
                assert torch.equal(engine.module.tall.weight, before) is frozen
        same(engines[1], weights(engines[0].module))

    @pytest.mark.parametrize("changes, says", [
        ({"layerwise": {"qk_clip": {"threshold": 100.0, "attention": []}}}, "qk_clip"),
        ({"layerwise": {"monitor": {"update_rms": True}}}, "with layerwise.monitor every update is watched"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
         "with zero_optimization.offload_optimizer states come from the host"),
        ({"optimizer": {"type": "LayerWise", "params": {"matrix_optimizer": "soap"}}}, "has optimizer soap"),
        ({"optimizer": {"type": "LayerWise", "params": {"momentum_dtype": "bfloat16", "stochastic_rounding": True}}},
         "has stochastic_rounding, which asks the host"),
        ({}, "the model is on cpu, which has no CUDA graphs")], ids=str)
    def test_an_update_that_no_graph_can_replay_is_refused(self, changes, says):
        config = {**ds_config(), **changes}
        config["layerwise"] = {"cuda_graph": True, **config["layerwise"]}
        with pytest.raises(ConfigError, match=says):
            start(Net(), config)
        dist.barrier()
