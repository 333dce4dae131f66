"""The chaos run: random events from a seed, and that it notices what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.chaos import Twin
from tests.support.rooms import rooms

pytestmark = rooms("atomic", "disks", "loading", "saving", "step_progress")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed, events, seconds, more", [
    (1, 24, 480, []), (5, 10, 480, ["--meshes", "--campaign=4"]),
    pytest.param(2, 100_000, 600, [], marks=pytest.mark.thorough),
    pytest.param(7, 320, 1200, ["--meshes"], marks=pytest.mark.thorough)])
def test_random_events(seed, events, seconds, more, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "chaos.py", f"--seed={seed}", f"--events={events}", f"--seconds={seconds}",
         f"--folder={tmp_path}", *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=seconds + 600)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert re.search(r"^\d\d+ events, 0 differences, 0 hangs", done.stdout.splitlines()[-1]), done.stdout[-2000:]


def reports_of(twin, step):
    """The reports of two ranks that are where ``twin`` is after so many steps."""
    there = twin.at(step)
    pieces = {}
    for (name, key), value in there["states"].items():
        pieces.setdefault(name, {})[key] = value.copy()
    halves = [[], []]
    for name, values in pieces.items():
        middle = values["fp32"].size // 2
        for part, cut in zip(halves, (slice(0, middle), slice(middle, None)), strict=True):
            state = {key: value[cut] for key, value in values.items()}
            part.append((name, cut.start, state.pop("fp32"), state))
    return [{"step": step, "updates": there["updates"], "skipped": there["skipped"], "pieces": half,
             "weights": {name: value.copy() for name, value in there["weights"].items()}} for half in halves]


def test_a_difference_is_noticed():
    twin = Twin({"frozen": True}, "fp32", 1.0)
    assert twin.at(6)["skipped"] == 1 and twin.at(6)["updates"] == 5
    assert not twin.differences(reports_of(twin, 8), 8)
    assert twin.differences(reports_of(twin, 7), 8) and twin.differences(reports_of(twin, 5), 6)

    def spoiled(spoil):
        reports = reports_of(twin, 8)
        spoil(reports)
        return "; ".join(twin.differences(reports, 8))

    assert "rank 1 has other weights of norm.weight" in spoiled(
        lambda reports: np.multiply(reports[1]["weights"]["norm.weight"], 1 + 1e-6,
                                    out=reports[1]["weights"]["norm.weight"]))
    assert "weights of tall.weight on rank 0" in spoiled(lambda reports: [
        np.add(report["weights"]["tall.weight"], 1e-3, out=report["weights"]["tall.weight"]) for report in reports])
    assert "missing or not whole" in spoiled(lambda reports: reports[1]["pieces"].pop())
    assert "momentum_buffer of square.weight is" in spoiled(lambda reports: [
        np.multiply(state["momentum_buffer"], 1.001, out=state["momentum_buffer"])
        for name, _, _, state in reports[0]["pieces"] if name == "square.weight"])
    assert "rank 1 has skipped 2, expected 1" in spoiled(lambda reports: reports[1].update(skipped=2))
