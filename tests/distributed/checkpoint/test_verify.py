"""``ds-layerwise verify`` on checkpoints that real engines saved and that were spoiled since."""

import os
import pickle
import shutil
import subprocess
import sys

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.checkpoint.manifest import FILE_NAME, ByteRange, Manifest, names_in
from ds_layerwise.checkpoint.plain_values import load_safely
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, whole_states
from tests.support.cli import MODEL_FILE, Everything, assert_refused, edit, run, saved
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, start_adamw, train_engine
from tests.support.universal import convert
from tests.support.versions import needs

pytestmark = rooms("plain_values", "verify", "manifest", "checkpoint_folder")


#: What a checkpoint of :class:`.Everything` holds: matrices under Muon, the rest under AdamW.
HOLDS = "7 x fp32, exp_avg, exp_avg_sq, step\n7 x fp32, momentum_buffer\n"


class TestVerify(DistributedTest):
    world_size = 1

    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints in folders that are called as the number of ranks that saved them."""
        return made_once(class_tmpdir / "runs", [1, 3], self.save)

    def save(self, folder):
        saved(folder / str(dist.get_world_size()), save_universal=True)

    def good(self, runs, kind, tmp_path):
        """A copy to spoil."""
        return shutil.copytree(runs / "3" / kind, tmp_path / "copy")

    def assert_found(self, folder, *lines):
        """It names nothing but ``lines``, of which each is a part of one."""
        code, out, err = run("verify", folder)
        found = [line for line in out.splitlines()[1:] if " x fp32" not in line]
        assert code == 1 and not err and len(found) == len(lines), (out, err)
        for line in lines:
            assert any(line in one for one in found), (line, out)

    def test_good_ones(self, runs):
        trained = [p for p in Everything().parameters() if p.requires_grad and p.numel()]
        for n, ranks in ((1, "1 rank"), (3, "3 ranks")):
            regular = runs / str(n) / "saved"
            for path, folder, kind in ((regular, regular, "regular"), (regular.parent, regular, "regular"),
                                       (*[regular.with_name("saved_universal")] * 2, "universal")):
                size = sum((folder / name).stat().st_size for name in names_in(folder))
                assert run("verify", path) == (0, (
                    f"{folder}: {kind} checkpoint, step 3, {ranks}, {len(trained)} parameters, "
                    f"{sum(p.numel() for p in trained):,} elements, {size:,} bytes\n{HOLDS}ok\n"), "")

    @pytest.mark.parametrize("kind", ["saved", "saved_universal"])
    def test_a_flipped_bit_in_each_file(self, kind, runs, tmp_path):
        folder = self.good(runs, kind, tmp_path)
        generator = torch.Generator().manual_seed(3)
        names = names_in(folder)
        assert len(names) > (3 if kind == "saved" else 50)
        for name in [*names, FILE_NAME]:
            path = folder / name
            content = path.read_bytes()
            place = int(torch.randint(0, len(content), (), generator=generator))
            path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1:])
            self.assert_found(folder, f"{path} ")
            path.write_bytes(content)
        assert run("verify", folder)[0] == 0

    def test_missing_and_additional_files(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)
        (folder / MODEL_FILE).rename(folder / "renamed")
        self.assert_found(folder, f"{folder / MODEL_FILE} is missing", f"warning: {folder / 'renamed'} is not of this")
        (folder / "renamed").rename(folder / MODEL_FILE)
        (folder / FILE_NAME).unlink()
        self.assert_found(folder, f"{folder / FILE_NAME} is missing")

    def test_a_missing_parameter(self, runs, tmp_path):
        folder = self.good(runs, "saved_universal", tmp_path)
        for name in ("tall.weight", "tall.bias"):  # a frozen one, and a trained one
            count = len(list((folder / "zero" / name).iterdir()))
            shutil.move(folder / "zero" / name, tmp_path / name)
            self.assert_found(folder, *[f"{folder / 'zero' / name}/"] * count)
            Manifest.of(folder).write(folder)
            self.assert_found(folder, f"{folder / 'zero' / name / 'fp32.pt'} is missing")
            shutil.move(tmp_path / name, folder / "zero" / name)
            Manifest.of(folder).write(folder)
        assert run("verify", folder)[0] == 0

    def test_a_missing_state(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)
        path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        partitions = load_safely(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        held = next(index for index, values in enumerate(partitions) if values.numel())

        def drop(content):
            del content["optimizer_state_dict"]["base_optimizer_state"]["state"][held]["exp_avg"]

        edit(path, drop)
        self.assert_found(folder, f"{path} ")

    def test_a_changed_master(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)
        path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        names = [name for group in load_safely(folder / MODEL_FILE)["param_shapes"] for name in group]
        partitions = load_safely(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        changed = next(index for index, values in enumerate(partitions) if values.numel())
        edit(path, lambda content: content["optimizer_state_dict"]["single_partition_of_fp32_groups"][changed][:1].add_(
            1))
        self.assert_found(folder, f"{names[changed]}: 1 of ")

    def test_weights_in_the_model_file_that_do_not_fit(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)

        def change(content):
            content["module"]["flat.weight"][3].add_(1)
            content["module"]["head.weight"] = content["module"]["head.weight"] + 1
            content["frozen_param_fragments"]["tall.weight"] = content["module"]["tall.weight"] + 1
            del content["module"]["twin.weight"]
        edit(folder / MODEL_FILE, change)
        self.assert_found(folder, "flat.weight: 40 of 480 weights in ", "twin.weight is missing in the module of ",
                          "head.weight is tied to embed.weight, and ", "tall.weight is frozen, and ")

    def test_names_and_shapes_in_the_model_file_that_do_not_fit(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)

        def change(content):
            for group in content["param_shapes"]:
                if "flat.weight" in group:
                    group["flat.weight"] = torch.Size((40, 12))
                if group.pop("twin.weight", None):
                    group["triplet.weight"] = torch.Size((12, 12))
        edit(folder / MODEL_FILE, change)
        self.assert_found(folder, "flat.weight is (12, 40), and (40, 12) in the param_shapes of ",
                          "twin.weight is missing in the param_shapes of ",
                          "triplet.weight is missing in the optimizer's files")

    def test_weights_of_a_universal_one_that_do_not_fit(self, runs, tmp_path):
        folder = self.good(runs, "saved_universal", tmp_path)
        edit(folder / "zero" / "flat.bias" / "fp32.pt", lambda content: content["param"][5:7].neg_())
        edit(folder / "zero" / "mean" / "fp32.pt", lambda content: content["param"].neg_())
        self.assert_found(folder, "flat.bias: 2 of 12 weights", "mean, which is not trained, is not the same")

    @pytest.mark.parametrize("spoil, line", [
        (lambda ours, index: ours["layerwise"]["param_starts"].update({"embed.weight": 1}),
         "does not hold the part of embed.weight that its layout says"),
        (lambda ours, index: ours["param_slice_mappings"][index].clear(),
         "does not hold the part of embed.weight that its layout says"),
        (lambda ours, index: ours["base_optimizer_state"]["state"][index].update(exp_avg=torch.zeros(2)),
         "has 2 elements of exp_avg of embed.weight, but 1"),
        (lambda ours, index: ours["base_optimizer_state"]["state"][index].pop("exp_avg_sq"),
         "has no elements of exp_avg_sq of embed.weight, but 1"),
        (lambda ours, index: ours["single_partition_of_fp32_groups"].__setitem__(index, torch.zeros(1)),
         "has 1 elements of fp32 of embed.weight, but 1"),
    ])
    def test_elements_that_are_not_there_exactly_once(self, spoil, line, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)
        for path in folder.glob("*_optim_states.pt"):
            ours = load_safely(path)["optimizer_state_dict"]["layerwise"]
            if ours["param_starts"].get("embed.weight") == 0:
                edit(path, lambda content: spoil(content["optimizer_state_dict"],
                                                 list(ours["shapes"]).index("embed.weight")))
        self.assert_found(folder, line)

    def test_values_where_a_rank_should_have_none(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)
        path = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        ours = load_safely(path)["optimizer_state_dict"]
        index, name = next((i, name) for i, name in enumerate(ours["layerwise"]["shapes"])
                           if name not in ours["layerwise"]["param_starts"])
        edit(path, lambda content: content["optimizer_state_dict"]["single_partition_of_fp32_groups"].__setitem__(
            index, torch.zeros(3)))
        self.assert_found(folder, f"has 3 elements of fp32 of {name}, but 0 in its layout")

    def test_an_element_that_two_ranks_have(self, runs, tmp_path):
        folder = self.good(runs, "saved", tmp_path)
        paths = sorted(folder.glob("*_optim_states.pt"))
        contents = [load_safely(path)["optimizer_state_dict"] for path in paths]
        index = list(contents[0]["layerwise"]["shapes"]).index("experts")
        owner = next(i for i, one in enumerate(contents) if one["param_slice_mappings"][index])

        def copied(content):
            ours = content["optimizer_state_dict"]
            for key in ("single_partition_of_fp32_groups", "param_slice_mappings"):
                ours[key][index] = contents[owner][key][index]
            ours["base_optimizer_state"]["state"][index] = contents[owner]["base_optimizer_state"]["state"][index]
            ours["layerwise"]["param_starts"]["experts"] = 0
        edit(paths[owner - 1], copied)
        self.assert_found(folder, "does not hold the part of experts that its layout says")

    def test_states_of_a_universal_one(self, runs, tmp_path):
        folder = self.good(runs, "saved_universal", tmp_path)
        edit(folder / "zero" / "tall.bias" / "exp_avg.pt", lambda content: content.update(param=torch.zeros(4)))
        (folder / "zero" / "flat.bias" / "exp_avg_sq.pt").unlink()
        Manifest.of(folder).write(folder)
        self.assert_found(folder, "tall.bias: exp_avg is (4,), the parameter is (40,)",
                          f"{folder / 'zero' / 'flat.bias' / 'exp_avg_sq.pt'} is missing")
        assert run("verify", folder, "--weights-only")[0] == 1

    def test_values_that_are_not_finite_are_a_warning(self, runs, tmp_path):
        folder = self.good(runs, "saved_universal", tmp_path)
        edit(folder / "zero" / "tall.bias" / "exp_avg.pt", lambda content: content["param"][3:4].fill_(float("nan")))
        code, out, _ = run("verify", folder)
        lines = out.splitlines()[-2:]
        assert code == 0 and lines == ["warning: tall.bias: exp_avg has values that are not finite", "ok"]
        assert "warning" not in run("verify", folder, "--weights-only")[1]

    @needs("deepspeed>=0.19.8", "its ds_to_universal.py leaves out frozen parameters")
    def test_a_checkpoint_that_deepspeeds_converter_wrote(self, runs, tmp_path):
        convert(runs / "3" / "saved", tmp_path / "converted")
        code, out, err = run("verify", tmp_path / "converted")
        assert code == 0 and f"\nwarning: {tmp_path / 'converted'} has no {FILE_NAME}" in out, (out, err)
        assert out.endswith("\nok\n")

    def test_a_script_that_is_not_deepspeeds(self, runs, tmp_path):
        """It is beside the checkpoints, and users run it."""
        folder = shutil.copytree(runs / "1", tmp_path / "copy")
        assert run("verify", folder)[1].count("warning") == 0
        script = folder / "zero_to_fp32.py"
        script.write_text(script.read_text() + "print('more')\n")
        code, out, _ = run("verify", folder)
        assert code == 0 and f"\nwarning: {script} differs from the script of the installed DeepSpeed" in out, out

    def test_a_list_that_names_a_size_that_nothing_has(self, runs, tmp_path):
        """Nor takes as much memory, in any command."""
        for kind in ("saved", "saved_universal"):
            folder = shutil.copytree(runs / "1" / kind, tmp_path / kind)
            manifest = Manifest.read(folder)
            name = max(manifest.files)
            Manifest({**manifest.files, name: (ByteRange(0, 1 << 60, 0),)}).write(folder)
            self.assert_found(folder, f"{folder / name} has ")
        assert_refused("were saved; restore it", "to-universal", tmp_path / "saved", tmp_path / "out")
        assert_refused("were saved; restore it", "consolidate", tmp_path / "saved", tmp_path / "out")

    def test_more_elements_than_a_parameter_has(self, runs, tmp_path):
        """With a list that agrees with the files."""
        before = {"fp32": "hold 43 elements of the weights of tall.bias, but its shape has 40",
                  "exp_avg": r"exp_avg \(43,\), now \(40,\)"}
        engine = start(Everything(), ds_config())
        expected = whole_states(engine)
        for key, message in before.items():
            folder = shutil.copytree(runs / "1" / "saved_universal", tmp_path / key)
            edit(folder / "zero" / "tall.bias" / f"{key}.pt",
                 lambda content: content.update(param=torch.cat([content["param"], torch.ones(3)])))
            with pytest.raises(LayerWiseError, match=message):
                engine.load_checkpoint(tmp_path, tag=key)
        for key, inside in {"master": lambda ours: ours["single_partition_of_fp32_groups"],
                            "exp_avg": lambda ours: [of["exp_avg"] for of in ours["base_optimizer_state"]["state"]
                                                     .values()]}.items():
            folder = shutil.copytree(runs / "1" / "saved", tmp_path / f"regular {key}")

            def longer(content, inside=inside):
                ours = content["optimizer_state_dict"]
                values = inside(ours)
                index = list(ours["layerwise"]["shapes"]).index("tall.bias")
                found = torch.cat([values[index], torch.ones(3)])
                if values is ours["single_partition_of_fp32_groups"]:
                    values[index] = found
                else:
                    ours["base_optimizer_state"]["state"][index]["exp_avg"] = found

            edit(next(folder.glob("*optim_states.pt")), longer)
            with pytest.raises(LayerWiseError, match=r"tall.bias is torch.Size\(\[43\]\), but has 40 elements in the"):
                engine.load_checkpoint(tmp_path, tag=folder.name)
        assert_equal_states(whole_states(engine), expected)

    def test_an_object_that_only_code_could_restore_is_named_and_not_advised(self, runs, tmp_path):
        folder = self.good(runs, "saved_universal", tmp_path)
        path = folder / "zero" / "tall.bias" / "fp32.pt"
        edit(path, lambda content: content.update(more=Everything))
        self.assert_found(folder, f"{path} cannot be read: UnpicklingError: it asks for tests.support.cli.Everything, "
                                  "which only code could restore")
        path.write_bytes(pickle.dumps({"param": 3}, protocol=0).replace(b"param", b"pa\xffam"))
        with pytest.raises(LayerWiseError, match="cannot be read") as refused:
            load_safely(path)
        assert "weights_only" not in str(refused.value) and "trusted" not in str(refused.value)

    def test_a_process_of_its_own(self, tmp_path):
        done = subprocess.run([sys.executable, "-m", "ds_layerwise.cli", "verify", tmp_path], capture_output=True,
                              text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
        assert (done.returncode, done.stdout, done.stderr) == (2, "", (
            f"ds-layerwise: {tmp_path} holds no checkpoint: no *_optim_states.pt, no zero folder, and no file named "
            "latest\n"))

    def test_stocks_own_is_refused(self, tmp_path):
        stock = start_adamw(Net())
        train_engine(stock, 1)
        stock.save_checkpoint(tmp_path, tag="tag")
        for command in (["verify", tmp_path], ["to-universal", tmp_path, tmp_path / "out"]):
            assert_refused("was not written by ds_layerwise", *command)
