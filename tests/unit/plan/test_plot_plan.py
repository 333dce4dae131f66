"""examples/plot_plan.py: the picture has the numbers of ``ds-layerwise plan --json``."""

import json
import subprocess
import sys

import pytest

from tests.support.cli import run
from tests.support.documents import ROOT
from tests.support.rooms import rooms

pytestmark = rooms("cli")


def test_a_picture_is_drawn_of_the_numbers_of_a_plan(tmp_path, monkeypatch):
    code, said, _ = run("plan", "--model", "gpt2-124m", "--config", ROOT / "ds_configs/bf16.json", "--ranks", "2,8",
                        "--json")
    assert code == 0
    (tmp_path / "plan.json").write_text(said)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import plot_plan
    for plan in json.loads(said):
        assert set(plot_plan.seconds_of(plan)) == {"reduce", "update", "gather"}
        assert sum(plot_plan.seconds_of(plan).values()) == pytest.approx(plan["predicted"]["seconds"]["all"])
        held = sum(plot_plan.gib_of(plan)[key] for key in ("params", "grads", "masters", "states"))
        assert held * 2**30 == pytest.approx(plan["memory_bytes"][plan["fullest_rank"]]["total"])
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "examples/plot_plan.py", tmp_path / "plan.json", tmp_path / "plan.png"],
                   check=True)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
