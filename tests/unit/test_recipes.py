"""The recipes: configs, the commands that run.sh makes, files of other tools, and what the page says of each."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "recipes.md").read_text()
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0")" "$@"
"""


def load_runner():
    spec = importlib.util.spec_from_file_location("recipes_run", RECIPES / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name, monkeypatch):
    """A file of the recipes as a module; ``import their_script`` inside it gets a module of its own, too."""
    for shared in ("material", "their_script"):
        monkeypatch.delitem(sys.modules, shared, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for shared in ("material", "their_script"):
        monkeypatch.delitem(sys.modules, shared, raising=False)
    return module


def printed(script, *words, folder, **variables):
    """The words of the command that ``script`` ends in, with stand-ins for what it starts."""
    for name in ("deepspeed", "accelerate", "python", "srun", "scontrol", "sed"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", str(script), *words], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/ds*.json")), ids=lambda path: "/".join(path.parts[-2:]))
def test_configs_are_ours_and_have_no_key_that_means_nothing(path):
    config = json.loads(path.read_text())
    if "optimizer" in config:
        OptimizerConfig.from_section({**config["optimizer"], "params": {
            key: value for key, value in config["optimizer"]["params"].items() if value != "auto"}})
    else:
        assert config["layerwise"]["client_optimizer"]
    LayerWiseConfig.from_section(config.get("layerwise", {}))


@pytest.mark.parametrize("name", load_runner().RECIPES)
def test_a_recipe_starts_its_script_with_its_config(name, tmp_path):
    script, *words = load_runner().RECIPES[name][0].split()
    config = RECIPES / load_runner().RECIPES[name][1]
    first = printed(RECIPES / script, *words, "--max_steps", "7", folder=tmp_path)
    given = printed(RECIPES / script, *words, "--max_steps", "7", folder=tmp_path, CONFIG="other.json")
    train = str((RECIPES / script).with_name("train.py"))
    assert train in first and first[-2:] == ["--max_steps", "7"]
    # The page names the config of a recipe with an adapter, or at stage 3.
    assert str(config) in first or "--adapter" in words or f"CONFIG={config.resolve().relative_to(ROOT)}" in PAGE
    assert "other.json" in given and not any(word.endswith("ds.json") for word in given)
    if first[0] == "python":
        assert "ds_layerwise.register()" in Path(train).read_text()
    else:
        assert "ds_layerwise.run" in first[:first.index(train)]


def test_under_slurm_all_nodes_meet_at_the_first_and_a_signal_queues_the_job_again(tmp_path):
    words = printed(RECIPES / "slurm" / "train.sbatch", "train.py", "--deepspeed_config", "ds.json", folder=tmp_path,
                    SLURM_JOB_NODELIST="node[0-1]", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8", SLURM_JOB_ID="17")
    # The first line that the stand-in of scontrol prints is its name.
    assert words == ["srun", "torchrun", "--nnodes", "2", "--nproc_per_node", "8", "--rdzv_id", "17", "--rdzv_backend",
                     "c10d", "--rdzv_endpoint", "scontrol:29500", "-m", "ds_layerwise.run", "train.py",
                     "--deepspeed_config", "ds.json"]
    (tmp_path / "srun").write_text("#!/usr/bin/env bash\nkill -TERM $PPID; sleep 1\n")
    done = subprocess.run(["bash", str(RECIPES / "slurm" / "train.sbatch"), "train.py"], capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n",
                               "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "17"}, timeout=60)
    assert done.stdout.splitlines()[-3:] == ["scontrol", "requeue", "17"] and done.stdout.count("requeue") == 1


@pytest.mark.parametrize("restarts, queued", [(0, True), (10, False)])
def test_under_slurm_a_job_that_fails_is_queued_again_ten_times(restarts, queued, tmp_path):
    for name, text in (("scontrol", STAND_IN), ("srun", "#!/usr/bin/env bash\nexit 3\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["bash", str(RECIPES / "slurm" / "train.sbatch"), "train.py"], capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n",
                               "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "17",
                               "SLURM_RESTART_COUNT": str(restarts)}, timeout=60)
    assert done.returncode == 1 and ("requeue" in done.stdout) == queued


def test_the_page_has_every_recipe_and_what_was_measured():
    for folder in sorted(path for path in RECIPES.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert f"examples/recipes/{folder.name}" in PAGE, folder.name
    losses = json.loads((RECIPES / "losses.json").read_text())
    runner = load_runner()
    for name in runner.RECIPES:
        assert runner.row(name, losses[name]) in PAGE, name


def test_a_run_that_is_resumed_and_ends_otherwise_is_an_error(tmp_path, monkeypatch):
    runner = load_runner()
    (tmp_path / "timm_muon" / "checkpoint-2").mkdir(parents=True)
    ends = {"adamw": [3.0, 1.0], "muon": [3.0, 1.0], "resumed": [3.0, 1.0]}
    monkeypatch.setattr(runner, "train", lambda name, kind, config, args, *more: ends[kind])
    args = type("Args", (), {"out": tmp_path, "steps": 4, "ours_alone": False})
    assert runner.measure("timm", args) == {"adamw": [3.0, 1.0], "muon": [3.0, 1.0]}
    ends["resumed"] = [3.0, 1.0001]
    with pytest.raises(RuntimeError, match="was resumed and ended at 1.0001, not 1.0"):
        runner.measure("timm", args)
    ends.update(muon=[3.0, 3.0], resumed=[3.0, 3.0])
    with pytest.raises(RuntimeError, match="did not learn"):
        runner.measure("timm", args)


@pytest.mark.parametrize("name, words", [("nanogpt", "--nanogpt"), ("deepspeed_examples", "--clone"),
                                         ("deepspeed_chat", "--clone")])
def test_a_recipe_of_a_cloned_script_takes_the_clone_beside_it_or_by_its_variable(name, words, tmp_path):
    variable = "NANOGPT" if name == "nanogpt" else "DEEPSPEED_EXAMPLES"
    script = RECIPES / name / "run.sh"
    beside = printed(script, folder=tmp_path, **{variable: ""})
    elsewhere = printed(script, folder=tmp_path, **{variable: "/else/where"})
    assert beside[beside.index(words) + 1] == {"nanogpt": "nanoGPT"}.get(name, "DeepSpeedExamples")
    assert elsewhere[elsewhere.index(words) + 1] == "/else/where"
    clone = re.search(r"git clone (\S+?),", script.read_text())[1]
    assert clone.endswith("/" + beside[beside.index(words) + 1]) and f"git clone {clone}" in PAGE


def test_deepspeed_chat_gives_its_groups_and_its_schedule_in_place_of_its_optimizer(monkeypatch):
    change = load("deepspeed_chat/train", monkeypatch).change
    matrix, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    own = torch.optim.AdamW([{**group} for group in groups], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
    given = change({"model": "model", "optimizer": own, "lr_scheduler": schedule, "config": {"a": 1}},
                   {"optimizer": {"type": "LayerWiseMuon"}})
    assert given["config"] == {"a": 1, "optimizer": {"type": "LayerWiseMuon"}} and "optimizer" not in given
    assert given["model_parameters"] == groups
    made = torch.optim.SGD([matrix], lr=0.5)
    moved = given["lr_scheduler"](made)
    made.step()
    moved.step()
    assert made.param_groups[0]["lr"] == 0.25
