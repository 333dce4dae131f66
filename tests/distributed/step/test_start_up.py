"""Memory of the device that starting takes, against the plan."""

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch import nn

import ds_layerwise
from ds_layerwise.ranks.comm import object_gather
from ds_layerwise.zero import start_report
from tests.support import internals
from tests.support.harness import DistributedTest, device
from tests.support.live_memory import LiveMemory, uncounted
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, ds_config, start, train_engine

pytestmark = rooms("buffers", "forecast", "start_report")


class Stack(nn.Module):
    """Ten equal matrices and a vector."""

    def __init__(self, dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))
        self.norm = nn.LayerNorm(64)
        self.to(device=device(), dtype=dtype)


class TestStartUp(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("case, sections", [
        ("float32", {}), ("bfloat16", BF16),
        ("offloaded", {"bf16": {"enabled": True}, "offload": True})])
    def test_it_takes_a_bucket_beside_what_is_held(self, case, sections, monkeypatch):
        """A rank keeps little beside the parameters at stage 2: two copies of them would be the most it ever has."""
        offload = {"offload_optimizer": {"device": "cpu"}} if sections.pop("offload", False) else {}
        config = ds_config(stage=2, bucket_numel=2 * 64 * 64, **sections)
        config["zero_optimization"].update(offload)
        # Ranks agree over the hosts, and gloo's threads let go of the last messages at any later time.
        monkeypatch.setattr(object_gather, "_of_all", uncounted(object_gather._of_all))
        model = Stack(torch.float32 if case == "float32" else torch.bfloat16)
        size = sum(p.nbytes for p in model.parameters())
        with LiveMemory(p.data for p in model.parameters()) as memory:
            engine = start(model, config)
        forecast = engine.optimizer.forecast()
        held = forecast.memory[engine.optimizer.rank]
        # Parameters move one bucket at a time; what lives on the host is made one bucket at a time on the device.
        element_size = next(model.parameters()).element_size()
        bucket = max(element_size * bucket.numel for bucket in engine.optimizer.layout.buckets)
        expected = max(held.params + bucket, held.total + held.staging)
        on_host = sum(t.nbytes for t in internals.host_tensors(engine))
        assert size < 0.9 * expected and memory.peak <= expected + on_host + 256
        if not offload:
            assert memory.peak > 0.95 * expected
            assert expected < (2 if case == "float32" else 3) * size


class TestZeros(DistributedTest):
    @pytest.mark.parametrize("hook, warns", [({"hyperball": "own"}, True), ({"relative_update": True}, True),
                                             ({"hyperball": 2.0}, False), ({"radial_brake": [0.5, 1]}, False)])
    def test_a_matrix_of_zeros_that_stays_one_is_told(self, hook, warns, monkeypatch):
        warned = []
        monkeypatch.setattr(logger, "warning", lambda text, *_: warned.append(text))
        model = Net()
        nn.init.zeros_(model.tall.weight)
        engine = start(model, ds_config(params=hook))
        about = [text for text in warned if "all weights are 0" in text]
        assert len(about) == (warns and engine.global_rank == 0)
        assert all("ds_layerwise: tall.weight: all weights are 0" in text for text in about)
        train_engine(engine, 2)
        assert bool(model.tall.weight.any()) is not warns


class TestLeftOut(DistributedTest):
    world_size = 1

    def test_parameters_of_no_group_are_listed(self):
        five = "experts, transposed, embed.weight, square.weight, square.bias"
        for count, told in ((1, "experts"), (5, five), (7, f"{five} and 2 more"), (0, None)):
            model = Net(odd=True, frozen=True)
            trainable = [p for p in model.parameters() if p.requires_grad and p.numel()]
            engine, *_ = ds_layerwise.initialize(model=model, model_parameters=trainable[count:], config=ds_config())
            lines = [line for line in engine.optimizer.describe().splitlines() if "group" in line]
            assert lines == [f"in no parameter group, so not trained here: {told}"] * bool(told)
            engine.destroy()


class TestDevice(DistributedTest):
    """Requests to the device at start."""

    def test_former_memory_of_parameters_is_given_back_after_the_move(self, monkeypatch):
        held = []

        def give_back(accelerator):
            held.append(all(p.data_ptr() == start_of[p] for p in model.parameters()))

        model = Net()
        start_of = {p: p.data_ptr() for p in model.parameters()}
        monkeypatch.setattr(type(get_accelerator()), "empty_cache", give_back)
        start(model, ds_config())
        assert held == [False]

    def test_the_table_asks_for_the_timer_where_overlap_does(self, monkeypatch):
        monkeypatch.setattr(start_report, "timer_told", lambda timer, device: f"timer {timer.enabled} {device}")
        for overlap in (True, False):
            engine = start(Net(), ds_config(layerwise={"overlap_param_gather": overlap}))
            assert ("timer True cpu" in engine.optimizer.describe()) == overlap
            engine.destroy()
