"""examples/plot_csv.py: the picture has what csv_monitor has written."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.documents import ROOT
from tests.support.rooms import rooms

pytestmark = rooms("outside")

FILES = {"Train_Samples_lr": "step,lr\n2,0.5\n4,0.25\n", "Train_Samples_muon_lr": "step,muon_lr\n2,0.1\n",
         # It was saved after four samples, and ended after six.
         "Train_Samples_grad_norm": "step,grad_norm\n2,1.5\n4,inf\n6,9.0\nstep,grad_norm\n6,1.0\n8,0.5\n",
         "Train_Samples_grad_norm_late": "step,grad_norm_late\n2,1.0\n", "loss": "step,loss\n2,3.0\n"}


@pytest.fixture
def plot_csv(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import plot_csv
    return plot_csv


def test_a_run_that_was_resumed_is_one_line(plot_csv, tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"{name}.csv").write_text(text)
    assert plot_csv.read(tmp_path) == {
        "lr": {2: 0.5, 4: 0.25}, "muon_lr": {2: 0.1}, "grad_norm": {2: 1.5, 4: float("inf"), 6: 1.0, 8: 0.5},
        "grad_norm_late": {2: 1.0}, "loss": {2: 3.0}}
    if find_spec("matplotlib"):
        subprocess.run([sys.executable, ROOT / "examples/plot_csv.py", tmp_path, tmp_path / "run.png"], check=True)
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
