"""``ds-layerwise to-universal`` and ``consolidate`` on checkpoints that real engines saved."""

import io
import json
from contextlib import redirect_stdout

import peft
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel

from ds_layerwise.checkpoint import universal
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest, names_in
from ds_layerwise.checkpoint.plain_values import load_safely
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_contents, assert_equal_states, on_rank_0, whole_states
from tests.support.cli import BF16, MODEL_FILE, TIED, Everything, assert_refused, run, saved
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import ds_config, start
from tests.support.universal import convert
from tests.support.versions import needs

pytestmark = rooms("cli", "exports")


class TestToUniversal(DistributedTest):
    @needs("deepspeed>=0.19.8", "its ds_to_universal.py leaves out frozen parameters")
    @pytest.mark.world_size([1, 3])
    def test_it_is_the_folder_that_the_engine_and_the_converter_write(self, tmp_path):
        engine = saved(tmp_path, save_universal=True)
        out = tmp_path / "elsewhere" / "by_command"
        on_rank_0(lambda: self.check_command(tmp_path, out))
        convert(tmp_path / "saved", tmp_path / "by_deepspeed")
        zero, by_deepspeed = out / "zero", tmp_path / "by_deepspeed" / "zero"
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad and p.numel()}
        for name in trained:
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                found, expected = (load_safely(folder / name / f"{key}.pt")["param"] for folder in (zero, by_deepspeed))
                assert torch.equal(found, expected), (name, key)
            assert load_safely(zero / name / "step.pt") == load_safely(by_deepspeed / name / "step.pt") == 3
        others = engine.module.state_dict().keys() - trained - TIED.keys()
        assert {path.parent.name for path in zero.glob("*/fp32.pt")} == trained | others
        for name in others:
            expected = load_safely(by_deepspeed / name / "fp32.pt")["param"]
            assert torch.equal(load_safely(zero / name / "fp32.pt")["param"].float(), expected), name

    def check_command(self, folder, out):
        code, said, err = run("to-universal", folder, out, "--workers", "3")
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        count = len({path.parent for path in out.glob("zero/*/exp_avg.pt")})
        assert (code, err) == (0, "") and said == (f"{out}: {count} parameters with their states, {size} bytes, from "
                                                   f"{folder / 'saved'}\n")
        assert (out.parent / universal.LATEST).read_text() == out.name
        by_engine = folder / "saved_universal"
        assert names_in(out) == names_in(by_engine)
        for name in names_in(out):
            assert_equal_contents(load_safely(out / name), load_safely(by_engine / name), (name,))
        manifest = Manifest.read(out)
        assert sorted(manifest.files) == names_in(out)
        manifest.check(out)

    @pytest.mark.world_size(2)
    def test_it_loads(self, tmp_path):
        engine = saved(tmp_path)
        on_rank_0(lambda: run("to-universal", tmp_path / "saved", tmp_path / "converted"))
        resumed = start(Everything(), ds_config(checkpoint={"load_universal": True}, **BF16))
        for value in resumed.module.state_dict().values():
            value.zero_()
        resumed.load_checkpoint(tmp_path)
        assert_equal_states(whole_states(resumed), whole_states(engine))
        assert_equal_states(resumed.module.state_dict(), engine.module.state_dict())

    @pytest.mark.world_size(1)
    def test_wrong_sources_and_targets_are_refused(self, tmp_path, monkeypatch):
        saved(tmp_path)
        source, out = tmp_path / "saved", tmp_path / "out"
        model_file = (source / MODEL_FILE).read_bytes()
        (source / MODEL_FILE).write_bytes(model_file[:-1])
        assert_refused(f"{source / MODEL_FILE} has {len(model_file) - 1} bytes", "to-universal", tmp_path, out)
        (source / MODEL_FILE).write_bytes(model_file)
        assert_refused(f"{out} is not a folder", "to-universal", out, tmp_path / "new")
        assert_refused(f"{source} is, or holds, the checkpoint", "to-universal", source, source, "--overwrite")
        assert_refused(f"{tmp_path} is, or holds, the checkpoint", "to-universal", source, tmp_path, "--overwrite")
        assert not out.exists()
        assert run("to-universal", source, out)[0] == 0
        assert_refused(f"{out} is a universal checkpoint already", "to-universal", out, tmp_path / "new")
        assert_refused(f"{out} exists", "to-universal", source, out)
        (out / "zero" / "old.pt").touch()
        assert run("to-universal", source, out, "--overwrite")[0] == 0
        assert not (out / "zero" / "old.pt").exists()
        (tmp_path / "notes").mkdir()
        assert_refused(f"{tmp_path / 'notes'} is something else", "to-universal", source, tmp_path / "notes",
                       "--overwrite")

        def full(*args):
            raise RuntimeError("[enforce fail] file write failed\nand more lines")
        monkeypatch.setattr(universal, "write_parameters", full)
        assert_refused("cannot be written: [enforce fail]", "to-universal", source, tmp_path / "new")
        assert {path.name for path in tmp_path.iterdir() if path.suffix != ".py"} == {
            "latest", universal.LATEST, "notes", "out", "saved"}

    @pytest.mark.world_size(1)
    def test_objects_of_the_client_are_read_if_trusted(self, tmp_path):
        saved(tmp_path, client_state={"note": ClientObject()})
        out = tmp_path / "out"
        for command in (["to-universal", tmp_path, out], ["verify", tmp_path], ["consolidate", tmp_path, out]):
            assert_refused(f"{MODEL_FILE} holds objects", *command)
            assert_refused("--trust-client-state", *command)
        assert not out.exists()
        assert run("to-universal", tmp_path, out, "--trust-client-state")[::2] == (0, "")
        assert run("verify", out, "--trust-client-state")[0] == 0


