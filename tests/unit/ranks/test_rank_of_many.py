"""A real engine as rank 0 of 512, on the path that devices take, over torch's fake process group."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_layerwise.optimizers import devices
from ds_layerwise.optimizers.rules import muon_family
from ds_layerwise.orthogonalize import batching, newton_schulz
from ds_layerwise.ranks.comm import streams
from ds_layerwise.ranks.owned import owned, reductions, weight_writes
from ds_layerwise.zero import run_state
from tests.support import streams as played_streams
from tests.support.harness import DistributedTest
from tests.support.launches import Launches, reads_of
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


#: Each side of Llama-3-8B is divided by it, and what the package takes at a time by its square.
SMALLER = 64


class TestOneOf8(DistributedTest):
    """Llama-3-8B in small, on rank 0 of 8, by what a step asks of its device."""

    world_size = 1
    init_distributed = False

    def step_of(self, stage, monkeypatch):
        """The launches of a step, and the lines of the package at which the host reads a number."""
        as_on_a_device(monkeypatch)
        monkeypatch.setattr(newton_schulz, "_normalised", newton_schulz._normalised_in_float64)
        monkeypatch.setattr(weight_writes, "_is_host", lambda masters: False)
        for module, name, times in ((weight_writes, "_AT_A_TIME", 1), (reductions, "_SQUARED_AT_A_TIME",
                                                                       devices.LONGER_ON_DEVICE)):
            monkeypatch.setattr(module, name, times * getattr(module, name) // SMALLER**2)
        for module in (muon_family, owned):
            monkeypatch.setattr(module, "max_batch_numel", lambda device: batching.MAX_BATCH_NUMEL // SMALLER**2)
        monkeypatch.setattr(muon_family.Orthogonalized, "full_batch_numel", batching.FULL_BATCH_NUMEL // SMALLER**2)
        bucket_numel = 50_000_000 // SMALLER**2
        zero = {"stage": stage, "reduce_bucket_size": bucket_numel, "overlap_comm": True}
        if stage == 3:
            # Vectors are below DeepSpeed's own, and matrices are not.
            zero["stage3_param_persistence_threshold"] = 100
        with rank_of_many(8, 8, Network()):
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(
                hidden_size=4096 // SMALLER, intermediate_size=14336 // SMALLER, num_hidden_layers=32,
                num_attention_heads=4, num_key_value_heads=1, vocab_size=128256 // SMALLER)).bfloat16()
            engine = start(model, ds_config(
                clip=1.0, bf16={"enabled": True}, params={"ns_method": "gram", "ns_dtype": "bf16"},
                layerwise={"reduction": "native", "alignment": 1}, zero_optimization=zero))
            tokens = torch.arange(8, device="cpu")[None]
            # DeepSpeed learns in two steps which parameters stay whole.
            for _ in range(3):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                with reads_of("ds_layerwise") as reads, Launches() as launches:
                    engine.step()
            engine.destroy()
        return sum(launches.found.values()), reads

    def test_a_step_is_few_launches_and_one_read(self, monkeypatch):
        """At stage 3, where a rank has no weights beside its masters, at most 1.3 times those of stage 1."""
        found = {}
        for stage in (1, 2, 3):
            found[stage], reads = self.step_of(stage, monkeypatch)
            assert list(reads.values()) == [1] and "step_agreement" in next(iter(reads)), reads
            monkeypatch.undo()
        assert max(found[1], found[2]) <= 2500 and found[3] <= 1.3 * found[1], found
