"""Regular checkpoints through the engine: exact resume, and what DeepSpeed's own tools read in them."""

import os
import subprocess
import sys

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from ds_layerwise.errors import LayerwiseError
from tests.harness import DistributedTest
from tests.training import Net, allow_fp16, ds_config, start, train_engine, weights


def states(engine):
    return {(name, key): value.clone() for name, state in engine.optimizer._owned.states.items()
            for key, value in state.items()}


def masters(engine):
    """Whole masters by name, put together from all ranks."""
    optimizer = engine.optimizer
    whole = {}
    for name, p in optimizer._params.items():
        value = torch.zeros(p.numel())
        for pieces in optimizer._owned.pieces:
            for piece in pieces:
                if piece.name == name:
                    value[piece.param_start:piece.param_start + piece.numel] = optimizer._owned.masters.piece(name)
        dist.all_reduce(value)
        whole[name] = value.view(p.shape)
    return whole


class TestResume(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("overlap_gather", [False, True])
    def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(self, precision, overlap_gather, tmp_path):
        allow_fp16()
        sections = {} if precision == "fp32" else {precision: {"enabled": True}}
        if precision == "fp16":
            sections["fp16"]["initial_scale_power"] = 4
        config = ds_config(gas=2, clip=5.0, layerwise={"overlap_param_gather": overlap_gather}, scheduler={
            "type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4}}, **sections)
        engine = start(Net(odd=True), config)
        train_engine(engine, 3, gas=2)
        engine.save_checkpoint(tmp_path, client_state={"note": "kept"})
        train_engine(engine, 3, gas=2, first=3)

        resumed = start(Net(odd=True), config)
        train_engine(resumed, 1, gas=2, first=40)
        _, client_state = resumed.load_checkpoint(tmp_path)
        assert client_state["note"] == "kept" and resumed.global_steps == 3
        assert resumed.optimizer.step_count == 3
        train_engine(resumed, 3, gas=2, first=3)
        engine.optimizer.wait_for_params()
        resumed.optimizer.wait_for_params()
        assert torch.equal(weights(resumed.module), weights(engine.module))
        left, right = states(engine), states(resumed)
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert torch.equal(value, right[key]), key
        assert resumed.get_lr() == engine.get_lr()


class TestDeepSpeedsTools(DistributedTest):
    world_size = [1, 2, 3]

    def test_zero_to_fp32_gives_the_masters(self, tmp_path):
        engine = start(Net(odd=True), ds_config(bf16={"enabled": True}))
        train_engine(engine, 3)
        engine.save_checkpoint(tmp_path)
        expected = masters(engine)
        found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        for name, value in expected.items():
            assert torch.equal(found[name], value), name

    def test_the_converter_finds_every_state(self, tmp_path):
        engine = start(Net(), ds_config(bf16={"enabled": True}))
        train_engine(engine, 3)
        engine.save_checkpoint(tmp_path, tag="saved")
        expected = masters(engine)
        if dist.get_rank() == 0:
            subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder",
                            str(tmp_path / "saved"), "--output_folder", str(tmp_path / "universal"),
                            "--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"],
                           check=True, capture_output=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
        dist.barrier()
        for name, value in expected.items():
            folder = tmp_path / "universal" / "zero" / name
            found = torch.load(folder / "fp32.pt", weights_only=False)["param"]
            assert torch.equal(found.view(value.shape), value), name
        for (name, key), value in states(engine).items():
            if key == "step":
                continue
            travels_as = "exp_avg" if key == "momentum_buffer" else key
            found = torch.load(tmp_path / "universal" / "zero" / name / f"{travels_as}.pt", weights_only=False)["param"]
            piece = next(p for pieces in engine.optimizer._owned.pieces for p in pieces if p.name == name)
            assert torch.equal(found.flatten()[piece.param_start:piece.param_start + piece.numel], value.flatten())


class TestRefusedLoads(DistributedTest):
    world_size = 2

    def test_another_layout_is_refused_on_every_rank(self, tmp_path):
        engine = start(Net(), ds_config(bucket_numel=600))
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        other = start(Net(), ds_config(bucket_numel=10**9))
        with pytest.raises(LayerwiseError, match="resume with as many ranks.*reduce_bucket_size"):
            other.load_checkpoint(tmp_path)

    def test_weights_alone_can_always_be_loaded(self, tmp_path):
        engine = start(Net(), ds_config(bucket_numel=600, bf16={"enabled": True}))
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path)
        other = start(Net(), ds_config(bucket_numel=10**9, bf16={"enabled": True}))
        other.load_checkpoint(tmp_path, load_optimizer_states=False, load_module_only=True)
        assert torch.equal(weights(other.module), weights(engine.module))
        for name, value in masters(other).items():
            assert torch.equal(value, engine.module.get_parameter(name).detach().float()), name
