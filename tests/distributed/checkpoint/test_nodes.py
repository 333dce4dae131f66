"""Two nodes that lose one, in short; what the tool compares, it notices."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes import BOUND, NEEDS, Wrong, nearly_the_same, the_same
from tests.support.rooms import rooms

pytestmark = rooms("atomic", "disks", "loading", "saving")

ROOT = Path(__file__).parents[3]

TRUTH = [{"step": 1, "losses": [(1.5).hex(), (2.5).hex()], "weights": "of 1"}, {"saved": 1, "states": "at 1"},
         {"step": 2, "losses": [(1.0).hex(), (2.0).hex()], "weights": "of 2"}, {"saved": 2, "states": "at 2"}]


@pytest.mark.thorough
@pytest.mark.parametrize("way, stage", [("deepspeed", 1), ("torchrun", 3)])
def test_a_node_is_lost(way, stage):
    if os.geteuid() or not all(map(shutil.which, NEEDS)):
        pytest.skip(f"needs root and {', '.join(NEEDS)}")
    done = subprocess.run([sys.executable, "-m", "tests.nodes", f"--ways={way}", f"--stages={stage}", "--ranks=1"],
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=3600)
    assert done.returncode == 0 and done.stdout.endswith("\n1 of 1\n"), done.stdout[-20000:] + done.stderr[-4000:]


def test_a_difference_is_noticed():
    went_on = [{"loaded": 1, "states": "at 1"}, *TRUTH[2:]]
    the_same(TRUTH, TRUTH, [0])
    the_same(went_on, TRUTH, [1])
    for number, key, value in [(0, "loaded", 2), (0, "states", "at 2"), (1, "losses", TRUTH[0]["losses"]),
                               (1, "weights", "of 1"), (2, "states", "at 1")]:
        notes = [*went_on[:number], {**went_on[number], key: value}, *went_on[number + 1:]]
        with pytest.raises(Wrong, match="the run that nobody stopped did not"):
            the_same(notes, TRUTH, [1, 2])
    for notes, steps in ((went_on, [0, 2]), (TRUTH, [1])):
        with pytest.raises(Wrong, match="went on from step"):
            the_same(notes, TRUTH, steps)


@pytest.mark.parametrize("far, is_right", [(0.0, True), (0.5 * BOUND, True), (2 * BOUND, False), (float("nan"), False)])
def test_a_loss_of_one_node_may_be_as_far_as_the_bound(far, is_right):
    notes = [{"loaded": 1, "states": "at 1"}, {**TRUTH[2], "losses": [(1.0).hex(), (2.0 + far).hex()], "weights": ""}]
    if is_right:
        assert nearly_the_same(notes, TRUTH, [1]) == pytest.approx(far)
    else:
        with pytest.raises(Wrong, match="on one node a loss is"):
            nearly_the_same(notes, TRUTH, [1])
    notes[0]["states"] = "at 2"
    with pytest.raises(Wrong, match="nobody stopped did not"):
        nearly_the_same(notes, TRUTH, [1])
