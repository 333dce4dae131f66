"""A real engine as rank 0 of 512, on the path that devices take, over torch's fake process group."""

import sys

import pytest
import torch

from ds_layerwise.ranks.comm import streams
from ds_layerwise.zero import run_state
from tests.support import streams as played_streams
from tests.support.harness import DistributedTest
from tests.support.rank_of_many import Network, rank_of_many
from tests.support.rooms import rooms
from tests.support.training import Net, allow_fp16, ds_config, reduced_gradients, start

pytestmark = rooms("bucket_transfers", "run_state", "nodes", "object_gather", "grad_sync")

PER_NODE = 8


def as_on_a_device(monkeypatch):
    """Streams, and collectives of NCCL's, whatever the device."""
    device = played_streams.Device()
    monkeypatch.setattr(streams, "get_accelerator", lambda: device)
    monkeypatch.setattr(streams.SideStream, "keep", lambda self, tensor: None)
    make = run_state.__dict__["make_wires"]
    monkeypatch.setattr(run_state, "make_wires", lambda groups, where, **kwargs: make(
        groups, where, **{**kwargs, "device": torch.device("cuda")}))


def train(engine, value=1.0):
    engine.backward(sum(p.sum() for p in engine.module.parameters()) * value)
    found = reduced_gradients(engine)
    engine.step()
    return found


class TestOneOf512(DistributedTest):
    world_size = 1
    init_distributed = False

    @pytest.mark.parametrize("stage", [1, 2])
    def test_sums_in_float16_have_room_for_512_gradients(self, stage, monkeypatch):
        """Each is 40,000, and two of them are no float16."""
        allow_fp16()
        as_on_a_device(monkeypatch)
        network = Network()
        with rank_of_many(512, PER_NODE, network):
            engine = start(Net(), ds_config(stage=stage, fp16={"enabled": True, "loss_scale": 1}, layerwise={
                "reduction": "native"}))
            found = train(engine, 40000.0)
            # What arrives in an exchange is nobody's here.
            layout = engine.optimizer.layout
            summed = {name: value for name, (_, value) in found.items() if layout.bucket_of(name).transport != "cuts"}
            assert summed and all(value.eq(40000).all() for value in summed.values()), summed
            assert not engine.optimizer.overflow and engine.skipped_steps == 0
            engine.destroy()
        assert "reduce_scatter" in {kind for kind, *_ in network.begun}

    def test_python_work_of_a_step_does_not_grow_with_ranks(self, monkeypatch):
        as_on_a_device(monkeypatch)
        found = {}
        for size in (PER_NODE, 512):
            network = Network()
            with rank_of_many(size, PER_NODE, network) as (gathers, groups):
                engine = start(Net(), ds_config(clip=1.0, bf16={"enabled": True}, layerwise={
                    "reduction": "native"}))
                at_start, made = gathers.calls, groups.calls
                train(engine)
                network.begun.clear()
                begun, calls = gathers.calls, 0

                def profile(frame, event, arg):
                    nonlocal calls
                    calls += event in ("call", "c_call")

                sys.setprofile(profile)
                train(engine)
                sys.setprofile(None)
                assert gathers.calls == begun and groups.calls == made
                found[size] = at_start, len(network.begun), calls
                engine.destroy()
        few, many = found[PER_NODE], found[512]
        assert many[0] <= few[0] + 2, found
        assert 0 < many[1] <= 2 * few[1] and many[2] < 1.3 * few[2], found