class ClientObject:
    """Something that only code can restore."""


class TestConsolidate(DistributedTest):
    @needs("deepspeed>=0.19.8", "its zero_to_fp32.py leaves out empty parameters")
    @pytest.mark.world_size([1, 3])
    def test_it_is_what_zero_to_fp32_gives(self, tmp_path):
        saved(tmp_path, save_universal=True)
        convert(tmp_path / "saved", tmp_path / "by_deepspeed")
        on_rank_0(lambda: self.check(tmp_path))

    def check(self, folder):
        with redirect_stdout(io.StringIO()):
            expected = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        for name, alias_of in TIED.items():
            assert torch.equal(expected.pop(name), expected[alias_of])
        # DeepSpeed takes all parameters without elements for one tied parameter.
        expected["empty_too"] = expected["empty"].view(0, 5)
        assert expected.keys() >= {"embed.weight", "tall.weight", "fixed.weight", "empty", "mean", "counts"}
        for source in (folder, folder / "saved_universal", folder / "by_deepspeed"):
            out = folder / f"{source.name}.safetensors"
            code, said, err = run("consolidate", source, out)
            found, metadata = opened(out)
            size = sum(value.nbytes for value in found.values())
            assert (code, err, said) == (0, "", f"{out}: {len(found)} tensors, {size} bytes in fp32, from "
                                                f"{folder / 'saved' if source == folder else source}\n")
            assert metadata == {"format": "pt", **TIED}
            self.assert_same(found, expected, torch.float32)
            assert out.stat().st_mode & 0o777 == (folder / "saved" / FILE_NAME).stat().st_mode & 0o777

            shards = folder / f"{source.name} as shards"
            code, said, err = run("consolidate", source, shards, "--dtype", "bf16", "--max-shard-size", "1KB")
            assert (code, err) == (0, "") and "no config.json lay beside the checkpoint" in said
            self.check_shards(shards, expected)
        assert_refused("fixed.weight has weights beyond 65504", "consolidate", folder, folder / "half", "--dtype",
                       "fp16")
        assert not list(folder.glob("half*"))
        assert_refused(f"{shards} exists", "consolidate", folder, shards)
        assert run("consolidate", folder, shards, "--overwrite")[::2] == (0, "")
        assert sorted(shards.glob("*.safetensors")) == [shards / "model-00001-of-00001.safetensors"]

    def check_shards(self, shards, expected):
        index = json.loads((shards / "model.safetensors.index.json").read_text())
        count = len(set(index["weight_map"].values()))
        assert count > 3
        found, sizes, metadata = {}, 0, {}
        for number in range(1, count + 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            tensors, said = opened(shards / file)
            assert {name for name, place in index["weight_map"].items() if place == file} == tensors.keys()
            size = sum(value.nbytes for value in tensors.values())
            assert size <= 1000 or sum(1 for value in tensors.values() if value.numel()) == 1, file
            assert {said[alias] for alias in TIED if alias in said} <= tensors.keys()
            found, sizes, metadata = {**found, **tensors}, sizes + size, {**metadata, **said}
        assert index["metadata"]["total_size"] == sizes and metadata == {"format": "pt", **TIED}
        self.assert_same(found, expected, torch.bfloat16)

    @staticmethod
    def assert_same(found, expected, dtype):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            wanted = value.to(dtype) if value.is_floating_point() else value
            assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name

    @pytest.mark.world_size(1)
    def test_a_damaged_one_is_refused(self, tmp_path, monkeypatch):
        saved(tmp_path)
        path, out = tmp_path / "saved" / MODEL_FILE, tmp_path / "out.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-9] + b"x" + content[-8:])
        assert_refused(f"{path} is damaged", "consolidate", tmp_path, out)
        path.write_bytes(content)

        def broken(*args):
            raise LayerWiseError("in the middle")
        out.write_text("before")
        monkeypatch.setattr("ds_layerwise.tools.exports._cast", broken)
        assert_refused("in the middle", "consolidate", tmp_path, out, "--overwrite")
        assert out.read_text() == "before" and not list(tmp_path.glob("*.incomplete"))


class TestHuggingFace(DistributedTest):
    @pytest.mark.world_size(1)
    def test_from_pretrained_reads_what_consolidate_writes(self, tmp_path):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=8))
        # As a Trainer lays it out: checkpoint-N holds global_stepN, and the files of the model beside it.
        folder = tmp_path / "checkpoint-3"
        engine = start(model, ds_config())
        engine.save_checkpoint(folder, tag="global_step3")
        out, weights = tmp_path / "out", model.state_dict()
        assert "no config.json lay beside" in run("consolidate", folder, tmp_path / "bare")[1]
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        (folder / "merges.txt").write_text("#version: 0.2\n")
        for name in ("trainer_state.json", "optimizer.pt"):
            (folder / name).write_text("{}")
        code, said, err = run("consolidate", folder, out)
        assert (code, err) == (0, "") and said.endswith(
            f"beside them, from {folder}: config.json, generation_config.json, merges.txt\n")
        assert {path.name for path in out.iterdir()} == {
            "model-00001-of-00001.safetensors", "model.safetensors.index.json", FILE_NAME, "config.json",
            "generation_config.json", "merges.txt"}
        self.check(out, weights)
        elsewhere = tmp_path / "llm.json"
        (folder / "config.json").rename(elsewhere)
        assert run("consolidate", folder, tmp_path / "asked", "--config", elsewhere)[::2] == (0, "")
        self.check(tmp_path / "asked", weights)
        assert_refused("is no file; give --config a config.json", "consolidate", folder, tmp_path / "new", "--config",
                       tmp_path)
        assert_refused("is one file; name a folder", "consolidate", folder, tmp_path / "new.safetensors", "--config",
                       elsewhere)
        assert not list(tmp_path.glob("new*"))

    @pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
    @pytest.mark.world_size(1)
    def test_adapters_are_no_model(self, tmp_path):
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=8))
        model.config.save_pretrained(tmp_path / "base")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        start(adapted, ds_config()).save_checkpoint(tmp_path / "saved")
        _, said, _ = run("consolidate", tmp_path / "saved", tmp_path / "out")
        assert "a PEFT model's names, such as base_model.model.transformer.h.0.attn.c_attn." in said
        assert_refused("load the adapter that the run saved with peft", "consolidate", tmp_path / "saved",
                       tmp_path / "new", "--config", tmp_path / "base")
        assert not (tmp_path / "new").exists()

    @staticmethod
    def check(out, weights):
        read = GPT2LMHeadModel.from_pretrained(out).state_dict()
        assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in read)


def opened(path):
    """The tensors and the metadata of a safetensors file."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
