"""Launch scripts under DeepSpeed's launcher again and again, and count the launches that do not end with exit code 0.

    python -m tests.launches 60 > out.txt

This launches, in turn, ``examples/train_gpt.py`` and a script that leaves its process group open, under
``ds_layerwise.run``; both on two ranks. It prints a line for each failure, with the launcher's output, and then the
counts. The exit code is 1 if there was a failure. A launch takes about ten seconds. ``tests/run.sh`` does not run this.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.harness import free_port

ROOT = Path(__file__).parents[1]

#: A script that ends without a word to the process group, as most do.
OPEN = """
import deepspeed
from torch import nn
engine, *_ = deepspeed.initialize(model=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "LayerWiseMuon"}, "zero_optimization": {"stage": 1}})
import torch
for _ in range(3):
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
"""


def launch(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Start ``command`` on two ranks, and wait for its end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "2"}
    return subprocess.run(["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()), *command],
                          cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main(num_launches: int) -> int:
    """Launch so many times; return how many launches failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "leaves_open.py").write_text(OPEN)
        config = str(ROOT / "ds_configs/quickstart.json")
        commands = [[str(ROOT / "examples/train_gpt.py"), "--deepspeed_config", config, "--steps", "3",
                     "--layers", "1", "--width", "32", "--eval_every", "3", "--no-save"],
                    ["--module", "ds_layerwise.run", "leaves_open.py"]]
        for number in range(num_launches):
            command = commands[number % len(commands)]
            done = launch(command, folder)
            if done.returncode:
                failed += 1
                print(f"launch {number}, {' '.join(command)}: exit code {done.returncode}\n{done.stdout}", flush=True)
    print(f"{num_launches} launches, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])) > 0)
