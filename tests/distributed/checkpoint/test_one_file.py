"""Masters and states of whole parameters in one file, outside of the engine's checkpoints."""

import contextlib
import io

import deepspeed.comm as dist
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ds_layerwise.checkpoint import single_file
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, masters, on_rank_0, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import BF16, Net, ds_config, start, train_engine, weights

pytestmark = rooms("optimizer", "single_file", "whole_states", "checkpointing", "plain_values")

ADAFACTOR = {"type": "LayerWise", "params": {"lr": 0.003, "matrix_optimizer": "torch.optim:Adafactor"}}
CONFIGS = {"fp32": {}, "stage2": {"stage": 2}, "bf16": BF16, "any": {"optimizer": ADAFACTOR},
           "host": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}}


class TestOneFile(DistributedTest):

    @pytest.fixture
    def saved(self, class_tmpdir):
        """Files that are called as the number of ranks that wrote them and the config."""
        return made_once(class_tmpdir / "saved", [1, 3], self.save)

    def save(self, folder):
        for name, changes in CONFIGS.items():
            engine = train_engine(start(Net(), ds_config(**changes)), 3)
            path = folder / f"{engine.world_size}_{name}"
            engine.optimizer.save_state_dict_to_file(path)
            expected = whole_states(engine)
            train_engine(engine, 2, first=3)
            later = whole_states(engine)
            if engine.global_rank == 0:
                assert [each.name for each in folder.glob(f"{path.name}*")] == [path.name]
                torch.save((expected, later), f"{path}.expected")

    @pytest.mark.world_size([1, 2, 3])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_run_of_any_size_goes_on_from_it(self, saved, name):
        for saved_by in (1, 3):
            path = saved / f"{saved_by}_{name}"
            engine = train_engine(start(Net(), ds_config(bucket_numel=10**6, **CONFIGS[name])), 1, first=40)
            engine.optimizer.load_state_dict_from_file(path)
            at_save, later = torch.load(f"{path}.expected")
            assert_equal_states(whole_states(engine), at_save)
            assert engine.optimizer.step_count == 3
            for param_name, value in masters(engine).items():
                param = trainable(engine.module)[param_name]
                assert torch.equal(param.detach(), value.to(param.dtype)), param_name
            train_engine(engine, 2, first=3)
            if saved_by == engine.world_size:
                assert_equal_states(whole_states(engine), later)

    @pytest.mark.world_size(2)
    def test_every_master_and_state_is_in_it(self, saved):
        engine = start(Net(), ds_config())
        expected, _ = torch.load(saved / "3_fp32.expected")
        content = load_file(saved / "3_fp32")
        shapes = {name: p.shape for name, p in trainable(engine.module).items()}
        found = {}
        for key, value in content.items():
            kind, _, name = key.partition(".")
            if kind == "master":
                found[name, "fp32"] = value.view(-1)
                assert value.shape == shapes[name]
            elif kind == "state":
                name, _, key = name.rpartition(".")
                found[name, key] = value.view(-1) if value.dim() else value
                assert key == "step" or value.shape == shapes[name]
        assert_equal_states(found, expected)

    @pytest.mark.world_size(2)
    def test_weights_alone(self, saved):
        engine = train_engine(start(Net(), ds_config()), 1, first=40)
        before = whole_states(engine)
        engine.optimizer.load_state_dict_from_file(saved / "3_fp32", states=False)
        expected, _ = torch.load(saved / "3_fp32.expected")
        for (name, key), value in whole_states(engine).items():
            assert torch.equal(value, (expected if key == "fp32" else before)[name, key]), (name, key)
        assert engine.optimizer.step_count == 1

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("name", ["fp32", "bf16"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_a_parameter_that_is_frozen_now_has_its_weights_too(self, saved, name, inside):
        expected, _ = torch.load(saved / f"3_{name}.expected")
        module, rename = Net(frozen=True), {}
        with torch.no_grad():
            module.tall.weight.zero_(), module.norm.bias.fill_(7)
        if inside:
            outer = nn.Module()
            outer.inner, rename = checkpoint_wrapper(module), {"*": "inner._checkpoint_wrapped_module.*"}
        engine = start(outer if inside else module, ds_config(layerwise={"rename": rename}, **CONFIGS[name]))
        before = whole_states(engine)
        for states in (False, True):
            with torch.no_grad():
                module.tall.weight.zero_(), module.norm.bias.fill_(7)
            engine.optimizer.load_state_dict_from_file(saved / f"3_{name}", states=states)
            for of, param in module.named_parameters():
                assert torch.equal(param.detach().view(-1), expected[of, "fp32"].to(param.dtype)), of
            for (of, key), value in whole_states(engine).items():
                wanted = expected if states or key == "fp32" else {(of, key): before[of, key]}
                assert torch.equal(value, wanted[of.rpartition("_module.")[2], key] if wanted is expected
                                   else wanted[of, key]), (of, key)

    @pytest.mark.world_size(2)
    def test_a_frozen_parameter_is_not_in_it(self, tmp_path):
        engine = train_engine(start(Net(frozen=True), ds_config()), 1)
        engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        module = Net(frozen=True)
        with torch.no_grad():
            module.tall.weight.fill_(7)
        other = start(module, ds_config())
        other.optimizer.load_state_dict_from_file(tmp_path / "file")
        assert_equal_states(whole_states(other), whole_states(engine))
        assert torch.equal(module.tall.weight, torch.full((40, 12), 7.0))
        with pytest.raises(LayerWiseError, match="lacks norm.bias, tall.weight, which the model has; re"):
            start(Net(), ds_config()).optimizer.load_state_dict_from_file(tmp_path / "file")

    @pytest.mark.world_size(2)
    def test_a_parameter_that_is_frozen_now_and_has_another_shape_is_an_error(self, saved):
        module = Net()
        module.tall.weight = nn.Parameter(torch.ones(12, 40), requires_grad=False)
        engine = start(module, ds_config())
        before = whole_states(engine)
        with pytest.raises(LayerWiseError, match=r"tall.weight is \(40, 12\) in the checkpoint, \(12, 40\) in"):
            engine.optimizer.load_state_dict_from_file(saved / "3_fp32")
        assert_equal_states(whole_states(engine), before)
        assert torch.equal(module.tall.weight, torch.ones(12, 40))

    @pytest.mark.world_size(2)
    def test_a_spoiled_file_changes_nothing(self, saved, tmp_path):
        engine = train_engine(start(Net(), ds_config()), 1, first=40)
        before, of_model = whole_states(engine), weights(engine).clone()

        def edited(change):
            content = load_file(saved / "3_fp32")
            change(content)
            save_file(content, tmp_path / "edited")

        def cut():
            (tmp_path / "edited").write_bytes((saved / "3_fp32").read_bytes()[:-100])

        def other():
            content = load_file(saved / "3_fp32")
            content["ds_layerwise"] = content["ds_layerwise"][:-50].clone()
            save_file(content, tmp_path / "edited")

        for make, message in [
            (lambda: None, "edited is not a file; every rank reads it"),
            (cut, "edited is not a complete safetensors file"),
            (other, "edited is damaged: its header or its checksums differ from the saved ones"),
            (lambda: edited(lambda content: content.update({"master.tall.weight": torch.zeros(3)})),
             "it has 3 elements of master.tall.weight, but checksums for 0"),
        ]:
            on_rank_0(make)
            with pytest.raises(LayerWiseError, match=message):
                engine.optimizer.load_state_dict_from_file(tmp_path / "edited")
            assert_equal_states(whole_states(engine), before)
        assert torch.equal(weights(engine), of_model)

    @pytest.mark.world_size(2)
    def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(self, tmp_path, monkeypatch):
        engine = train_engine(start(Net(), ds_config()), 1)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(single_file.atomic, "write_whole", full)
            with pytest.raises(LayerWiseError, match=r"file cannot be written: .*No space left on device"):
                engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        dist.barrier()
        assert not list(tmp_path.iterdir())
        dist.barrier()
        engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        dist.barrier()
        assert [each.name for each in tmp_path.iterdir()] == ["file"]
        on_rank_0((tmp_path / "file.incomplete").mkdir)
        with pytest.raises(LayerWiseError, match="file.incomplete is a folder or a link"):
            engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        # The file before stays.
        with safe_open(tmp_path / "file", framework="pt") as content:
            assert content.keys()
        train_engine(engine, 1, first=1)

    @pytest.mark.world_size(2)
    def test_ranks_that_read_files_of_two_saves_are_told(self, tmp_path):
        engine = start(Net(), ds_config())
        for name in ("0", "1"):
            train_engine(engine, 1)
            engine.optimizer.progress.updates = 1
            engine.optimizer.save_state_dict_to_file(tmp_path / name)
        before = whole_states(engine)
        with pytest.raises(LayerWiseError, match="the checkpoint in .* differs between ranks"):
            engine.optimizer.load_state_dict_from_file(tmp_path / str(engine.global_rank))
        assert_equal_states(whole_states(engine), before)

    @pytest.mark.world_size(2)
    def test_a_step_that_is_not_over_is_repeated_and_that_is_said(self, tmp_path):
        engine = train_engine(start(Net(), ds_config(gas=2)), 1, gas=2)
        expected = whole_states(engine)
        engine.backward(engine((1, 0, engine.global_rank)))
        engine.step()
        engine.optimizer.save_state_dict_to_file(tmp_path / "file")
        train_engine(engine, 1, gas=2, first=1)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            engine.optimizer.load_state_dict_from_file(tmp_path / "file")
        assert_equal_states(whole_states(engine), expected)
        assert engine.global_rank or "was saved within a step: no gradients are loaded" in said.getvalue()
