"""The benchmark that trains a published recipe beside its authors' own code: short, and with a stand-in for theirs."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "benchmarks" / "published_recipe.py"
SHORT = ("--steps", "20", "--layers", "1", "--width", "32", "--context", "16")


def run(tmp_path, *args):
    # Whoever has a checkout may have said so in the environment.
    environment = {key: value for key, value in os.environ.items() if key != "MODDED_NANOGPT"}
    return subprocess.run([sys.executable, str(SCRIPT), *SHORT, "--out", str(tmp_path / "out"), *args],
                          capture_output=True, text=True, timeout=600, env=environment)


def checkout(folder, text):
    path = folder / "records" / "track_3_optimization" / "train_gpt_simple.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return folder


def test_both_sides_lose_alike_as_written_down(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with open(tmp_path / "out" / "losses.csv", newline="") as file:
        losses = [(float(row["ours"]), float(row["theirs"])) for row in csv.DictReader(file)]
    assert len(losses) == 20 and losses[0][0] == pytest.approx(5.545177, abs=1e-5)  # log 256: logits of zeros
    assert losses[-1][1] < losses[0][1] - 1
    assert max(abs(ours - theirs) for ours, theirs in losses) < 1e-5
    assert "| 20 |" in done.stdout and "theirs: the recipe as written down here" in done.stdout


@pytest.mark.parametrize("text, message", [
    (None, "there is no records/track_3_optimization/train_gpt_simple.py in it"),
    ("for _ in range(1):\n    pass\n", r"sets up no training with set_hparams\(\) in a loop")])
def test_a_folder_that_is_no_checkout_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    script = importlib.import_module("published_recipe")
    with pytest.raises(SystemExit, match=message):
        script.published(tmp_path if text is None else checkout(tmp_path, text), script.Gpt(1, 32), num_steps=20)


def test_the_config_has_their_eps_for_averages_over_their_tokens():
    params = json.loads((ROOT / "ds_configs" / "modded_nanogpt.json").read_text())["optimizer"]["params"]
    assert params["eps"] == 1e-10 / 524288
