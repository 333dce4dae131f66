"""Training on any device; where there are GPUs, examples/benchmarks/gpu.py runs these over NCCL."""

import os

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_layerwise.plan.layout.layout import Slot
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.sync.bucket_transfers import make_wires
from tests.support.expected import by_the_oracle, compared_to
from tests.support.harness import DistributedTest, device
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    assert_same_on_all_ranks,
    ds_config,
    relative_error,
    start,
    train_engine,
    train_engines,
    weights,
)
from tests.support.transports import bucket_of, plan_in_cuts

pytestmark = [*rooms("bucket_transfers", "grad_sync", "param_sync", "host_memory", "optimizer"), pytest.mark.gpu]

REDUCTIONS = ("native", "ordered")


class TestWires(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("transport", ["even", "cuts"])
    def test_sums_of_whole_numbers_and_back(self, transport, reduction):
        rank, size = dist.get_rank(), dist.get_world_size()
        numels = {"even": [64] * size, "cuts": [0, 64 * size, *[0] * (size - 2)]}[transport]
        slots = tuple(Slot(str(i), sum(numels[:i]), numel) for i, numel in enumerate(numels) if numel)
        bucket = bucket_of(0, "bfloat16", True, 0, numels, slots, transport=transport)
        wire = make_wires({1: None}, [0] * size, native=reduction == "native", device=device())[1]
        start, stop = 64 * rank, 64 * (rank + 1)
        rows = torch.randint(-9, 9, (size, bucket.numel), generator=torch.Generator().manual_seed(3)).bfloat16()
        out = torch.full((stop - start,), torch.nan, device=device())
        wire.reduce(rows[rank].to(device()), out, divide_by=4.0, wire_dtype=torch.bfloat16,
                    turn=Turn(device())).wait()
        assert torch.equal(out.cpu(), rows.float().sum(0)[start:stop] / 4)
        memory = torch.full((bucket.numel,), torch.nan, dtype=torch.bfloat16, device=device())
        memory[start:stop] = rows[0, start:stop].to(device())
        wire.gather(memory).wait()
        assert torch.equal(memory.cpu(), rows[0])


class TestTraining(DistributedTest):
    world_size = [1, 2, 4]

    def trained(self, *, offload=None, **config):
        """The weights after three steps in bf16."""
        config = ds_config(gas=2, clip=5.0, bf16={"enabled": True}, **config)
        if offload is not None:
            config["zero_optimization"]["offload_optimizer"] = offload
        engine = train_engine(start(Net(), config), 3, gas=2)
        engine.optimizer.wait_for_params()
        found = weights(engine.module).cpu()
        assert_same_on_all_ranks(engine.module)
        engine.destroy()
        return found

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_gradients_are_exact_and_weights_the_oracles(self, stage, reduction):
        expected = by_the_oracle(Net, 3, gas=2)
        engine = start(Net(), ds_config(gas=2, stage=stage, layerwise={"reduction": reduction}))

        train_engine(engine, 3, gas=2, check=compared_to(expected))
        assert_same_on_all_ranks(engine.module)
        for name, p in engine.module.named_parameters():
            assert relative_error(p.detach().cpu(), expected.params[name]) < 1e-4, name

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_overlap_changes_no_bit(self, stage, reduction, monkeypatch):
        plan_in_cuts(monkeypatch, lambda bucket: bucket.index % 2)
        both = [self.trained(stage=stage, overlap=overlap, layerwise={
            "reduction": reduction, "overlap_param_gather": overlap}) for overlap in (False, True)]
        assert torch.equal(*both)

    @pytest.mark.parametrize("pin_memory", [True, False])
    def test_host_memory_changes_no_bit(self, pin_memory):
        # Batches end at buckets where something comes from the host; which kernel a device takes may depend on that.
        own = {} if get_accelerator().device_name() == "cpu" else {"layerwise": {"batch_matrices": False}}
        assert torch.equal(self.trained(**own), self.trained(
            offload={"device": "cpu", "pin_memory": pin_memory}, **own))

    def test_a_resumed_run_does_what_an_unbroken_one_did(self, class_tmpdir):
        config = ds_config(bf16={"enabled": True})
        engine, other = start(Net(), config), start(Net(), config)
        train_engine(engine, 2)
        engine.save_checkpoint(str(class_tmpdir / str(dist.get_world_size())))
        other.load_checkpoint(str(class_tmpdir / str(dist.get_world_size())))
        train_engines((engine, other), 2, first=2)
        assert torch.equal(weights(engine.module), weights(other.module))


class TestInitialize(DistributedTest):
    world_size = [1, 2, 4]
    init_distributed = False

    def test_a_process_that_has_not_chosen_its_device(self):
        if get_accelerator().device_name() != "cpu":
            get_accelerator().set_device(0)
        engine = start(Net(), ds_config())
        assert engine.device.index in (None, int(os.environ["LOCAL_RANK"]))
        train_engine(engine, 1)
        assert_same_on_all_ranks(engine.module)
        engine.destroy()
        dist.destroy_process_group()
