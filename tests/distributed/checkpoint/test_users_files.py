"""Files that users, Hugging Face and Accelerate put beside a checkpoint stay through saves and through our commands."""

import json

import deepspeed.comm as dist

from ds_layerwise.checkpoint.manifest import Manifest
from tests.support.checkpoints import assert_equal_states, on_rank_0, states
from tests.support.cli import run
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine
from tests.unit.checkpoint.test_user_files import FILES, assert_kept, put

pytestmark = rooms("user_files", "exports")


class TestUsersFiles(DistributedTest):
    def test_stay_through_saves_of_the_same_tag_and_commands(self, tmp_path):
        engine, resumed = (start(Net(), ds_config(layerwise={"save_universal": True})) for _ in range(2))
        folders = [tmp_path / "tag", tmp_path / "tag_universal"]
        # Before the first save. A regular checkpoint with a folder called zero would be a universal one.
        on_rank_0(lambda: [folder.mkdir() or put(folder, FILES[:4]) for folder in folders])
        for step in range(2):
            train_engine(engine, 1, first=step)
            engine.save_checkpoint(tmp_path, tag="tag")
            for folder in folders:
                assert_kept(folder, FILES[:4])
                manifest = Manifest.read(folder)
                assert "tokenizer.json" not in manifest.files
                manifest.check(folder)
        for tag in ("tag", "tag_universal"):
            resumed.load_checkpoint(tmp_path, tag=tag)
            assert_equal_states(states(resumed), states(engine))
        dist.barrier()
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["tag", "tag_universal"]
        on_rank_0(lambda: self.commands(tmp_path))

    def commands(self, folder):
        for name in ("tag", "tag_universal"):
            code, out, err = run("verify", folder / name)
            assert code == 0 and "tokenizer.json is not of this save" in out + err
        out = folder / "converted"
        assert run("to-universal", folder / "tag", out)[0] == 0
        put(out)
        (out / "zero" / "gone").mkdir()
        (out / "zero" / "gone" / "fp32.pt").write_text("of a parameter that there is no more")
        assert run("to-universal", folder / "tag", out, "--overwrite")[0] == 0
        assert_kept(out)
        assert not (out / "zero" / "gone").exists() and run("verify", out)[0] == 0
        for there in (["model.safetensors"], ["model.safetensors.index.json", "model-00001-of-00009.safetensors"]):
            model = folder / there[0].replace(".", "_")
            model.mkdir()
            put(model)
            for name in (*there, "config.json", "mine.safetensors"):
                (model / name).write_text("theirs")
            assert run("consolidate", folder / "tag", model)[0] == 2
            assert run("consolidate", folder / "tag", model, "--overwrite", "--max-shard-size", "1KB")[0] == 0
            assert_kept(model)
            assert (model / "config.json").read_text() == (model / "mine.safetensors").read_text() == "theirs"
            # What the checkpoint has besides is laid there, and nothing of it under the name of the user's config.
            for name in ("config.json", "generation_config.json"):
                (folder / name).write_text("of the checkpoint")
            code, said, _ = run("consolidate", folder / "tag", model, "--overwrite", "--max-shard-size", "1KB")
            assert code == 0 and f"beside them, from {folder}: generation_config.json\n" in said
            assert_kept(model)
            assert (model / "config.json").read_text() == "theirs"
            assert (model / "generation_config.json").read_text() == "of the checkpoint"
            index = json.loads((model / "model.safetensors.index.json").read_text())
            assert {path.name for path in model.glob("model*.safetensors")} == set(index["weight_map"].values())
