"""The runner hands a script what it would have got without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import neighbour
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
print(__name__, sys.argv, "layerwisemuon" in DEEPSPEED_OPTIMIZERS, neighbour.__name__)
"""


def run(*args, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "ds_layerwise.run", *args], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_sees_its_own_arguments_and_neighbours(as_module, tmp_path):
    (tmp_path / "neighbour.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    target = ["-m", "script"] if as_module else [str(script)]
    # The launcher of DeepSpeed puts its own argument before everything else.
    done = run("--local_rank=3", *target, "--steps", "2", cwd=tmp_path)
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"__main__ {[str(script), '--local_rank=3', '--steps', '2']} True neighbour", done.stderr


@pytest.mark.parametrize("args", [[], ["--local_rank=0"], ["-m"], ["--unknown", "x.py"]])
def test_nothing_to_run_is_a_usage_error(args):
    done = run(*args)
    assert done.returncode != 0 and "usage: python -m ds_layerwise.run" in done.stderr
