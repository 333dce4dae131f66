"""Weights that a user writes between steps: masters follow, and nothing else is taken for a write."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from ds_layerwise.errors import LayerWiseError, StepError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, assert_same_run, masters, whole_states
from tests.support.expected import assert_masters_are, oracle_step, start_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    relative_error,
    start,
    train_engine,
    train_engines,
)

pytestmark = rooms("weight_writes")


def assert_weights_are_masters(engine):
    for name, value in masters(engine).items():
        p = engine.module.get_parameter(name)
        assert torch.equal(p, value.to(p.dtype)), name


def written_config(stage, ratio, dtype):
    sections = BF16 if dtype == torch.bfloat16 else {}
    config = ds_config(stage=stage, **sections)
    if ratio:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    return config


def write_data(module, values):
    for name, value in values.items():
        module.get_parameter(name).data.copy_(value)


@torch.no_grad()
def write_without_grad(module, values):
    for name, value in values.items():
        module.get_parameter(name).copy_(value)


@torch.no_grad()
def write_at_once(module, values):
    torch._foreach_copy_([module.get_parameter(name) for name in values], list(values.values()))


WAYS_TO_WRITE = {"load_state_dict": lambda module, values: module.load_state_dict(values, strict=False),
                 "data": write_data, "no_grad": write_without_grad, "foreach": write_at_once}


class TestWeights(DistributedTest):
    @pytest.mark.parametrize("way", WAYS_TO_WRITE)
    def test_writes_hold_and_are_said_once(self, way, capsys):
        """Masters follow, as in fp32, where they are the parameters; Muon's momentum and Adam's averages stay."""
        stage, ratio, dtype = {"load_state_dict": (1, 0, torch.bfloat16), "data": (2, 0, torch.bfloat16),
                               "no_grad": (1, 0.5, torch.bfloat16), "foreach": (2, 0, torch.float32)}[way]
        engine = start(Net(tied=True), written_config(stage, ratio, dtype))
        oracle = start_oracle(Net(tied=True), param_dtype=dtype, accum_dtype=dtype)
        for step in range(4):
            if step in (1, 2):
                written = {name: (p * -0.5).add(0.01) for name, p in trainable(engine.module).items()}
                WAYS_TO_WRITE[way](engine.module, written)
                for name, value in written.items():
                    oracle.params[name] = value.detach().float().clone()
            train_engine(engine, 1, first=step)
            oracle_step(oracle, step)
            assert_masters_are(engine, oracle.params)
        assert_same_on_all_ranks(engine.module)
        said = capsys.readouterr().out.count("float32 masters were set to them")
        assert said == (dtype == torch.bfloat16 and dist.get_rank() == 0)
        if dtype == torch.bfloat16:
            assert_weights_are_masters(engine)

    @pytest.mark.parametrize("way", ["load_state_dict", "foreach"])
    def test_a_write_of_one_rank_alone_is_an_error_on_all(self, way):
        stage, dtype = {"load_state_dict": (1, torch.bfloat16), "foreach": (2, torch.float32)}[way]
        engine = train_engine(start(Net(), written_config(stage, 0, dtype)), 1)
        before = masters(engine)
        values = {"square.weight": engine.module.square.weight.detach() * -0.5}
        if dist.get_rank() == 1:
            WAYS_TO_WRITE[way](engine.module, values)
        for _ in range(2):
            with pytest.raises(LayerWiseError, match="square.weight was written since the last step, and is not the "
                                                     "same on ranks 0 and 1; write the same values on every rank"):
                train_engine(engine, 1, first=1)
            engine.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in masters(engine).items() if "square" not in name)
        # The way out; on the other rank nobody counts this.
        dist.broadcast(engine.module.square.weight.data, 1)
        train_engine(engine, 1, first=1)
        found, (name, value) = masters(engine), *values.items()
        oracle = start_oracle(Net(), param_dtype=dtype, accum_dtype=dtype)
        oracle_step(oracle, 0)
        oracle.params[name] = value.float()
        oracle_step(oracle, 1)
        assert relative_error(found[name], oracle.params[name]) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_write_through_data_of_one_rank_is_found(self, dtype):
        sections = BF16 if dtype == torch.bfloat16 else {}
        engine = train_engine(start(Net(), ds_config(layerwise={"check_writes": 2}, **sections)), 1)
        matrix = engine.module.square.weight
        if dist.get_rank() == 1:
            matrix.data.mul_(2)
        told = "square.weight was written since the last step, and is not the same on ranks 0 and 1"
        with pytest.raises(LayerWiseError, match=told):
            engine.optimizer.reload_weights()
        with pytest.raises(LayerWiseError, match=told):
            train_engine(engine, 1, first=1)
        engine.zero_grad()
        dist.broadcast(matrix.data, 1)
        engine.optimizer.reload_weights()
        assert_weights_are_masters(engine)
        train_engine(engine, 1, first=1)

    @pytest.mark.parametrize("ratio, sections", [
        (0, {}), (0.5, {}), (0, {"master_dtype": "bfloat16+remainder"})])
    def test_saves_and_reads_while_an_average_is_tried_leave_masters_alone(self, ratio, sections, tmp_path):
        engine, plain = (start(Net(), written_config(1, ratio, torch.bfloat16)) for _ in range(2))
        if sections:
            engine, plain = (start(Net(), ds_config(bf16={"enabled": True}, layerwise=sections)) for _ in range(2))
        for step in range(4):
            if step == 2:
                kept = {name: p.detach().clone() for name, p in trainable(engine.module).items()}
                average = {name: p * 0.5 + 0.01 for name, p in kept.items()}
                write_data(engine.module, average)
                assert torch.equal(safe_get_full_fp32_param(engine.module.experts), average["experts"].float())
                engine.save_checkpoint(str(tmp_path), tag="tried")
                engine.optimizer.save_state_dict_to_file(tmp_path / "tried.pt")
                torch.distributed.checkpoint.save(engine.optimizer.sharded_state_dict(), checkpoint_id=tmp_path / "dcp")
                write_data(engine.module, kept)
            train_engines((engine, plain), 1, first=step)
        assert not internals.owned(engine).written
        assert_same_run(engine, plain)
        for load in (lambda: plain.load_checkpoint(str(tmp_path), tag="tried"),
                     lambda: plain.optimizer.load_state_dict_from_file(tmp_path / "tried.pt"),
                     lambda: plain.optimizer.load_sharded_state_dict(tmp_path / "dcp")):
            train_engine(plain, 1)
            load()
            for name, value in masters(plain).items():
                assert torch.equal(value, average[name].float()), name
                assert torch.equal(plain.module.get_parameter(name), average[name]), name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_is_saved_while_the_memory_of_an_average_is_swapped_in(self, dtype, tmp_path):
        engine = train_engine(start(Net(), written_config(1, 0, dtype)), 1)
        param = engine.module.square.weight
        kept, param.data = param.data, param.detach() * 0.5
        for save in (lambda: engine.save_checkpoint(str(tmp_path), tag="swapped"),
                     lambda: engine.optimizer.save_state_dict_to_file(tmp_path / "swapped.pt"),
                     engine.optimizer.sharded_state_dict):
            with pytest.raises(StepError, match="square.weight was replaced since this engine was made.*write into it "
                                                "in place"):
                save()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        param.data = kept
        engine.save_checkpoint(str(tmp_path))
        train_engine(engine, 1, first=1)

    def test_nothing_else_is_taken_for_a_write(self, tmp_path):
        """Masters keep the precision that the parameters lack."""
        engine = start(Net(odd=True), written_config(1, 0.5, torch.bfloat16))
        plain = start(Net(odd=True), written_config(1, 0, torch.bfloat16))
        for step in range(6):
            engine.save_checkpoint(str(tmp_path), tag=str(step))
            if step == 1:
                engine.load_checkpoint(str(tmp_path), tag=str(step))
            if step == 2:
                engine.offload_states()
                engine.reload_states()
            if step == 3:
                average = {name: torch.randn_like(p) for name, p in trainable(engine.module).items()}
                kept = {name: p.detach().clone() for name, p in trainable(engine.module).items()}
                write_data(engine.module, average)
                write_data(engine.module, kept)
            if step == 4:
                # Halfway between two bfloat16 numbers, but for less than float32 tells.
                value = torch.full((3, 6, 9), 1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
                for each in (engine, plain):
                    safe_set_full_fp32_param(each.module.experts, value)
            train_engines((engine, plain), 1, first=step)
        assert not internals.owned(engine).written
        assert_equal_states(whole_states(engine), whole_states(plain))
