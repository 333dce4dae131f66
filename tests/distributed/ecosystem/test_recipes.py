"""Recipes run small: they learn, save, and end the same when they are resumed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.rooms import rooms

pytestmark = rooms("outside")

ROOT = Path(__file__).resolve().parents[3]
#: By recipe, the package that it needs beside those of the tests.
NEEDS = {"trainer_ner": None, "accelerate": None, "accelerate_own": None, "trainer_image": None,
         "trainer_translation": None, "trainer_lm": None, "trainer_lm_stage3": None, "trl_sft": "trl",
         "trl_sft_stage3": "trl", "trl_dpo": "trl", "trl_grpo": "trl", "trl_reward": "trl", "lora": "trl",
         "dora": "trl", "lightning": "lightning", "timm": "timm", "diffusers": "diffusers",
         "sentence_transformers": "sentence_transformers"}
ALWAYS = {"trainer_ner"}


@pytest.mark.parametrize("name", [
    name if name in ALWAYS else pytest.param(name, marks=pytest.mark.thorough) for name, package in NEEDS.items()
    if package is None or importlib.util.find_spec(package)])
def test_a_recipe_learns_saves_and_resumes(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "recipes" / "run.py"), name, "--steps", "6", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=900, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"| {name} | " in done.stdout
